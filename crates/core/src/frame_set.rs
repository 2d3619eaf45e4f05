//! A set of frames of one naturally aligned run of at most the highest order: one bit for each
//! index in the run.

use foliomem_types::units::{BLOCK_PAGES, FrameRun, Order};

const WORD_BITS: u32 = u64::BITS;

/// A bitmap of the frames of one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FrameSet([u64; BLOCK_PAGES / WORD_BITS as usize]);

impl FrameSet {
    /// Adds the 2^order frames from `index` on. `index` must be a multiple of 2^order.
    pub fn insert(&mut self, index: u32, order: Order) {
        debug_assert!(index.is_multiple_of(order.pages()));
        let first = (index / WORD_BITS) as usize;
        if order.pages() >= WORD_BITS {
            self.0[first..first + (order.pages() / WORD_BITS) as usize].fill(u64::MAX);
        } else {
            self.0[first] |= ((1 << order.pages()) - 1) << (index % WORD_BITS);
        }
    }

    /// Returns whether the set contains the frame at `index`.
    pub fn contains(&self, index: u32) -> bool {
        self.0[(index / WORD_BITS) as usize] >> (index % WORD_BITS) & 1 == 1
    }

    /// Removes the first frame and returns its index.
    pub fn pop_first(&mut self) -> Option<u32> {
        let (word, bits) = (0..).zip(&mut self.0).find(|(_, bits)| **bits != 0)?;
        let bit = bits.trailing_zeros();
        *bits &= *bits - 1;
        Some(word * WORD_BITS + bit)
    }

    /// Returns the number of frames in the set.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|bits| bits.count_ones()).sum()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        *self == FrameSet::default()
    }

    /// Returns whether the set contains every frame of `run`. The set must be one of `run`.
    pub fn covers(&self, run: FrameRun) -> bool {
        self.len() == run.frames()
    }
}
