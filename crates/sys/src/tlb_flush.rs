//! The time that a flush of another CPU's TLB takes.
//!
//! Each move of a page flushes the TLBs of all CPUs that run the memory, by an interrupt. On
//! hardware that takes 2 to 4 us, and much longer in a virtual machine without help of its host.

use crate::clock::now_ns;
use crate::region::Region;
use foliomem_types::units::PAGE_BYTES;

/// Minimum time, in nanoseconds, at which the agent serves faults on the CPU of the thread that
/// faults: then a flush costs more than what two CPUs gain.
pub const EXPENSIVE_NS: u64 = 7_000;
/// Number of flushes that are measured; their median counts.
const FLUSHES: usize = 9;

/// Measures a flush with `page`, a region of one page. Another thread must keep its CPU busy
/// meanwhile. Returns nanoseconds, at least 1.
pub fn measure_ns(page: &Region) -> u64 {
    let mut took_ns = [0; FLUSHES];
    for took_ns in &mut took_ns {
        // A failure leaves the page, and shows as a cheap flush.
        let _ = page.populate(0, PAGE_BYTES);
        let started_ns = now_ns();
        let _ = page.discard(0, PAGE_BYTES);
        *took_ns = now_ns() - started_ns;
    }
    took_ns.sort_unstable();
    took_ns[FLUSHES / 2].max(1)
}
