//! Schedules of the protocols between processes: an event arrives complete, and no cluster has two
//! owners or none.

#[path = "../../core/tests/schedules/mod.rs"]
mod explorer;

use crate::cluster_ownership::{RowIndex, SwapSpace};
use crate::content_sample::{ContentSample, MAX_ENTRIES, Sample};
use crate::trace_ring::TraceRing;
use explorer::explore;
use foliomem_sync::atomic::{AtomicU32, Ordering::SeqCst};
use foliomem_sync::back_off;
use foliomem_types::trace_event::Event;
use foliomem_types::units::{ClusterNumber, PageNumber};
use shuttle::sync::Arc;
use shuttle::thread;

/// Waits until the threads end.
fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
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
                        back_off();
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
            back_off();
        }
        join([writer]);
    });
}

/// A reader of a content sample gets one of those that were published, as a whole, or none.
#[test]
fn a_content_sample_is_read_whole() {
    explore(3000, || {
        let published = Arc::new(ContentSample::default());
        let sample = |number: u64| {
            let mut sample = Sample::default();
            // Later samples have fewer entries.
            (number..=MAX_ENTRIES as u64).for_each(|entry| sample.add(PageNumber(entry), number as u32, number));
            sample
        };
        let writer = {
            let published = Arc::clone(&published);
            thread::spawn(move || (1..=3).for_each(|number| published.publish(&sample(number), number)))
        };
        let mut last = 0;
        while last < 3 {
            if let Some((read, swapped_out_bytes)) = published.read() {
                assert!(swapped_out_bytes >= last, "an older one");
                assert_eq!(read, sample(swapped_out_bytes));
                last = swapped_out_bytes;
            }
            back_off();
        }
        join([writer]);
    });
}

/// A pid that no process has.
const DEAD: u32 = i32::MAX as u32;

struct Swap {
    space: SwapSpace,
    /// Number of users of each cluster.
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
                    assert!(self.space.fence(cluster));
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

/// Two processes find a third one dead. A fourth process then claims the row that one of them has
/// freed.
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

/// A cluster that a parent shares with its child stays held until both have released it, in any
/// order.
#[test]
fn a_shared_cluster_is_free_when_both_have_released_it() {
    explore(2000, || {
        let swap = Swap::new();
        let me = std::process::id();
        let parent = swap.space.enter(me).expect("a free row");
        let cluster = ClusterNumber(0);
        assert!(swap.space.claim(parent, cluster));
        let child = swap.space.share(parent, me).expect("a free row");
        let left = Arc::new(AtomicU32::new(2));
        let release = |row: RowIndex, is_child: bool| {
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
        let threads = [release(parent, false), release(child, true)];
        let other = swap.space.enter(me).expect("a free row");
        if swap.space.claim(other, cluster) {
            assert_eq!(left.load(SeqCst), 0, "it is held");
            swap.space.release(other, cluster);
        }
        join(threads);
        swap.verify_free();
    });
}

/// The only holder of a cluster writes to it again after a fence, while another process joins by
/// what was published before: who has joined never reads other content.
#[test]
fn a_joined_cluster_keeps_its_content() {
    explore(3000, || {
        let (swap, content) = (Swap::new(), Arc::new(AtomicU32::new(1)));
        let me = std::process::id();
        let cluster = ClusterNumber(0);
        let writer = swap.space.enter(me).expect("a free row");
        assert!(swap.space.claim(writer, cluster));
        let published = swap.space.generation(cluster);
        let joins: Vec<_> = (0..2)
            .map(|_| {
                let (swap, content) = (Arc::clone(&swap), Arc::clone(&content));
                let row = swap.space.enter(me).expect("a free row");
                thread::spawn(move || {
                    if swap.space.join(row, cluster, published) {
                        assert_eq!(content.load(SeqCst), 1, "the slots were used again");
                        back_off();
                        assert_eq!(content.load(SeqCst), 1, "the slots were used again");
                        assert!(!swap.space.claim(row, cluster));
                        swap.space.release(row, cluster);
                    }
                    swap.space.leave(row);
                })
            })
            .collect();
        if swap.space.fence(cluster) {
            content.store(2, SeqCst);
            assert!(!swap.space.join(writer, cluster, published), "the holder itself is told");
            assert!(swap.space.join(writer, cluster, swap.space.generation(cluster)));
        }
        swap.space.leave(writer);
        join(joins);
        swap.verify_free();
    });
}
