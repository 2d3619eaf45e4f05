//! Which folios are worth keeping: what was evicted and soon wanted again.
//!
//! User space sees no accessed bit. That a folio is in use shows in two ways only: it is touched while it is staged, or it
//! is touched when it is out. The second is judged by its *refault distance*, as `mm/workingset.c` of Linux does: how
//! much was evicted between its own eviction and its return. A folio that would still be there if memory were as
//! much larger as it is now belongs to the working set and becomes *active*; one that has been away longer is as
//! good as new, and so is everything that is fetched ahead, so that a pass over much data does not drive out what is used
//! all the time.
//!
//! Resident folios are in one of three queues (see [`crate::queue`]). New ones are on *probation*, and are staged first, as
//! long as they are a [`PROBATION_SHARE`]th of all; active ones only when there are few of those. Before either go those that are
//! *copied*: they have come back from the store, which still has what they were, and are not active. Mostly they have
//! not been written to since, and then it costs nothing to let them go. So a pass over what is only read drives out
//! nothing that would have to be compressed, and of what is written first and soon thrown away less is compressed.
//!
//! No lock.

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A fraction of the resident pages that are on probation at least. (Of 820,000 touches by Zipf's law of 192 MiB, half of it
/// resident, 190,000 were swap-ins with one queue, 194,000 with a half here, 178,000 with a quarter, 170,000 with an eighth.)
pub const PROBATION_SHARE: u64 = 8;
/// A fraction of the resident pages that are copied at least. (numpy at half its need: 5.6 million pages went out and 4.1 came back
/// in 24.4 s without that queue, 4.6 and 3.1 in 20.8 s with an eighth, 3.7 and 2.3 in 17.9 s with a 16th, 3.3 and 2.1 in
/// 17.7 s with a 64th.)
pub const COPIED_SHARE: u64 = 16;
/// Evictions are counted in 2^6 pages, so that 16 bits reach 16 GiB. What returns after more than that may
/// be taken for younger, rarely.
const UNIT_SHIFT: u32 = 6;

/// A moment, in evictions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Eviction(pub(crate) u16);

/// Counts what is evicted.
#[derive(Debug, Default)]
pub struct Workingset {
    evicted_pages: AtomicU64,
}

impl Workingset {
    /// Counts `pages` as evicted; returns when that was.
    pub fn evict(&self, pages: u64) -> Eviction {
        let before = self.evicted_pages.fetch_add(pages, Relaxed);
        // 0 stands for never.
        Eviction(((before >> UNIT_SHIFT) as u16).max(1))
    }

    /// Whether what was evicted at `then` would still be there if `memory_pages` pages more could be kept.
    pub fn is_refault(&self, then: Eviction, memory_pages: u64) -> bool {
        let now = (self.evicted_pages.load(Relaxed) >> UNIT_SHIFT) as u16;
        then != Eviction::default() && u64::from(now.wrapping_sub(then.0)) << UNIT_SHIFT <= memory_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_returns_soon_is_a_refault() {
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
