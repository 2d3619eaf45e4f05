//! The nonfull-first strategy: "mm, swap: prefer nonfull over free clusters" (2025-08, the second
//! patch of "improve cluster scan strategy"; `cluster_alloc_swap_entry` of Linux 6.18). Nonfull
//! clusters are filled up before a free one is opened, unless the device wants discard, where
//! spreading writes is better.
//!
//! Three rules differ from the kernel.
//! - A CPU at the end of its current cluster continues at the start of that cluster if it has room
//!   there.
//! - A full cluster that gets room again becomes the spare of the CPU that freed it, unless that
//!   CPU has one. The kernel puts it on the nonfull list, where all CPUs meet.
//! - In the kernel, any freed slot makes a cluster nonfull, so an allocation may scan any number of
//!   nonfull clusters before one has room. Here a cluster is nonfull, or a spare, only after *room
//!   for its order* was freed, until it is tried or its last such room is stolen.
//!
//! So the first nonfull cluster has room, and an allocation scans three clusters at most: the CPU's
//! current one; one that is nonfull, a spare, fragmented or stolen from; and a full one for slots
//! to reclaim.

use super::{Policy, full};
use crate::cluster::lists::Place;
use crate::cluster::search::{Search, Tries};
use crate::cluster::table::Cluster;
use foliomem_types::units::{Order, Slot, SlotIndex};

pub(in crate::cluster) struct NonfullFirst;

impl Policy for NonfullFirst {
    fn find(&self, search: &mut Search<'_>) -> Option<Slot> {
        let order = search.order();
        let nonfull = |search: &mut Search<'_>| search.listed(Place::Nonfull(order), Tries::One);
        let found = if search.spreads_writes() {
            search.free_cluster().or_else(|| nonfull(search))
        } else {
            nonfull(search).or_else(|| search.anyones_spare(order)).or_else(|| search.free_cluster())
        };
        found.or_else(|| search.listed(Place::Frag(order), Tries::One)).or_else(|| search.steal())
    }

    fn goes_round(&self) -> bool {
        true
    }

    fn keeps_spares(&self) -> bool {
        true
    }

    fn after_try(&self, cluster: &Cluster, order: Order) -> Place {
        if cluster.is_full() {
            full(cluster)
        } else if order != cluster.order
            && matches!(cluster.place, Place::Nonfull(_) | Place::Spare)
            && cluster.has_room()
        {
            Place::Nonfull(cluster.order)
        } else {
            Place::Frag(cluster.order)
        }
    }

    fn after_free(&self, cluster: &Cluster, at: SlotIndex, slots: u32) -> Place {
        match cluster.place {
            Place::Spare => Place::Spare,
            _ if cluster.has_room_around(at, slots) => Place::Nonfull(cluster.order),
            Place::Full | Place::FullCacheOnly => Place::Frag(cluster.order),
            place => place,
        }
    }

    fn check(&self, cluster: &Cluster) {
        assert!(!matches!(cluster.place, Place::Nonfull(_)) || cluster.has_room(), "a nonfull cluster without room");
    }
}
