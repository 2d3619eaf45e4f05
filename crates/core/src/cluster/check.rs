//! The whole-allocator check: every slot has one state, every cluster is where it belongs.

use super::lists::Place;
use super::{SlotState, SwapClusters};
use foliomem_types::units::{ClusterNumber, Order, Slot};

impl SwapClusters {
    /// Walks all clusters and lists and panics at the first inconsistency. No other call may be in
    /// progress.
    pub fn check(&self) {
        let listed = self.lists.lock().check();
        let spares: Vec<_> = self.per_cpu.iter().flat_map(|cpu| *cpu.spares()).flatten().collect();
        let mut used_slots = 0;
        for (number, listed) in (0..).map(ClusterNumber).zip(&listed) {
            let cluster = self.table.get(number).lock();
            assert_eq!(*listed, Some(cluster.place).filter(|place| place.is_listed()), "{number:?}");
            assert!(
                cluster.place != Place::Spare || spares.contains(&number),
                "{number:?} is at Spare, but no CPU's spare"
            );
            cluster.check(number);
            self.policy.check(&cluster);
            used_slots += cluster.used_slots();
        }
        assert_eq!(used_slots, self.used_slots(), "slots in use");
        assert!(listed.len() as u32 <= self.table.len(), "more clusters are in use than there are");
        for (cpu, order) in self.per_cpu.iter().flat_map(|cpu| Order::all().map(move |order| (cpu, order))) {
            let current = cpu.current(order);
            assert!(current.is_none_or(|at| (at.cluster.0 as usize) < listed.len()), "{current:?} of {order:?}");
        }
    }

    /// Returns the state of `slot`.
    pub fn slot_state(&self, slot: Slot) -> SlotState {
        let cluster = self.table.get(slot.cluster()).lock();
        let index = slot.index_in_cluster();
        match (cluster.is_used(index), cluster.is_cache_only(index)) {
            (false, _) => SlotState::Free,
            (true, false) => SlotState::InUse,
            (true, true) => SlotState::CacheOnly,
        }
    }
}
