//! The arena's memory as slices: of a run for its token, of a piece for a borrow of it.
//!
//! Only this module makes Rust references to the arena's memory. Invariant: a slice lives no longer
//! than its token. The tokens follow the rules of references: [`foliomem_core::run_tokens`] and
//! [`foliomem_core::store`] give out either one token that writes or any number that read. The free
//! lists and the store behind the tokens must be those of this arena; an agent has only one of
//! each. There is no lock here.

use crate::ports::machine::LinuxMachine;
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{Fragment, FragmentMut, FragmentRef, Piece, PlaceMut};
use foliomem_sys::region::{HugePages, Region};
use foliomem_sys::{pagemap, userfaultfd};
use foliomem_types::units::MAX_ORDER;
use foliomem_types::units::{FrameRun, PAGE_BYTES};
use rustix::io::Errno;
use std::ops::Deref;
use std::sync::atomic::Ordering;

/// The arena: all frames in a row.
#[derive(Debug)]
pub(crate) struct Arena(Region);

impl Deref for Arena {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0
    }
}

fn offset(run: FrameRun) -> usize {
    run.head.0 as usize * PAGE_BYTES
}

fn range(fragment: &Fragment) -> (usize, usize) {
    (fragment.start_bytes() as usize, fragment.len_bytes as usize)
}

impl Arena {
    /// Creates an arena in `region`.
    pub fn new(region: Region) -> Arena {
        Arena(region)
    }

    /// Returns the bytes of a populated run, to read.
    pub fn bytes<'a>(&'a self, run: RunRef<'a>) -> &'a [u8] {
        // SAFETY: the token keeps writers out while it lives. The run is populated: only populated
        // runs have tokens, except while a run is being populated.
        unsafe { self.0.slice(offset(*run), run.order.bytes()) }
    }

    /// Returns the bytes of a populated run, to write.
    pub fn bytes_mut<'a>(&'a self, run: RunMut<'a>) -> &'a mut [u8] {
        // SAFETY: the token keeps all other readers and writers out while it lives, and the run is
        // populated, as in `bytes`.
        unsafe { self.0.slice_mut(offset(*run), run.order.bytes()) }
    }

    fn stored<'a>(&'a self, fragment: FragmentRef<'a>) -> &'a [u8] {
        let (start, len) = range(&fragment);
        // SAFETY: the fragment pins its piece, so the store neither writes its bytes nor frees its
        // frames.
        unsafe { self.0.slice(start, len) }
    }

    fn stored_mut<'a>(&'a self, fragment: FragmentMut<'a>) -> &'a mut [u8] {
        let (start, len) = range(&fragment);
        // SAFETY: the store lets only one thread write a place, and none read it before its piece
        // is sealed; it holds the frames.
        unsafe { self.0.slice_mut(start, len) }
    }

    /// Returns the stored bytes of a piece as one slice: in the arena, or copied to `gathered`.
    pub fn gather<'a>(&'a self, gathered: &'a mut [u8], piece: &'a Piece<'_>) -> &'a [u8] {
        if let Some(only) = piece.only_fragment() {
            return self.stored(only);
        }
        let len = self.copy_out(piece, gathered);
        &gathered[..len]
    }

    /// Copies the stored bytes of a piece to the start of `to`. Returns their number.
    pub fn copy_out(&self, piece: &Piece<'_>, to: &mut [u8]) -> usize {
        let mut filled = 0;
        piece.for_each_fragment(|fragment| {
            let bytes = self.stored(fragment);
            to[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        });
        filled
    }

    /// Copies `bytes` to the place for the stored bytes of a piece.
    pub fn scatter(&self, mut bytes: &[u8], mut place: PlaceMut<'_>) {
        place.for_each_fragment(|fragment| {
            let (now, rest) = bytes.split_at(fragment.len_bytes as usize);
            self.stored_mut(fragment).copy_from_slice(now);
            bytes = rest;
        });
    }

    /// Copies the stored bytes of a fragment to another one.
    pub fn copy_stored(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.stored_mut(to).copy_from_slice(self.stored(from));
    }
}

/// Number of runs that are populated without a try for a huge page, after the kernel had none.
const HUGE_PAUSE_RUNS: u32 = 8;

impl LinuxMachine {
    /// Unpopulates the home frames of `run`, a run of the highest order, and populates them with a
    /// huge page if the kernel has one. Does not try if the kernel had none lately. (An empty table
    /// of single pages prevents a huge page: unpopulating removes it, since Linux 6.14.)
    pub(super) fn populate_huge(&self, run: FrameRun) -> bool {
        let (offset, len) = (run.head.0 as usize * PAGE_BYTES, run.order.bytes());
        if self.huge_pause.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |runs| runs.checked_sub(1)).is_ok() {
            return false;
        }
        let populated = self.unregistered(run, || {
            self.arena.discard(offset, len)?;
            self.arena.set_huge_pages(offset, len, HugePages::Allowed)?;
            let populated = self.arena.populate(offset, len);
            self.arena.set_huge_pages(offset, len, HugePages::Forbidden).and(populated)
        });
        if !pagemap::is_huge(&self.descriptors().pagemap, self.home(run)) {
            self.huge_pause.store(HUGE_PAUSE_RUNS, Ordering::Relaxed);
        }
        populated
    }

    /// Discards memory of the arena by installing a guard. The kernel sends no message about that,
    /// so it is cheaper than [`unregistered`](Self::unregistered), and no other thread waits.
    pub(super) fn discard_by_guard(&self, offset: usize, len: usize) -> bool {
        // No part of a huge page is freed while it is whole.
        let _ = self.arena.split_huge(offset, len);
        self.arena.guard(offset, len).is_ok() && self.arena.unguard(offset, len).is_ok()
    }

    /// Runs `act` with `run` unregistered. While the run is registered, `act` would raise a mapping
    /// event and wait until a thread of the agent has received it.
    pub(super) fn unregistered(&self, run: FrameRun, act: impl FnOnce() -> Result<(), Errno>) -> bool {
        let (start, len, uffd) = (self.home(run), run.order.bytes(), &self.descriptors().program);
        uffd.unregister(start, len).is_ok() && {
            let done = act();
            uffd.register(start, len, userfaultfd::Mode::Destination).is_ok() && done.is_ok()
        }
    }

    pub(super) fn home(&self, run: FrameRun) -> usize {
        self.arena.start() + run.head.0 as usize * PAGE_BYTES
    }

    /// Gives all frames back to the kernel. The arena's content must not be needed any more.
    pub fn give_arena_back(&self) {
        // If this fails, the frames stay populated.
        let _ = self.arena.discard(0, self.arena.len());
    }

    /// Populates `run`, with a huge page if it is of the highest order.
    pub(super) fn populate_run(&self, run: RunMut<'_>) {
        if run.order == MAX_ORDER && self.populate_huge(*run) {
            return;
        }
        // A failure (the machine is out of memory) shows when the pages are touched.
        let _ = self.arena.populate(run.head.0 as usize * PAGE_BYTES, run.order.bytes());
    }

    /// Gives the memory of `run` back to the kernel.
    pub(super) fn release_run(&self, run: RunMut<'_>) {
        let (offset, len) = (run.head.0 as usize * PAGE_BYTES, run.order.bytes());
        if run.order < MAX_ORDER && self.marks.can_guard() && self.discard_by_guard(offset, len) {
            return;
        }
        let released = self.unregistered(*run, || {
            if run.order < MAX_ORDER {
                // No part of a huge page is freed while it is whole.
                let _ = self.arena.split_huge(offset, len);
            }
            self.arena.discard(offset, len)
        });
        if !released {
            self.budget.control().notice(format_args!("cannot give memory back to the system"));
        }
    }

    /// Fills `run` with zeros.
    pub(super) fn zero_run(&self, run: RunMut<'_>) {
        let may_be_huge = run.order == MAX_ORDER && !pagemap::is_huge(&self.descriptors().pagemap, self.home(*run));
        if !may_be_huge || !self.populate_huge(*run) {
            self.arena.bytes_mut(run).fill(0);
        }
    }
}

#[cfg(test)]
mod tests;
