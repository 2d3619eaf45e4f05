//! The search for cold memory in a process that works, for `--idle`: how often, and how much of it.
//!
//! In each round the companion stages some of the oldest memory, and compresses what has stayed
//! staged for [`COLD_ROUNDS`] rounds ([`Wanted::FindCold`]). A touch of staged memory costs the
//! program a fault. The share of the process's CPU time that goes into these faults says how much
//! the next round stages.
//!
//! [`Wanted::FindCold`]: foliomem_session::memory_request::Wanted::FindCold

use foliomem_session::memory_request::COLD_ROUNDS;
use std::time::{Duration, Instant};

/// Minimum time between two rounds.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Share of its CPU time that a process may lose by touches of staged memory, as a divisor: half a
/// per cent.
const LOST_SHARE: u32 = 200;
/// Assumed time that a process loses by such a touch beside the time to serve it: it waits for a
/// CPU, and finds less in the caches and the TLB.
const TOUCH: Duration = Duration::from_micros(20);
/// Assumed time that a new page costs more once the agent serves the faults, and the share of the
/// CPU time that this may cost, as a divisor. A process that gets new memory all the time is left
/// alone.
const NEW_PAGE: Duration = Duration::from_micros(10);
const NEW_SHARE: u32 = 100;
/// Minimum pages that a round stages: 256 KiB, with faults of at most a millisecond.
const MIN_PAGES: u64 = 64;

/// What a process has used so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Used {
    /// Its CPU time.
    pub cpu_time: Duration,
    /// Number of touches of staged memory, and the time to serve them.
    pub touches: u64,
    pub served: Duration,
    /// New pages that the kernel gave it.
    pub new_pages: u64,
}

/// The search in one process.
#[derive(Clone, Copy, Debug)]
pub struct ColdSearch {
    began: Instant,
    /// The time of the last round, and what the process had used then.
    last: Instant,
    used: Used,
    /// Pages that the last round staged.
    pages: u64,
}

impl ColdSearch {
    /// Creates the search in a process that was seen first at `now`.
    pub fn new(now: Instant) -> ColdSearch {
        ColdSearch { began: now, last: now, used: Used::default(), pages: MIN_PAGES }
    }

    /// Returns how many of the process's `resident_pages` to stage, if a round is due. In
    /// `idle_time` all of them have their turn, unless that costs too much. The first rounds only
    /// look at what the process uses.
    pub fn round(
        &mut self,
        now: Instant,
        idle_time: Duration,
        resident_pages: u64,
        used: impl FnOnce() -> Option<Used>,
    ) -> Option<u64> {
        let interval = (idle_time / COLD_ROUNDS).max(MIN_INTERVAL);
        if now - self.last < interval {
            return None;
        }
        self.last = now;
        let used = used()?;
        let before = std::mem::replace(&mut self.used, used);
        let cpu_time = used.cpu_time.saturating_sub(before.cpu_time);
        let new_pages = small(used.new_pages.saturating_sub(before.new_pages));
        if now - self.began < idle_time || NEW_PAGE * new_pages > cpu_time / NEW_SHARE {
            return None;
        }
        let most = (resident_pages as f64 * interval.div_duration_f64(idle_time).min(1.0)) as u64;
        let touches = small(used.touches.saturating_sub(before.touches));
        let lost = used.served.saturating_sub(before.served) + TOUCH * touches;
        let is_dear = lost > cpu_time / LOST_SHARE;
        let pages = if is_dear { self.pages / 2 } else { self.pages * 2 };
        self.pages = pages.min(most).max(MIN_PAGES);
        Some(self.pages)
    }
}

/// Converts a count to the type by which a time can be multiplied.
fn small(count: u64) -> u32 {
    count.min(u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE_TIME: Duration = Duration::from_secs(40);
    const RESIDENT_PAGES: u64 = 100_000;

    struct Process {
        now: Instant,
        used: Used,
        search: ColdSearch,
    }

    impl Process {
        fn new() -> Process {
            let now = Instant::now();
            Process { now, used: Used::default(), search: ColdSearch::new(now) }
        }

        /// Works for a second, in which it touches staged memory and gets new pages.
        fn second(&mut self, touches: u64, new_pages: u64) -> Option<u64> {
            self.now += Duration::from_secs(1);
            self.used.cpu_time += Duration::from_secs(1);
            self.used.touches += touches;
            self.used.served += Duration::from_micros(5 * touches);
            self.used.new_pages += new_pages;
            self.search.round(self.now, IDLE_TIME, RESIDENT_PAGES, || Some(self.used))
        }

        fn rounds(&mut self, seconds: u32, touches: u64, new_pages: u64) -> Vec<u64> {
            (0..seconds).filter_map(|_| self.second(touches, new_pages)).collect()
        }
    }

    #[test]
    fn all_memory_has_its_turn_in_the_idle_time_if_that_costs_nothing() {
        let mut process = Process::new();
        assert!(process.rounds(39, 0, 0).is_empty(), "a new process");
        assert_eq!(process.rounds(31, 0, 0), [128, 256, 512, 1024]);
        assert_eq!(process.rounds(50, 0, 0), [2048, 4096, 8192, 16_384, 25_000]);
        assert_eq!(process.rounds(10, 0, 0), [25_000]);
    }

    #[test]
    fn a_process_that_uses_staged_memory_is_searched_slowly() {
        let mut process = Process::new();
        process.rounds(200, 0, 0);
        assert_eq!(process.rounds(20, 199, 0), [25_000; 2]);
        assert_eq!(process.rounds(30, 201, 0), [12_500, 6_250, 3_125]);
        assert_eq!(process.rounds(100, 201, 0).last(), Some(&MIN_PAGES));
        assert_eq!(process.rounds(20, 0, 0), [128, 256]);
    }

    #[test]
    fn a_process_that_gets_new_memory_all_the_time_is_left_alone() {
        let mut process = Process::new();
        assert!(process.rounds(200, 0, 1_100).is_empty());
        assert_eq!(process.rounds(10, 0, 900).len(), 1);
    }

    #[test]
    fn an_idle_time_of_a_second_stages_no_more_than_there_is() {
        let mut search = ColdSearch::new(Instant::now());
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        let rounds =
            (2..20).map(|second| search.round(later(second), Duration::from_secs(1), 500, || Some(Used::default())));
        assert_eq!(rounds.last(), Some(Some(500)));
    }
}
