//! Notices whether a run swaps memory in.

use foliomem_session::process_table::ProcessSlot;
use std::time::{Duration, Instant};

/// A run that has swapped nothing in for this long does not swap in: a fault may take some time.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The faults of the living processes that had to swap in.
#[derive(Debug, Default)]
pub struct SwapIns {
    count: u64,
    /// When that number changed for the last time.
    changed: Option<Instant>,
}

impl SwapIns {
    /// Looks at the processes. Returns whether one has swapped something in lately.
    pub fn look(&mut self, processes: &[(u32, &ProcessSlot)]) -> bool {
        let now = Instant::now();
        // The program may have overwritten any of these words.
        let count = processes.iter().map(|(_, slot)| slot.counters.vm.pgmajfault.get()).fold(0, u64::wrapping_add);
        if std::mem::replace(&mut self.count, count) != count {
            self.changed = Some(now);
        }
        self.changed.is_some_and(|changed| now - changed < TIMEOUT)
    }
}
