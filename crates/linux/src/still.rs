//! How a forking thread has the keeper hold everything still.
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | idle | no fork | the forking thread: wanted |
//! | wanted | the keeper is to hold still | the keeper: still |
//! | still | the thread may fork | the forking thread: over, or failed |
//! | over, failed | the fork has happened, or not | the keeper: idle |
//!
//! One thread forks at a time (`crate::clone_trap`). A futex word.
//!
//! Orderings: `state` hands everything over, in both directions: each change releases what its
//! maker did before, each look acquires it. `kick` orders nothing but itself: who has seen a kick
//! looks at `state`.
//!
//! The forking thread waits for nothing else of the agent's: at every return from a system call the kernel may touch
//! its control block (rseq(2)), which somebody may have to bring in first, with whatever lock that takes.

use crate::control_block::BLOCK_PAGES;
use crate::word_wait::{self, ALL};
use foliomem_core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

const IDLE: u32 = 0;
const WANTED: u32 = 1;
const STILL: u32 = 2;
const OVER: u32 = 3;
const FAILED: u32 = 4;

/// See the module.
#[derive(Debug, Default)]
pub struct Still {
    state: AtomicU32,
    /// Bumped to wake the keeper.
    kick: AtomicU32,
    /// Addresses of pages that must be there while everything is still.
    needed: [AtomicUsize; BLOCK_PAGES],
}

impl Still {
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
        // Release pairs with the Acquire in `kicks`: what the keeper is to look at is there.
        self.kick.fetch_add(1, Ordering::Release);
        word_wait::wake(&self.kick, 1);
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
        // Acquire pairs with the Release in `wake_keeper`.
        self.kick.load(Ordering::Acquire)
    }

    /// The word that changes with each request.
    pub fn kick(&self) -> &AtomicU32 {
        &self.kick
    }

    /// The keeper: whether somebody wants to fork.
    pub fn is_requested(&self) -> bool {
        // Acquire pairs with the Release in `change` of `request`: the needed pages.
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
        // Acquire pairs with the Release in `change` of `release`.
        self.state.load(Ordering::Acquire) == OVER
    }

    /// The keeper: everything goes on.
    pub fn finish(&self) {
        self.change(IDLE);
    }

    fn change(&self, to: u32) {
        // Release pairs with the Acquire in `wait_while`, `is_requested` and `hold`.
        self.state.store(to, Ordering::Release);
        word_wait::wake(&self.state, ALL);
    }

    fn wait_while(&self, states: &[u32]) {
        loop {
            // Acquire pairs with the Release in `change`: what the other side did before.
            let now = self.state.load(Ordering::Acquire);
            if !states.contains(&now) {
                return;
            }
            word_wait::wait(&self.state, now);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn the_keeper_holds_still_while_a_thread_forks() {
        let still = Still::default();
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
                        word_wait::wait_for(still.kick(), kicks, Duration::from_millis(1));
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
