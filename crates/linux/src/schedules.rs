//! Schedules of the protocols without locks: what the program's threads, the monitor and other
//! processes tell each other arrives whole, once and in order, and nobody sleeps for ever (a run
//! whose threads all sleep fails).

#[path = "../../core/tests/schedules/mod.rs"]
mod explorer;

use crate::advice::Advices;
use crate::allocation_notice::{AllocationNotices, NoticeKind};
use crate::fork::quiesce::{Peer, Quiesce};
use crate::ranges::Ranges;
use crate::swap_space::{RowIndex, SwapSpace};
use crate::trace_ring::TraceRing;
use explorer::explore;
use foliomem_sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use foliomem_sync::yield_now;
use foliomem_sys::cell_list::{Cell, CellList};
use foliomem_sys::thread_control_block::BLOCK_PAGES;
use foliomem_sys::word_wait;
use foliomem_types::size_policy::Advice;
use foliomem_types::trace_event::Event;
use foliomem_types::units::{ClusterNumber, PageNumber};
use shuttle::sync::Arc;
use shuttle::thread;
use std::ptr::NonNull;
use std::time::Duration;

const TELLERS: usize = 3;
const LONG: Duration = Duration::from_secs(1);

/// Runs the threads to their end.
fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

struct Notices {
    allocations: AllocationNotices,
    quiesce: Quiesce,
    /// What the monitor has seen last of each thread.
    seen: [AtomicUsize; TELLERS],
    tellers: AtomicUsize,
}

impl Notices {
    fn keep(&self) {
        loop {
            let kicks = self.quiesce.kicks();
            while let Some(told) = self.allocations.receive() {
                self.seen[told.range.start].store(told.range.end, SeqCst);
                told.answer();
            }
            if self.tellers.load(SeqCst) == 0 {
                break;
            }
            word_wait::wait_for(self.quiesce.kick(), kicks, LONG);
        }
    }

    fn tell(&self, teller: usize) {
        for turn in TELLERS..TELLERS + 2 {
            let is_heard = self.allocations.notify(NoticeKind::Allocated, teller..turn, || self.quiesce.wake_monitor());
            assert!(!is_heard || self.seen[teller].load(SeqCst) == turn, "answered, but not seen");
        }
        self.tellers.fetch_sub(1, SeqCst);
        self.quiesce.wake_monitor();
    }
}

#[test]
fn a_notice_is_answered_after_it_was_seen() {
    explore(3000, || {
        let seen = std::array::from_fn(|_| AtomicUsize::new(0));
        let (allocations, quiesce, tellers) =
            (AllocationNotices::new(1 << 20), Quiesce::default(), AtomicUsize::new(TELLERS));
        let notices = Arc::new(Notices { allocations, quiesce, seen, tellers });
        let tellers = (0..TELLERS).map(|teller| {
            let notices = Arc::clone(&notices);
            thread::spawn(move || notices.tell(teller))
        });
        let tellers: Vec<_> = tellers.collect();
        notices.keep();
        join(tellers);
        assert!(notices.allocations.is_idle(), "a slot is lost");
    });
}

#[test]
fn paused_threads_go_on_when_the_last_holder_lets_go() {
    explore(3000, || {
        let allocations = Arc::new(AllocationNotices::new(1 << 20));
        let mut threads = Vec::new();
        for _ in 0..2 {
            let allocations = Arc::clone(&allocations);
            threads.push(thread::spawn(move || {
                let held = allocations.pause();
                assert!(allocations.is_watched(64), "others go on");
                drop(held);
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
fn everything_is_quiet_while_a_thread_forks() {
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
                    quiesce.release(fork != 1);
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
                forks += u32::from(quiesce.wait_for_fork(|| Peer::Present));
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

/// A side of a fork that may end, as the other one sees it.
fn peer(is_gone: &AtomicBool) -> Peer {
    if is_gone.load(SeqCst) { Peer::Gone } else { Peer::Present }
}

/// Lets time limits end, again and again, until `is_over`.
fn clock(quiesce: &Arc<Quiesce>, is_over: &Arc<AtomicBool>) -> thread::JoinHandle<()> {
    let (quiesce, is_over) = (Arc::clone(quiesce), Arc::clone(is_over));
    thread::spawn(move || {
        while !is_over.load(SeqCst) {
            quiesce.end_time_limits();
            yield_now();
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
                    assert!(quiesce.wait_for_fork(|| Peer::Present));
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
            quiesce.release(true);
        }
        is_over.store(true, SeqCst);
        join([monitor, clock]);
    });
}

/// The forking thread is killed while it forks: whether there is a child, the monitor cannot know.
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
                assert!(quiesce.wait_for_fork(|| peer(&is_gone)), "its child would lose the swap file");
                break;
            }
            word_wait::wait_for(quiesce.kick(), kicks, LONG);
        }
        is_over.store(true, SeqCst);
        join([forking, clock]);
    });
}

#[test]
fn advice_is_heard_in_the_order_it_was_told() {
    const THREADS: usize = 2;
    explore(3000, || {
        let told = Arc::new((Advices::default(), Ranges::default()));
        told.1.insert(0..THREADS);
        // As many calls as there is room for, then more: the ring comes round.
        for _ in 0..2 {
            let tellers = (0..THREADS).map(|thread| {
                let told = Arc::clone(&told);
                thread::spawn(move || {
                    for advice in [Advice::NoHuge, Advice::Huge] {
                        told.0.tell(thread..thread + 1, advice);
                    }
                })
            });
            let tellers: Vec<_> = tellers.collect();
            let hearer = {
                let told = Arc::clone(&told);
                thread::spawn(move || told.0.hear(&told.1))
            };
            told.0.hear(&told.1);
            join(tellers);
            join([hearer]);
            told.0.hear(&told.1);
            let heard = [0, 1].map(|page| told.1.containing(page).map(|known| known.advice));
            assert_eq!(heard, [Some(Advice::Huge); THREADS]);
        }
    });
}

#[test]
fn an_event_is_taken_whole_and_in_order() {
    const EVENTS: u64 = 5;
    explore(3000, || {
        let ring = Arc::new(TraceRing::default());
        let writer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                for number in 0..EVENTS {
                    while !ring.push(number, &Event::Fill(PageNumber(number)..PageNumber(2 * number + 1))) {
                        yield_now();
                    }
                }
            })
        };
        let mut next = 0;
        while next < EVENTS {
            ring.take(&mut |time_us, event| {
                assert_eq!((time_us, event), (next, Event::Fill(PageNumber(next)..PageNumber(2 * next + 1))));
                next += 1;
            });
            yield_now();
        }
        join([writer]);
    });
}

/// No process has this id.
const DEAD: u32 = i32::MAX as u32;

struct Swap {
    space: SwapSpace,
    /// How many use each cluster.
    users: [AtomicU32; 2],
}

impl Swap {
    fn new() -> Arc<Swap> {
        Arc::new(Swap { space: SwapSpace::for_schedules(2), users: std::array::from_fn(|_| AtomicU32::new(0)) })
    }

    fn use_clusters(&self, row: RowIndex) {
        for _ in 0..2 {
            for (cluster, users) in (0..).map(ClusterNumber).zip(&self.users) {
                if self.space.claim(row, cluster) {
                    assert_eq!(users.fetch_add(1, SeqCst), 0, "{cluster:?} has two holders");
                    assert!(self.space.has_one_holder(cluster));
                    users.fetch_sub(1, SeqCst);
                    self.space.release(row, cluster);
                }
            }
        }
    }

    fn verify_free(&self) {
        let row = self.space.enter(std::process::id()).expect("a free row");
        assert!((0..2).all(|cluster| self.space.claim(row, ClusterNumber(cluster))), "a cluster is lost");
    }
}

#[test]
fn a_cluster_has_one_claimant() {
    explore(2000, || {
        let swap = Swap::new();
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let swap = Arc::clone(&swap);
                thread::spawn(move || {
                    let row = swap.space.enter(std::process::id()).expect("a free row");
                    swap.use_clusters(row);
                    swap.space.leave(row);
                })
            })
            .collect();
        join(threads);
        swap.verify_free();
    });
}

/// Two processes find a third one dead, and a fourth begins in the row of which one of them has
/// taken its leave.
#[test]
fn a_row_is_reaped_once() {
    explore(3000, || {
        let swap = Swap::new();
        let dead = swap.space.enter(DEAD).expect("a free row");
        assert!(swap.space.claim(dead, ClusterNumber(0)));
        let mut threads: Vec<_> = (0..2)
            .map(|_| {
                let swap = Arc::clone(&swap);
                thread::spawn(move || swap.space.reap())
            })
            .collect();
        let begun = Arc::clone(&swap);
        threads.push(thread::spawn(move || {
            let row = begun.space.enter(std::process::id()).expect("a free row");
            begun.use_clusters(row);
            begun.space.leave(row);
        }));
        join(threads);
        swap.verify_free();
    });
}

/// What a parent has is its child's, too, whoever lets go of it first.
#[test]
fn a_shared_cluster_is_free_when_both_have_let_go() {
    explore(2000, || {
        let swap = Swap::new();
        let me = std::process::id();
        let parent = swap.space.enter(me).expect("a free row");
        let cluster = ClusterNumber(0);
        assert!(swap.space.claim(parent, cluster));
        let child = swap.space.share(parent, me).expect("a free row");
        let left = Arc::new(AtomicU32::new(2));
        let letting_go = |row: RowIndex, is_child: bool| {
            let (swap, left) = (Arc::clone(&swap), Arc::clone(&left));
            thread::spawn(move || {
                if is_child {
                    assert!(swap.space.adopt(row, me, me));
                }
                left.fetch_sub(1, SeqCst);
                swap.space.release(row, cluster);
                swap.space.leave(row);
            })
        };
        let threads = [letting_go(parent, false), letting_go(child, true)];
        let other = swap.space.enter(me).expect("a free row");
        if swap.space.claim(other, cluster) {
            assert_eq!(left.load(SeqCst), 0, "it is held");
            swap.space.release(other, cluster);
        }
        join(threads);
        swap.verify_free();
    });
}

#[test]
fn a_spare_cell_is_one_threads_at_a_time() {
    explore(4000, || {
        let list = Arc::new(CellList::<AtomicU32>::new());
        let cells: Vec<_> = (0..3).map(|_| Box::into_raw(Box::new(Cell::new(AtomicU32::new(0))))).collect();
        for &cell in &cells {
            // SAFETY: the cell is new, and freed after all threads.
            unsafe { list.give_back(NonNull::new(cell).unwrap()) };
        }
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let list = Arc::clone(&list);
                thread::spawn(move || {
                    for _ in 0..2 {
                        let Some(cell) = list.take() else { continue };
                        // SAFETY: a cell that was taken is ours until it is given back.
                        unsafe {
                            assert_eq!(cell.as_ref().value.fetch_add(1, SeqCst), 0, "a cell of two threads");
                            cell.as_ref().value.fetch_sub(1, SeqCst);
                            list.give_back(cell);
                        }
                    }
                })
            })
            .collect();
        join(threads);
        assert_eq!(std::iter::from_fn(|| list.take()).count(), cells.len(), "a cell is lost");
        for cell in cells {
            // SAFETY: nobody else has it any more.
            drop(unsafe { Box::from_raw(cell) });
        }
    });
}
