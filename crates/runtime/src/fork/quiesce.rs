//! How a forking thread has the monitor quiesce the agent.
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | idle | no fork | the forking thread: requested |
//! | requested | the monitor quiesces the agent | the monitor: quiesced |
//! | quiesced | the thread may fork | the forking thread: forked, or failed |
//! | forked, failed | the fork has happened, or not | the monitor: idle |
//!
//! Each side may end at any moment: the companion is killed or turns itself off, or the program is
//! killed while it forks. So nobody waits for the other side without looking whether that is there.
//!
//! One thread forks at a time (`foliomem_sys::interception::entry`, `foliomem_sys::interception::dispatch`). The state is a futex
//! word, and takes no part in the lock order: the forking thread waits for nothing else of the
//! agent's. At every return from a system call the kernel may touch that thread's control block
//! (rseq(2)), and the agent may have to map it in first, with locks of its own.
//!
//! The *kick* is the word on which the monitor sleeps. Allocation notices bump it, too.
//!
//! Orderings: `state` carries everything, in both directions: each change releases what its maker
//! did before, and each look acquires it. `kick` orders nothing else: the monitor looks at `state`
//! after a kick.

use foliomem_sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use foliomem_sys::thread_control_block::BLOCK_PAGES;
use foliomem_sys::word_wait::{self, ALL};
use std::time::Duration;

/// How often a side that waits checks that the other one is there.
const LIVENESS_PAUSE: Duration = Duration::from_millis(20);

const IDLE: u32 = 0;
const REQUESTED: u32 = 1;
const QUIESCED: u32 = 2;
const FORKED: u32 = 3;
const FAILED: u32 = 4;

/// The other side of a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// It is there.
    Present,
    /// It has ended, and changes the state no more.
    Gone,
}

/// The state of a fork, as the forking thread and the monitor see it.
#[derive(Debug, Default)]
pub struct Quiesce {
    state: AtomicU32,
    /// Bumped to wake the monitor.
    kick: AtomicU32,
    /// Addresses of pages that must be resident while the agent is quiesced.
    needed: [AtomicUsize; BLOCK_PAGES],
}

impl Quiesce {
    /// Forking thread: returns when the agent is quiesced, and the pages `needed` stay resident; or
    /// [`Peer::Gone`] if there is no agent any more. `monitor` tells whether there is.
    pub fn request(&self, needed: [usize; BLOCK_PAGES], monitor: impl Fn() -> Peer) -> Peer {
        if self.wait_while(&[REQUESTED, QUIESCED, FORKED, FAILED], &monitor) == Peer::Gone {
            return Peer::Gone;
        }
        for (slot, address) in self.needed.iter().zip(needed) {
            slot.store(address, Ordering::Relaxed);
        }
        self.change(REQUESTED);
        self.wake_monitor();
        self.wait_while(&[REQUESTED], &monitor)
    }

    /// Any thread: wakes the monitor.
    pub fn wake_monitor(&self) {
        // Release pairs with the Acquire in `kicks`: the monitor sees the reason for the kick.
        self.kick.fetch_add(1, Ordering::Release);
        word_wait::wake(&self.kick, 1);
    }

    /// Forking thread, in the parent: lets the agent go on.
    pub fn release(&self, forked: bool) {
        self.change(if forked { FORKED } else { FAILED });
    }

    /// In the child of a fork, where no other thread is.
    pub fn reset(&self) {
        let Quiesce {
            state,
            // Kept: a counter.
            kick: _,
            // Kept: the child's monitor keeps these control blocks resident.
            needed: _,
        } = self;
        state.store(IDLE, Ordering::Relaxed);
    }

    /// Monitor: a number that changes with the next kick.
    pub fn kicks(&self) -> u32 {
        // Acquire pairs with the Release in `wake_monitor`.
        self.kick.load(Ordering::Acquire)
    }

    /// The word that changes with each kick.
    pub fn kick(&self) -> &AtomicU32 {
        &self.kick
    }

    /// Monitor: whether a thread wants to fork.
    pub fn is_requested(&self) -> bool {
        // Acquire pairs with the Release in `change` of `request`: the needed pages.
        self.state.load(Ordering::Acquire) == REQUESTED
    }

    /// Monitor: the addresses of the pages that must be resident.
    pub fn needed(&self) -> [usize; BLOCK_PAGES] {
        std::array::from_fn(|index| self.needed[index].load(Ordering::Relaxed))
    }

    /// Monitor: lets the thread fork, and returns when that is over; whether there may be a child.
    /// `program` tells whether the forking thread is there: one that was killed may have a child.
    pub fn wait_for_fork(&self, program: impl Fn() -> Peer) -> bool {
        self.change(QUIESCED);
        // Acquire pairs with the Release in `change` of `release`.
        self.wait_while(&[QUIESCED], &program) == Peer::Gone || self.state.load(Ordering::Acquire) == FORKED
    }

    /// Monitor: the agent goes on.
    pub fn finish(&self) {
        self.change(IDLE);
    }

    /// The time limits of all who wait end.
    #[cfg(all(test, feature = "shuttle"))]
    pub fn end_time_limits(&self) {
        word_wait::wake(&self.state, ALL);
    }

    fn change(&self, to: u32) {
        // Release pairs with the Acquire in `wait_while`, `is_requested` and `wait_for_fork`.
        self.state.store(to, Ordering::Release);
        word_wait::wake(&self.state, ALL);
    }

    /// Waits while the state is one of `states`, and looks now and then whether the other side is
    /// there: not at once, as nearly all forks are over by then.
    fn wait_while(&self, states: &[u32], peer: &impl Fn() -> Peer) -> Peer {
        let mut found = Peer::Present;
        loop {
            // Acquire pairs with the Release in `change`: what the other side did before.
            let now = self.state.load(Ordering::Acquire);
            if !states.contains(&now) {
                return Peer::Present;
            }
            if found == Peer::Gone {
                return Peer::Gone;
            }
            word_wait::wait_for(&self.state, now, LIVENESS_PAUSE);
            // Before the state is looked at: what the other side did before its end is seen.
            found = peer();
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn the_agent_is_quiesced_while_a_thread_forks() {
        let quiesce = Quiesce::default();
        let (quiesced, stop, forks) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let kicks = quiesce.kicks();
                    if quiesce.is_requested() {
                        assert_eq!(quiesce.needed(), [4096, 8192]);
                        quiesced.store(true, Ordering::Relaxed);
                        forks.fetch_add(u32::from(quiesce.wait_for_fork(|| Peer::Present)), Ordering::Relaxed);
                        quiesced.store(false, Ordering::Relaxed);
                        quiesce.finish();
                    } else {
                        word_wait::wait_for(quiesce.kick(), kicks, Duration::from_millis(1));
                    }
                }
            });
            for round in 0..1000 {
                quiesce.request([4096, 8192], || Peer::Present);
                assert!(quiesced.load(Ordering::Relaxed));
                quiesce.release(round % 2 == 0);
            }
            quiesce.wait_while(&[REQUESTED, QUIESCED, FORKED, FAILED], &|| Peer::Present);
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(forks.load(Ordering::Relaxed), 500);
    }
}
