//! The cluster table: one cluster, and the array of all, allocated chunk by chunk at first use.

use super::bits::Bits;
use super::lists::Place;
use crate::sync::{Mutex, OnceLock, ranks::SlotCluster};
use foliomem_types::units::{CLUSTER_SLOTS, ClusterNumber, Order, SlotIndex};

/// Clusters allocated at a time: 12 KiB for 128 MiB of slots.
const CHUNK_CLUSTERS: usize = 64;

/// One cluster: the use of its slots.
// This order puts the fields that every call needs into the first cache line, after the lock and
// with most of `used`.
#[repr(C)]
pub(super) struct Cluster {
    used_slots: u16,
    cache_only_slots: u16,
    /// The order that the cluster serves, from its first allocation until it is wholly free again.
    pub order: Order,
    /// The place of the cluster. A change from or to a list also needs the list lock and happens
    /// together with the lists.
    pub place: Place,
    /// The slots that are not free.
    used: Bits,
    /// Those of `used` to which only the swap cache refers.
    cache_only: Bits,
}

/// A cluster with its lock, in its own cache lines.
#[derive(Default)]
#[repr(align(64))]
struct Padded(Mutex<Cluster, SlotCluster>);

impl Default for Cluster {
    fn default() -> Cluster {
        Cluster {
            used: Bits::default(),
            cache_only: Bits::default(),
            used_slots: 0,
            cache_only_slots: 0,
            order: Order::ZERO,
            place: Place::Free,
        }
    }
}

impl Cluster {
    pub fn is_empty(&self) -> bool {
        self.used_slots == 0
    }

    pub fn is_full(&self) -> bool {
        u32::from(self.used_slots) == CLUSTER_SLOTS
    }

    pub fn used_slots(&self) -> u32 {
        self.used_slots.into()
    }

    pub fn cache_only_slots(&self) -> u32 {
        self.cache_only_slots.into()
    }

    pub fn is_used(&self, at: SlotIndex) -> bool {
        self.used.contains(at)
    }

    pub fn is_cache_only(&self, at: SlotIndex) -> bool {
        self.cache_only.contains(at)
    }

    /// Returns the first aligned run of free slots at or after `from`.
    #[inline]
    pub fn find_free(&self, order: Order, from: SlotIndex) -> Option<SlotIndex> {
        if self.used_slots() + order.pages() > CLUSTER_SLOTS {
            return None;
        }
        self.used.find_clear(order, from)
    }

    /// Returns the first aligned run of slots that are free or cache-only.
    pub fn find_reclaimable(&self, order: Order) -> Option<SlotIndex> {
        if self.cache_only_slots == 0 {
            return None;
        }
        self.used.without(&self.cache_only).find_clear(order, SlotIndex::FIRST)
    }

    /// Returns whether an allocation of the cluster's own order finds room.
    pub fn has_room(&self) -> bool {
        self.find_free(self.order, SlotIndex::FIRST).is_some()
    }

    /// Returns whether freeing these slots made room for the cluster's own order.
    #[inline]
    pub fn has_room_around(&self, at: SlotIndex, slots: u32) -> bool {
        let is_room = slots >= self.order.pages() && at == at.head(self.order);
        is_room || self.used.has_clear_around(at, slots, self.order)
    }

    /// Marks free slots as used.
    #[inline]
    pub fn take(&mut self, at: SlotIndex, slots: u32) {
        self.used.set(at, slots);
        self.used_slots += slots as u16;
    }

    /// Marks used slots as free; they may be cache-only.
    #[inline]
    pub fn free(&mut self, at: SlotIndex, slots: u32) {
        self.used.clear(at, slots);
        self.used_slots -= slots as u16;
        if self.cache_only_slots > 0 {
            self.cache_only_slots -= self.cache_only.clear_any(at, slots) as u16;
        }
    }

    /// Marks slots in use as cache-only.
    pub fn mark_cache_only(&mut self, at: SlotIndex, slots: u32) {
        assert!(self.used.contains_all(at, slots), "{slots} slots from {at:?} are not all used");
        self.cache_only.set(at, slots);
        self.cache_only_slots += slots as u16;
    }

    /// Marks cache-only slots as in use.
    pub fn mark_in_use(&mut self, at: SlotIndex, slots: u32) {
        self.cache_only.clear(at, slots);
        self.cache_only_slots -= slots as u16;
    }

    /// Panics if the counts do not match the bits, or the slots do not fit the cluster's place.
    pub fn check(&self, number: ClusterNumber) {
        let (used, cache_only) = (self.used.count(), self.cache_only.count());
        assert_eq!((used, cache_only), (self.used_slots(), self.cache_only_slots()), "{number:?}");
        assert_eq!(
            self.cache_only.without(&self.used),
            Bits::default(),
            "{number:?} has free slots that are cache-only"
        );
        let fits = match self.place {
            Place::Free | Place::AwaitsDiscard | Place::Discarding => self.is_empty(),
            Place::Nonfull(order) | Place::Frag(order) => !self.is_empty() && !self.is_full() && order == self.order,
            Place::Spare => !self.is_empty() && self.has_room(),
            Place::Full => self.is_full() && cache_only == 0,
            Place::FullCacheOnly => self.is_full() && cache_only > 0,
            Place::InUse => !self.is_empty(),
        };
        assert!(fits, "{number:?}, of {:?}, with {used} slots used, is at {:?}", self.order, self.place);
    }
}

/// All clusters of a device, each with its lock.
pub(super) struct ClusterTable {
    chunks: Box<[OnceLock<Box<[Padded]>>]>,
    clusters: u32,
}

impl ClusterTable {
    pub fn new(clusters: u32) -> ClusterTable {
        let chunks = (0..(clusters as usize).div_ceil(CHUNK_CLUSTERS)).map(|_| OnceLock::new()).collect();
        ClusterTable { chunks, clusters }
    }

    /// Returns the number of clusters of the device.
    pub fn len(&self) -> u32 {
        self.clusters
    }

    #[inline]
    pub fn get(&self, number: ClusterNumber) -> &Mutex<Cluster, SlotCluster> {
        let (chunk, index) = (number.0 as usize / CHUNK_CLUSTERS, number.0 as usize % CHUNK_CLUSTERS);
        let make = || (0..CHUNK_CLUSTERS).map(|_| Padded::default()).collect();
        &self.chunks[chunk].get_or_init(make)[index].0
    }
}
