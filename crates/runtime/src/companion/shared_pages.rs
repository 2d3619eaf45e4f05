//! Pages that a fork has left shared: their number, and the throttle of their copies.
//!
//! A process that swaps a shared page out leaves a larger part of it to the others. If it counted
//! less at once, the sum over the tree would be too small until the others have measured. So a
//! measurement that lowers what the process counts waits until all others have measured after it.
//!
//! Only the monitor measures and throttles. The lock is a leaf.

use crate::address_space::cow_throttle::CowThrottle;
use crate::companion::context::Context;
use foliomem_sync::Mutex;
use foliomem_sys::clock::{self, now_ns};
use foliomem_sys::pagemap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Minimum interval between two measurements of the shared pages, in nanoseconds: the kernel walks
/// the page tables for one.
const SHARED_INTERVAL_NS: u64 = 20_000_000;
/// A measurement counts after this time at the latest: another process may be stopped.
const MAX_WAIT_NS: u64 = 2_000_000_000;

/// A measurement that waits until it may count.
#[derive(Clone, Copy)]
pub(crate) struct Measured {
    shared_pages: i64,
    /// The minor faults when it began, and the time.
    at_faults: i64,
    at_ns: u64,
}

/// The knowledge about pages that a fork has left shared.
#[derive(Default)]
pub(crate) struct SharedPages {
    pub(crate) throttle: CowThrottle,
    /// Time of the next measurement, in nanoseconds.
    pub(crate) due_ns: AtomicU64,
    /// The last measurement, if the other processes must measure before it counts.
    pub(crate) waiting: Mutex<Option<Measured>>,
}

impl SharedPages {
    /// Notes a fork, on either side: the number of shared pages is known for now. (Measuring it
    /// costs more than a short-lived child.)
    pub(crate) fn forked(&self, context: &Context) {
        // The throttle: `CowThrottle::forks`, before the fork or in `take_over_engine`.
        let SharedPages { throttle: _, due_ns, waiting } = self;
        context.budget.forked();
        *waiting.lock() = None;
        due_ns.store(now_ns() + SHARED_INTERVAL_NS, Ordering::Relaxed);
    }

    /// Measures the shared pages if a measurement is due: while the other side of a fork lives,
    /// each write changes their number. `crowd` is the factor by which the monitor samples more
    /// rarely because of other processes.
    pub(crate) fn measure(&self, context: &Context, crowd: u32) {
        let (Some(files), budget) = (&*context.files, &context.budget) else { return };
        let at_ns = now_ns();
        if !budget.shares() {
            return;
        }
        let mut waiting = self.waiting.lock();
        if let Some(measured) = *waiting
            && (budget.may_share_more(measured.at_ns) || at_ns - measured.at_ns > MAX_WAIT_NS)
        {
            budget.set_shared_pages(measured.shared_pages, measured.at_faults, measured.at_ns);
            *waiting = None;
        }
        if waiting.is_some() || at_ns < self.due_ns.load(Ordering::Relaxed) {
            return;
        }
        let (at_faults, began_cpu_ns) = (budget.minor_faults(), clock::thread_cpu_ns());
        let shared_pages = pagemap::shared_anon_pages(&files.smaps_rollup).unwrap_or(0);
        let measured = Measured { shared_pages, at_faults, at_ns };
        if shared_pages <= budget.still_shared_pages() {
            budget.set_shared_pages(shared_pages, at_faults, at_ns);
        } else {
            // The published size covers what was measured.
            budget.shares_are_known(at_ns);
            *waiting = Some(measured);
        }
        // The time of a measurement grows with the memory. The pause limits it to 1/20 of a CPU.
        let pause_ns = (clock::thread_cpu_ns() - began_cpu_ns).saturating_mul(20).max(SHARED_INTERVAL_NS);
        self.due_ns.store(now_ns() + pause_ns * u64::from(crowd), Ordering::Relaxed);
    }
}
