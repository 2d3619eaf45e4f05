//! `foliomem bench slots`: measures the allocation of swap slots by strategy, order, number of
//! threads and fill level.
//!
//! A device of 1 GiB of slots is filled. Then each thread, as a CPU of its own, repeats *pairs* of
//! one release and one allocation. The fill levels are
//! - *empty*: no slot in use; a pair is one allocation and its release;
//! - *half* and *99%*, with folios of the order; a pair frees a folio chosen at random and
//!   allocates one;
//! - *fragmented*: 7/8, with folios; half of the releases are folios and half are single slots from
//!   anywhere, as after swap-in page by page. If no range for a folio is free, single slots are
//!   allocated, as the engine does. The measured state is the steady state of this, which depends
//!   on the strategy.
//!
//! Time is that of all threads together: twice the threads on twice the CPUs take half, at best.

use crate::{Error, median};
use foliomem_core::cluster::{Strategy, SwapClusters, SwapDevice};
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_SLOTS, CpuNumber, Order, Slot};
use serde::{Deserialize, Serialize};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The default orders to measure.
pub const ORDERS: [u8; 4] = [0, 2, 4, 9];
/// The default numbers of threads.
pub const THREADS: [u16; 4] = [1, 2, 4, 8];
/// Clusters of the device.
const CLUSTERS: u32 = 512;
const SLOTS: u32 = CLUSTERS * CLUSTER_SLOTS;
/// Measurements of a row; the median counts. With [`ROUND`] it bounds the time of 256 rows to a
/// minute and a half.
const ROUNDS: usize = 5;
/// Duration of one measurement.
const ROUND: Duration = Duration::from_millis(20);
/// Slots that a thread allocates and frees before it reads the clock again. The bound is in slots,
/// because a pair of order 9 handles 512 times the slots of a pair of order 0.
const BATCH_SLOTS: u32 = 2048;

/// The fill level of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fill {
    /// No slot in use.
    Empty,
    /// Half of the slots in use.
    Half,
    /// 99% of the slots in use.
    #[serde(rename = "99%")]
    Nearly,
    /// 7/8 of the slots in use, not only by whole folios.
    Fragmented,
}

impl Fill {
    /// All fill levels.
    pub const ALL: [Fill; 4] = [Fill::Empty, Fill::Half, Fill::Nearly, Fill::Fragmented];

    fn slots(self) -> u32 {
        match self {
            Fill::Empty => 0,
            Fill::Half => SLOTS / 2,
            Fill::Nearly => SLOTS / 100 * 99,
            Fill::Fragmented => SLOTS / 8 * 7,
        }
    }
}

/// One combination, measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The strategy, as on the command line.
    pub strategy: String,
    /// Order of the folios.
    pub order: u8,
    /// Number of concurrent threads, each as a CPU of its own.
    pub threads: u16,
    /// Fill level of the device.
    pub fill: Fill,
    /// Elapsed nanoseconds divided by the pairs of all threads.
    pub ns_per_pair: f64,
    /// Clusters scanned for each allocation of any order.
    pub clusters_scanned_per_alloc: f64,
    /// Share of the allocations of folios that got no range of slots.
    pub fallback_rate: f64,
}

/// The combinations to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Strategies to measure.
    pub strategies: Vec<Strategy>,
    /// Folio orders to measure.
    pub orders: Vec<Order>,
    /// Numbers of threads to measure, each at least 1.
    pub threads: Vec<u16>,
}

/// Measures and calls `progress` with each row.
///
/// # Errors
/// Fails if the allocator's slot count is wrong afterwards.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    for fill in Fill::ALL {
        for &order in &options.orders {
            for &threads in &options.threads {
                for &strategy in &options.strategies {
                    let row = measure(strategy, order, threads, fill)?;
                    progress(&row);
                    rows.push(row);
                }
            }
        }
    }
    Ok(rows)
}

/// A xorshift generator. Its numbers are random enough here and take two nanoseconds.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * limit as u128) >> 64) as usize
    }
}

/// The slots of one thread.
struct Thread<'a> {
    swap: &'a SwapClusters,
    cpu: CpuNumber,
    order: Order,
    folios: Vec<Slot>,
    /// Slots that do not belong, or no longer belong, to a whole folio.
    singles: Vec<Slot>,
    random: Random,
}

impl Thread<'_> {
    /// Allocates the slots of a folio, as one range or one by one.
    fn alloc(&mut self) {
        if let Ok(slot) = self.swap.alloc(self.cpu, self.order) {
            self.folios.push(slot);
        } else if self.order > Order::ZERO {
            let singles = (0..self.order.pages()).map_while(|_| self.swap.alloc(self.cpu, Order::ZERO).ok());
            self.singles.extend(singles);
        }
    }

    fn free_folio(&mut self) {
        if !self.folios.is_empty() {
            let index = self.random.below(self.folios.len());
            self.swap.free(self.cpu, self.folios.swap_remove(index), self.order.pages());
        }
    }

    /// Frees as many slots as a folio has, each from anywhere.
    fn free_singles(&mut self) {
        let pages = self.order.pages() as usize;
        for _ in 0..pages {
            let index = self.random.below(self.singles.len() + self.folios.len() * pages);
            let slot = if index < self.singles.len() {
                self.singles.swap_remove(index)
            } else {
                let index = index - self.singles.len();
                let folio = self.folios.swap_remove(index / pages);
                let slot = folio.offset((index % pages) as u32);
                let rest = (0..self.order.pages()).map(|page| folio.offset(page)).filter(|&page| page != slot);
                self.singles.extend(rest);
                slot
            };
            self.swap.free(self.cpu, slot, 1);
        }
    }

    fn pair(&mut self, fill: Fill) {
        match fill {
            Fill::Empty => {
                self.alloc();
                self.free_folio();
            }
            Fill::Half | Fill::Nearly => {
                self.free_folio();
                self.alloc();
            }
            Fill::Fragmented => {
                if self.random.below(2) == 0 && !self.folios.is_empty() {
                    self.free_folio();
                } else {
                    self.free_singles();
                }
                self.alloc();
            }
        }
    }

    /// Repeats pairs until `stop` is set; returns their number.
    fn work(&mut self, fill: Fill, stop: &AtomicBool, until: Instant) -> u64 {
        let batch = (BATCH_SLOTS / self.order.pages()).max(1);
        let mut pairs = 0;
        while !stop.load(Relaxed) {
            (0..batch).for_each(|_| self.pair(fill));
            pairs += u64::from(batch);
            if Instant::now() >= until {
                stop.store(true, Relaxed);
            }
        }
        pairs
    }
}

fn measure(strategy: Strategy, order: Order, threads: u16, fill: Fill) -> Result<Row, Error> {
    let swap = SwapClusters::new(SwapDevice { slots: SLOTS, discard: Discard::Never }, threads, strategy);
    let mut workers: Vec<Thread> = (0..threads)
        .map(|cpu| Thread {
            swap: &swap,
            cpu: CpuNumber(cpu),
            order,
            folios: Vec::new(),
            singles: Vec::new(),
            random: Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(cpu + 1)),
        })
        .collect();
    for index in 0..(fill.slots() / order.pages()) as usize {
        workers[index % usize::from(threads)].alloc();
    }
    if fill == Fill::Fragmented {
        // On average, every slot is freed and allocated twice.
        for index in 0..(2 * SLOTS / order.pages()) as usize {
            workers[index % usize::from(threads)].pair(fill);
        }
    }
    let before = swap.counters();
    let mut ns_per_pair = Vec::new();
    for _ in 0..ROUNDS {
        ns_per_pair.push(round(&mut workers, fill));
    }
    let after = swap.counters();
    swap.check();
    let held: usize =
        workers.iter().map(|worker| worker.folios.len() * order.pages() as usize + worker.singles.len()).sum();
    if held != swap.used_slots() as usize {
        return Err(Error::WrongResult(format!("{held} slots are held and {} in use", swap.used_slots())));
    }
    let grown = |before: &[u64], after: &[u64]| after.iter().sum::<u64>() - before.iter().sum::<u64>();
    let all = grown(&before.allocs, &after.allocs) + grown(&before.fallbacks, &after.fallbacks);
    let at = order.index();
    let fallbacks = after.fallbacks[at] - before.fallbacks[at];
    let tried = after.allocs[at] - before.allocs[at] + fallbacks;
    Ok(Row {
        strategy: strategy.to_string(),
        order: order.get(),
        threads,
        fill,
        ns_per_pair: median(&ns_per_pair),
        clusters_scanned_per_alloc: (after.clusters_scanned - before.clusters_scanned) as f64 / all.max(1) as f64,
        fallback_rate: fallbacks as f64 / tried.max(1) as f64,
    })
}

/// Runs all threads for one round; returns the nanoseconds of a pair.
fn round(workers: &mut [Thread], fill: Fill) -> f64 {
    let (stop, start) = (AtomicBool::new(false), Barrier::new(workers.len()));
    let (stop, start) = (&stop, &start);
    std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|worker| {
                scope.spawn(move || {
                    start.wait();
                    let started = Instant::now();
                    let pairs = worker.work(fill, stop, started + ROUND);
                    (pairs, started, Instant::now())
                })
            })
            .collect();
        let worked: Vec<_> = threads.into_iter().filter_map(|thread| thread.join().ok()).collect();
        let pairs: u64 = worked.iter().map(|(pairs, ..)| pairs).sum();
        let started = worked.iter().map(|(_, started, _)| started).min();
        let ended = worked.iter().map(|(.., ended)| ended).max();
        let elapsed = started.zip(ended).map_or(Duration::ZERO, |(started, ended)| *ended - *started);
        elapsed.as_nanos() as f64 / pairs.max(1) as f64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fill_level_is_measured() {
        for fill in Fill::ALL {
            let order = Order::new(4).unwrap();
            let row = measure(Strategy::default(), order, 2, fill).unwrap();
            assert!(row.ns_per_pair > 0.0);
            assert_eq!(row.fallback_rate > 0.0, fill == Fill::Fragmented, "{row:?}");
            assert!(row.clusters_scanned_per_alloc <= 3.0, "{row:?}");
        }
    }
}
