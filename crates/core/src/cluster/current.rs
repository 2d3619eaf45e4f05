//! What each CPU keeps for itself: where it was last and a spare cluster, by order, and what it has counted.
//!
//! Where it was is a hint, checked under the cluster's lock by whoever follows it, so that an old
//! one costs a failed try at worst. Counters are only ever added to. Each CPU has cache lines of its own.
//!
//! Lock: that of the spares, before those of clusters. A cluster at [`Place::Spare`](super::lists::Place::Spare) is the
//! spare of some CPU, whoever takes it holds both locks, and so nobody misses it who looks at all CPUs'. A spare that is
//! anywhere else is an old one.

use super::SlotCounters;
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::sync::{Mutex, MutexGuard, ranks::SlotSpare};
use crate::units::{CLUSTER_SLOTS, ClusterNumber, ORDERS, Order, SlotIndex};

/// A CPU's current cluster for an order, and where to go on in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Current {
    pub cluster: ClusterNumber,
    pub next: SlotIndex,
}

/// 0 for none, else 1 + the number of the slot to go on at.
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

/// One CPU's.
// 128 bytes: two cache lines, because processors fetch them in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct PerCpu {
    current: [AtomicU64; ORDERS],
    /// Allocations that found room in the current cluster or a spare, where no list is locked.
    hits: [AtomicU64; ORDERS],
    freed_slots: AtomicU64,
    spares: Mutex<[Option<ClusterNumber>; ORDERS], SlotSpare>,
}

impl PerCpu {
    pub fn spares(&self) -> MutexGuard<'_, [Option<ClusterNumber>; ORDERS], SlotSpare> {
        self.spares.lock()
    }

    /// Makes a cluster, which the caller has locked, the spare for `order`, unless there is one.
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
        // Release pairs with the Acquire in `freed_slots`: what is seen as freed is seen as
        // allocated.
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

    /// Adds what this CPU has counted to `all`: each hit has looked through one cluster.
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
