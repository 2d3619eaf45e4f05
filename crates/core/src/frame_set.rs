//! A set of the frames of one naturally aligned run, of the highest order at most: a bit for each, by its place in the run.

use crate::units::{BLOCK_PAGES, FrameRun, Order};

const WORD_BITS: u32 = u64::BITS;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FrameSet([u64; BLOCK_PAGES / WORD_BITS as usize]);

impl FrameSet {
    /// Adds the 2^order frames from place `index` on, a multiple of 2^order.
    pub fn insert(&mut self, index: u32, order: Order) {
        debug_assert!(index.is_multiple_of(order.pages()));
        let first = (index / WORD_BITS) as usize;
        if order.pages() >= WORD_BITS {
            self.0[first..first + (order.pages() / WORD_BITS) as usize].fill(u64::MAX);
        } else {
            self.0[first] |= ((1 << order.pages()) - 1) << (index % WORD_BITS);
        }
    }

    /// Whether the frame at place `index` is in it.
    pub fn contains(&self, index: u32) -> bool {
        self.0[(index / WORD_BITS) as usize] >> (index % WORD_BITS) & 1 == 1
    }

    /// Takes the first frame out; returns its place.
    pub fn pop_first(&mut self) -> Option<u32> {
        let (word, bits) = (0..).zip(&mut self.0).find(|(_, bits)| **bits != 0)?;
        let bit = bits.trailing_zeros();
        *bits &= *bits - 1;
        Some(word * WORD_BITS + bit)
    }

    /// How many frames are in it.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|bits| bits.count_ones()).sum()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        *self == FrameSet::default()
    }

    /// Whether every frame of `run` is in it, the run it is a set of.
    pub fn covers(&self, run: FrameRun) -> bool {
        self.len() == run.frames()
    }
}
