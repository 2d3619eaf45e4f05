//! Messages of the agents to the supervisor, which prints them.
//!
//! An agent may be killed at any instruction, so a message counts only when its state says that it
//! is complete. One message ends the run; only the first such message is kept. Up to
//! [`MAX_NOTICES`] other messages are notices. There is no lock: the thread that moves a message
//! from "none" to "being written" is its only writer.

use crate::message_line::with_line;
use crate::segment::Control;
use foliomem_sys::shared_words;
use rustix::process::Pid;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Why a limit is exceeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Excess {
    /// The managed memory does not compress well enough.
    Incompressible = 1,
    /// Much of the managed memory cannot be moved.
    Unevictable = 2,
    /// Much of the memory is unmanaged.
    Unmanaged = 4,
    /// The data would fit compressed, but the program grows faster than the agent can compress.
    SlowReclaim = 8,
    /// Forked processes share pages, and each makes copies of what it writes.
    Shared = 16,
    /// The data does not compress well enough, and the swap file has no room for the rest.
    SwapFull = 32,
    /// Processes without the agent take the memory.
    WithoutAgent = 64,
}

impl Excess {
    /// Returns the cause, and what the user can do.
    pub fn explain(self) -> [&'static str; 2] {
        match self {
            Excess::Incompressible => {
                ["the data does not compress into the limit", "use --swap FILE, --codec zstd or a larger limit"]
            }
            Excess::Unevictable => [
                "much of the memory is read-only, locked or pinned, which cannot be moved",
                "use a larger limit, or lock less",
            ],
            Excess::Unmanaged => [
                "much of the memory cannot be managed (private file mappings that were written, stacks, executable or \
                 write-only memory, many small processes)",
                "use a larger limit",
            ],
            Excess::SlowReclaim => [
                "the program grows faster than its memory can be compressed",
                "use a larger limit, more CPUs or fewer threads",
            ],
            Excess::Shared => [
                "forked processes share memory, of which each makes a copy as it writes",
                "use a larger limit or fewer processes",
            ],
            Excess::WithoutAgent => [
                "processes without the agent, of which nothing can be compressed, leave too little of the limit",
                "use a larger limit, or dynamic builds of these programs",
            ],
            Excess::SwapFull => [
                "the data does not compress into the limit, and the swap file is full",
                "use a larger swap file (--swap FILE:SIZE) or a larger limit",
            ],
        }
    }
}

/// Maximum length of a message, in bytes.
const MESSAGE_BYTES: usize = 512;
/// Maximum number of notices of a run. The message that ends the run is not counted.
pub const MAX_NOTICES: usize = 16;
shared_words! {
    /// One line for the supervisor to print.
    pub(crate) struct Message {
        /// 0: none, 1: being written, 2: written, 3: taken.
        state: AtomicU32,
        len: AtomicU32,
        bytes: [AtomicU64; MESSAGE_BYTES / 8],
    }
}

impl Message {
    /// Writes the message, unless one has been written or is being written.
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
        // Release pairs with the Acquire in `read` and `take`: the message is complete.
        self.state.store(2, Ordering::Release);
    }

    /// Returns whether the message is complete.
    pub(crate) fn is_written(&self) -> bool {
        // Acquire pairs with the Release in `write`.
        self.state.load(Ordering::Acquire) >= 2
    }

    /// Returns the message if it is complete.
    pub(crate) fn read(&self) -> Option<String> {
        if !self.is_written() {
            return None;
        }
        let words = self.bytes.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let line: Vec<u8> = words.take(self.len.load(Ordering::Relaxed) as usize).collect();
        Some(String::from_utf8_lossy(&line).into_owned())
    }

    /// Returns the message if it is complete and was not taken before.
    pub(crate) fn take(&self) -> Option<String> {
        // Acquire pairs with the Release in `write`.
        let taken = self.state.compare_exchange(2, 3, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().and_then(|_| self.read())
    }
}

impl Control {
    /// Leaves the reason why the run must end; only the first reason is kept.
    pub fn fail(&self, why: fmt::Arguments<'_>) {
        self.header.failure.write(why);
    }

    /// Returns why the run must end, as a complete line; `None` if it need not end.
    pub fn failure(&self) -> Option<String> {
        self.header.failure.read()
    }

    /// Leaves a line for the supervisor to print; lines beyond [`MAX_NOTICES`] are dropped.
    pub fn notice(&self, text: fmt::Arguments<'_>) {
        let index = self.header.notices_used.fetch_add(1, Ordering::Relaxed) as usize;
        if let Some(notice) = self.header.notices.get(index) {
            notice.write(text);
        }
    }

    /// Returns the lines that agents have left and the supervisor has not taken yet.
    pub fn take_notices(&self) -> Vec<String> {
        self.header.notices.iter().filter_map(Message::take).collect()
    }

    /// Notes that the limit is exceeded, and warns about each cause once. A hard limit ends the
    /// run.
    pub fn limit_exceeded(&self, excess: Excess) {
        let before = self.header.limit_exceeded.fetch_or(excess as u32, Ordering::Relaxed);
        let [cause, remedy] = excess.explain();
        if self.configuration().hard {
            self.fail(format_args!(
                "the program needs more than the limit, and the limit is hard: stopped; {cause}: {remedy}"
            ));
        } else if before & excess as u32 == 0 {
            self.notice(format_args!(
                "{cause}: going over the limit rather than lose any; {remedy} (--hard stops instead)"
            ));
        }
    }

    /// Says that the core dump of `process` lacks what is swapped out. The kernel cannot ask for it
    /// while it writes the dump. Only the first dump of a run is announced.
    pub fn announce_core_dump(&self, process: Pid) {
        if self.header.core_dump_announced.swap(1, Ordering::Relaxed) == 0 {
            self.notice(format_args!(
                "the core dump of process {} has zeros in the place of swapped-out memory: for a whole one, run it with \
                 a limit that it fits in",
                process.as_raw_nonzero()
            ));
        }
    }

    /// Returns whether the limit was exceeded at any time in the run.
    pub fn was_limit_exceeded(&self) -> bool {
        self.header.limit_exceeded.load(Ordering::Relaxed) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};

    fn control(hard: bool) -> &'static Control {
        let configuration = Configuration { hard, ..Configuration::plain(Limit::Bytes(1 << 30)) };
        Control::create(&configuration).unwrap().0
    }

    const ALL: [Excess; 7] = [
        Excess::Incompressible,
        Excess::Unevictable,
        Excess::Unmanaged,
        Excess::SlowReclaim,
        Excess::Shared,
        Excess::SwapFull,
        Excess::WithoutAgent,
    ];

    #[test]
    fn each_cause_is_said_once_with_what_to_do() {
        let control = control(false);
        assert!(!control.was_limit_exceeded());
        for excess in ALL.into_iter().chain(ALL) {
            control.limit_exceeded(excess);
        }
        let said = control.take_notices();
        assert_eq!(said.len(), ALL.len(), "{said:?}");
        assert!(said.iter().all(|line| line.contains("; use ") && line.contains("going over the limit")), "{said:?}");
        assert!(control.was_limit_exceeded() && control.failure().is_none());
    }

    #[test]
    fn a_hard_limit_stops_the_run_with_the_cause() {
        for excess in ALL {
            let control = control(true);
            control.limit_exceeded(excess);
            let (said, [cause, remedy]) = (control.failure().unwrap(), excess.explain());
            assert!(said.contains("limit is hard: stopped") && said.contains(cause) && said.contains(remedy), "{said}");
            assert!(control.take_notices().is_empty());
        }
    }
}
