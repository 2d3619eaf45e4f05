//! Pages that a fork has left shared: their number, and the throttle of their copies.
//!
//! Only the monitor measures and throttles. There is no lock.

use crate::address_space::cow_throttle::CowThrottle;
use crate::companion::context::Context;
use foliomem_sys::clock::now_ns;
use foliomem_sys::pagemap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Minimum interval between two measurements of the shared pages, in nanoseconds: the kernel walks
/// the page tables for one.
const SHARED_INTERVAL_NS: u64 = 20_000_000;

/// The knowledge about pages that a fork has left shared.
#[derive(Default)]
pub(crate) struct SharedPages {
    pub(crate) throttle: CowThrottle,
    /// Time of the next measurement, in nanoseconds.
    pub(crate) due_ns: AtomicU64,
}

impl SharedPages {
    /// Notes a fork, on either side: the number of shared pages is known for now. (Measuring it
    /// costs more than a short-lived child.)
    pub(crate) fn forked(&self, context: &Context) {
        context.budget.forked();
        self.throttle.forked();
        self.due_ns.store(now_ns() + SHARED_INTERVAL_NS, Ordering::Relaxed);
    }

    /// Measures the shared pages if a measurement is due: while the other side of a fork lives,
    /// each write changes their number. `crowd` is the factor by which the monitor samples more
    /// rarely because of other processes.
    pub(crate) fn measure(&self, context: &Context, crowd: impl FnOnce() -> u32) {
        let Some(files) = &*context.files else { return };
        let started = now_ns();
        if !context.budget.shares() || started < self.due_ns.load(Ordering::Relaxed) {
            return;
        }
        let shared = pagemap::shared_anon_pages(&files.smaps_rollup);
        context.budget.set_shared_pages(shared.unwrap_or(0));
        let now = now_ns();
        // A measurement takes longer the more memory there is: it may take a twentieth of the time.
        let pause_ns = (now - started).saturating_mul(20).max(SHARED_INTERVAL_NS);
        self.due_ns.store(now + pause_ns * u64::from(crowd()), Ordering::Relaxed);
    }
}
