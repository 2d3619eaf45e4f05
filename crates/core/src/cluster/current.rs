//! Per-CPU state: by order, the position of the last allocation and a spare cluster; and counters.
//!
//! The position is a hint. Its user checks it under the cluster's lock, so a stale one costs a
//! failed try at worst. Counters only grow. Each CPU has its own cache lines.
//!
//! Lock: the lock of the spares comes before those of clusters. A cluster at
//! [`Place::Spare`](super::lists::Place::Spare) is the spare of some CPU. A thread that takes it
//! holds both locks, so a thread that searches the spares of all CPUs cannot miss it. A spare that
//! is at another place is stale.

use super::SlotCounters;
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::sync::{Mutex, MutexGuard, ranks::SlotSpare};
use foliomem_types::units::{CLUSTER_SLOTS, ClusterNumber, ORDERS, Order, SlotIndex};

/// A CPU's current cluster for an order, and the slot at which to continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Current {
    pub cluster: ClusterNumber,
    pub next: SlotIndex,
}

/// Encodes the position: 0 for none, else 1 + the number of the slot at which to continue.
fn encode(current: Option<Current>) -> u64 {
    current.map_or(0, |Current { cluster, next }| {
        1 + u64::from(cluster.0) * u64::from(CLUSTER_SLOTS) + u64::from(next.get())
    })
}

fn decode(word: u64) -> Option<Current> {
    let slot = word.checked_sub(1)?;
    let cluster = ClusterNumber((slot / u64::from(CLUSTER_SLOTS)) as u32);
    Some(Current { cluster, next: SlotIndex::new((slot % u64::from(CLUSTER_SLOTS)) as u32)? })
}

/// The state of one CPU.
// 128 bytes: two cache lines, because processors fetch them in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct PerCpu {
    current: [AtomicU64; ORDERS],
    /// Allocations from the current cluster or a spare, which take no list lock.
    hits: [AtomicU64; ORDERS],
    freed_slots: AtomicU64,
    spares: Mutex<[Option<ClusterNumber>; ORDERS], SlotSpare>,
}

impl PerCpu {
    pub fn spares(&self) -> MutexGuard<'_, [Option<ClusterNumber>; ORDERS], SlotSpare> {
        self.spares.lock()
    }

    /// Makes a cluster, which the caller has locked, the spare for `order` unless there is one.
    /// Returns whether it did.
    pub fn keep_spare(&self, order: Order, cluster: ClusterNumber) -> bool {
        let Some(mut spares) = self.spares.try_lock() else { return false };
        let spare = &mut spares[order.index()];
        let has_none = spare.is_none();
        if has_none {
            *spare = Some(cluster);
        }
        has_none
    }

    pub fn count_freed(&self, slots: u32) {
        // Release pairs with the Acquire in `freed_slots`: every slot counted as freed is also
        // counted as allocated.
        self.freed_slots.fetch_add(slots.into(), Release);
    }

    pub fn freed_slots(&self) -> u64 {
        // Acquire pairs with the Release in `count_freed`.
        self.freed_slots.load(Acquire)
    }

    pub fn current(&self, order: Order) -> Option<Current> {
        decode(self.current[order.index()].load(Relaxed))
    }

    pub fn set_current(&self, order: Order, current: Option<Current>) {
        self.current[order.index()].store(encode(current), Relaxed);
    }

    pub fn count_hit(&self, order: Order) {
        self.hits[order.index()].fetch_add(1, Relaxed);
    }

    /// Adds this CPU's counters to `all`. Each hit scanned one cluster.
    pub fn add_to(&self, all: &mut SlotCounters) {
        for (hits, allocs) in self.hits.iter().zip(&mut all.allocs) {
            let hits = hits.load(Relaxed);
            *allocs += hits;
            all.clusters_scanned += hits;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_current_cluster_is_read_back() {
        let last = SlotIndex::new(CLUSTER_SLOTS - 1).unwrap();
        for current in [
            None,
            Some(Current { cluster: ClusterNumber(0), next: SlotIndex::FIRST }),
            Some(Current { cluster: ClusterNumber(u32::MAX / CLUSTER_SLOTS), next: last }),
        ] {
            assert_eq!(decode(encode(current)), current);
        }
    }
}
