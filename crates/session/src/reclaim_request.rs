//! Requests to reclaim now: `foliomem ctl PID reclaim` leaves them, the companion serves them.
//!
//! A request is a number and an amount in the slot of a process. The companion works on the newest
//! one, and publishes the number of what it has finished. A request that is replaced before the
//! companion saw it counts as finished with its successor. No lock: the number orders the words.

use foliomem_sys::shared_words;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

shared_words! {
    /// The request of one process.
    #[derive(Debug)]
    pub struct ReclaimRequest {
        /// The number of the newest request; 0 before the first.
        number: AtomicU32,
        /// The number of the newest finished request.
        finished: AtomicU32,
        /// How many pages the newest request wants swapped out.
        pages: AtomicU64,
    }
}

/// A request as the companion reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pending {
    /// Its number.
    pub number: u32,
    /// The pages to free; more than there are means all.
    pub pages: u64,
}

impl ReclaimRequest {
    /// Asks for `pages` to be swapped out. Returns the number of the request.
    pub fn ask(&self, pages: u64) -> u32 {
        self.pages.store(pages, Ordering::Relaxed);
        // Release pairs with the Acquire in `pending`: the amount is this request's, or a newer
        // one's.
        self.number.fetch_add(1, Ordering::Release).wrapping_add(1)
    }

    /// The request that is not finished, if there is one.
    pub fn pending(&self) -> Option<Pending> {
        // Acquire pairs with the Release in `ask`.
        let number = self.number.load(Ordering::Acquire);
        let is_finished = number == self.finished.load(Ordering::Relaxed);
        (!is_finished).then(|| Pending { number, pages: self.pages.load(Ordering::Relaxed) })
    }

    /// The companion: request `number` and all before it are served.
    pub fn finish(&self, number: u32) {
        // Release pairs with the Acquire in `is_finished`: sizes are published.
        self.finished.store(number, Ordering::Release);
    }

    /// Whether request `number` is served, or will not be because the slot has another owner.
    pub fn is_finished(&self, number: u32) -> bool {
        // Acquire pairs with the Release in `finish`.
        let finished = self.finished.load(Ordering::Acquire);
        finished.wrapping_sub(number) as i32 >= 0 || self.number.load(Ordering::Relaxed) < number
    }

    /// For the next owner of the slot.
    pub(crate) fn clear(&self) {
        self.number.store(0, Ordering::Relaxed);
        self.finished.store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use foliomem_sys::shared_memory::zeroed;

    #[test]
    fn the_newest_request_counts_and_finishes_those_before() {
        let request = zeroed::<ReclaimRequest>();
        assert_eq!(request.pending(), None);
        let first = request.ask(7);
        let second = request.ask(9);
        assert_eq!(request.pending(), Some(Pending { number: second, pages: 9 }));
        assert!(!request.is_finished(first) && !request.is_finished(second));
        request.finish(first);
        assert!(request.is_finished(first) && !request.is_finished(second));
        assert!(request.pending().is_some());
        request.finish(second);
        assert!(request.is_finished(first) && request.is_finished(second) && request.pending().is_none());
    }

    #[test]
    fn a_request_to_a_process_that_ended_is_finished() {
        let request = zeroed::<ReclaimRequest>();
        let number = request.ask(1);
        request.clear();
        assert!(request.is_finished(number) && request.pending().is_none());
    }
}
