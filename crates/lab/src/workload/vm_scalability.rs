//! Cases of vm-scalability on a page cache of large folios ([`crate::page_cache`]): files that are
//! read or mapped, shared memory and anonymous memory, with one task for each CPU.
//!
//! Sizes relative to memory are relative to the scenario's limit. Files exceed memory by the factor
//! of the published runs. An untimed pass fills memory with them. Then the timed pass reads
//! `memories` times the size of memory.

mod case;

use super::Round;
use crate::error::LabError;
use crate::lab::Lab;
use crate::page_cache::{CacheCounters, PageCache};
use crate::scenario::Within;
use crate::schedule::{self, Took};
use case::Run;
use foliomem_core::buddy::Pick;
use foliomem_core::compaction::Variant;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

pub use case::Case;

/// A case and its parameters.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmScalability {
    case: Case,
    /// The compaction variant; none means Linux before the series, which does not move large
    /// folios.
    #[serde(deserialize_with = "compaction")]
    compaction: Option<Variant>,
    /// The choice among free runs of an order.
    #[serde(deserialize_with = "free_runs")]
    free_runs: Pick,
    /// How much is read or written, as a multiple of the size of memory.
    memories: Within<1, 1024>,
}

fn compaction<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Variant>, D::Error> {
    match String::deserialize(from)?.as_str() {
        "base" => Ok(None),
        name => name.parse().map(Some).map_err(|error| D::Error::custom(format!("{error}, or base"))),
    }
}

fn free_runs<'de, D: Deserializer<'de>>(from: D) -> Result<Pick, D::Error> {
    match String::deserialize(from)?.as_str() {
        "lowest" => Ok(Pick::Lowest),
        "last-freed" => Ok(Pick::LastFreed),
        other => Err(D::Error::custom(format!("unknown free_runs {other:?}: use lowest or last-freed"))),
    }
}

/// The outcome of a case.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheOutcome {
    /// The counters of the page cache.
    #[serde(flatten)]
    pub counters: CacheCounters,
    /// Allocations that waited for compaction.
    pub compact_stall: u64,
    /// Successful compactions.
    pub compact_success: u64,
    /// Failed compactions.
    pub compact_fail: u64,
    /// Pages visited by the migrate scanner.
    pub compact_migrate_scanned: u64,
    /// Pages visited by the free scanner.
    pub compact_free_scanned: u64,
    /// Migrated pages.
    pub pgmigrate_success: u64,
    /// Modelled throughput of all tasks in KiB a second.
    pub modelled_throughput: f64,
}

impl CacheOutcome {
    fn of(cache: &PageCache, modelled_throughput: f64) -> CacheOutcome {
        let vm = cache.vm_counters();
        CacheOutcome {
            counters: cache.counters(),
            compact_stall: vm.compact_stall.get(),
            compact_success: vm.compact_success.get(),
            compact_fail: vm.compact_fail.get(),
            compact_migrate_scanned: vm.compact_migrate_scanned.get(),
            compact_free_scanned: vm.compact_free_scanned.get(),
            pgmigrate_success: vm.pgmigrate_success.get(),
            modelled_throughput,
        }
    }

    /// Returns the number of allocated, reclaimed and migrated pages.
    pub fn page_events(&self) -> u64 {
        let came: u64 = (0..).zip(self.counters.allocated).map(|(order, folios)| folios << order).sum();
        came + self.counters.reclaimed_pages + self.pgmigrate_success
    }
}

impl VmScalability {
    /// Returns 1: the case does not use the engine's address space.
    pub fn pages(&self) -> u32 {
        1
    }

    /// Runs the workload. If the lab is checked, also checks the page cache after each round.
    pub fn run(&self, lab: &mut Lab, seed: u64) -> Result<(Vec<Round>, Took), LabError> {
        let cpus = lab.engine().config().cpus;
        let memory_pages = lab.machine().limit_pages() as u32;
        let cache = PageCache::new(memory_pages, cpus, self.compaction, self.free_runs, *lab.machine().costs());
        let mut run = Run::new(self.case, cache, *lab.machine().costs(), u32::from(cpus), memory_pages, seed)?;
        let mut took = Took::default();
        if run.fills_memory_first() {
            run.start(1);
            drive(lab, cpus, &mut run)?;
        }
        let mut done_bytes = 0;
        for _ in 0..run.rounds(self.memories.get()) {
            run.start(self.memories.get());
            let round = drive(lab, cpus, &mut run)?;
            took.cpu_ns += round.cpu_ns;
            took.computed_ns += round.computed_ns;
            took.elapsed_ns += round.elapsed_ns;
            done_bytes += run.done_bytes();
            if lab.is_checked() {
                run.cache().check();
            }
            run.finish()?;
        }
        let throughput = done_bytes as f64 / 1024.0 / (took.elapsed_ns as f64 / 1e9);
        lab.note_page_cache(CacheOutcome::of(run.cache(), throughput));
        Ok((Vec::new(), took))
    }
}

/// Runs all tasks in turns until they are done.
fn drive(lab: &mut Lab, cpus: u16, run: &mut Run) -> Result<Took, LabError> {
    run.cache().take_spent_ns();
    schedule::run(lab, cpus, run.tasks(), |lab, task| {
        run.cache().set_cpu((task % u32::from(cpus)) as u16);
        let goes_on = run.slice(task)?;
        let (spent_ns, computed_ns) = run.cache().take_spent_ns();
        lab.machine().spend(spent_ns);
        lab.machine().compute(computed_ns);
        Ok(goes_on)
    })
}
