//! The lock order as data: each lock has a [`Rank`], and a thread takes locks in ascending order.
//!
//! A thread never holds two locks of one rank. The order covers all locks of the engine and of the
//! agent under which another lock is taken; all other locks are leaves. The rank is a type
//! parameter of [`Mutex`](super::Mutex) and [`RwLock`](super::RwLock).
//!
//! | rank | lock | protects |
//! |---|---|---|
//! | (none) | `core::gate`, passed before any lock | everything, while the program forks |
//! | `Compaction` | `core::compaction`: the scanners | one compaction at a time |
//! | `Mappings` | the address space's known mapping events | pages move only between events |
//! | `Block` | `core::page_table`: a block | the entries of 2 MiB of the address space |
//! | `StoreClass` | `core::store`: a size class | its zspages |
//! | `FileSlots` | `core::store`: the slots of the swap file | the owners of its clusters |
//! | `SlotSpare` | `core::cluster`: the spares of a CPU | its spare clusters |
//! | `SlotCluster` | `core::cluster`: a cluster | its slots |
//! | `SlotLists` | `core::cluster`: the lists | which clusters are free, full, in use |
//! | `Advice` | advice for unmanaged memory | held while the managed ranges are looked up |
//! | `Leaf` | all other locks | no other lock is taken under a leaf |
//! | `Unchecked` | locks of the worlds in tests | |
//!
//! The lock of the agent's heap is below the leaves: a thread may allocate while it holds any lock.
//! The heap's lock is not a lock of this module.
//!
//! The feature `lock-ranks`, which the tests of the engine and of the agent enable, checks
//! each acquisition: a thread that takes a lock out of order panics, whether or not another thread
//! holds it. A number identifies a thread, because threads of the agent have no thread-local
//! storage of this library: see `identify_threads`.

/// The place of a lock in the lock order.
pub trait Rank {
    /// The place, below 32. A thread takes locks in ascending order of places.
    const PLACE: u8;
    /// The name in messages.
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

    /// The names of all ranks by place; the name of an unused place is empty.
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
    /// The address space's known mapping events.
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
    /// Advice for unmanaged memory.
    Advice = 9;
    /// A lock under which no other is taken.
    Leaf = 30;
    /// A lock of a test's world, outside the lock order.
    Unchecked = 31;
}

/// The two ways to take a lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Waits {
    /// The thread waits for the lock, so it must keep the order.
    Yes,
    /// The thread continues without the lock if the lock is held.
    No,
}

/// Does nothing: acquisitions are not checked.
#[cfg(not(feature = "lock-ranks"))]
#[inline]
pub(super) fn acquire<R: Rank>(_waits: Waits) {}

/// Does nothing: acquisitions are not checked.
#[cfg(not(feature = "lock-ranks"))]
#[inline]
pub fn assert_none_held_from<R: Rank>() {}

#[cfg(feature = "lock-ranks")]
pub(super) use checks::{acquire, release};
#[cfg(feature = "lock-ranks")]
pub use checks::{assert_none_held_from, identify_threads};

#[cfg(feature = "lock-ranks")]
mod checks {
    use super::{NAMES, Rank, Unchecked, Waits};
    use std::cell::Cell;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    /// Maximum number of threads that are checked at a time.
    const THREADS: usize = 1024;
    /// Number of entries that a thread tries. The thread is not checked if others own all of them.
    const PROBES: usize = 16;

    /// The locks that a thread holds. Relaxed accesses suffice, because only the owner changes the
    /// entry while it holds a lock.
    struct Held {
        /// The number of the owner; 0 if the entry is free.
        thread: AtomicU32,
        /// A bit for each rank that the owner holds.
        ranks: AtomicU32,
    }

    static HELD: [Held; THREADS] = [const { Held { thread: AtomicU32::new(0), ranks: AtomicU32::new(0) } }; THREADS];
    static IDENTIFY: OnceLock<fn() -> u32> = OnceLock::new();

    #[cfg(feature = "shuttle")]
    use shuttle::thread_local;
    thread_local! {
        /// A bit for each rank that the thread holds. Unused if numbers identify threads.
        static RANKS: Cell<u32> = const { Cell::new(0) };
    }

    /// Makes `identify` identify threads, instead of thread-local storage. It must return a number
    /// above 0 that no two living threads share. Called once, before any lock is taken.
    pub fn identify_threads(identify: fn() -> u32) {
        let _ = IDENTIFY.set(identify);
    }

    fn entry(thread: u32) -> Option<&'static Held> {
        let first = thread.wrapping_mul(0x9e37_79b9) as usize;
        let entries = || (first..first + PROBES).map(|index| &HELD[index % THREADS]);
        // A thread that holds a lock owns an entry, and other threads do not take it.
        let has = |held: &&Held| held.thread.load(Relaxed) == thread;
        let takes = |held: &&Held| held.thread.compare_exchange(0, thread, Relaxed, Relaxed).is_ok();
        entries().find(has).or_else(|| entries().find(takes))
    }

    /// Changes the set of ranks that the calling thread holds.
    fn change(to: impl FnOnce(u32) -> u32) {
        let Some(identify) = IDENTIFY.get() else {
            // An ending thread has no storage any more and is not checked.
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

    /// Panics if the calling thread holds a lock of rank `R` or of a higher one, for functions that
    /// wait for others.
    pub fn assert_none_held_from<R: Rank>() {
        change(|ranks| {
            if let Some(held) = (ranks & !((1 << R::PLACE) - 1)).checked_ilog2() {
                panic!("a function that may wait is called under a lock of rank {}", NAMES[held as usize]);
            }
            ranks
        });
    }

    /// Notes that the calling thread takes a lock of rank `R`, and panics if the order forbids it.
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

    /// Notes that the calling thread releases a lock of rank `R`.
    pub fn release<R: Rank>() {
        if R::PLACE != Unchecked::PLACE {
            change(|ranks| ranks & !(1 << R::PLACE));
        }
    }
}

#[cfg(all(test, feature = "lock-ranks", not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::{Mutex, RwLock};

    #[test]
    fn locks_are_taken_in_ascending_order() {
        let (mappings, block, leaf) =
            (RwLock::<i32, Mappings>::default(), Mutex::<i32, Block>::new(1), Mutex::<i32>::new(2));
        let read = mappings.read();
        let guard = block.lock();
        assert_eq!(*leaf.lock() + *guard + *read, 3);
        drop((guard, read));
        // `try_lock` does not wait, so the order does not apply.
        let held = leaf.lock();
        assert!(block.try_lock().is_some());
        drop(held);
        drop(block.lock());
    }

    #[test]
    #[should_panic(expected = "a lock of rank Block is taken under one of rank Leaf")]
    fn taking_a_lock_under_a_leaf_panics() {
        let (block, leaf) = (Mutex::<(), Block>::default(), Mutex::<()>::default());
        let _leaf = leaf.lock();
        let _block = block.lock();
    }

    #[test]
    #[should_panic(expected = "a lock of rank Block is taken under one of rank Block")]
    fn taking_a_second_block_panics() {
        let (one, other) = (Mutex::<(), Block>::default(), Mutex::<(), Block>::default());
        let _one = one.lock();
        let _other = other.lock();
    }

    #[test]
    #[should_panic(expected = "a function that may wait is called under a lock of rank Block")]
    fn waiting_under_a_lock_panics() {
        assert_none_held_from::<Mappings>();
        let block = Mutex::<(), Block>::default();
        let _block = block.lock();
        assert_none_held_from::<Leaf>();
        assert_none_held_from::<Mappings>();
    }

    #[test]
    fn each_thread_has_its_own_set_of_held_ranks() {
        let (block, leaf) = (Mutex::<(), Block>::default(), Mutex::<()>::default());
        let _leaf = leaf.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(block.lock()));
        });
    }
}
