//! Held faults: a process whose turn it is not gets no fault served.
//!
//! Handlers receive its messages all the same, because changes of mappings come by them, and forget
//! the faults of the program's threads. When the process may run, the monitor wakes all threads
//! that wait, and they raise their faults again. The faults of others are served: the monitor
//! touches pages of the program, too, and nobody would wake it; and a debugger or `ps` does not
//! wait for the turn of what it looks at. There is no lock.

use foliomem_sync::atomic::{AtomicBool, Ordering};

/// Whether threads of the program wait although no handler knows their faults.
#[derive(Debug, Default)]
pub(crate) struct HeldFaults {
    are_left: AtomicBool,
}

impl HeldFaults {
    /// Returns whether a handler must leave a fault that it has received: the process is held, and
    /// the fault is the program's.
    pub fn leave(&self, must_wait: impl FnOnce() -> bool) -> bool {
        let leaves = must_wait();
        if leaves {
            self.are_left.store(true, Ordering::SeqCst);
        }
        leaves
    }

    /// Wakes all threads that wait for a fault if the process may run again. The monitor calls
    /// this.
    pub fn wake_if_over(&self, is_held: impl FnOnce() -> bool, wake_all: impl FnOnce()) {
        if self.are_left.load(Ordering::SeqCst) && !is_held() {
            // The flag first: a fault that a handler leaves in between has waited since before, so
            // it is woken, and one that is left after the wake sets the flag again.
            self.are_left.store(false, Ordering::SeqCst);
            wake_all();
        }
    }

    /// Returns whether threads wait until the process may run.
    pub fn are_left(&self) -> bool {
        self.are_left.load(Ordering::Relaxed)
    }

    /// Forgets the parent's faults. The child of a fork calls this.
    pub fn reset(&self) {
        self.are_left.store(false, Ordering::Relaxed);
    }
}
