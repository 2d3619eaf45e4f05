//! A bit for each page of a block.

use foliomem_core::units::BLOCK_PAGES;
use std::ops::Range;

/// See the module.
pub type Bits = [u64; BLOCK_PAGES / 64];

/// Sets those of `pages`, numbers in the block, or clears them; how many that changes.
pub fn set(bits: &mut Bits, pages: Range<usize>, on: bool) -> u32 {
    let mut changed = 0;
    for page in pages {
        let (word, mask) = (&mut bits[page / 64], 1 << (page % 64));
        changed += u32::from((*word & mask != 0) != on);
        *word = if on { *word | mask } else { *word & !mask };
    }
    changed
}

/// Whether that of a page is set.
pub fn is_set(bits: &Bits, page: usize) -> bool {
    bits[page / 64] & 1 << (page % 64) != 0
}
