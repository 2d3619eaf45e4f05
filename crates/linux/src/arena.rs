//! The arena's memory as slices: of a run for a token of it, of a piece for a borrow of it.
//!
//! This is the one place where the arena's memory becomes Rust references. A slice lives no longer
//! than the token it was made for. The tokens keep the rules of references:
//! [`foliomem_core::run_tokens`] and [`foliomem_core::store`] give out one that writes, or any
//! number that read. The free lists and the store behind those tokens must be those of this arena;
//! an agent has only one of each.

use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{Fragment, FragmentMut, FragmentRef, Piece, PlaceMut};
use foliomem_sys::region::Region;
use foliomem_types::units::{FrameRun, PAGE_BYTES};
use std::ops::Deref;

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

#[cfg(test)]
mod tests;
