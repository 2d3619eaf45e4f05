//! Backoff of reclaim that freed next to nothing recently.
//!
//! Data that do not compress stay over the limit, and compressing all of it in vain for every fault
//! would slow the program down. So after [`PATIENCE`] unprofitable reclaims in a row, reclaim is
//! tried for one request in two and with half of the usual effort, then for one in four with a
//! quarter of it, and so on, as Linux defers compaction. Each profitable reclaim halves the number
//! of failures, so a program whose data compress again is held to the limit after a few faults.
//!
//! There is no lock: counts lost to concurrent callers do not matter.

use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Number of failures in a row before reclaim backs off.
pub(super) const PATIENCE: u32 = 3;
/// Maximum backoff as a shift: reclaim is tried for one request in 2^6, with 1/2^6 of the usual
/// effort.
const MAX_SHIFT: u32 = 6;

/// The backoff state of one engine.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: AtomicU32,
    /// Number of requests since the last one that was tried.
    considered: AtomicU32,
}

impl Backoff {
    /// Returns the backoff as a shift: the effort of a reclaim is 1/2^shift of the usual one.
    pub(super) fn shift(&self) -> u32 {
        (self.failures.load(Relaxed) + 1).saturating_sub(PATIENCE).min(MAX_SHIFT)
    }

    /// Returns whether to skip a request. Call it once for each request.
    pub(super) fn defers(&self) -> bool {
        let (shift, considered) = (self.shift(), self.considered.load(Relaxed) + 1);
        let defers = considered < 1 << shift;
        self.considered.store(if defers { considered } else { 0 }, Relaxed);
        defers
    }

    /// Records whether a request that was made paid.
    pub(super) fn note(&self, pays: bool) {
        let failures = self.failures.load(Relaxed);
        let now = if pays { failures / 2 } else { (failures + 1).min(PATIENCE + MAX_SHIFT - 1) };
        self.failures.store(now, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of requests until one is tried.
    fn until_tried(backoff: &Backoff) -> u32 {
        (1..1000).find(|_| !backoff.defers()).unwrap()
    }

    #[test]
    fn failures_back_off_and_successes_recover() {
        let backoff = Backoff::default();
        let mut tried = |pays| {
            let requests = until_tried(&backoff);
            backoff.note(pays);
            requests
        };
        assert_eq!([false; 12].map(&mut tried), [1, 1, 1, 2, 4, 8, 16, 32, 64, 64, 64, 64]);
        assert_eq!([true; 4].map(&mut tried), [64, 4, 1, 1]);
        assert_eq!([false, false, true, false, true, false].map(&mut tried), [1; 6]);
    }
}
