//! The engine's arena: how the memory of frames is populated, moved and released.
//!
//! The arena is registered with the userfaultfd that has the program's ranges. An unpopulated home
//! frame is never touched: a reader or writer has a token of the run
//! ([`crate::ports::arena_memory`]). There is no lock.

use crate::address_space::lent_pages::Lenders;
use crate::ports::arena_memory::ArenaMemory;
use crate::ports::attachment::{ArenaSide, Attachment};
use foliomem_core::ports::{self, Stopped};
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_session::cluster_ownership::Event;
use foliomem_session::segment::Control;
use foliomem_sys::codec::checksum;
use foliomem_sys::region::HugePages;
use foliomem_sys::{pagemap, userfaultfd};
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order, PAGE_BYTES};
use rustix::io::Errno;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of runs that are populated without a try for a huge page, after the kernel had none.
const HUGE_PAUSE_RUNS: u32 = 8;

/// The arena.
pub struct Arena {
    memory: &'static ArenaMemory,
    attachment: &'static Attachment,
    control: &'static Control,
    /// Tells whether the program hands pages to the kernel by reference.
    lenders: &'static Lenders,
    /// Whether the kernel has guards (`MADV_GUARD_INSTALL`).
    can_guard: bool,
    /// Number of runs of the highest order to populate without a huge page.
    huge_pause: AtomicU32,
}

impl Arena {
    /// Makes the arena in `memory`, which is registered.
    pub(super) fn new(
        memory: &'static ArenaMemory,
        attachment: &'static Attachment,
        control: &'static Control,
        lenders: &'static Lenders,
        can_guard: bool,
    ) -> Arena {
        Arena { memory, attachment, control, lenders, can_guard, huge_pause: AtomicU32::new(0) }
    }

    /// Unpopulates the home frames of `run`, a run of the highest order, and populates them with a
    /// huge page if the kernel has one. Does not try if the kernel had none lately. (An empty table
    /// of single pages prevents a huge page: unpopulating removes it, since Linux 6.14.)
    fn populate_huge(&self, run: FrameRun) -> bool {
        let (offset, len) = (run.head.0 as usize * PAGE_BYTES, run.order.bytes());
        if self.huge_pause.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |runs| runs.checked_sub(1)).is_ok() {
            return false;
        }
        let populated = self.unregistered(run, || {
            self.memory.discard(offset, len)?;
            self.memory.set_huge_pages(offset, len, HugePages::Allowed)?;
            let populated = self.memory.populate(offset, len);
            self.memory.set_huge_pages(offset, len, HugePages::Forbidden).and(populated)
        });
        if !pagemap::is_huge(&self.attachment.descriptors().pagemap, self.memory.home(run)) {
            self.huge_pause.store(HUGE_PAUSE_RUNS, Ordering::Relaxed);
        }
        populated
    }

    /// Runs `act` with `run` unregistered. While the run is registered, `act` would raise a mapping
    /// event and wait until a thread of the agent has received it.
    fn unregistered(&self, run: FrameRun, act: impl FnOnce() -> Result<(), Errno>) -> bool {
        let (start, len, uffd) = (self.memory.home(run), run.order.bytes(), &self.attachment.descriptors().program);
        uffd.unregister(start, len).is_ok() && {
            let done = act();
            uffd.register(start, len, userfaultfd::Mode::Destination).is_ok() && done.is_ok()
        }
    }

    /// Returns the addresses of all frames.
    pub(super) fn addresses(&self) -> Range<usize> {
        self.memory.start()..self.memory.start() + self.memory.len()
    }

    /// Returns whether `range` has frames in it.
    pub(crate) fn overlaps(&self, range: &Range<usize>) -> bool {
        let own = self.addresses();
        range.start < own.end && own.start < range.end
    }

    /// Gives all frames back to the kernel. The arena's content must not be needed any more.
    pub fn give_back(&self) {
        // If this fails, the frames stay populated.
        let _ = self.memory.discard(0, self.memory.len());
    }
}

impl ports::Arena for Arena {
    fn populate(&self, run: RunMut<'_>) {
        if run.order == MAX_ORDER && self.populate_huge(*run) {
            return;
        }
        // A failure (the machine is out of memory) shows when the pages are touched.
        let _ = self.memory.populate(run.head.0 as usize * PAGE_BYTES, run.order.bytes());
    }

    fn release(&self, run: RunMut<'_>) {
        let (offset, len) = (run.head.0 as usize * PAGE_BYTES, run.order.bytes());
        if run.order < MAX_ORDER && self.can_guard && self.memory.discard_by_guard(offset, len) {
            return;
        }
        let released = self.unregistered(*run, || {
            if run.order < MAX_ORDER {
                // No part of a huge page is freed while it is whole.
                let _ = self.memory.split_huge(offset, len);
            }
            self.memory.discard(offset, len)
        });
        if !released {
            self.control.notice(format_args!("cannot give memory back to the system"));
        }
    }

    fn zero(&self, run: RunMut<'_>) {
        let may_be_huge =
            run.order == MAX_ORDER && !pagemap::is_huge(&self.attachment.descriptors().pagemap, self.memory.home(*run));
        if !may_be_huge || !self.populate_huge(*run) {
            self.memory.bytes_mut(run).fill(0);
        }
    }

    fn copy(&self, from: RunRef<'_>, to: RunMut<'_>) {
        self.memory.bytes_mut(to).copy_from_slice(self.memory.bytes(from));
    }

    fn regroup(&self, from: Frame, to: Frame, pages: u32) -> Result<(), Stopped> {
        let home = |frame| self.memory.home(FrameRun::new(frame, Order::ZERO));
        self.attachment.move_pages(home(to), home(from), pages, ArenaSide::Destination)
    }

    fn hash(&self, run: RunRef<'_>) -> u64 {
        checksum(self.memory.bytes(run))
    }

    fn frames_escape(&self) -> bool {
        self.lenders.may_have_lent()
    }

    fn note_full(&self) {
        if self.control.swap().is_news(Event::ArenaFull) {
            self.control.notice(format_args!(
                "the arena, {} MiB of address space, is full of data that does not compress: what more there is is left to the \
                 system, without a limit; use a larger --limit, or --swap, or allow more address space (ulimit -v)",
                self.memory.len() >> 20
            ));
        }
    }
}
