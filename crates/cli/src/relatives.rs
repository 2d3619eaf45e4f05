//! When the supervisor compares what processes and their parents have swapped out
//! ([`foliomem_session::content_sample`]): it takes some milliseconds for a hundred processes.

use foliomem_session::segment::Control;
use std::time::{Duration, Instant};

/// Minimum time between two comparisons. Companions take samples at the same interval.
const INTERVAL: Duration = Duration::from_millis(250);
/// A comparison takes at most this part of the time.
const TIME_SHARE: u32 = 50;

/// Compares from time to time.
#[derive(Debug)]
pub struct Relatives {
    due: Instant,
    /// What has been compared so far ([`Control::sample_heads`]).
    heads: Vec<(u32, u64)>,
}

impl Relatives {
    /// Makes one for which the first comparison is due.
    pub fn new() -> Relatives {
        Relatives { due: Instant::now(), heads: Vec::new() }
    }

    /// Compares what processes and their parents have swapped out, if that is due and there is
    /// something new.
    pub fn look(&mut self, control: &Control) {
        let began = Instant::now();
        if began < self.due {
            return;
        }
        if control.sample_heads().eq(self.heads.iter().copied()) {
            self.due = began + INTERVAL;
            return;
        }
        // What changes from here on is compared at the next look.
        self.heads.clear();
        self.heads.extend(control.sample_heads());
        control.compare_with_parents();
        self.due = Instant::now() + INTERVAL.max(began.elapsed() * TIME_SHARE);
    }
}
