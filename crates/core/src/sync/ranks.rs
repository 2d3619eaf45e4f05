//! The order in which locks are taken, as data: each lock has a [`Rank`], and a thread takes locks
//! in ascending order.
//!
//! Two locks of one rank are never held by one thread. The order holds for all locks of the engine
//! and of the agent that are held while another one is taken; all the others are leaves.
//! [`Mutex`](super::Mutex) and [`RwLock`](super::RwLock) have their rank as a type.
//!
//! | rank | lock | protects |
//! |---|---|---|
//! | (none) | [`crate::gate`] | everything, while the program forks: passed before any lock |
//! | `Compaction` | [`crate::compaction`]: the scanners | one compaction at a time |
//! | `Mappings` | the machine's known mapping changes | changes are heard by one thread; pages move only between changes |
//! | `Block` | [`crate::page_table`]: a block | the entries of 2 MiB of the program's address space |
//! | `StoreClass` | [`crate::store`]: a size class | its zspages |
//! | `FileSlots` | [`crate::store`]: the slots of the swap file | which clusters are whose |
//! | `SlotSpare` | [`crate::cluster`]: the spares of a CPU | |
//! | `SlotCluster` | [`crate::cluster`]: a cluster | its slots |
//! | `SlotLists` | [`crate::cluster`]: the lists | which clusters are free, full, in use |
//! | `Advice` | advice for memory that is not managed | is held while the managed ranges are looked up |
//! | `Leaf` | all others | no other lock is taken under one |
//! | `Unchecked` | those of the worlds in tests | |
//!
//! Below the leaves is the lock of the agent's heap: any thread may allocate while it holds a lock.
//! It is no lock of this module.
//!
//! With the feature `lock-ranks`, which the tests of this crate and of `foliomem-linux` have, each
//! acquisition is checked: a thread that takes a lock out of order panics, whatever the others do
//! at that moment. A thread is known by a number, not by thread-local storage of this library,
//! which threads of the agent do not have: see [`identify_threads`].

/// Where a lock is in the order.
pub trait Rank {
    /// Its place: locks are taken in ascending order.
    const PLACE: u8;
    /// For messages.
    const NAME: &'static str;
}

macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident = $place:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name;

        impl Rank for $name {
            const PLACE: u8 = $place;
            const NAME: &'static str = stringify!($name);
        }
    )*

    /// The names of all ranks, by place; empty where there is none.
    #[cfg(feature = "lock-ranks")]
    const NAMES: [&str; 32] = {
        let mut names = [""; 32];
        $(names[$name::PLACE as usize] = $name::NAME;)*
        names
    };
    };
}

ranks! {
    /// The scanners of the compactor.
    Compaction = 1;
    /// The machine's known mapping changes.
    Mappings = 2;
    /// A block of the page table.
    Block = 3;
    /// A size class of the store.
    StoreClass = 4;
    /// The slots of the swap file.
    FileSlots = 5;
    /// The spare clusters of a CPU.
    SlotSpare = 6;
    /// A cluster of slots.
    SlotCluster = 7;
    /// The lists of clusters.
    SlotLists = 8;
    /// Advice for memory that is not managed.
    Advice = 9;
    /// A lock under which no other is taken.
    Leaf = 30;
    /// A lock of a test's own world, which is no part of the order.
    Unchecked = 31;
}

/// Whether a thread that takes a lock waits for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Waits {
    /// It does, so the order must be kept.
    Yes,
    /// It goes on without the lock.
    No,
}

/// The calling thread takes a lock; nobody checks.
#[cfg(not(feature = "lock-ranks"))]
#[inline]
pub(super) fn acquire<R: Rank>(_waits: Waits) {}

#[cfg(feature = "lock-ranks")]
pub use checks::identify_threads;
#[cfg(feature = "lock-ranks")]
pub(super) use checks::{acquire, release};

#[cfg(feature = "lock-ranks")]
mod checks {
    use super::{NAMES, Rank, Unchecked, Waits};
    use std::cell::Cell;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    /// Threads that can hold locks at a time.
    const THREADS: usize = 1024;
    /// Entries that are looked at for a thread. Where others have all of them, it goes unchecked.
    const PROBES: usize = 16;

    /// What a thread holds. No ordering: only that thread changes it while it holds something.
    struct Held {
        /// The thread's number; 0 while nobody has the entry.
        thread: AtomicU32,
        /// A bit for each rank.
        ranks: AtomicU32,
    }

    static HELD: [Held; THREADS] = [const { Held { thread: AtomicU32::new(0), ranks: AtomicU32::new(0) } }; THREADS];
    static IDENTIFY: OnceLock<fn() -> u32> = OnceLock::new();

    #[cfg(feature = "shuttle")]
    use shuttle::thread_local;
    thread_local! {
        /// A bit for each rank that the thread holds, unless threads are known by a number.
        static RANKS: Cell<u32> = Cell::new(0);
    }

    /// Has threads known by what `identify` says, a number above 0 that no two living threads
    /// share, instead of by thread-local storage. Once, before any lock is taken.
    pub fn identify_threads(identify: fn() -> u32) {
        let _ = IDENTIFY.set(identify);
    }

    fn entry(thread: u32) -> Option<&'static Held> {
        let first = thread.wrapping_mul(0x9e37_79b9) as usize;
        let entries = || (first..first + PROBES).map(|index| &HELD[index % THREADS]);
        // While a thread holds a lock it has an entry, which others do not take.
        let has = |held: &&Held| held.thread.load(Relaxed) == thread;
        let takes = |held: &&Held| held.thread.compare_exchange(0, thread, Relaxed, Relaxed).is_ok();
        entries().find(has).or_else(|| entries().find(takes))
    }

    /// Changes what the calling thread holds.
    fn change(to: impl FnOnce(u32) -> u32) {
        let Some(identify) = IDENTIFY.get() else {
            // A thread that ends has no storage any more, and is not looked at.
            let _ = RANKS.try_with(|ranks| ranks.set(to(ranks.get())));
            return;
        };
        let Some(held) = entry(identify()) else { return };
        let ranks = to(held.ranks.load(Relaxed));
        held.ranks.store(ranks, Relaxed);
        if ranks == 0 {
            held.thread.store(0, Relaxed);
        }
    }

    /// The calling thread takes a lock.
    pub fn acquire<R: Rank>(waits: Waits) {
        if R::PLACE == Unchecked::PLACE {
            return;
        }
        change(|ranks| {
            let highest = ranks.checked_ilog2();
            if let Some(highest) = highest.filter(|&highest| waits == Waits::Yes && highest >= R::PLACE.into()) {
                panic!("a lock of rank {} is taken under one of rank {}", R::NAME, NAMES[highest as usize]);
            }
            ranks | 1 << R::PLACE
        });
    }

    /// The calling thread lets go of it.
    pub fn release<R: Rank>() {
        if R::PLACE != Unchecked::PLACE {
            change(|ranks| ranks & !(1 << R::PLACE));
        }
    }
}

#[cfg(all(test, feature = "lock-ranks", not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::sync::{Mutex, RwLock};

    #[test]
    fn locks_are_taken_in_ascending_order() {
        let (mappings, block, leaf) =
            (RwLock::<i32, Mappings>::default(), Mutex::<i32, Block>::new(1), Mutex::<i32>::new(2));
        let read = mappings.read();
        let guard = block.lock();
        assert_eq!(*leaf.lock() + *guard + *read, 3);
        drop((guard, read));
        // One that is not waited for needs no order.
        let held = leaf.lock();
        assert!(block.try_lock().is_some());
        drop(held);
        drop(block.lock());
    }

    #[test]
    #[should_panic(expected = "a lock of rank Block is taken under one of rank Leaf")]
    fn a_lock_under_a_leaf_is_refused() {
        let (block, leaf) = (Mutex::<(), Block>::default(), Mutex::<()>::default());
        let _leaf = leaf.lock();
        let _block = block.lock();
    }

    #[test]
    #[should_panic(expected = "a lock of rank Block is taken under one of rank Block")]
    fn a_second_block_is_refused() {
        let (one, other) = (Mutex::<(), Block>::default(), Mutex::<(), Block>::default());
        let _one = one.lock();
        let _other = other.lock();
    }

    #[test]
    fn what_one_thread_holds_is_nothing_to_another() {
        let (block, leaf) = (Mutex::<(), Block>::default(), Mutex::<()>::default());
        let _leaf = leaf.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(block.lock()));
        });
    }
}
