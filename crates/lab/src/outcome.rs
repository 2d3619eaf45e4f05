//! The outcome of a run. It depends only on the scenario: equal scenarios give equal bits.

use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::mix;
use crate::scenario::Scenario;
use crate::schedule::Took;
use crate::workload::{CacheOutcome, Round, fallback_percent};
use foliomem_types::units::Order;
use serde::{Deserialize, Serialize};

/// Counters that digests cover only if they are not zero: they are newer than the first digests,
/// and equal results keep equal digests.
const NEWER_COUNTERS: [&str; 4] = ["discarded_unheard", "joined", "mapping_searches", "unseen_callers"];

/// A counter that was always 0 when the first digests were made, and is hashed as 0.
const UNHASHED_COUNTER: &str = "swpin_zero";

/// The results of one run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Hash of all counters and of all fields below: runs that differ in anything differ here.
    pub digest: String,
    /// Number of page accesses by the program.
    pub accesses: u64,
    /// Number of faults among the accesses.
    pub faults: u64,
    /// Number of pages that came or went.
    pub page_events: u64,
    /// Faults that had to fetch swapped-out content.
    pub pgmajfault: u64,
    /// Pages swapped in by faults or readahead.
    pub pswpin: u64,
    /// Pages swapped out.
    pub pswpout: u64,
    /// Peak of the charged pages.
    pub peak_pages: u64,
    /// Recorded peak of the swapped-out pages.
    pub peak_swapped_pages: u64,
    /// Counters by folio size, for sizes with any events.
    pub sizes: Vec<SizeOutcome>,
    /// Slot allocations that succeeded.
    pub slot_allocs: u64,
    /// Slot allocations that failed.
    pub slot_fallbacks: u64,
    /// Clusters whose slots were scanned.
    pub clusters_scanned: u64,
    /// Scanned clusters for each allocation, including failed ones.
    pub clusters_scanned_per_alloc: f64,
    /// Slots that order 0 took from clusters of higher orders.
    pub slots_stolen: u64,
    /// Modelled CPU time of all CPUs together on the machine of the cost table.
    pub modelled_cpu_seconds: f64,
    /// Modelled time until the last CPU is done.
    pub modelled_elapsed_seconds: f64,
    /// Modelled CPU time outside of the programs' own computation.
    pub modelled_sys_seconds: f64,
    /// The part of that time spent waiting for the list lock of the slot allocator.
    pub modelled_wait_seconds: f64,
    /// Modelled time to swap everything out, if the workload does that by itself.
    pub modelled_page_out_seconds: f64,
    /// Modelled time to swap everything in again.
    pub modelled_page_in_seconds: f64,
    /// The rounds of the workload, if it has any.
    pub rounds: Vec<Round>,
    /// The outcome of the workload's page cache, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_cache: Option<CacheOutcome>,
}

/// Counters of a folio size, as in `hugepages-<size>kB/stats`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SizeOutcome {
    /// The folio size in KiB.
    pub kib: u32,
    /// Folios allocated at a first touch.
    pub anon_fault_alloc: u64,
    /// First touches that tried this size and fell back.
    pub anon_fault_fallback: u64,
    /// Folios swapped in whole.
    pub swpin: u64,
    /// Folios swapped out whole.
    pub swpout: u64,
    /// Folios split because no contiguous slots were free.
    pub swpout_fallback: u64,
    /// `swpout_fallback` as a percentage of itself and `swpout`.
    pub fallback_percent: Option<f64>,
}

impl Scenario {
    /// Runs the scenario. Checks the engine after every `check_every` faults and at the end, if
    /// that is given.
    pub fn run(&self, check_every: Option<u64>) -> Result<Outcome, LabError> {
        let mut lab = self.lab(check_every);
        let (rounds, took) = self.workload.run(&mut lab, u64::from(self.seed))?;
        if check_every.is_some() {
            lab.engine().check();
        }
        Ok(Outcome::of(&lab, rounds, took))
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl Outcome {
    fn of(lab: &Lab, rounds: Vec<Round>, took: Took) -> Outcome {
        let (slots, counters) = (lab.slots(), lab.engine().counters());
        let (accesses, faults) = lab.accesses();
        let sizes = Order::all().map(|order| {
            let counters = counters.of(order);
            let (swpout, swpout_fallback) = (counters.swpout.get(), counters.swpout_fallback.get());
            SizeOutcome {
                kib: order.kib(),
                anon_fault_alloc: counters.anon_fault_alloc.get(),
                anon_fault_fallback: counters.anon_fault_fallback.get(),
                swpin: counters.swpin.get(),
                swpout,
                swpout_fallback,
                fallback_percent: fallback_percent(swpout, swpout_fallback).filter(|_| order > Order::ZERO),
            }
        });
        let (allocs, fallbacks): (u64, u64) = (slots.allocs.iter().sum(), slots.fallbacks.iter().sum());
        let mut outcome = Outcome {
            digest: String::new(),
            accesses,
            faults,
            page_events: lab.page_events(),
            pgmajfault: counters.vm.pgmajfault.get(),
            pswpin: counters.vm.pswpin.get(),
            pswpout: counters.vm.pswpout.get(),
            peak_pages: lab.machine().peak_pages(),
            peak_swapped_pages: lab.peak_swapped_pages(),
            sizes: sizes
                .filter(|size| size.anon_fault_alloc + size.swpin + size.swpout + size.swpout_fallback > 0)
                .collect(),
            slot_allocs: allocs,
            slot_fallbacks: fallbacks,
            clusters_scanned: slots.clusters_scanned,
            clusters_scanned_per_alloc: slots.clusters_scanned as f64 / (allocs + fallbacks).max(1) as f64,
            slots_stolen: slots.stolen,
            modelled_cpu_seconds: seconds(took.cpu_ns),
            modelled_elapsed_seconds: seconds(took.elapsed_ns),
            modelled_sys_seconds: seconds(took.cpu_ns - took.computed_ns),
            modelled_wait_seconds: seconds(took.waited_ns),
            modelled_page_out_seconds: seconds(took.page_out_ns),
            modelled_page_in_seconds: seconds(took.page_in_ns),
            rounds,
            page_cache: lab.page_cache().cloned(),
        };
        let all = counters.size.iter().flat_map(|size| size.fields()).chain(counters.vm.fields());
        let all = all
            .chain(counters.store.fields())
            .map(|(name, counter)| (name, if name == UNHASHED_COUNTER { 0 } else { counter.get() }));
        let all = all.filter(|&(name, count)| count > 0 || !NEWER_COUNTERS.contains(&name)).map(|(_, count)| count);
        let all = all.chain(slots.allocs).chain(slots.fallbacks).chain([slots.reclaims]);
        // JSON represents these numbers exactly.
        let text = serde_json::json!(outcome).to_string();
        let hash = all.chain(text.bytes().map(u64::from)).fold(0, mix);
        outcome.digest = format!("{hash:016x}");
        outcome
    }
}
