//! How a forking thread has the keeper hold everything still.
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | idle | no fork | the forking thread: wanted |
//! | wanted | the keeper is to hold still | the keeper: still |
//! | still | the thread may fork | the forking thread: over, or failed |
//! | over, failed | the fork has happened, or not | the keeper: idle |
//!
//! One thread forks at a time (`crate::fork::trap`). A futex word.
//!
//! The forking thread waits for nothing else of the agent's: at every return from a system call the kernel may touch
//! its control block (rseq(2)), which somebody may have to bring in first, with whatever lock that takes.

use crate::thread_control_block::BLOCK_PAGES;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

const IDLE: u32 = 0;
const WANTED: u32 = 1;
const STILL: u32 = 2;
const OVER: u32 = 3;
const FAILED: u32 = 4;

/// See the module.
#[derive(Debug, Default)]
pub struct Quiesce {
    state: AtomicU32,
    /// Bumped to wake the keeper.
    kick: AtomicU32,
    /// Addresses of pages that must be there while everything is still.
    needed: [AtomicUsize; BLOCK_PAGES],
}

impl Quiesce {
    /// The forking thread: returns when everything is still and the pages in `needed` are there to stay.
    pub fn request(&self, needed: [usize; BLOCK_PAGES]) {
        self.wait_while(&[WANTED, STILL, OVER, FAILED]);
        for (slot, address) in self.needed.iter().zip(needed) {
            slot.store(address, Ordering::Relaxed);
        }
        self.change(WANTED);
        self.wake_keeper();
        self.wait_while(&[WANTED]);
    }

    /// Anybody: the keeper is to look around now.
    pub fn wake_keeper(&self) {
        self.kick.fetch_add(1, Ordering::Release);
        let _ = futex::wake(&self.kick, futex::Flags::PRIVATE, 1);
    }

    /// The forking thread, in the parent: lets things go on.
    pub fn release(&self, forked: bool) {
        self.change(if forked { OVER } else { FAILED });
    }

    /// In the child, where nobody else is.
    pub fn reset(&self) {
        self.state.store(IDLE, Ordering::Relaxed);
    }

    /// The keeper: a number that changes with the next request.
    pub fn kicks(&self) -> u32 {
        self.kick.load(Ordering::Acquire)
    }

    /// The word that changes with each request.
    pub fn kick(&self) -> &AtomicU32 {
        &self.kick
    }

    /// The keeper: whether somebody wants to fork.
    pub fn is_requested(&self) -> bool {
        self.state.load(Ordering::Acquire) == WANTED
    }

    /// The keeper: the addresses of the pages that the request wants to be there.
    pub fn needed(&self) -> [usize; BLOCK_PAGES] {
        std::array::from_fn(|index| self.needed[index].load(Ordering::Relaxed))
    }

    /// The keeper: says that everything is still, and returns when the fork is over; whether there was one.
    pub fn hold(&self) -> bool {
        self.change(STILL);
        self.wait_while(&[STILL]);
        self.state.load(Ordering::Acquire) == OVER
    }

    /// The keeper: everything goes on.
    pub fn finish(&self) {
        self.change(IDLE);
    }

    fn change(&self, to: u32) {
        self.state.store(to, Ordering::Release);
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    fn wait_while(&self, states: &[u32]) {
        loop {
            let now = self.state.load(Ordering::Acquire);
            if !states.contains(&now) {
                return;
            }
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, now, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::timespec;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn the_keeper_holds_still_while_a_thread_forks() {
        let still = Quiesce::default();
        let (held, stop, forks) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let kicks = still.kicks();
                    if still.is_requested() {
                        assert_eq!(still.needed(), [4096, 8192]);
                        held.store(true, Ordering::Relaxed);
                        forks.fetch_add(u32::from(still.hold()), Ordering::Relaxed);
                        held.store(false, Ordering::Relaxed);
                        still.finish();
                    } else {
                        let time = timespec(Duration::from_millis(1));
                        let _ = futex::wait(still.kick(), futex::Flags::PRIVATE, kicks, Some(&time));
                    }
                }
            });
            for round in 0..1000 {
                still.request([4096, 8192]);
                assert!(held.load(Ordering::Relaxed));
                still.release(round % 2 == 0);
            }
            still.wait_while(&[WANTED, STILL, OVER, FAILED]);
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(forks.load(Ordering::Relaxed), 500);
    }
}
