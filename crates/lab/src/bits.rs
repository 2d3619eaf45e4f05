//! Page bitmaps: one bit for each page of a block.

use foliomem_types::units::BLOCK_PAGES;
use std::ops::Range;

/// A set of pages of one block, as bits.
pub type Bits = [u64; BLOCK_PAGES / 64];

/// Sets the bits of `pages`, which are indices in the block. Returns the number of changed bits.
#[inline]
pub fn set(bits: &mut Bits, pages: Range<usize>) -> u32 {
    let mut changed = 0;
    for (word, mask) in words(pages) {
        changed += (!bits[word] & mask).count_ones();
        bits[word] |= mask;
    }
    changed
}

/// Clears the bits of `pages`. Returns the number of changed bits.
#[inline]
pub fn clear(bits: &mut Bits, pages: Range<usize>) -> u32 {
    let mut changed = 0;
    for (word, mask) in words(pages) {
        changed += (bits[word] & mask).count_ones();
        bits[word] &= !mask;
    }
    changed
}

/// Sets the bit of `page`.
#[inline]
pub fn set_page(bits: &mut Bits, page: usize) {
    bits[page / 64] |= 1 << (page % 64);
}

/// Clears the bit of `page`. Returns whether it was set.
#[inline]
pub fn clear_page(bits: &mut Bits, page: usize) -> bool {
    let was_set = is_set(bits, page);
    bits[page / 64] &= !(1 << (page % 64));
    was_set
}

/// Iterates over the words that have bits of `pages`, each with the mask of these bits.
#[inline]
fn words(pages: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    (pages.start / 64..pages.end.div_ceil(64)).map(move |word| {
        let (start, end) = (pages.start.max(word * 64), pages.end.min(word * 64 + 64));
        (word, u64::MAX.unbounded_shr(64 - (end - start) as u32) << (start % 64))
    })
}

/// Returns whether the bit of `page` is set.
#[inline]
pub fn is_set(bits: &Bits, page: usize) -> bool {
    bits[page / 64] & 1 << (page % 64) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_set_and_cleared_bit_by_bit() {
        for pages in [0..0, 70..70, 0..1, 63..64, 5..64, 64..128, 60..70, 3..200, 0..BLOCK_PAGES] {
            let mut bits = Bits::default();
            // Some of the bits are set already.
            let before: Vec<usize> = (0..BLOCK_PAGES).filter(|page| page % 3 == 0).collect();
            before.iter().for_each(|&page| set_page(&mut bits, page));
            assert!(clear_page(&mut bits, 3) && !clear_page(&mut bits, 3));
            set_page(&mut bits, 3);
            let was_set = before.iter().filter(|&page| pages.contains(page)).count();
            assert_eq!(set(&mut bits, pages.clone()) as usize, pages.len() - was_set, "{pages:?}");
            assert!((0..BLOCK_PAGES).all(|page| is_set(&bits, page) == (page % 3 == 0 || pages.contains(&page))));
            assert_eq!(clear(&mut bits, pages.clone()) as usize, pages.len(), "{pages:?}");
            assert!((0..BLOCK_PAGES).all(|page| is_set(&bits, page) == (page % 3 == 0 && !pages.contains(&page))));
        }
    }
}
