//! Planes: the bytes of a piece, sorted by significance before compression.
//!
//! In arrays of numbers and pointers the high bytes hardly differ from word to word and the low
//! bytes are noise. A codec that looks for repeated strings finds few of them. Sorted by
//! significance, as Blosc does it, the high bytes compress well. 8 planes serve words of 1, 2, 4
//! and 8 bytes.
//!
//! For lz4 each page has planes of its own, so decompression can stop after any page. For zstd the
//! whole piece has one set of planes, and each plane gets an entropy code of its own.
//!
//! A piece's *pattern* says which of the 8 bytes of a word mostly equal those of the word before.
//! For each pattern, [`Choice`] now and then compresses a piece both ways and remembers which way
//! paid.

use foliomem_types::units::PAGE_BYTES;

/// Number of planes: the bytes of a word.
pub(super) const PLANES: usize = 8;
/// Number of pairs of neighbouring words that are compared. The count of equal bytes fits into a
/// byte.
const SAMPLES: usize = 64;
/// Number of equal pairs from which a byte counts as steady.
const STEADY: u8 = 48;
/// Interval, in pieces of a pattern, at which one is compressed both ways.
const TRY_EVERY: u8 = 16;
/// Planes pay up to this size, in 8ths of the plain result: joining them takes time.
const PAYS_8THS: usize = 7;

/// The experience with one pattern.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pattern {
    /// Whether planes paid when both ways were tried last.
    pays: bool,
    /// Number of pieces until both ways are tried again.
    due: u8,
}

/// How to compress a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// Compress the content unchanged.
    Plain,
    /// Compress the planes.
    Planes,
    /// Compress both ways, and report the sizes to [`Choice::learn`].
    Try,
}

/// How it is chosen whether a piece is compressed as planes.
#[derive(Debug)]
pub(super) enum Choice {
    /// By experience with each pattern, indexed by its bits.
    ByExperience(Box<[Pattern; 1 << PLANES]>),
    /// By trying both ways with each piece: equal content then becomes equal bytes.
    ByTrying,
}

impl Default for Choice {
    fn default() -> Choice {
        Choice::ByExperience(Box::new([Pattern::default(); 1 << PLANES]))
    }
}

impl Choice {
    /// Decides how to compress `src`.
    pub(super) fn way(&mut self, src: &[u8]) -> Way {
        let steady = steady_bytes(src);
        // Planes cannot help if no byte is steady, or if all are, and need whole pages.
        if steady == 0 || steady == u8::MAX || !src.len().is_multiple_of(PAGE_BYTES) {
            return Way::Plain;
        }
        let Choice::ByExperience(patterns) = self else { return Way::Try };
        let pattern = &mut patterns[usize::from(steady)];
        if pattern.due == 0 {
            return Way::Try;
        }
        pattern.due -= 1;
        if pattern.pays { Way::Planes } else { Way::Plain }
    }

    /// Notes the sizes to which `src` was compressed both ways. Returns whether planes pay.
    pub(super) fn learn(&mut self, src: &[u8], plain_bytes: usize, planes_bytes: usize) -> bool {
        let pays = planes_bytes <= plain_bytes * PAYS_8THS / 8;
        if let Choice::ByExperience(patterns) = self {
            patterns[usize::from(steady_bytes(src))] = Pattern { pays, due: TRY_EVERY - 1 };
        }
        pays
    }
}

/// Returns the pattern of `src`: the bit of each byte that mostly equals that byte of the word
/// before.
fn steady_bytes(src: &[u8]) -> u8 {
    let (words, _) = src.as_chunks::<PLANES>();
    let Some(step) = words.len().checked_sub(2).map(|pairs| pairs / SAMPLES).filter(|&step| step > 0) else { return 0 };
    let mut equal = 0u64;
    for pair in words.windows(2).step_by(step).take(SAMPLES) {
        let differing = u64::from_le_bytes(pair[0]) ^ u64::from_le_bytes(pair[1]);
        // First a bit for each byte that is not zero, then for each that is. No carry crosses a
        // byte.
        const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
        let not_zero = (((differing & LOW) + LOW) | differing) >> 7 & 0x0101_0101_0101_0101;
        equal += not_zero ^ 0x0101_0101_0101_0101;
    }
    let counts = equal.to_le_bytes().into_iter().enumerate();
    counts.fold(0, |bits, (byte, count)| bits | u8::from(count >= STEADY) << byte)
}

/// Splits each `span_bytes` of `src` into planes.
pub(super) fn split(src: &[u8], dst: &mut [u8], span_bytes: usize) {
    src.chunks_exact(span_bytes).zip(dst.chunks_exact_mut(span_bytes)).for_each(|(from, to)| split_span(from, to));
}

/// Joins the planes of each `span_bytes` of `src`.
pub(super) fn join(src: &[u8], dst: &mut [u8], span_bytes: usize) {
    src.chunks_exact(span_bytes).zip(dst.chunks_exact_mut(span_bytes)).for_each(|(from, to)| join_span(from, to));
}

/// Splits a span into planes. A group of 8 words fills 8 bytes of each plane.
fn split_span(from: &[u8], to: &mut [u8]) {
    let (groups, _) = from.as_chunks::<{ PLANES * PLANES }>();
    let mut planes = to.chunks_exact_mut(groups.len() * PLANES);
    let mut planes: [&mut [u8]; PLANES] = std::array::from_fn(|_| planes.next().unwrap_or_default());
    for (index, group) in groups.iter().enumerate() {
        let (rows, _) = group.as_chunks::<PLANES>();
        let columns = transposed(std::array::from_fn(|row| u64::from_le_bytes(rows[row])));
        for (plane, column) in planes.iter_mut().zip(columns) {
            let (places, _) = plane.as_chunks_mut::<PLANES>();
            places[index] = column.to_le_bytes();
        }
    }
}

/// Joins the planes of a span.
fn join_span(from: &[u8], to: &mut [u8]) {
    let (groups, _) = to.as_chunks_mut::<{ PLANES * PLANES }>();
    let mut planes = from.chunks_exact(groups.len() * PLANES);
    let planes: [&[[u8; PLANES]]; PLANES] =
        std::array::from_fn(|_| planes.next().unwrap_or_default().as_chunks::<PLANES>().0);
    for (index, group) in groups.iter_mut().enumerate() {
        let columns = planes.map(|plane| u64::from_le_bytes(plane[index]));
        let (rows, _) = group.as_chunks_mut::<PLANES>();
        rows.iter_mut().zip(transposed(columns)).for_each(|(row, word)| *row = word.to_le_bytes());
    }
}

/// Transposes a matrix of 8 by 8 bytes: halves, quarters and single bytes are swapped across the
/// diagonal.
#[inline]
fn transposed(mut rows: [u64; PLANES]) -> [u64; PLANES] {
    const STAGES: [(usize, u32, u64); 3] =
        [(1, 8, 0x00ff_00ff_00ff_00ff), (2, 16, 0x0000_ffff_0000_ffff), (4, 32, 0x0000_0000_ffff_ffff)];
    for (distance, bits, mask) in STAGES {
        for upper in (0..PLANES).filter(|row| row & distance == 0) {
            let lower = upper + distance;
            let moved = (rows[upper] >> bits ^ rows[lower]) & mask;
            rows[lower] ^= moved;
            rows[upper] ^= moved << bits;
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(word: impl Fn(u64) -> u64) -> Vec<u8> {
        (0..8192).flat_map(|index| word(index).to_le_bytes()).collect()
    }

    fn noise(index: u64) -> u64 {
        (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }

    #[test]
    fn bytes_of_equal_significance_lie_side_by_side() {
        let page: Vec<u8> = (0..PAGE_BYTES).map(|at| (at % PLANES) as u8).collect();
        let mut planes = vec![0; PAGE_BYTES];
        split(&page, &mut planes, PAGE_BYTES);
        assert!(planes.iter().enumerate().all(|(at, &byte)| usize::from(byte) == at * PLANES / PAGE_BYTES));
    }

    #[test]
    fn steady_bytes_are_found() {
        assert_eq!(steady_bytes(&words(|_| 7)), 0xff);
        assert_eq!(steady_bytes(&words(noise)), 0);
        assert_eq!(steady_bytes(&words(|index| noise(index) >> 48)), 0b1111_1100);
        assert_eq!(steady_bytes(&words(|index| noise(index) & 0xffff_0000_ffff)), 0b1100_1100);
        assert_eq!(
            steady_bytes(&words(|index| noise(index) >> 40 & 0xffff | (noise(index) & 0xffff) << 32)),
            0b1100_1100
        );
        for short in [0, 7, 8, 16, 500] {
            assert_eq!(steady_bytes(&vec![3; short]), 0, "{short}: too few to tell");
        }
    }

    #[test]
    fn the_better_way_is_learnt_by_pattern() {
        let (numbers, noise) = (words(|index| noise(index) >> 48), words(noise));
        let mut choice = Choice::default();
        assert_eq!(choice.way(&noise), Way::Plain);
        for pays in [true, false] {
            assert_eq!(choice.way(&numbers), Way::Try);
            assert_eq!(choice.learn(&numbers, 1000, if pays { 875 } else { 876 }), pays);
            for _ in 1..TRY_EVERY {
                assert_eq!(choice.way(&numbers), if pays { Way::Planes } else { Way::Plain });
            }
        }
    }

    proptest! {
        #[test]
        fn split_content_is_joined_unchanged(pages in 1usize..4, seed: u64) {
            let src: Vec<u8> = (0..pages as u64 * 512).flat_map(|at| noise(at ^ seed).to_le_bytes()).collect();
            for span_bytes in [PAGE_BYTES, src.len()] {
                let (mut planes, mut joined) = (vec![0; src.len()], vec![0; src.len()]);
                split(&src, &mut planes, span_bytes);
                prop_assert_ne!(&planes, &src);
                join(&planes, &mut joined, span_bytes);
                prop_assert_eq!(&joined, &src);
            }
        }
    }
}
