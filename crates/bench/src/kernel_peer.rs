//! Measures the kernel's zram swap (lz4) with folios of one size, as [`crate::swap`] measures
//! foliomem's.
//!
//! One round fills a fresh anonymous mapping from the corpus, so that it consists of folios of the
//! size. The clock runs over `MADV_PAGEOUT` of all of it, then over a sequential touch of all of
//! it. The first round warms zram's allocator up and is not counted. Rates are medians over the
//! rounds, in MB/s (10^6 bytes of uncompressed data). A round whose memory was not swapped out in
//! whole folios of the size is not counted either: its figures would belong to another size.

use std::process::Command;

use serde::Serialize;

use crate::corpus::CorpusFile;
use crate::kernel::{Folios, KernelSwap, Root};
use crate::kernel_child::{Round, arguments};
use crate::rounds::Rounds;
use crate::{Error, median};

/// Share of the memory that must be swapped out in whole folios for a round to count. The kernel's
/// own noise splits the rest, for example a page in a per-CPU list at the time of the advice.
const WHOLE: f64 = 0.95;

/// The kernel's figures for one folio size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct KernelFigures {
    /// Swap-out rate, in MB/s.
    pub out_mb_s: f64,
    /// Swap-in rate of a sequential touch, in MB/s.
    pub in_mb_s: f64,
    /// Uncompressed size divided by compressed size.
    pub ratio: f64,
    /// Uncompressed size divided by zram's memory, with its allocator's waste.
    pub memory_ratio: f64,
    /// Share of the memory that was swapped out in whole folios of the size (1 for 4K).
    pub whole_out: f64,
    /// Share of the memory that was swapped in as whole folios of the size (1 for 4K). Linux 6.18
    /// never swaps in a whole 2M folio.
    pub whole_in: f64,
}

/// The kernel's swap with folios of one size, set up and ready.
#[derive(Debug)]
pub struct KernelPeer {
    size_kib: u64,
    swap: KernelSwap,
    rounds: Rounds,
    seen: Vec<Round>,
}

impl KernelPeer {
    /// Sets up swap with folios of `size_kib` (4: single pages) for the content of `corpus`.
    /// Returns `None` if the kernel cannot be measured: not root, no zram, or no folios of this
    /// size.
    ///
    /// The running binary is started again as a child; its `main` must begin with
    /// [`crate::kernel_child::enter_if_asked`].
    ///
    /// # Errors
    /// Fails if a step fails.
    pub fn start(corpus: &CorpusFile, size_kib: u64) -> Result<Option<Self>, Error> {
        let root = Root::default();
        let Some(swap) = KernelSwap::set_up(&root, size_kib, Folios::WhereAdvised)? else { return Ok(None) };
        let own = std::env::current_exe().map_err(Error::doing("the path of this program"))?;
        let mthp = root.mthp(size_kib).unwrap_or_default();
        let arguments = arguments(size_kib, corpus.path(), &mthp, swap.mm_stat_path());
        let rounds = Rounds::start(Command::new(own).args(arguments))?;
        Ok(Some(Self { size_kib, swap, rounds, seen: Vec::new() }))
    }

    /// Measures one more round.
    ///
    /// # Errors
    /// Fails if the child failed.
    pub fn round(&mut self) -> Result<(), Error> {
        let round = self.rounds.next()?;
        self.seen.push(round);
        Ok(())
    }

    /// Returns the figures of the rounds since the last call. The first round is not counted.
    ///
    /// # Errors
    /// Fails with [`Error::NotWhole`].
    pub fn figures(&mut self) -> Result<KernelFigures, Error> {
        let rounds = std::mem::take(&mut self.seen);
        summary(self.size_kib, rounds.get(1..).unwrap_or_default())
    }

    /// Restores the machine's settings.
    ///
    /// # Errors
    /// Fails with [`Error::NotRestored`].
    pub fn restore(self) -> Result<(), Error> {
        drop(self.rounds);
        self.swap.restore()
    }
}

/// Returns the medians over the rounds that count.
fn summary(size_kib: u64, rounds: &[Round]) -> Result<KernelFigures, Error> {
    let share = |part: u64, r: &Round| if size_kib == 4 { 1.0 } else { ratio(part, r.out_bytes) };
    let counted: Vec<&Round> = rounds.iter().filter(|r| share(r.whole_out_bytes, r) >= WHOLE).collect();
    if counted.len() * 2 <= rounds.len() {
        let best = rounds.iter().map(|r| share(r.whole_out_bytes, r)).fold(0.0, f64::max);
        return Err(Error::NotWhole { size_kib, percent: (best * 100.0) as u64 });
    }
    let over = |figure: &dyn Fn(&Round) -> f64| median(&counted.iter().map(|r| figure(r)).collect::<Vec<_>>());
    Ok(KernelFigures {
        out_mb_s: over(&|r| r.out_bytes as f64 / 1e6 / r.out_seconds),
        in_mb_s: over(&|r| r.out_bytes as f64 / 1e6 / r.in_seconds),
        ratio: over(&|r| ratio(r.orig_data_size, r.compr_data_size)),
        memory_ratio: over(&|r| ratio(r.orig_data_size, r.mem_used_total)),
        whole_out: over(&|r| share(r.whole_out_bytes, r)),
        whole_in: over(&|r| share(r.whole_in_bytes, r)),
    })
}

fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(seconds: f64, whole: u64) -> Round {
        Round {
            out_bytes: 100_000_000,
            out_seconds: seconds,
            in_seconds: seconds / 2.0,
            whole_out_bytes: whole,
            whole_in_bytes: whole,
            orig_data_size: 100_000_000,
            compr_data_size: 40_000_000,
            mem_used_total: 50_000_000,
        }
    }

    #[test]
    fn figures_are_medians_of_the_rounds_with_whole_folios() {
        let mut rounds: Vec<Round> = (1..=7).map(|s| round(f64::from(s), 100_000_000)).collect();
        rounds[6] = round(1000.0, 10_000_000);
        let figures = summary(64, &rounds).unwrap();
        assert_eq!(figures.out_mb_s, f64::midpoint(100.0 / 3.0, 25.0));
        assert_eq!((figures.ratio, figures.memory_ratio, figures.whole_out), (2.5, 2.0, 1.0));
    }

    #[test]
    fn split_folios_give_no_figures_but_single_pages_do() {
        let rounds = vec![round(1.0, 0); 7];
        assert!(matches!(summary(64, &rounds), Err(Error::NotWhole { size_kib: 64, percent: 0 })));
        assert_eq!(summary(4, &rounds).unwrap().in_mb_s, 200.0);
    }
}
