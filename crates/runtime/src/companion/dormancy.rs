//! Dormancy: the monitor of an idle process sleeps for longer, and a fault wakes it.
//!
//! The supervisor says in the process's slot that the process uses no CPU (`--idle`). Almost all of
//! its memory is swapped out by then, so a thread that wakes faults at once, and the handler that
//! serves the fault ends dormancy. A fault that is being served while dormancy begins may be
//! missed; the next one is not. There is no lock.

use crate::fork::quiesce::Quiesce;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether the monitor is dormant.
#[derive(Debug, Default)]
pub(crate) struct Dormancy {
    is_dormant: AtomicBool,
}

impl Dormancy {
    /// Begins dormancy. The monitor calls this before it sleeps.
    pub fn begin(&self) {
        self.is_dormant.store(true, Relaxed);
    }

    /// Ends dormancy, because the process is not idle. The monitor calls this.
    pub fn end(&self) {
        self.is_dormant.store(false, Relaxed);
    }

    /// Returns whether no fault has ended dormancy since it began.
    pub fn lasts(&self) -> bool {
        self.is_dormant.load(Relaxed)
    }

    /// Notes that the program has faulted: wakes the monitor if it is dormant. Handlers call this.
    pub fn note_fault(&self, quiesce: &Quiesce) {
        if self.lasts() && self.is_dormant.swap(false, Relaxed) {
            quiesce.wake_monitor();
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn the_first_fault_wakes_a_dormant_monitor() {
        let (dormancy, quiesce) = (Dormancy::default(), Quiesce::default());
        let kicks = quiesce.kicks();
        dormancy.note_fault(&quiesce);
        assert_eq!(quiesce.kicks(), kicks, "the monitor looks often anyway");
        dormancy.begin();
        dormancy.note_fault(&quiesce);
        dormancy.note_fault(&quiesce);
        assert_eq!(quiesce.kicks(), kicks + 1);
        assert!(!dormancy.lasts());
    }
}
