//! The work of `foliomem-bench-access`, the program of [`crate::access`]: it touches its memory in
//! one pattern while a clock runs, and verifies every touched page.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::access::Pattern;
use crate::{Error, MIB};

/// Bytes of a page, the unit of a touch.
const PAGE: usize = 4096;
/// Bytes of real data in each page; the rest repeats them. Pages compress to about a fifth, as
/// those of many programs do, and fit into a quarter of their size.
const REAL: usize = 1024;
/// Touches for each write.
const WRITE_EVERY: u64 = 8;
/// Pages between two touches of the strided pattern. It is larger than a folio of 64 KiB, and
/// prime, so that the pattern reaches every page.
const STRIDE: u64 = 17;
/// Skew of the Zipf pattern, which is YCSB's.
const SKEW: f64 = 0.99;

/// The result of one run.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Run {
    /// Seconds of the timed touches, without filling and warm-up.
    pub seconds: f64,
}

/// Returns the arguments that start the child.
#[must_use]
pub fn arguments(pattern: Pattern, need_mib: u64, touches: u64, corpus: &Path) -> Vec<std::ffi::OsString> {
    let texts = [pattern.to_string(), need_mib.to_string(), touches.to_string()];
    texts.into_iter().map(Into::into).chain([corpus.into()]).collect()
}

/// Does the work that the arguments of [`arguments`] ask for, and prints the result.
#[must_use]
pub fn measure(arguments: &[String]) -> ExitCode {
    let asked = "the arguments of the measured program";
    let bad = || Error::parse(asked, &arguments.join(" "));
    let parsed = || {
        let [pattern, need_mib, touches, corpus] = arguments else { return Err(bad()) };
        let number = |text: &String| text.parse::<u64>().map_err(|_| bad());
        Ok((pattern.parse()?, number(need_mib)?, number(touches)?, Path::new(corpus)))
    };
    let line = parsed()
        .and_then(|(pattern, need_mib, touches, corpus)| run(pattern, need_mib, touches, corpus))
        .and_then(|run| serde_json::to_string(&run).map_err(|e| Error::parse(asked, &e.to_string())));
    match line {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(pattern: Pattern, need_mib: u64, touches: u64, corpus: &Path) -> Result<Run, Error> {
    let corpus = std::fs::read(corpus).map_err(Error::at(corpus))?;
    let mut memory = Memory::filled(need_mib, &corpus)?;
    drop(corpus);
    let mut order = Order::new(pattern, memory.pages());
    for _ in 0..touches / 4 {
        memory.touch(order.next())?;
    }
    let clock = Instant::now();
    for _ in 0..touches {
        memory.touch(order.next())?;
    }
    Ok(Run { seconds: clock.elapsed().as_secs_f64() })
}

/// The touched memory and its expected content.
struct Memory {
    bytes: Vec<u8>,
    /// Number of writes to each page.
    writes: Vec<u32>,
    touches: u64,
}

impl Memory {
    fn filled(need_mib: u64, corpus: &[u8]) -> Result<Self, Error> {
        if corpus.len() < REAL {
            return Err(Error::WrongResult("the corpus is shorter than a page's share of it".into()));
        }
        let mut bytes = vec![0; (need_mib * MIB) as usize];
        for (number, page) in bytes.chunks_exact_mut(PAGE).enumerate() {
            let at = number * REAL % (corpus.len() - REAL + 1);
            for part in page.chunks_exact_mut(REAL) {
                part.copy_from_slice(&corpus[at..at + REAL]);
            }
            page[..8].copy_from_slice(&(number as u64).to_le_bytes());
            page[8..12].fill(0);
        }
        let pages = bytes.len() / PAGE;
        Ok(Self { bytes, writes: vec![0; pages], touches: 0 })
    }

    fn pages(&self) -> u64 {
        self.writes.len() as u64
    }

    /// Reads a byte of every cache line of the page, verifies its number and write count, and
    /// writes on every [`WRITE_EVERY`]th touch.
    fn touch(&mut self, number: u64) -> Result<(), Error> {
        let page = &mut self.bytes[number as usize * PAGE..][..PAGE];
        let writes = &mut self.writes[number as usize];
        let sum = page.chunks_exact(64).fold(0u64, |sum, line| sum.wrapping_add(u64::from(line[63])));
        std::hint::black_box(sum);
        if page[..8] != number.to_le_bytes() || page[8..12] != writes.to_le_bytes() {
            return Err(Error::WrongResult(format!("page {number} holds something else than was written to it")));
        }
        self.touches += 1;
        if self.touches.is_multiple_of(WRITE_EVERY) {
            *writes += 1;
            page[8..12].copy_from_slice(&writes.to_le_bytes());
        }
        Ok(())
    }
}

/// The order of the touches, which is equal in every run.
struct Order {
    pattern: Pattern,
    pages: u64,
    at: u64,
    seed: u64,
    /// Cumulated weights of the pages by rank, for Zipf.
    cumulated: Vec<f64>,
}

impl Order {
    fn new(pattern: Pattern, pages: u64) -> Self {
        let mut total = 0.0;
        let ranks = if pattern == Pattern::Zipf { pages } else { 0 };
        let cumulated = (1..=ranks).map(|rank| {
            total += (rank as f64).powf(-SKEW);
            total
        });
        Self { pattern, pages, at: 0, seed: 1, cumulated: cumulated.collect() }
    }

    fn next(&mut self) -> u64 {
        match self.pattern {
            Pattern::Sequential => self.at = (self.at + 1) % self.pages,
            // Each sweep ends next to its beginning, so the next sweep touches the next pages.
            Pattern::Strided => {
                self.at += STRIDE;
                if self.at >= self.pages {
                    self.at = (self.at % STRIDE + 1) % STRIDE;
                }
            }
            Pattern::Random => self.at = self.random() % self.pages,
            Pattern::Zipf => {
                let total = self.cumulated.last().copied().unwrap_or(0.0);
                let wanted = (self.random() >> 11) as f64 / (1u64 << 53) as f64 * total;
                let rank = self.cumulated.partition_point(|&share| share < wanted) as u64;
                // The multiplication scatters popular pages.
                self.at = rank.wrapping_mul(2_654_435_761) % self.pages;
            }
        }
        self.at
    }

    /// Returns the next number of splitmix64.
    fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.seed;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn counts(pattern: Pattern, pages: u64, touches: u64) -> BTreeMap<u64, u64> {
        let mut order = Order::new(pattern, pages);
        let mut counts = BTreeMap::new();
        (0..touches).for_each(|_| *counts.entry(order.next()).or_default() += 1);
        counts
    }

    #[test]
    fn regular_patterns_touch_every_page() {
        for pattern in [Pattern::Sequential, Pattern::Strided] {
            let counts = counts(pattern, 1000, 3000);
            assert_eq!(counts.len(), 1000, "{pattern}");
            assert!(counts.values().all(|count| (2..=4).contains(count)), "{pattern}");
        }
    }

    #[test]
    fn irregular_patterns_have_their_skew() {
        let uniform = counts(Pattern::Random, 1000, 100_000);
        assert!(uniform.values().all(|count| (50..=160).contains(count)));
        let mut zipf: Vec<u64> = counts(Pattern::Zipf, 1000, 100_000).into_values().collect();
        zipf.sort_unstable();
        let top: u64 = zipf.iter().rev().take(100).sum();
        assert!((60_000..75_000).contains(&top), "a tenth of the pages get {top} of 100000 touches");
    }

    #[test]
    fn a_lost_write_is_reported() {
        let mut memory = Memory::filled(1, &[7; 4096]).unwrap();
        (0..64).for_each(|page| memory.touch(page).unwrap());
        memory.bytes[7 * PAGE + 8] ^= 1;
        assert!(memory.touch(7).is_err());
        assert!(Memory::filled(1, &[7; 10]).is_err());
    }
}
