//! Schedules of the lock-free protocols: messages between the program's threads, the monitor and
//! other processes arrive complete, once and in order. No thread sleeps forever (a run whose
//! threads all sleep fails).

#[path = "../../core/tests/schedules/mod.rs"]
mod explorer;

use crate::address_space::advice::Advices;
use crate::address_space::allocation_notice::{AllocationNotices, NoticeKind};
use crate::address_space::ranges::{Madvice, Ranges};
use crate::companion::held_faults::HeldFaults;
use crate::fork::quiesce::{Peer, Quiesce};
use explorer::explore;
use foliomem_sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use foliomem_sync::back_off;
use foliomem_sys::interception::fork_call::ForkOutcome;
use foliomem_sys::thread_control_block::BLOCK_PAGES;
use foliomem_sys::word_wait;
use foliomem_types::size_policy::Advice;
use shuttle::sync::Arc;
use shuttle::thread;
use std::time::Duration;

const SENDERS: usize = 3;
const LONG: Duration = Duration::from_secs(1);

/// Waits until the threads end.
fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

struct Notices {
    allocations: AllocationNotices,
    quiesce: Quiesce,
    /// The last value of each thread that the monitor has seen.
    seen: [AtomicUsize; SENDERS],
    senders: AtomicUsize,
}

impl Notices {
    fn monitor(&self) {
        loop {
            let kicks = self.quiesce.kicks();
            while let Some(notice) = self.allocations.receive() {
                self.seen[notice.range.start].store(notice.range.end, SeqCst);
                notice.answer();
            }
            if self.senders.load(SeqCst) == 0 {
                break;
            }
            word_wait::wait_for(self.quiesce.kick(), kicks, LONG);
        }
    }

    fn send(&self, sender: usize) {
        for turn in SENDERS..SENDERS + 2 {
            let is_answered =
                self.allocations.notify(NoticeKind::Allocated, sender..turn, || self.quiesce.wake_monitor());
            assert!(!is_answered || self.seen[sender].load(SeqCst) == turn, "answered, but not seen");
        }
        self.senders.fetch_sub(1, SeqCst);
        self.quiesce.wake_monitor();
    }
}

#[test]
fn a_notice_is_answered_after_it_was_seen() {
    explore(3000, || {
        let seen = std::array::from_fn(|_| AtomicUsize::new(0));
        let (allocations, quiesce, senders) =
            (AllocationNotices::new(1 << 20), Quiesce::default(), AtomicUsize::new(SENDERS));
        let notices = Arc::new(Notices { allocations, quiesce, seen, senders });
        let senders = (0..SENDERS).map(|sender| {
            let notices = Arc::clone(&notices);
            thread::spawn(move || notices.send(sender))
        });
        let senders: Vec<_> = senders.collect();
        notices.monitor();
        join(senders);
        assert!(notices.allocations.is_idle(), "a slot is lost");
    });
}

#[test]
fn paused_threads_go_on_when_the_last_guard_is_dropped() {
    explore(3000, || {
        let allocations = Arc::new(AllocationNotices::new(1 << 20));
        let mut threads = Vec::new();
        for _ in 0..2 {
            let allocations = Arc::clone(&allocations);
            threads.push(thread::spawn(move || {
                let guard = allocations.pause();
                assert!(allocations.is_watched(64), "allocating threads are not paused");
                drop(guard);
            }));
        }
        for _ in 0..2 {
            let allocations = Arc::clone(&allocations);
            threads.push(thread::spawn(move || allocations.wait_while_paused()));
        }
        join(threads);
        allocations.wait_while_paused();
    });
}

#[test]
fn the_agent_is_quiesced_while_a_thread_forks() {
    const FORKS: u32 = 3;
    explore(4000, || {
        let quiesce = Arc::new(Quiesce::default());
        let (quiet, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let forking = {
            let (quiesce, quiet, over) = (Arc::clone(&quiesce), Arc::clone(&quiet), Arc::clone(&over));
            thread::spawn(move || {
                for fork in 0..FORKS {
                    quiesce.request([fork as usize; BLOCK_PAGES], || Peer::Present);
                    assert!(quiet.load(SeqCst), "a fork while others run");
                    quiesce.release(if fork == 1 { ForkOutcome::Failed } else { ForkOutcome::Forked });
                }
                over.fetch_add(1, SeqCst);
                quiesce.wake_monitor();
            })
        };
        let other = {
            let quiesce = Arc::clone(&quiesce);
            thread::spawn(move || quiesce.wake_monitor())
        };
        let mut forks = 0;
        while over.load(SeqCst) == 0 {
            let kicks = quiesce.kicks();
            if quiesce.is_requested() {
                let needed = quiesce.needed();
                assert!(needed.iter().all(|&page| page == needed[0]), "a request that is not whole: {needed:?}");
                quiet.store(true, SeqCst);
                forks += u32::from(quiesce.wait_for_fork(|| Peer::Present) == ForkOutcome::Forked);
                quiet.store(false, SeqCst);
                quiesce.finish();
            } else if over.load(SeqCst) == 0 {
                word_wait::wait_for(quiesce.kick(), kicks, LONG);
            }
        }
        join([forking, other]);
        assert_eq!(forks, FORKS - 1, "one of them failed");
    });
}

/// Returns the state of a side of a fork that may end, as the other side sees it.
fn peer(is_gone: &AtomicBool) -> Peer {
    if is_gone.load(SeqCst) { Peer::Gone } else { Peer::Present }
}

/// Ends time limits again and again, until `is_over`.
fn clock(quiesce: &Arc<Quiesce>, is_over: &Arc<AtomicBool>) -> thread::JoinHandle<()> {
    let (quiesce, is_over) = (Arc::clone(quiesce), Arc::clone(is_over));
    thread::spawn(move || {
        while !is_over.load(SeqCst) {
            quiesce.end_time_limits();
            back_off();
        }
    })
}

/// The monitor quiesces one fork at most, and ends at any moment. Its last step before that counts.
#[test]
fn a_fork_does_not_wait_for_a_monitor_that_has_ended() {
    explore(4000, || {
        let (quiesce, is_gone) = (Arc::new(Quiesce::default()), Arc::new(AtomicBool::new(false)));
        let (quiet, is_over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let clock = clock(&quiesce, &is_over);
        let monitor = {
            let (quiesce, is_gone, quiet) = (Arc::clone(&quiesce), Arc::clone(&is_gone), Arc::clone(&quiet));
            thread::spawn(move || {
                if quiesce.is_requested() {
                    quiet.store(true, SeqCst);
                    assert_eq!(quiesce.wait_for_fork(|| Peer::Present), ForkOutcome::Forked);
                    quiet.store(false, SeqCst);
                    quiesce.finish();
                }
                is_gone.store(true, SeqCst);
            })
        };
        for _ in 0..2 {
            if quiesce.request([0; BLOCK_PAGES], || peer(&is_gone)) == Peer::Gone {
                break;
            }
            assert!(quiet.load(SeqCst), "a fork while others run");
            quiesce.release(ForkOutcome::Forked);
        }
        is_over.store(true, SeqCst);
        join([monitor, clock]);
    });
}

/// The forking thread is killed while it forks. The monitor cannot know whether there is a child.
#[test]
fn the_monitor_does_not_wait_for_a_forking_thread_that_was_killed() {
    explore(3000, || {
        let (quiesce, is_gone) = (Arc::new(Quiesce::default()), Arc::new(AtomicBool::new(false)));
        let is_over = Arc::new(AtomicBool::new(false));
        let clock = clock(&quiesce, &is_over);
        let forking = {
            let (quiesce, is_gone) = (Arc::clone(&quiesce), Arc::clone(&is_gone));
            thread::spawn(move || {
                assert_eq!(quiesce.request([0; BLOCK_PAGES], || Peer::Present), Peer::Present);
                is_gone.store(true, SeqCst);
            })
        };
        loop {
            let kicks = quiesce.kicks();
            if quiesce.is_requested() {
                let outcome = quiesce.wait_for_fork(|| peer(&is_gone));
                assert_eq!(outcome, ForkOutcome::Forked, "its child would lose the swap file");
                break;
            }
            word_wait::wait_for(quiesce.kick(), kicks, LONG);
        }
        is_over.store(true, SeqCst);
        join([forking, clock]);
    });
}

#[test]
fn advice_is_received_in_the_order_of_its_notices() {
    const THREADS: usize = 2;
    explore(3000, || {
        let shared = Arc::new((Advices::default(), Ranges::default()));
        shared.1.insert(0..THREADS);
        // As many notices as the ring has room for, then more: the ring wraps.
        for _ in 0..2 {
            let senders = (0..THREADS).map(|thread| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    for advice in [Advice::NoHuge, Advice::Huge].map(Madvice::HugePages) {
                        shared.0.notify(thread..thread + 1, advice);
                    }
                })
            });
            let senders: Vec<_> = senders.collect();
            let receiver = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.0.receive(&shared.1))
            };
            shared.0.receive(&shared.1);
            join(senders);
            join([receiver]);
            shared.0.receive(&shared.1);
            let received = [0, 1].map(|page| shared.1.containing(page).map(|known| known.advice.huge_pages));
            assert_eq!(received, [Some(Advice::Huge); THREADS]);
        }
    });
}

/// A process that is held, let run, and held again, while its threads fault.
#[derive(Default)]
struct Held {
    faults: HeldFaults,
    is_held: AtomicBool,
    /// Number of times that all waiting threads were woken.
    woken: AtomicUsize,
    served: AtomicUsize,
}

#[test]
fn every_fault_of_a_held_process_is_served_in_the_end() {
    explore(3000, || {
        let held = Arc::new(Held::default());
        let fault = || {
            let held = Arc::clone(&held);
            move || loop {
                // The thread waits from here on, before the handler knows of it.
                let woken = held.woken.load(SeqCst);
                if !held.faults.leave(|| held.is_held.load(SeqCst)) {
                    held.served.fetch_add(1, SeqCst);
                    return;
                }
                while held.woken.load(SeqCst) == woken {
                    back_off();
                }
            }
        };
        let supervisor = {
            let held = Arc::clone(&held);
            move || [true, false, true, false].into_iter().for_each(|is_held| held.is_held.store(is_held, SeqCst))
        };
        let threads = [thread::spawn(fault()), thread::spawn(fault()), thread::spawn(supervisor)];
        while held.served.load(SeqCst) < 2 {
            held.faults.wake_if_over(|| held.is_held.load(SeqCst), || _ = held.woken.fetch_add(1, SeqCst));
            back_off();
        }
        join(threads);
    });
}
