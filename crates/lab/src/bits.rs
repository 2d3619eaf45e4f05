//! Page bitmaps: one bit for each page of a block.

use foliomem_types::units::BLOCK_PAGES;
use std::ops::Range;

/// A set of pages of one block, as bits.
pub type Bits = [u64; BLOCK_PAGES / 64];

/// Sets the bits of `pages`, which are indices in the block, to `on`. Returns the number of changed
/// bits.
pub fn set(bits: &mut Bits, pages: Range<usize>, on: bool) -> u32 {
    let mut changed = 0;
    for page in pages {
        let (word, mask) = (&mut bits[page / 64], 1 << (page % 64));
        changed += u32::from((*word & mask != 0) != on);
        *word = if on { *word | mask } else { *word & !mask };
    }
    changed
}

/// Returns whether the bit of `page` is set.
pub fn is_set(bits: &Bits, page: usize) -> bool {
    bits[page / 64] & 1 << (page % 64) != 0
}
