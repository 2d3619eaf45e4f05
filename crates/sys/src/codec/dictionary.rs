//! Dictionaries for small pieces: what a program's pages have in common, as content that each of them may refer to.
//!
//! A page on its own gives zstd little to refer back to; a dictionary is content that lies before it, as it were. What
//! that brings depends on how alike the pages are. At level 3, ratios of 4 KiB without and with it: headers and scripts
//! 3.64 and 4.53, JSON records 3.80 and 4.36, machine code 1.96 and 2.11, small objects 4.47 and 4.60, all of these mixed
//! 3.41 and 3.52. At 16 KiB it is a third of that, and above [`SMALL_PIECE_BYTES`] 1%: there it is not used.
//!
//! # Training
//! Of the small pieces that are compressed, one in so many gives a page to the *samples*. When there are enough, a
//! background thread chooses the segments of them whose 8-byte strings are in the most other samples, as the trainer that comes
//! with zstd does (`fastCover`). That one cannot be used: it calls malloc. Nor are its entropy tables missed: zstd
//! takes those for every small piece, whether they fit or not, and on content of several kinds they cost more than
//! they save (mixed corpus, 4 KiB, level 3, 32 KiB: ratio 3.52 without a dictionary, 3.36 with tables, 3.67 without).
//! A new dictionary is tried on samples it was not made of, and dropped unless it saves something.
//!
//! # Generations
//! What a program holds changes, so training is repeated, each time after 16 times as much has been compressed. A
//! generation, once made, stays for the life of the process: a piece's second byte names the one it needs, and 0 none.
//! They are plain memory of the agent, and so the child of a fork has a copy of each.
//!
//! Lock: one leaf, over the samples, held while a page is copied; training takes them out.

use super::zstd;
use foliomem_sync::Mutex;
use foliomem_sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use foliomem_types::units::PAGE_BYTES;
use std::sync::OnceLock;

/// The largest piece that is compressed with a dictionary: 16 KiB.
pub(super) const SMALL_PIECE_BYTES: usize = 16 << 10;
/// Content of a dictionary. Twice that saves half a percent more at 4 KiB, and takes more of the processor's cache.
const DICTIONARY_BYTES: usize = 32 << 10;
/// Less than that is not worth a lookup.
const DICTIONARY_MIN_BYTES: usize = 1 << 10;
/// Pages that a dictionary is chosen of: 1 MiB.
const SAMPLE_PAGES: usize = 256;
/// One sample in so many is kept for the trial.
const TRIAL_EVERY: usize = 8;
/// A dictionary is used if it saves at least this part (1/2^n) of the trial's bytes: 1.6%.
const SAVES_SHIFT: u32 = 6;
/// Of so many small pieces one gives a sample, by generation. The first dictionary is made after 4 MiB of single pages,
/// the second after 64 MiB more.
const SAMPLE_EVERY: [u32; GENERATIONS] = [4, 64, 1024];
const GENERATIONS: usize = 3;

/// The bytes that are looked for in other samples, and how long a chosen piece of content is.
const STRING_BYTES: usize = 8;
const SEGMENT_BYTES: usize = 512;
/// Strings are told apart by so many bits of a hash: about as many as there are strings.
const HASH_BITS: u32 = 20;

const _: () = assert!(PAGE_BYTES.is_multiple_of(SEGMENT_BYTES) && DICTIONARY_BYTES.is_multiple_of(SEGMENT_BYTES));
// Samples are numbered, and generations named, by a byte.
const _: () = assert!(SAMPLE_PAGES - SAMPLE_PAGES / TRIAL_EVERY < 255 && GENERATIONS < 255);

/// All dictionaries of a process.
#[derive(Debug, Default)]
pub struct Dictionaries {
    generations: [OnceLock<zstd::Dictionary>; GENERATIONS],
    /// Generations from 1 to this are there.
    newest: AtomicUsize,
    /// Small pieces compressed since the last training.
    offered: AtomicU32,
    /// The samples are complete.
    due: AtomicBool,
    samples: Mutex<Samples>,
}

#[derive(Debug, Default)]
struct Samples {
    /// Which training they are for: an index of [`SAMPLE_EVERY`], or beyond it.
    training: usize,
    pages: Vec<[u8; PAGE_BYTES]>,
}

impl Dictionaries {
    /// The last one made, and its generation.
    pub(super) fn newest(&self) -> Option<(u8, &zstd::Dictionary)> {
        // Acquire pairs with the Release in `train`.
        let generation = self.newest.load(Ordering::Acquire) as u8;
        self.get(generation).map(|dictionary| (generation, dictionary))
    }

    /// The one of `generation`, counted from 1.
    pub(super) fn get(&self, generation: u8) -> Option<&zstd::Dictionary> {
        self.generations.get(usize::from(generation).checked_sub(1)?)?.get()
    }

    /// How many have been made.
    pub fn generations(&self) -> usize {
        self.newest.load(Ordering::Relaxed)
    }

    /// Shows a small piece that was compressed.
    pub(super) fn offer(&self, piece: &[u8]) {
        let offered = self.offered.fetch_add(1, Ordering::Relaxed);
        // Most are told apart without the lock: the first training samples most densely.
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
        // Any page of the piece, as long as it is not always the first.
        let page = pages[samples.pages.len() % pages.len()];
        samples.pages.push(page);
        self.due.store(samples.pages.len() == SAMPLE_PAGES, Ordering::Relaxed);
    }

    /// Makes a dictionary if there are samples for one, for `compressor`'s level; takes some 20 ms then. It is used from
    /// then on.
    pub(super) fn train_if_due(&self, compressor: &mut zstd::Compressor) {
        if !self.due.load(Ordering::Relaxed) || !self.due.swap(false, Ordering::Relaxed) {
            return;
        }
        let pages = {
            let mut samples = self.samples.lock();
            samples.training += 1;
            std::mem::take(&mut samples.pages)
        };
        let (trial, training): (Vec<_>, Vec<_>) = pages.iter().enumerate().partition(|(i, _)| i % TRIAL_EVERY == 0);
        let training: Vec<_> = training.into_iter().map(|(_, page)| page).collect();
        let content = choose(&training);
        if content.len() < DICTIONARY_MIN_BYTES {
            return;
        }
        let Some(dictionary) = zstd::Dictionary::new(content, compressor.level()) else { return };
        let mut room = vec![0; PAGE_BYTES];
        let mut bytes_with = |dictionary: Option<&zstd::Dictionary>| -> usize {
            let sizes = trial
                .iter()
                .map(|(_, page)| compressor.compress(dictionary, *page, 1, &mut room).unwrap_or(PAGE_BYTES));
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
            // Release pairs with the Acquire in `newest`: whoever sees the number sees the
            // dictionary.
            self.newest.store(generation + 1, Ordering::Release);
        }
    }
}

/// Hashes of all strings of `bytes`, in order.
fn hashes(bytes: &[u8]) -> impl Iterator<Item = usize> {
    bytes.windows(STRING_BYTES).map(|string| {
        let word = string.iter().rev().fold(0, |word: u64, &byte| word << 8 | u64::from(byte));
        (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - HASH_BITS)) as usize
    })
}

/// The content of a dictionary for pages such as `samples`: of each of as many stretches of them as there is room for
/// segments, the segment whose strings are in the most samples, most telling last, where they are cheapest to refer to.
fn choose(samples: &[&[u8; PAGE_BYTES]]) -> Box<[u8]> {
    // By hash of a string: in how many other samples it is, and in which it was seen last, counted from 1.
    let (mut others, mut last_seen) = (vec![0u8; 1 << HASH_BITS], vec![0u8; 1 << HASH_BITS]);
    for (number, sample) in (1u8..).zip(samples) {
        for hash in hashes(*sample) {
            if last_seen[hash] != 0 && last_seen[hash] != number {
                others[hash] = others[hash].saturating_add(1);
            }
            last_seen[hash] = number;
        }
    }
    let mut chosen = Vec::new();
    for stretch in samples.chunks(samples.len().div_ceil(DICTIONARY_BYTES / SEGMENT_BYTES).max(1)) {
        let best = stretch.iter().map(|sample| (best_segment(sample, &others), sample));
        let Some(((score, start), sample)) = best.max_by_key(|((score, _), _)| *score) else { continue };
        if score > 0 {
            let segment = &sample[start..start + SEGMENT_BYTES];
            // Nobody needs it twice.
            hashes(segment).for_each(|hash| others[hash] = 0);
            chosen.push((score, segment));
        }
    }
    chosen.sort_by_key(|(score, _)| *score);
    chosen.iter().flat_map(|(_, segment)| segment.iter().copied()).collect()
}

/// The segment of `sample` whose different strings are in the most other samples together, and how many those are.
fn best_segment(sample: &[u8; PAGE_BYTES], others: &[u8]) -> (u32, usize) {
    const STRINGS: usize = SEGMENT_BYTES - STRING_BYTES + 1;
    // How often a string is in the segment, by some bits of its hash: those that share them count as one.
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
    fn what_samples_share_is_chosen_once_and_comes_last() {
        let (shared, own): (Vec<_>, usize) = ((0..600).map(noise(999)).collect(), 1000);
        // Somewhere else in each page, the same 600 bytes.
        let pages: Vec<_> = (0..64)
            .map(|number| {
                let at = number * 53 % 3000;
                page(|i| if (at..at + 600).contains(&i) { shared[i - at] } else { noise(number + own)(i) })
            })
            .collect();
        let content = choose(&pages.iter().collect::<Vec<_>>());
        let last = &content[content.len() - SEGMENT_BYTES..];
        assert!(shared.windows(SEGMENT_BYTES).any(|window| window == last));
        let second = &content[content.len() - 2 * SEGMENT_BYTES..content.len() - SEGMENT_BYTES];
        assert!(!shared.windows(SEGMENT_BYTES / 2).any(|window| second.starts_with(window)), "it is there once");
        assert!(choose(&[]).is_empty());
    }

    #[test]
    fn a_dictionary_that_saves_nothing_is_not_used() {
        let (dictionaries, mut compressor) = (Dictionaries::default(), zstd::Compressor::new(3));
        // Compressible, but not by what others have.
        for number in 0..SAMPLE_PAGES * 4 {
            dictionaries.offer(&page(|i| noise(number)(i % 512)));
        }
        assert!(dictionaries.due.load(Ordering::Relaxed));
        dictionaries.train_if_due(&mut compressor);
        assert!(dictionaries.newest().is_none() && !dictionaries.due.load(Ordering::Relaxed));
        assert_eq!(dictionaries.samples.lock().training, 1);
    }

    #[test]
    fn generations_are_made_one_after_the_other_and_stay() {
        let (dictionaries, mut compressor) = (Dictionaries::default(), zstd::Compressor::new(3));
        // Every training sees pages of another kind: half of a page is one of four of that kind.
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
