//! The work of `foliomem-bench-access`, the program of [`crate::access`]: it touches its memory in
//! one pattern while a clock runs, and verifies every touched page.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
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
/// Longest touch that is told from longer ones, in nanoseconds, and digits of its time.
const MAX_TOUCH_NS: u64 = 10_000_000_000;
const DIGITS: u8 = 2;

/// The result of one run.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Run {
    /// Seconds of the timed touches, without filling and warm-up.
    pub seconds: f64,
    /// The time of a touch that 99% do not exceed, in nanoseconds.
    pub touch_p99_ns: u64,
    /// The time of a touch that 99.9% do not exceed, in nanoseconds.
    pub touch_p999_ns: u64,
}

/// The work of the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// The order of the touches.
    pub pattern: Pattern,
    /// Memory that is touched, in MiB.
    pub need_mib: u64,
    /// Number of threads. Each touches a part of the memory of its own.
    pub threads: u64,
    /// Timed touches of all threads together.
    pub touches: u64,
}

/// Returns the arguments that start the child.
#[must_use]
pub fn arguments(work: &Work, corpus: &Path) -> Vec<std::ffi::OsString> {
    let Work { pattern, need_mib, threads, touches } = work;
    let texts = [pattern.to_string(), need_mib.to_string(), threads.to_string(), touches.to_string()];
    texts.into_iter().map(Into::into).chain([corpus.into()]).collect()
}

/// Does the work that the arguments of [`arguments`] ask for, and prints the result.
#[must_use]
pub fn measure(arguments: &[String]) -> ExitCode {
    let asked = "the arguments of the measured program";
    let bad = || Error::parse(asked, &arguments.join(" "));
    let parsed = || {
        let [pattern, need_mib, threads, touches, corpus] = arguments else { return Err(bad()) };
        let number = |text: &String| text.parse::<u64>().map_err(|_| bad());
        let work = Work {
            pattern: pattern.parse()?,
            need_mib: number(need_mib)?,
            threads: number(threads)?,
            touches: number(touches)?,
        };
        Ok((work, Path::new(corpus)))
    };
    let line = parsed()
        .and_then(|(work, corpus)| run(&work, corpus))
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

fn run(work: &Work, corpus: &Path) -> Result<Run, Error> {
    let corpus = std::fs::read(corpus).map_err(Error::at(corpus))?;
    let mut memory = Memory::filled(work.need_mib, &corpus)?;
    drop(corpus);
    let threads = work.threads.max(1);
    let touches = work.touches / threads;
    let barrier = Barrier::new(threads as usize);
    let parts = memory.parts(threads).into_iter().zip(1..);
    let mut touching = parts.map(|(part, seed)| {
        let order = Order::new(work.pattern, part.pages(), seed);
        || touch_all(part, order, touches, &barrier)
    });
    // A program of one thread has one thread.
    let Some(first) = touching.next() else { return Err(Error::WrongResult("there is no memory to touch".into())) };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let others: Vec<_> = touching.map(|touch| scope.spawn(touch)).collect();
        let first = first();
        let others = others.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(ended_early())));
        [first].into_iter().chain(others).collect()
    });
    let (mut slowest, mut times) = (Duration::ZERO, histogram());
    for outcome in outcomes {
        let (took, touched) = outcome?;
        slowest = slowest.max(took);
        times += touched;
    }
    let quantile_ns = |quantile| times.value_at_quantile(quantile);
    Ok(Run { seconds: slowest.as_secs_f64(), touch_p99_ns: quantile_ns(0.99), touch_p999_ns: quantile_ns(0.999) })
}

fn ended_early() -> Error {
    Error::WrongResult("a thread of the measured program ended early".into())
}

fn histogram() -> Histogram<u32> {
    let times = Histogram::new_with_bounds(1, MAX_TOUCH_NS, DIGITS);
    times.unwrap_or_else(|_| unreachable!("the bounds are constants"))
}

/// Warms up, and then touches `touches` pages of `part` in `order`, when all threads have warmed
/// up. Returns how long it took, and the times of the touches.
fn touch_all(
    mut part: Part<'_>,
    mut order: Order,
    touches: u64,
    barrier: &Barrier,
) -> Result<(Duration, Histogram<u32>), Error> {
    let mut times = histogram();
    let warm = (0..touches / 4).try_for_each(|_| part.touch(order.next()));
    barrier.wait();
    warm?;
    let started = Instant::now();
    let mut before = started;
    for _ in 0..touches {
        part.touch(order.next())?;
        let now = Instant::now();
        times.saturating_record((now - before).as_nanos() as u64);
        before = now;
    }
    Ok((before - started, times))
}

/// The touched memory.
struct Memory {
    /// The pages, and before them what is needed to align them: a touch of a page that lies across
    /// two pages of the system would be two touches.
    bytes: Vec<u8>,
    /// Where the first page begins.
    start: usize,
    /// Number of writes to each page.
    writes: Vec<u32>,
}

/// A part of the memory, and its expected content.
struct Part<'a> {
    bytes: &'a mut [u8],
    writes: &'a mut [u32],
    /// The number of its first page.
    first: u64,
    touches: u64,
}

impl Memory {
    fn filled(need_mib: u64, corpus: &[u8]) -> Result<Self, Error> {
        if corpus.len() < REAL {
            return Err(Error::WrongResult("the corpus is shorter than a page's share of it".into()));
        }
        let needed = (need_mib * MIB) as usize;
        let mut bytes = vec![0; needed + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        bytes.truncate(start + needed);
        for (number, page) in bytes[start..].chunks_exact_mut(PAGE).enumerate() {
            let at = number * REAL % (corpus.len() - REAL + 1);
            for part in page.chunks_exact_mut(REAL) {
                part.copy_from_slice(&corpus[at..at + REAL]);
            }
            page[..8].copy_from_slice(&(number as u64).to_le_bytes());
            page[8..12].fill(0);
        }
        Ok(Self { bytes, start, writes: vec![0; needed / PAGE] })
    }

    /// Returns `count` parts of equal size.
    fn parts(&mut self, count: u64) -> Vec<Part<'_>> {
        let pages = (self.writes.len() / count as usize).max(1);
        let parts = self.bytes[self.start..].chunks_exact_mut(pages * PAGE).zip(self.writes.chunks_exact_mut(pages));
        let parts = parts.zip((0..).step_by(pages)).take(count as usize);
        parts.map(|((bytes, writes), first)| Part { bytes, writes, first, touches: 0 }).collect()
    }
}

impl Part<'_> {
    fn pages(&self) -> u64 {
        self.writes.len() as u64
    }

    /// Reads a byte of every cache line of the page, verifies its number and write count, and
    /// writes on every [`WRITE_EVERY`]th touch.
    fn touch(&mut self, index: u64) -> Result<(), Error> {
        let number = self.first + index;
        let page = &mut self.bytes[index as usize * PAGE..][..PAGE];
        let writes = &mut self.writes[index as usize];
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
    fn new(pattern: Pattern, pages: u64, seed: u64) -> Self {
        let mut total = 0.0;
        let ranks = if pattern == Pattern::Zipf { pages } else { 0 };
        let cumulated = (1..=ranks).map(|rank| {
            total += (rank as f64).powf(-SKEW);
            total
        });
        Self { pattern, pages, at: 0, seed, cumulated: cumulated.collect() }
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
        let mut order = Order::new(pattern, pages, 1);
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
        for (mut part, pages) in memory.parts(3).into_iter().zip([85, 85, 85]) {
            assert_eq!(part.pages(), pages);
            (0..pages).for_each(|page| part.touch(page).unwrap());
            part.bytes[7 * PAGE + 8] ^= 1;
            assert!(part.touch(7).is_err());
        }
        assert!(Memory::filled(1, &[7; 10]).is_err());
    }
}
