//! The cluster lists as first merged ("mTHP swap allocator", late 2024; `cluster_alloc_swap_entry`
//! of Linux 6.12): a free cluster, then nonfull ones, then every fragmented one. Each failure scans
//! all fragmented clusters.

use super::Policy;
use crate::cluster::lists::Place;
use crate::cluster::search::{Search, Tries};
use foliomem_types::units::Slot;

pub(in crate::cluster) struct ClusterLists;

impl Policy for ClusterLists {
    fn find(&self, search: &mut Search<'_>) -> Option<Slot> {
        let order = search.order();
        search
            .free_cluster()
            .or_else(|| search.listed(Place::Nonfull(order), Tries::All))
            .or_else(|| search.listed(Place::Frag(order), Tries::All))
            .or_else(|| search.steal())
    }
}
