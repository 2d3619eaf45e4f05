//! Quiescing: how a forking thread makes the monitor stop the agent's threads.
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | idle | no fork | the forking thread: requested |
//! | requested | the monitor quiesces the agent | the monitor: quiesced |
//! | quiesced | the thread may fork | the forking thread: forked, or failed |
//! | forked, failed | the fork has happened, or not | the monitor: idle |
//!
//! Each side may end at any moment: the companion is killed or turns itself off, or the program is
//! killed while it forks. So a waiting side always checks that the other one exists.
//!
//! One thread forks at a time (`foliomem_sys::interception::entry`,
//! `foliomem_sys::interception::dispatch`). The state is a futex word, and takes no part in the
//! lock order: the forking thread waits for nothing else of the agent. At every return from a
//! system call, the kernel may touch that thread's control block (rseq(2)), and the agent may have
//! to map it in first, with its own locks.
//!
//! The *kick* is the word on which the monitor sleeps. Allocation notices increment it, too.
//!
//! Orderings: `state` carries all data in both directions: each change releases the earlier writes
//! of its thread, and each read acquires them. `kick` orders nothing else: the monitor reads
//! `state` after a kick.

use foliomem_sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use foliomem_sys::interception::fork_call::ForkOutcome;
use foliomem_sys::thread_control_block::BLOCK_PAGES;
use foliomem_sys::word_wait::{self, ALL};
use std::time::Duration;

/// Interval at which a waiting side checks that the other one exists.
const LIVENESS_PAUSE: Duration = Duration::from_millis(20);

const IDLE: u32 = 0;
const REQUESTED: u32 = 1;
const QUIESCED: u32 = 2;
const FORKED: u32 = 3;
const FAILED: u32 = 4;

/// The other side of a fork, as the waiting side sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// It exists.
    Present,
    /// It has ended, and does not change the state any more.
    Gone,
}

/// The state of a fork, which the forking thread and the monitor share.
#[derive(Debug, Default)]
pub struct Quiesce {
    state: AtomicU32,
    /// Incremented to wake the monitor.
    kick: AtomicU32,
    /// Addresses of pages that must be resident while the agent is quiesced.
    needed: [AtomicUsize; BLOCK_PAGES],
}

impl Quiesce {
    /// Returns when the agent is quiesced and the pages `needed` stay resident, or returns
    /// [`Peer::Gone`] if there is no agent any more. `monitor` checks that. The forking thread
    /// calls this.
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

    /// Wakes the monitor. Any thread may call.
    pub fn wake_monitor(&self) {
        // Release pairs with the Acquire in `kicks`: the monitor sees the reason for the kick.
        self.kick.fetch_add(1, Ordering::Release);
        word_wait::wake(&self.kick, 1);
    }

    /// Lets the agent go on after the fork. The forking thread calls this in the parent.
    pub fn release(&self, outcome: ForkOutcome) {
        self.change(match outcome {
            ForkOutcome::Forked => FORKED,
            ForkOutcome::Failed => FAILED,
        });
    }

    /// Resets the state in the child of a fork, which has no other thread.
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

    /// Returns a number that changes with the next kick. The monitor calls this.
    pub fn kicks(&self) -> u32 {
        // Acquire pairs with the Release in `wake_monitor`.
        self.kick.load(Ordering::Acquire)
    }

    /// Returns the word that changes with each kick.
    pub fn kick(&self) -> &AtomicU32 {
        &self.kick
    }

    /// Returns whether a thread wants to fork. The monitor calls this.
    pub fn is_requested(&self) -> bool {
        // Acquire pairs with the Release in `change` of `request`: the needed pages.
        self.state.load(Ordering::Acquire) == REQUESTED
    }

    /// Returns the addresses of the pages that must be resident. The monitor calls this.
    pub fn needed(&self) -> [usize; BLOCK_PAGES] {
        std::array::from_fn(|index| self.needed[index].load(Ordering::Relaxed))
    }

    /// Lets the thread fork, and waits for the end of the fork. Returns
    /// [`ForkOutcome::Forked`] if there may be a child: a forking thread that was killed may have
    /// one. `program` checks that the thread exists. The monitor calls this.
    pub fn wait_for_fork(&self, program: impl Fn() -> Peer) -> ForkOutcome {
        self.change(QUIESCED);
        // Acquire pairs with the Release in `change` of `release`.
        let peer = self.wait_while(&[QUIESCED], &program);
        let may_have_child = peer == Peer::Gone || self.state.load(Ordering::Acquire) == FORKED;
        if may_have_child { ForkOutcome::Forked } else { ForkOutcome::Failed }
    }

    /// Notes that the agent goes on. The monitor calls this.
    pub fn finish(&self) {
        self.change(IDLE);
    }

    /// Ends the time limits of all waiting threads.
    #[cfg(all(test, feature = "shuttle"))]
    pub fn end_time_limits(&self) {
        word_wait::wake(&self.state, ALL);
    }

    fn change(&self, to: u32) {
        // Release pairs with the Acquire in `wait_while`, `is_requested` and `wait_for_fork`.
        self.state.store(to, Ordering::Release);
        word_wait::wake(&self.state, ALL);
    }

    /// Waits while the state is one of `states`, and checks from time to time that the other side
    /// exists. The first check comes late, because nearly all forks are over by then.
    fn wait_while(&self, states: &[u32], peer: &impl Fn() -> Peer) -> Peer {
        let mut found = Peer::Present;
        loop {
            // Acquire pairs with the Release in `change`: the earlier writes of the other side.
            let now = self.state.load(Ordering::Acquire);
            if !states.contains(&now) {
                return Peer::Present;
            }
            if found == Peer::Gone {
                return Peer::Gone;
            }
            word_wait::wait_for(&self.state, now, LIVENESS_PAUSE);
            // Checked before the state is read: the writes before the other side's end are visible.
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
                        assert_eq!(quiesce.needed(), [4096, 8192, 4096]);
                        quiesced.store(true, Ordering::Relaxed);
                        let outcome = quiesce.wait_for_fork(|| Peer::Present);
                        forks.fetch_add(u32::from(outcome == ForkOutcome::Forked), Ordering::Relaxed);
                        quiesced.store(false, Ordering::Relaxed);
                        quiesce.finish();
                    } else {
                        word_wait::wait_for(quiesce.kick(), kicks, Duration::from_millis(1));
                    }
                }
            });
            for round in 0..1000 {
                quiesce.request([4096, 8192, 4096], || Peer::Present);
                assert!(quiesced.load(Ordering::Relaxed));
                quiesce.release(if round % 2 == 0 { ForkOutcome::Forked } else { ForkOutcome::Failed });
            }
            quiesce.wait_while(&[REQUESTED, QUIESCED, FORKED, FAILED], &|| Peer::Present);
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(forks.load(Ordering::Relaxed), 500);
    }
}
