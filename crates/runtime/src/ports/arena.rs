//! The arena's memory as slices: of a run for a token of it, of a piece for a borrow of it.
//!
//! This is the one place where the arena's memory becomes Rust references. A slice lives no longer
//! than the token it was made for. The tokens keep the rules of references:
//! [`foliomem_core::run_tokens`] and [`foliomem_core::store`] give out one that writes, or any
//! number that read. The free lists and the store behind those tokens must be those of this arena;
//! an agent has only one of each.

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

/// The arena: all frames, one behind the other.
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
    /// An arena in `region`.
    pub fn new(region: Region) -> Arena {
        Arena(region)
    }

    /// The bytes of a run with pages, to read.
    pub fn bytes<'a>(&'a self, run: RunRef<'a>) -> &'a [u8] {
        // SAFETY: nobody has the right to write the run while the token lives. It has pages: only
        // runs with pages have tokens, but for the moment in which it gets them.
        unsafe { self.0.slice(offset(*run), run.order.bytes()) }
    }

    /// The bytes of a run with pages, to write.
    pub fn bytes_mut<'a>(&'a self, run: RunMut<'a>) -> &'a mut [u8] {
        // SAFETY: nobody else has the right to read or write the run while the token lives, and it
        // has pages, as above.
        unsafe { self.0.slice_mut(offset(*run), run.order.bytes()) }
    }

    fn stored<'a>(&'a self, fragment: FragmentRef<'a>) -> &'a [u8] {
        let (start, len) = range(&fragment);
        // SAFETY: the piece is pinned while the fragment lives, so nobody writes its bytes, nor
        // frees its frames.
        unsafe { self.0.slice(start, len) }
    }

    fn stored_mut<'a>(&'a self, fragment: FragmentMut<'a>) -> &'a mut [u8] {
        let (start, len) = range(&fragment);
        // SAFETY: the place has no reader before its piece is sealed, and one writer; the store
        // holds its frames.
        unsafe { self.0.slice_mut(start, len) }
    }

    /// The stored bytes of a piece as one slice: where they lie, or in `gathered`.
    pub fn gather<'a>(&'a self, gathered: &'a mut [u8], piece: &'a Piece<'_>) -> &'a [u8] {
        if let Some(only) = piece.only_fragment() {
            return self.stored(only);
        }
        let len = self.copy_out(piece, gathered);
        &gathered[..len]
    }

    /// Copies the stored bytes of a piece to the start of `to`; returns how many there are.
    pub fn copy_out(&self, piece: &Piece<'_>, to: &mut [u8]) -> usize {
        let mut filled = 0;
        piece.for_each_fragment(|fragment| {
            let bytes = self.stored(fragment);
            to[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        });
        filled
    }

    /// Copies `bytes` to where the stored bytes of a piece are to be.
    pub fn scatter(&self, mut bytes: &[u8], mut place: PlaceMut<'_>) {
        place.for_each_fragment(|fragment| {
            let (now, rest) = bytes.split_at(fragment.len_bytes as usize);
            self.stored_mut(fragment).copy_from_slice(now);
            bytes = rest;
        });
    }

    /// Copies stored bytes to another place.
    pub fn copy_stored(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.stored_mut(to).copy_from_slice(self.stored(from));
    }
}

/// Where the kernel has no huge page to give, or never gives one, it is asked again after so many runs.
const HUGE_PAUSE_RUNS: u32 = 8;

impl LinuxMachine {
    /// Empties the homes of `run`, a run of the highest order, and lets the kernel put a huge page there if it has one. Not
    /// tried where it had none lately. (An empty table of single pages is in a huge page's way: emptying removes it,
    /// since Linux 6.14.)
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

    /// Discards memory of the arena as a guard does, without a message to wait for: half the price of
    /// [`unregistered`](Self::unregistered), and no other thread waits for it.
    pub(super) fn discard_by_guard(&self, offset: usize, len: usize) -> bool {
        // Of a huge page nothing goes back as long as it is one.
        let _ = self.arena.split_huge(offset, len);
        self.arena.guard(offset, len).is_ok() && self.arena.unguard(offset, len).is_ok()
    }

    /// Does something that would be told to us of registered memory, and wait until we have heard of it.
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

    /// Gives all frames back to the system; the arena has no content that counts any more.
    pub fn give_arena_back(&self) {
        // A failure leaves them.
        let _ = self.arena.discard(0, self.arena.len());
    }

    /// Populates `run`, with a huge page if it is of the highest order.
    pub(super) fn populate_run(&self, run: RunMut<'_>) {
        if run.order == MAX_ORDER && self.populate_huge(*run) {
            return;
        }
        // A failure (the machine itself is out of memory) shows when the pages are touched.
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
                // Of a huge page nothing goes back as long as it is one.
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
