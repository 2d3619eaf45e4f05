//! Messages of the agents to the supervisor, which prints them.
//!
//! An agent may be killed at any instruction, so a message counts only when its state says that it
//! is whole. One message ends the run; the first one is kept. Up to [`MOST_NOTICES`] others are
//! notices. No lock: the state of a message names its writer.

use crate::message_line::with_line;
use crate::segment::Control;
use foliomem_sys::shared_words;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Why a limit is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Excess {
    /// What the engine has does not compress well enough.
    Incompressible,
    /// Much of what it has cannot be moved.
    Unevictable,
    /// Much is not the engine's.
    Unmanaged,
}

/// Length of a message an agent may leave.
const MESSAGE_BYTES: usize = 512;
/// Messages of a run, beyond the one that ends it.
pub const MOST_NOTICES: usize = 16;
shared_words! {
    /// One line for the supervisor to print.
    pub(crate) struct Message {
        /// 0 none, 1 being written, 2 written, 3 taken.
        state: AtomicU32,
        len: AtomicU32,
        bytes: [AtomicU64; MESSAGE_BYTES / 8],
    }
}

impl Message {
    pub(crate) fn write(&self, text: fmt::Arguments<'_>) {
        if self.state.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        with_line(text, |line| {
            for (word, bytes) in self.bytes.iter().zip(line.chunks(8)) {
                let mut padded = [0; 8];
                padded[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
            }
            self.len.store(line.len() as u32, Ordering::Relaxed);
        });
        // Release pairs with the Acquire in `read` and `take`: the message is whole.
        self.state.store(2, Ordering::Release);
    }

    pub(crate) fn is_written(&self) -> bool {
        // Acquire pairs with the Release in `write`.
        self.state.load(Ordering::Acquire) >= 2
    }

    pub(crate) fn read(&self) -> Option<String> {
        if !self.is_written() {
            return None;
        }
        let words = self.bytes.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let line: Vec<u8> = words.take(self.len.load(Ordering::Relaxed) as usize).collect();
        Some(String::from_utf8_lossy(&line).into_owned())
    }

    /// Reads a message once.
    pub(crate) fn take(&self) -> Option<String> {
        // Acquire pairs with the Release in `write`.
        let taken = self.state.compare_exchange(2, 3, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().and_then(|_| self.read())
    }
}

impl Control {
    /// Leaves the reason why the run must end; only the first one is kept.
    pub fn fail(&self, why: fmt::Arguments<'_>) {
        self.header.failure.write(why);
    }

    /// Why the run must end, if it must: a whole line.
    pub fn failure(&self) -> Option<String> {
        self.header.failure.read()
    }

    /// Leaves a line for the supervisor to print; those beyond [`MOST_NOTICES`] are dropped.
    pub fn notice(&self, text: fmt::Arguments<'_>) {
        let index = self.header.notices_used.fetch_add(1, Ordering::Relaxed) as usize;
        if let Some(notice) = self.header.notices.get(index) {
            notice.write(text);
        }
    }

    /// The lines that were left and not taken yet.
    pub fn take_notices(&self) -> Vec<String> {
        self.header.notices.iter().filter_map(Message::take).collect()
    }

    /// The limit cannot be kept. Ends the run if it is hard.
    pub fn limit_exceeded(&self, excess: Excess) {
        let before = self.header.limit_exceeded.swap(1, Ordering::Relaxed);
        if before == 0 && !self.configuration().hard {
            let why = match excess {
                Excess::Unevictable => "much of the memory is read-only, locked or pinned, which cannot be moved",
                Excess::Unmanaged => {
                    "much of the memory is not such as can be managed (private mappings of files that were written, stacks, \
                     memory that may be executed, or may only be written)"
                }
                Excess::Incompressible => "the data does not compress into the limit",
            };
            self.notice(format_args!("{why}: going over the limit rather than lose any (--hard stops instead)"));
        }
        if self.configuration().hard {
            self.fail(format_args!("the program needs more than the limit, and the limit is hard: stopped"));
        }
    }

    /// Whether the limit was exceeded.
    pub fn was_limit_exceeded(&self) -> bool {
        self.header.limit_exceeded.load(Ordering::Relaxed) != 0
    }
}
