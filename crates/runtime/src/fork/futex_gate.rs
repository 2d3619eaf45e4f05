//! The gate that stops the agent's threads for a fork ([`foliomem_core::gate`]), over futexes.
//!
//! The gate comes before every lock.

use foliomem_core::gate::WordWait;
use foliomem_sync::atomic::AtomicU32;
use foliomem_sys::word_wait::{self, ALL};

/// Waits on a word of this process by futex.
#[derive(Debug, Default)]
pub struct Futex;

impl WordWait for Futex {
    fn wait(&self, word: &AtomicU32, now: u32) {
        word_wait::wait(word, now);
    }

    fn wake_all(&self, word: &AtomicU32) {
        word_wait::wake(word, ALL);
    }
}

/// The gate that stops the agent's threads, over futexes.
pub type Gate = foliomem_core::gate::Gate<Futex>;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn no_thread_is_inside_a_closed_gate() {
        let gate = Gate::default();
        let (closed, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _inside = gate.enter();
                        assert!(!closed.load(Ordering::Relaxed), "inside a closed gate");
                    }
                });
            }
            for _ in 0..2000 {
                gate.close();
                closed.store(true, Ordering::Relaxed);
                std::hint::spin_loop();
                closed.store(false, Ordering::Relaxed);
                gate.open();
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
