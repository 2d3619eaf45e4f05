//! Dictionaries for small pieces: content that the pages of a program have in common.
//!
//! A single page gives zstd little earlier content to refer to. A dictionary acts as content before
//! the page. It saves memory for pages that resemble each other; the gain falls with the size of
//! the piece, so pieces above [`SMALL_PIECE_BYTES`] do not use one.
//!
//! # Training
//! Some of the compressed small pieces give one page each to the *samples*. When there are enough,
//! a background thread selects those segments of the samples whose 8-byte strings occur in the most
//! other samples, as zstd's trainer `fastCover` does. That trainer calls malloc, so the agent
//! cannot use it. Its entropy tables are not missed: zstd applies them to every small piece, and
//! for mixed content they cost more than they save. A new dictionary is tested on samples that it
//! was not made from, and dropped if it saves too little.
//!
//! # Generations
//! A program's content changes, so training repeats, each time after 16 times as much compressed
//! content. A generation is never freed: the second byte of a piece names its generation, 0 for
//! none. Dictionaries are plain memory of the agent, so the child of a fork has its own copy of
//! each.
//!
//! Lock order: the lock of the samples is a leaf, held while one page is copied. Training takes the
//! samples out before it reads them.

use super::zstd;
use foliomem_sync::Mutex;
use foliomem_sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use foliomem_types::units::PAGE_BYTES;
use std::sync::OnceLock;

/// Maximum length of a piece that is compressed with a dictionary, in bytes.
pub(super) const SMALL_PIECE_BYTES: usize = 16 << 10;
/// Maximum length of a dictionary, in bytes. A larger one saves little more and displaces more of
/// the CPU's cache.
const DICTIONARY_BYTES: usize = 32 << 10;
/// Minimum length of a dictionary, in bytes. The lookups in a shorter one do not pay.
const MIN_DICTIONARY_BYTES: usize = 1 << 10;
/// Number of pages that one training uses: 1 MiB.
const SAMPLE_PAGES: usize = 256;
/// Interval, in samples, at which one is kept to test the dictionary.
const TEST_EVERY: usize = 8;
/// A dictionary is used if it saves at least this part (1/2^n) of the test samples: 1.6%.
const SAVES_SHIFT: u32 = 6;
/// Interval, in small pieces, at which one gives a sample, by generation. The first training
/// follows 4 MiB of single pages, the second 64 MiB more.
const SAMPLE_EVERY: [u32; GENERATIONS] = [4, 64, 1024];
/// Maximum number of dictionaries of a process.
const GENERATIONS: usize = 3;

/// Length of the strings that are counted in other samples, in bytes.
const STRING_BYTES: usize = 8;
/// Length of a segment that is selected as a whole, in bytes.
const SEGMENT_BYTES: usize = 512;
/// Bits of a string's hash. There are about as many hashes as strings in the samples.
const HASH_BITS: u32 = 20;

const _: () = assert!(PAGE_BYTES.is_multiple_of(SEGMENT_BYTES) && DICTIONARY_BYTES.is_multiple_of(SEGMENT_BYTES));
// The sample's number and the generation are stored in a byte.
const _: () = assert!(SAMPLE_PAGES - SAMPLE_PAGES / TEST_EVERY < 255 && GENERATIONS < 255);

/// All dictionaries of a process.
#[derive(Debug, Default)]
pub struct Dictionaries {
    generations: [OnceLock<zstd::Dictionary>; GENERATIONS],
    /// Number of generations that exist: generations 1 to this one.
    newest: AtomicUsize,
    /// Small pieces compressed since the last training.
    offered: AtomicU32,
    /// Whether the samples are complete and wait for training.
    due: AtomicBool,
    samples: Mutex<Samples>,
}

/// The pages from which the next dictionary is made.
#[derive(Debug, Default)]
struct Samples {
    /// Index of the training that they are for, in [`SAMPLE_EVERY`]; beyond its end there is none.
    training: usize,
    pages: Vec<[u8; PAGE_BYTES]>,
}

impl Dictionaries {
    /// Returns the newest dictionary and its generation.
    pub(super) fn newest(&self) -> Option<(u8, &zstd::Dictionary)> {
        // Acquire pairs with the Release in `train_if_due`.
        let generation = self.newest.load(Ordering::Acquire) as u8;
        self.get(generation).map(|dictionary| (generation, dictionary))
    }

    /// Returns the dictionary of `generation`, counted from 1.
    pub(super) fn get(&self, generation: u8) -> Option<&zstd::Dictionary> {
        self.generations.get(usize::from(generation).checked_sub(1)?)?.get()
    }

    /// Returns the number of dictionaries that have been made.
    pub fn generations(&self) -> usize {
        self.newest.load(Ordering::Relaxed)
    }

    /// Offers a small piece that was compressed as a sample.
    pub(super) fn offer(&self, piece: &[u8]) {
        let offered = self.offered.fetch_add(1, Ordering::Relaxed);
        // The first training samples most densely, so this check skips most pieces without the
        // lock.
        if !offered.is_multiple_of(SAMPLE_EVERY[0]) || self.due.load(Ordering::Relaxed) {
            return;
        }
        let Some(mut samples) = self.samples.try_lock() else { return };
        let Some(&every) = SAMPLE_EVERY.get(samples.training) else { return };
        let (pages, _) = piece.as_chunks::<PAGE_BYTES>();
        if !offered.is_multiple_of(every) || samples.pages.len() == SAMPLE_PAGES || pages.is_empty() {
            return;
        }
        if samples.pages.capacity() == 0 {
            samples.pages.reserve_exact(SAMPLE_PAGES);
        }
        // The page's position in the piece varies from sample to sample.
        let page = pages[samples.pages.len() % pages.len()];
        samples.pages.push(page);
        self.due.store(samples.pages.len() == SAMPLE_PAGES, Ordering::Relaxed);
    }

    /// Trains a dictionary for `compressor`'s level if the samples are complete. Compressors use it
    /// from then on if it saves enough. Training takes tens of milliseconds.
    pub(super) fn train_if_due(&self, compressor: &mut zstd::Compressor) {
        if !self.due.load(Ordering::Relaxed) || !self.due.swap(false, Ordering::Relaxed) {
            return;
        }
        let pages = {
            let mut samples = self.samples.lock();
            samples.training += 1;
            std::mem::take(&mut samples.pages)
        };
        let (test, training): (Vec<_>, Vec<_>) = pages.iter().enumerate().partition(|(i, _)| i % TEST_EVERY == 0);
        let training: Vec<_> = training.into_iter().map(|(_, page)| page).collect();
        let content = select(&training);
        if content.len() < MIN_DICTIONARY_BYTES {
            return;
        }
        let Some(dictionary) = zstd::Dictionary::new(content, compressor.level()) else { return };
        let mut room = vec![0; PAGE_BYTES];
        let mut bytes_with = |dictionary: Option<&zstd::Dictionary>| -> usize {
            let sizes =
                test.iter().map(|(_, page)| compressor.compress(dictionary, *page, 1, &mut room).unwrap_or(PAGE_BYTES));
            sizes.sum()
        };
        let before = bytes_with(self.newest().map(|(_, dictionary)| dictionary));
        let after = bytes_with(Some(&dictionary));
        compressor.forget_dictionary();
        if after + (before >> SAVES_SHIFT) > before {
            return;
        }
        let generation = self.newest.load(Ordering::Relaxed);
        if self.generations[generation].set(dictionary).is_ok() {
            // Release pairs with the Acquire in `newest`: a thread that reads the number also reads
            // the dictionary.
            self.newest.store(generation + 1, Ordering::Release);
        }
    }
}

/// Returns the hashes of all strings of `bytes`, in order.
fn hashes(bytes: &[u8]) -> impl Iterator<Item = usize> {
    bytes.windows(STRING_BYTES).map(|string| {
        let word = string.iter().rev().fold(0, |word: u64, &byte| word << 8 | u64::from(byte));
        (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - HASH_BITS)) as usize
    })
}

/// Selects the content of a dictionary for pages that resemble `samples`.
///
/// The samples are divided into as many stretches as the dictionary has segments. Each stretch
/// gives the segment whose strings occur in the most samples. The best segments come last, where
/// references to them are shortest.
fn select(samples: &[&[u8; PAGE_BYTES]]) -> Box<[u8]> {
    // For each hash of a string: the number of other samples that contain it, and the last sample
    // that did, counted from 1.
    let (mut others, mut last_seen) = (vec![0u8; 1 << HASH_BITS], vec![0u8; 1 << HASH_BITS]);
    for (number, sample) in (1u8..).zip(samples) {
        for hash in hashes(*sample) {
            if last_seen[hash] != 0 && last_seen[hash] != number {
                others[hash] = others[hash].saturating_add(1);
            }
            last_seen[hash] = number;
        }
    }
    let mut selected = Vec::new();
    for stretch in samples.chunks(samples.len().div_ceil(DICTIONARY_BYTES / SEGMENT_BYTES).max(1)) {
        let best = stretch.iter().map(|sample| (best_segment(sample, &others), sample));
        let Some(((score, start), sample)) = best.max_by_key(|((score, _), _)| *score) else { continue };
        if score > 0 {
            let segment = &sample[start..start + SEGMENT_BYTES];
            // A second copy of these strings would not help.
            hashes(segment).for_each(|hash| others[hash] = 0);
            selected.push((score, segment));
        }
    }
    selected.sort_by_key(|(score, _)| *score);
    selected.iter().flat_map(|(_, segment)| segment.iter().copied()).collect()
}

/// Returns the score and the offset of the best segment of `sample`. The score is the sum of
/// `others` over the segment's distinct strings.
fn best_segment(sample: &[u8; PAGE_BYTES], others: &[u8]) -> (u32, usize) {
    const STRINGS: usize = SEGMENT_BYTES - STRING_BYTES + 1;
    // Occurrences of each string in the segment, by 12 bits of its hash. Strings that share them
    // count as one.
    let mut inside = [0u16; 1 << 12];
    let slot = |hash: usize| hash % (1 << 12);
    let all: Vec<usize> = hashes(sample).collect();
    let (mut score, mut best) = (0, (0, 0));
    for (end, &entering) in all.iter().enumerate() {
        if let Some(start) = end.checked_sub(STRINGS) {
            let leaving = all[start];
            inside[slot(leaving)] -= 1;
            score -= if inside[slot(leaving)] == 0 { i64::from(others[leaving]) } else { 0 };
        }
        score += if inside[slot(entering)] == 0 { i64::from(others[entering]) } else { 0 };
        inside[slot(entering)] += 1;
        if end + 1 >= STRINGS && score > i64::from(best.0) {
            best = (score as u32, end + 1 - STRINGS);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(of: impl Fn(usize) -> u8) -> [u8; PAGE_BYTES] {
        std::array::from_fn(of)
    }

    fn noise(seed: usize) -> impl Fn(usize) -> u8 {
        move |i| {
            let mixed = (seed * PAGE_BYTES + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed ^ mixed >> 31).wrapping_mul(0xff51_afd7_ed55_8ccd) >> 40) as u8
        }
    }

    #[test]
    fn shared_content_is_selected_once_and_comes_last() {
        let (shared, own): (Vec<_>, usize) = ((0..600).map(noise(999)).collect(), 1000);
        // The 600 shared bytes lie at another offset in each page.
        let pages: Vec<_> = (0..64)
            .map(|number| {
                let at = number * 53 % 3000;
                page(|i| if (at..at + 600).contains(&i) { shared[i - at] } else { noise(number + own)(i) })
            })
            .collect();
        let content = select(&pages.iter().collect::<Vec<_>>());
        let last = &content[content.len() - SEGMENT_BYTES..];
        assert!(shared.windows(SEGMENT_BYTES).any(|window| window == last));
        let second = &content[content.len() - 2 * SEGMENT_BYTES..content.len() - SEGMENT_BYTES];
        assert!(
            !shared.windows(SEGMENT_BYTES / 2).any(|window| second.starts_with(window)),
            "the shared content occurs once"
        );
        assert!(select(&[]).is_empty());
    }

    #[test]
    fn a_dictionary_that_saves_nothing_is_not_used() {
        let (dictionaries, mut compressor) = (Dictionaries::default(), zstd::Compressor::new(3));
        // Each page is compressible, but has nothing in common with the others.
        for number in 0..SAMPLE_PAGES * 4 {
            dictionaries.offer(&page(|i| noise(number)(i % 512)));
        }
        assert!(dictionaries.due.load(Ordering::Relaxed));
        dictionaries.train_if_due(&mut compressor);
        assert!(dictionaries.newest().is_none() && !dictionaries.due.load(Ordering::Relaxed));
        assert_eq!(dictionaries.samples.lock().training, 1);
    }

    #[test]
    fn generations_follow_each_other_and_stay() {
        let (dictionaries, mut compressor) = (Dictionaries::default(), zstd::Compressor::new(3));
        // Each training gets pages of another kind. Half of a page is one of four contents of that
        // kind.
        let sample = |kind: usize, number: usize| {
            page(|i| if i < 2048 { noise(kind * 10 + number % 4)(i) } else { noise(100 + number)(i) })
        };
        for training in 0..GENERATIONS + 1 {
            for number in 0..(SAMPLE_PAGES as u32 * SAMPLE_EVERY[training.min(GENERATIONS - 1)]) as usize {
                dictionaries.offer(&sample(training, number / 4));
            }
            dictionaries.train_if_due(&mut compressor);
            assert_eq!(dictionaries.generations(), (training + 1).min(GENERATIONS));
        }
        assert!((1..=GENERATIONS as u8).all(|generation| dictionaries.get(generation).is_some()));
        assert!(dictionaries.get(0).is_none() && dictionaries.get(GENERATIONS as u8 + 1).is_none());
    }
}
