//! The gate that stops the agent's threads for a fork.
//!
//! `fork` copies the engine as it stands at that instant, so no thread may be inside it then, nor in the agent's
//! heap. A worker passes the gate before it touches the engine or allocates, and leaves it before it sleeps; the forking thread
//! closes the gate, which waits until nobody is inside, and opens it after the fork, in parent and child.
//! A worker inside the gate never waits for a thread of the program, except through the kernel.
//!
//! One futex word: bit 31 = closed, the rest counts who is inside. Top of the lock order: the gate is
//! passed before any lock is taken.

use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};

const CLOSED: u32 = 1 << 31;

/// See the module.
#[derive(Debug, Default)]
pub struct Gate(AtomicU32);

/// Proof of being inside; leaves on drop.
#[derive(Debug)]
pub struct Inside<'a>(&'a Gate);

impl Gate {
    /// Passes the gate, waiting while it is closed.
    pub fn enter(&self) -> Inside<'_> {
        loop {
            // Acquire pairs with the release in `open`: what the forking thread did is seen.
            let now = self.0.fetch_add(1, Ordering::Acquire);
            if now & CLOSED == 0 {
                return Inside(self);
            }
            self.leave();
            let now = self.0.load(Ordering::Relaxed);
            if now & CLOSED != 0 {
                // An error is a spurious return: the loop looks again.
                let _ = futex::wait(&self.0, futex::Flags::PRIVATE, now, None);
            }
        }
    }

    fn leave(&self) {
        // Release pairs with the acquire in `close`: what was done inside is seen by the forking thread.
        let before = self.0.fetch_sub(1, Ordering::Release);
        if before & CLOSED != 0 {
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Closes the gate and waits until nobody is inside. One thread at a time may close it.
    pub fn close(&self) {
        let mut now = self.0.fetch_or(CLOSED, Ordering::Acquire) | CLOSED;
        while now != CLOSED {
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, now, None);
            now = self.0.load(Ordering::Acquire);
        }
    }

    /// Opens it again.
    pub fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// In a fork's child, where no thread but the caller exists: open, with nobody inside, whatever the
    /// word said at the instant of the fork. (Threads turned away at the closed gate count themselves
    /// in and out again.)
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn nobody_is_inside_while_it_is_closed() {
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
