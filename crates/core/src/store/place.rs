//! Where a piece's bytes are: a short list of contiguous stretches of frames.

use super::extent::MOST_RUNS;
use crate::units::{Frame, PAGE_BYTES};
use std::fmt;

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
#[derive(Clone)]
pub struct Place(Fragments);

/// By value as long as they are those of one extent: so most pieces' are, and each that is read or written has its place made.
#[derive(Clone)]
enum Fragments {
    Few([Fragment; MOST_RUNS], u8),
    /// Of a piece that is a chain of extents.
    Many(Vec<Fragment>),
}

impl Place {
    pub(super) const EMPTY: Place = Place(Fragments::Few([Fragment::NONE; MOST_RUNS], 0));

    /// All of it is there.
    #[inline]
    pub(super) fn of(fragment: Fragment) -> Place {
        let mut few = [Fragment::NONE; MOST_RUNS];
        few[0] = fragment;
        Place(Fragments::Few(few, 1))
    }

    /// The fragments, in the order of the bytes.
    pub fn fragments(&self) -> &[Fragment] {
        match &self.0 {
            Fragments::Few(few, count) => &few[..usize::from(*count)],
            Fragments::Many(many) => many,
        }
    }

    fn fragments_mut(&mut self) -> &mut [Fragment] {
        match &mut self.0 {
            Fragments::Few(few, count) => &mut few[..usize::from(*count)],
            Fragments::Many(many) => many,
        }
    }

    /// Length of all fragments together.
    pub fn len_bytes(&self) -> u32 {
        self.fragments().iter().map(|fragment| fragment.len_bytes).sum()
    }

    /// Appends a fragment; one that follows the last in memory makes it longer instead.
    pub(super) fn push(&mut self, fragment: Fragment) {
        if let Some(last) = self.fragments_mut().last_mut()
            && last.end_bytes() == fragment.start_bytes()
        {
            last.len_bytes += fragment.len_bytes;
            return;
        }
        match &mut self.0 {
            Fragments::Few(few, count) if usize::from(*count) < MOST_RUNS => {
                few[usize::from(*count)] = fragment;
                *count += 1;
            }
            Fragments::Few(few, _) => self.0 = Fragments::Many([few.as_slice(), &[fragment]].concat()),
            Fragments::Many(many) => many.push(fragment),
        }
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
