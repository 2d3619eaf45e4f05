//! Requests to reclaim or to resume now: `foliomem ctl` and the supervisor leave them, the
//! companion serves them.
//!
//! A request is a number and what is wanted, in one word in the slot of a process. The companion
//! works on the newest one, and publishes the number of what it has finished. A request that is
//! replaced before the companion saw it counts as finished with its successor. There is no lock.

use foliomem_sys::shared_words;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

shared_words! {
    /// The request of one process.
    #[derive(Debug)]
    pub struct MemoryRequest {
        /// The newest request: its number above, what is wanted below; 0 before the first.
        newest: AtomicU64,
        /// The number of the newest finished request.
        finished: AtomicU32,
    }
}

/// The task of a request to a companion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// Swap out `pages` pages, or all pages if there are fewer.
    Reclaim {
        /// The pages to free.
        pages: u64,
    },
    /// Swap in whatever is swapped out, as far as there is room.
    Resume,
    /// A round of the search for cold memory: stage pages, and swap out those that have been staged
    /// since [`COLD_ROUNDS`] rounds.
    FindCold {
        /// The pages to stage.
        pages: u64,
    },
}

/// Number of rounds for which a page must stay staged to count as cold.
pub const COLD_ROUNDS: u32 = 4;

impl Wanted {
    /// The code of [`Wanted::Resume`].
    const RESUME: u32 = u32::MAX;
    /// This bit is set in the code of [`Wanted::FindCold`], and clear in that of
    /// [`Wanted::Reclaim`]. The other bits are the pages.
    const COLD: u32 = 1 << 31;

    fn encode(self) -> u32 {
        match self {
            Wanted::Reclaim { pages } => pages.min(u64::from(Wanted::COLD - 1)) as u32,
            Wanted::FindCold { pages } => Wanted::COLD | pages.min(u64::from(Wanted::COLD - 2)) as u32,
            Wanted::Resume => Wanted::RESUME,
        }
    }

    fn decode(code: u32) -> Wanted {
        match code {
            Wanted::RESUME => Wanted::Resume,
            code if code & Wanted::COLD != 0 => Wanted::FindCold { pages: u64::from(code & !Wanted::COLD) },
            pages => Wanted::Reclaim { pages: u64::from(pages) },
        }
    }
}

/// A request as the companion reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pending {
    /// Its number.
    pub number: u32,
    /// What it wants.
    pub wanted: Wanted,
}

/// Returns the number of the request in `word`.
fn number_in(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Returns the word of the request that follows the one in `word`.
fn after(word: u64, wanted: Wanted) -> u64 {
    u64::from(number_in(word).wrapping_add(1)) << 32 | u64::from(wanted.encode())
}

impl MemoryRequest {
    /// Makes `wanted` the newest request. Returns its number.
    pub fn ask(&self, wanted: Wanted) -> u32 {
        let next = |word| Some(after(word, wanted));
        // The closure never refuses.
        let (Ok(before) | Err(before)) = self.newest.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        number_in(before).wrapping_add(1)
    }

    /// Makes `wanted` the newest request if all requests so far are finished.
    pub fn ask_unless_pending(&self, wanted: Wanted) {
        let next = |word| (number_in(word) == self.finished.load(Ordering::Relaxed)).then(|| after(word, wanted));
        // A pending request stays.
        let _ = self.newest.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// Makes `wanted` the newest request if request `number` is the newest one so far.
    pub fn replace(&self, number: u32, wanted: Wanted) {
        let next = |word| (number_in(word) == number).then(|| after(word, wanted));
        // A newer request stays.
        let _ = self.newest.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// Returns the request that is not finished, if there is one.
    pub fn pending(&self) -> Option<Pending> {
        let word = self.newest.load(Ordering::Relaxed);
        let number = number_in(word);
        let is_finished = number == self.finished.load(Ordering::Relaxed);
        (!is_finished).then(|| Pending { number, wanted: Wanted::decode(word as u32) })
    }

    /// Notes that request `number` and all before it are served. Only the companion calls this.
    pub fn finish(&self, number: u32) {
        // Release pairs with the Acquire in `is_finished`: sizes are published.
        self.finished.store(number, Ordering::Release);
    }

    /// Returns whether request `number` is served, or never will be because the slot has another
    /// owner.
    pub fn is_finished(&self, number: u32) -> bool {
        // Acquire pairs with the Release in `finish`.
        let finished = self.finished.load(Ordering::Acquire);
        finished.wrapping_sub(number) as i32 >= 0 || number_in(self.newest.load(Ordering::Relaxed)) < number
    }

    /// Forgets all requests, for the next owner of the slot.
    pub(crate) fn clear(&self) {
        self.newest.store(0, Ordering::Relaxed);
        self.finished.store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use foliomem_sys::shared_memory::zeroed;

    const SOME: Wanted = Wanted::Reclaim { pages: 7 };

    #[test]
    fn the_newest_request_counts_and_finishes_those_before() {
        let request = zeroed::<MemoryRequest>();
        assert_eq!(request.pending(), None);
        let first = request.ask(SOME);
        let second = request.ask(Wanted::Resume);
        assert_eq!(request.pending(), Some(Pending { number: second, wanted: Wanted::Resume }));
        assert!(!request.is_finished(first) && !request.is_finished(second));
        request.finish(first);
        assert!(request.is_finished(first) && !request.is_finished(second));
        assert!(request.pending().is_some());
        request.finish(second);
        assert!(request.is_finished(first) && request.is_finished(second) && request.pending().is_none());
    }

    #[test]
    fn a_request_to_a_process_that_ended_is_finished() {
        let request = zeroed::<MemoryRequest>();
        let number = request.ask(SOME);
        request.clear();
        assert!(request.is_finished(number) && request.pending().is_none());
    }

    #[test]
    fn only_the_newest_request_is_replaced() {
        let request = zeroed::<MemoryRequest>();
        let first = request.ask(SOME);
        request.replace(first, Wanted::Reclaim { pages: 0 });
        let second = Pending { number: first + 1, wanted: Wanted::Reclaim { pages: 0 } };
        assert_eq!(request.pending(), Some(second));
        request.replace(first, Wanted::Resume);
        assert_eq!(request.pending(), Some(second));
    }

    #[test]
    fn a_request_that_must_not_replace_another_waits_for_its_end() {
        let request = zeroed::<MemoryRequest>();
        let first = request.ask(SOME);
        request.ask_unless_pending(Wanted::Resume);
        assert_eq!(request.pending(), Some(Pending { number: first, wanted: SOME }));
        request.finish(first);
        request.ask_unless_pending(Wanted::Resume);
        assert_eq!(request.pending(), Some(Pending { number: first + 1, wanted: Wanted::Resume }));
    }

    #[test]
    fn what_is_wanted_is_what_the_companion_reads() {
        let request = zeroed::<MemoryRequest>();
        let [most, most_cold] = [(1 << 31) - 1, (1 << 31) - 2];
        let (reclaim, find_cold) = (|pages| Wanted::Reclaim { pages }, |pages| Wanted::FindCold { pages });
        let clamped = [(reclaim(u64::MAX), reclaim(most)), (find_cold(u64::MAX), find_cold(most_cold))];
        let exact = [SOME, Wanted::Resume, reclaim(0), find_cold(0), find_cold(7)].map(|wanted| (wanted, wanted));
        for (wanted, read) in clamped.into_iter().chain(exact) {
            request.ask(wanted);
            assert_eq!(request.pending().map(|pending| pending.wanted), Some(read));
        }
    }
}
