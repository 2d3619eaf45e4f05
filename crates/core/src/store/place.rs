//! Where a piece's bytes are: a short list of contiguous stretches of frames, held by value.

use super::classes::EXTENT_FRAMES;
use super::extent::MOST_RUNS;
use crate::units::{Frame, MAX_ORDER, PAGE_BYTES};
use std::fmt;

/// The most fragments a piece has: nearly 2 MiB in extents of 64 KiB, the last of which is several runs.
pub const MAX_FRAGMENTS: usize = MAX_ORDER.bytes() / (EXTENT_FRAMES as usize * PAGE_BYTES) - 1 + MOST_RUNS;

/// Contiguous bytes within contiguous frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fragment {
    /// The frame the offset counts from.
    pub head: Frame,
    /// Where the bytes begin; may lie beyond the first frame.
    pub offset_bytes: u32,
    /// How many there are.
    pub len_bytes: u32,
}

impl Fragment {
    const NONE: Fragment = Fragment { head: Frame(0), offset_bytes: 0, len_bytes: 0 };

    /// `len_bytes` bytes from `offset_bytes` after the start of `head`.
    pub const fn new(head: Frame, offset_bytes: u32, len_bytes: u32) -> Fragment {
        Fragment { head, offset_bytes, len_bytes }
    }

    /// Its first byte, counted from the start of the arena.
    pub const fn start_bytes(&self) -> u64 {
        self.head.0 as u64 * PAGE_BYTES as u64 + self.offset_bytes as u64
    }

    /// The first byte after it.
    pub const fn end_bytes(&self) -> u64 {
        self.start_bytes() + self.len_bytes as u64
    }
}

/// Where a piece's bytes are, first to last.
#[derive(Clone, Copy)]
pub struct Place {
    fragments: [Fragment; MAX_FRAGMENTS],
    count: u8,
}

impl Place {
    pub(super) const EMPTY: Place = Place { fragments: [Fragment::NONE; MAX_FRAGMENTS], count: 0 };

    /// The fragments, in the order of the bytes.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments[..usize::from(self.count)]
    }

    /// Length of all fragments together.
    pub fn len_bytes(&self) -> u32 {
        self.fragments().iter().map(|fragment| fragment.len_bytes).sum()
    }

    /// Appends a fragment; one that follows the last in memory makes it longer instead.
    pub(super) fn push(&mut self, fragment: Fragment) {
        if let Some(last) = self.fragments[..usize::from(self.count)].last_mut()
            && last.end_bytes() == fragment.start_bytes()
        {
            last.len_bytes += fragment.len_bytes;
            return;
        }
        self.fragments[usize::from(self.count)] = fragment;
        self.count += 1;
    }
}

impl PartialEq for Place {
    fn eq(&self, other: &Place) -> bool {
        self.fragments() == other.fragments()
    }
}

impl Eq for Place {}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.fragments()).finish()
    }
}
