//! Pages that a fork has left shared: how many there are, and when copies of them must wait.
//!
//! The monitor alone measures and throttles. There is no lock.

use crate::address_space::cow_throttle::CowThrottle;
use crate::companion::context::Context;
use foliomem_sys::clock::now_ns;
use foliomem_sys::pagemap;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often the kernel is asked for the number of shared pages, for which it walks the page
/// tables.
const SHARED_INTERVAL_NS: u64 = 20_000_000;

/// What is known of pages that a fork has left shared.
#[derive(Default)]
pub(crate) struct SharedPages {
    pub(crate) throttle: CowThrottle,
    /// When [`SharedPages::measure`] asks again.
    pub(crate) due_ns: AtomicU64,
}

impl SharedPages {
    /// On either side of a fork: the number of shared pages is known for now. (To measure it costs
    /// more than a short child.)
    pub(crate) fn forked(&self, context: &Context) {
        context.budget.forked();
        self.throttle.forked();
        self.due_ns.store(now_ns() + SHARED_INTERVAL_NS, Ordering::Relaxed);
    }

    /// Measures again if that is due: while the other side of a fork lives, each write changes the
    /// number of shared pages. `crowd`: how much rarer the monitor looks because of other
    /// processes.
    pub(crate) fn measure(&self, context: &Context, crowd: impl FnOnce() -> u32) {
        let Some(files) = &*context.files else { return };
        let started = now_ns();
        if !context.budget.shares() || started < self.due_ns.load(Ordering::Relaxed) {
            return;
        }
        let shared = pagemap::shared_anon_pages(&files.smaps_rollup);
        context.budget.set_shared_pages(shared.unwrap_or(0));
        let now = now_ns();
        // Measuring takes longer the more there is: a twentieth of the time at most.
        let pause_ns = (now - started).saturating_mul(20).max(SHARED_INTERVAL_NS);
        self.due_ns.store(now + pause_ns * u64::from(crowd()), Ordering::Relaxed);
    }
}
