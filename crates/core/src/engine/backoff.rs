//! How hard reclaim is tried where it has freed next to nothing lately.
//!
//! What does not compress stays over the limit whatever is done, and to compress all of it in vain for every fault would make
//! a slow program of it. So after [`PATIENCE`] reclaims in a row that have not paid, one request in two is tried, and half as
//! hard, then one in four, as compaction is deferred in Linux. Each that pays halves the number of failures, so
//! that a program whose data compress again is held to the limit after a few faults.
//!
//! No lock: what concurrent callers lose of the counts makes no difference.

use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Failures in a row that change nothing yet.
pub(super) const PATIENCE: u32 = 3;
/// At last one request in 2^this is tried, 1/2^this as hard.
const MAX_SHIFT: u32 = 6;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: AtomicU32,
    /// Requests since the last that was tried.
    considered: AtomicU32,
}

impl Backoff {
    /// Reclaim is tried 1/2^this as hard as usual.
    pub(super) fn shift(&self) -> u32 {
        (self.failures.load(Relaxed) + 1).saturating_sub(PATIENCE).min(MAX_SHIFT)
    }

    /// Whether a request is better not made. To be asked once for each.
    pub(super) fn defers(&self) -> bool {
        let (shift, considered) = (self.shift(), self.considered.load(Relaxed) + 1);
        let defers = considered < 1 << shift;
        self.considered.store(if defers { considered } else { 0 }, Relaxed);
        defers
    }

    /// Whether a request that was made has paid.
    pub(super) fn note(&self, pays: bool) {
        let failures = self.failures.load(Relaxed);
        let now = if pays { failures / 2 } else { (failures + 1).min(PATIENCE + MAX_SHIFT - 1) };
        self.failures.store(now, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests until one is tried.
    fn until_tried(backoff: &Backoff) -> u32 {
        (1..1000).find(|_| !backoff.defers()).unwrap()
    }

    #[test]
    fn what_fails_is_tried_less_and_less_and_again_when_it_succeeds() {
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
