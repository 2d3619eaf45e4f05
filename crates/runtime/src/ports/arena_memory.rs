//! The arena's memory as slices: of a run for its token, of a piece for a borrow of it.
//!
//! Only this module makes Rust references to the arena's memory. Invariant: a slice lives no longer
//! than its token. The tokens follow the rules of references: [`foliomem_core::run_tokens`] and
//! [`foliomem_core::store`] give out either one token that writes or any number that read. The free
//! lists and the store behind the tokens must be those of this arena; an agent has only one of
//! each. There is no lock here.

use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{Fragment, FragmentMut, FragmentRef, Piece, PlaceMut};
use foliomem_sys::region::Region;
use foliomem_types::units::{FrameRun, PAGE_BYTES};
use std::ops::Deref;

/// The arena: all frames in a row.
#[derive(Debug)]
pub(crate) struct ArenaMemory(Region);

impl Deref for ArenaMemory {
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

impl ArenaMemory {
    /// Creates an arena in `region`.
    pub fn new(region: Region) -> ArenaMemory {
        ArenaMemory(region)
    }

    /// Returns the address of the first page of `run`.
    pub fn home(&self, run: FrameRun) -> usize {
        self.start() + offset(run)
    }

    /// Frees the frames of a range by installing a guard. The kernel sends no mapping event about
    /// that, so no other thread waits. Returns false if the kernel has no guards
    /// (`MADV_GUARD_INSTALL`).
    pub fn discard_by_guard(&self, offset: usize, len: usize) -> bool {
        // No part of a huge page is freed while it is whole.
        let _ = self.split_huge(offset, len);
        self.guard(offset, len).is_ok() && self.unguard(offset, len).is_ok()
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
        self.for_each_stored(piece, |bytes| {
            to[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        });
        filled
    }

    /// Calls `visit` with the stored bytes of a piece, part by part.
    pub fn for_each_stored(&self, piece: &Piece<'_>, mut visit: impl FnMut(&[u8])) {
        piece.for_each_fragment(|fragment| visit(self.stored(fragment)));
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

#[cfg(test)]
mod tests;
