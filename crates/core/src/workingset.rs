//! The working set: which folios to keep, judged by evictions and refaults.
//!
//! User space sees no accessed bit. Only two events show that a folio is in use: the program
//! touches it while it is staged, or after it was swapped out. For the second, this module uses the
//! *refault distance*, as `mm/workingset.c` of Linux does: the number of pages evicted between the
//! folio's own eviction and its return. If the folio would still be resident in twice the memory,
//! it belongs to the working set and becomes *active*. A folio with a longer distance counts as
//! new, and so does every folio that readahead fetches. Thus one pass over much data does not evict
//! pages in constant use.
//!
//! Resident folios are in one of three queues (see [`crate::queue`]). New ones are on *probation*
//! and are staged first, as long as they are at least 1/[`PROBATION_SHARE`] of all. Active ones are
//! staged only when few are on probation. Before both queues, reclaim stages *cached* folios, as
//! long as they are at least 1/[`CACHED_SHARE`] of all. A cached folio came back from the store,
//! still has a swap-cache entry, and is not active. Most cached folios are unchanged, so their
//! eviction costs nothing. Thus a pass over read-only data evicts nothing that must be compressed,
//! and data that is written once and soon freed is compressed less often.
//!
//! There is no lock.

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Minimum share of the resident pages on probation, as a divisor. (820,000 Zipf-distributed
/// touches of 192 MiB, half resident, took 190,000 swap-ins with one queue, 194,000 with 1/2,
/// 178,000 with 1/4 and 170,000 with 1/8.)
pub const PROBATION_SHARE: u64 = 8;
/// Minimum share of the resident pages in the cached queue, as a divisor. numpy at half of its need
/// took 24.4 s without the queue, 20.8 s with 1/8, 17.9 s with 1/16 and 17.7 s with 1/64.
pub const CACHED_SHARE: u64 = 16;
/// Evictions are counted in units of 2^6 pages, so that 16 bits cover 16 GiB. A longer refault
/// distance wraps and may, rarely, count as a shorter one.
const UNIT_SHIFT: u32 = 6;

/// A point in time, counted in evictions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Eviction(pub(crate) u16);

/// Counts evictions and judges refaults.
#[derive(Debug, Default)]
pub struct Workingset {
    evicted_pages: AtomicU64,
}

impl Workingset {
    /// Counts `pages` as evicted and returns the time of their eviction.
    pub fn evict(&self, pages: u64) -> Eviction {
        let before = self.evicted_pages.fetch_add(pages, Relaxed);
        // 0 stands for never.
        Eviction(((before >> UNIT_SHIFT) as u16).max(1))
    }

    /// Returns whether pages evicted at `then` would still be resident with `memory_pages` pages
    /// more memory.
    pub fn is_refault(&self, then: Eviction, memory_pages: u64) -> bool {
        let now = (self.evicted_pages.load(Relaxed) >> UNIT_SHIFT) as u16;
        then != Eviction::default() && u64::from(now.wrapping_sub(then.0)) << UNIT_SHIFT <= memory_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_early_return_is_a_refault() {
        let workingset = Workingset::default();
        workingset.evict(5_000_000 << UNIT_SHIFT);
        let then = workingset.evict(64);
        assert!(workingset.is_refault(then, 1000));
        workingset.evict(900);
        assert!(workingset.is_refault(then, 1000));
        workingset.evict(200);
        assert!(!workingset.is_refault(then, 1000));
        assert!(!workingset.is_refault(Eviction::default(), u64::MAX), "never evicted");
    }
}
