//! What each CPU keeps for itself: where it was last, by order, and what it has counted.
//!
//! No lock: where it was is a hint, checked under the cluster's lock by whoever follows it, so that an old
//! one costs a failed try at worst. Counters are only ever added to. Each CPU has cache lines of its own.

use super::SlotCounters;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
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
    allocs: [AtomicU64; ORDERS],
    fallbacks: [AtomicU64; ORDERS],
    clusters_scanned: AtomicU64,
    stolen: AtomicU64,
    reclaims: AtomicU64,
}

impl PerCpu {
    pub fn current(&self, order: Order) -> Option<Current> {
        decode(self.current[order.index()].load(Relaxed))
    }

    pub fn set_current(&self, order: Order, current: Option<Current>) {
        self.current[order.index()].store(encode(current), Relaxed);
    }

    pub fn count_alloc(&self, order: Order) {
        self.allocs[order.index()].fetch_add(1, Relaxed);
    }

    pub fn count_fallback(&self, order: Order) {
        self.fallbacks[order.index()].fetch_add(1, Relaxed);
    }

    pub fn count_scanned(&self, clusters: u64) {
        self.clusters_scanned.fetch_add(clusters, Relaxed);
    }

    pub fn count_stolen(&self) {
        self.stolen.fetch_add(1, Relaxed);
    }

    pub fn count_reclaim(&self) {
        self.reclaims.fetch_add(1, Relaxed);
    }

    /// Adds what this CPU has counted to `all`.
    pub fn add_to(&self, all: &mut SlotCounters) {
        for order in 0..ORDERS {
            all.allocs[order] += self.allocs[order].load(Relaxed);
            all.fallbacks[order] += self.fallbacks[order].load(Relaxed);
        }
        all.clusters_scanned += self.clusters_scanned.load(Relaxed);
        all.stolen += self.stolen.load(Relaxed);
        all.reclaims += self.reclaims.load(Relaxed);
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
