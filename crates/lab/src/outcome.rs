//! What a run came to. All of it follows from the scenario: the same to the bit on each run.

use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::mix;
use crate::scenario::Scenario;
use crate::schedule::Took;
use crate::workload::{CacheOutcome, Round, fallback_percent};
use foliomem_core::units::Order;
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Hash of all counters and of everything below. Two runs that differ in anything differ here.
    pub digest: String,
    /// Accesses of pages by the program.
    pub accesses: u64,
    /// Those of them that were faults.
    pub faults: u64,
    /// Pages that came or went.
    pub page_events: u64,
    /// Faults that had to fetch what was out, pages that came back by them or by readahead, and pages that went out.
    pub pgmajfault: u64,
    /// See `pgmajfault`.
    pub pswpin: u64,
    /// See `pgmajfault`.
    pub pswpout: u64,
    /// The most pages that were charged.
    pub peak_pages: u64,
    /// The most pages that were out whenever that was noted.
    pub peak_swapped_pages: u64,
    /// By folio size, where anything happened.
    pub sizes: Vec<SizeOutcome>,
    /// Slot allocations that got what they wanted, and that did not.
    pub slot_allocs: u64,
    /// See `slot_allocs`.
    pub slot_fallbacks: u64,
    /// Clusters whose slots were looked through.
    pub clusters_scanned: u64,
    /// The same by allocation, failed ones included.
    pub clusters_scanned_per_alloc: f64,
    /// Slots that order 0 took from clusters of higher orders.
    pub slots_stolen: u64,
    /// Modelled: what the machine of the costs would take, all CPUs together and until the last is done.
    pub modelled_cpu_seconds: f64,
    /// See `modelled_cpu_seconds`.
    pub modelled_elapsed_seconds: f64,
    /// What of the CPUs' time programs did not compute.
    pub modelled_sys_seconds: f64,
    /// What of that was waiting for the lists of clusters.
    pub modelled_wait_seconds: f64,
    /// Until what was to go out was out, and until it was back, where the workload does that by itself.
    pub modelled_page_out_seconds: f64,
    /// See `modelled_page_out_seconds`.
    pub modelled_page_in_seconds: f64,
    /// Parts of the workload, where it has some.
    pub rounds: Vec<Round>,
    /// What its page cache came to, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_cache: Option<CacheOutcome>,
}

/// Counters of a folio size, as in `hugepages-<size>kB/stats`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SizeOutcome {
    /// The size.
    pub kib: u32,
    /// Folios made at a first touch.
    pub anon_fault_alloc: u64,
    /// First touches that wanted this size and could not have it.
    pub anon_fault_fallback: u64,
    /// Folios that came back in one piece.
    pub swpin: u64,
    /// Folios that went out in one piece.
    pub swpout: u64,
    /// Folios that were split because no contiguous slots could be had.
    pub swpout_fallback: u64,
    /// `swpout_fallback` by it and `swpout`.
    pub fallback_percent: Option<f64>,
}

impl Scenario {
    /// Runs it; the engine is checked after so many faults, if it is to be, and at the end.
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
        let all = all.chain(counters.store.fields()).map(|(_, counter)| counter.get());
        let all = all.chain(slots.allocs).chain(slots.fallbacks).chain([slots.reclaims]);
        // What JSON has of a number is exact.
        let text = serde_json::json!(outcome).to_string();
        let hash = all.chain(text.bytes().map(u64::from)).fold(0, mix);
        outcome.digest = format!("{hash:016x}");
        outcome
    }
}
