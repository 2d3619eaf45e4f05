//! The per-CPU strategy: swap-out of large folios as first merged ("Swap-out mTHP without
//! splitting", 2024-04; `scan_swap_map_try_ssd_cluster` and `scan_swap_map_slots` of Linux 6.10).
//! Only free clusters are on a list. A CPU goes once through its current cluster, then takes a free
//! one. If there is none, higher orders fail, although slots may have been freed behind the CPUs;
//! order 0 scans the whole device, including other CPUs' clusters.

use super::Policy;
use crate::cluster::lists::Place;
use crate::cluster::search::Search;
use crate::cluster::table::Cluster;
use foliomem_types::units::{Order, Slot, SlotIndex};

pub(in crate::cluster) struct PerCpuLinear;

impl Policy for PerCpuLinear {
    fn find(&self, search: &mut Search<'_>) -> Option<Slot> {
        search.free_cluster().or_else(|| if search.order() == Order::ZERO { search.linear() } else { None })
    }

    fn keeps_lists(&self) -> bool {
        false
    }

    fn after_try(&self, _cluster: &Cluster, _order: Order) -> Place {
        Place::InUse
    }

    fn after_free(&self, _cluster: &Cluster, _at: SlotIndex, _slots: u32) -> Place {
        Place::InUse
    }

    fn after_mark(&self, _cluster: &Cluster) -> Place {
        Place::InUse
    }
}
