//! One slot allocation: the search steps that strategies consist of.
//!
//! A step that scans a cluster on a list holds both locks meanwhile (scanning eight words is faster
//! than releasing and taking a lock), and leaves the cluster at the end of the list that its
//! strategy chooses. It skips clusters that other threads have locked. It remembers a range of
//! cache-only slots, which the caller must reclaim if no step finds room. (The kernel reclaims such
//! slots when it meets them on a device over half full. Here an entry is worth a compression, so it
//! goes only if there is no other way.)

use super::current::{Current, PerCpu};
use super::lists::{Lists, Place};
use super::table::Cluster;
use super::{NoSlots, SwapClusters};
use crate::sync::MutexGuard;
use crate::sync::ranks::{SlotCluster, SlotLists};
use foliomem_types::units::{ClusterNumber, MAX_ORDER, Order, Slot, SlotIndex};
use std::ops::Range;

/// How many clusters of a list a step tries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tries {
    /// Only the first cluster.
    One,
    /// Every cluster on the list at the start.
    All,
}

/// The locked lists.
type LockedLists<'a> = MutexGuard<'a, Lists, SlotLists>;
/// A locked cluster and its number.
type LockedCluster<'a> = (ClusterNumber, MutexGuard<'a, Cluster, SlotCluster>);

/// A locked view of one list. All lists stay locked with it.
pub(super) struct Look<'a> {
    pub lists: LockedLists<'a>,
    /// The first cluster of the list that no other thread has locked.
    pub first: Option<LockedCluster<'a>>,
    /// A cluster that was skipped because it was locked.
    pub contended: Option<ClusterNumber>,
}

/// The state of one allocation.
pub(super) struct Search<'a> {
    clusters: &'a SwapClusters,
    cpu: &'a PerCpu,
    order: Order,
    /// Number of scanned clusters, except the one with room.
    scanned: u64,
    reclaimable: Option<Range<Slot>>,
    contended: Option<ClusterNumber>,
    /// The number of cluster moves at the first look, and the moves that this search made since.
    moves: Option<u64>,
    own_moves: u64,
    /// The current cluster, after it had no room.
    left: Option<ClusterNumber>,
}

impl<'a> Search<'a> {
    pub fn new(clusters: &'a SwapClusters, cpu: &'a PerCpu, order: Order) -> Search<'a> {
        let (reclaimable, contended, moves, left) = (None, None, None, None);
        Search { clusters, cpu, order, scanned: 0, reclaimable, contended, moves, own_moves: 0, left }
    }

    pub fn order(&self) -> Order {
        self.order
    }

    pub fn spreads_writes(&self) -> bool {
        self.clusters.spreads_writes()
    }

    /// Allocates where this CPU allocated last.
    #[inline]
    pub fn current(&mut self) -> Option<Slot> {
        let Current { cluster: number, next } = self.cpu.current(self.order)?;
        let mut cluster = self.clusters.table.get(number).lock();
        let usable = match cluster.place {
            Place::Nonfull(_) | Place::Frag(_) | Place::Spare => cluster.order == self.order,
            Place::InUse => cluster.order == self.order || self.order == Order::ZERO,
            // Its last slot was freed, and no other thread has taken it since.
            Place::Free => true,
            Place::Full | Place::FullCacheOnly | Place::AwaitsDiscard | Place::Discarding => false,
        };
        if usable {
            let mut from = next;
            if cluster.place == Place::Free {
                (cluster.order, from) = (self.order, SlotIndex::FIRST);
            }
            let mut found = cluster.find_free(self.order, from);
            if found.is_none() && self.clusters.policy.goes_round() {
                found = cluster.find_free(self.order, SlotIndex::FIRST);
            }
            if let Some(at) = found {
                return Some(self.hit(number, &mut cluster, at));
            }
            self.scanned += 1;
            if self.clusters.policy.keeps_lists() {
                self.note_reclaimable(number, &cluster);
            }
        }
        self.left = Some(number);
        self.cpu.set_current(self.order, None);
        None
    }

    /// Allocates from this CPU's spare.
    pub fn spare(&mut self) -> Option<Slot> {
        self.spare_of(self.cpu, self.order)
    }

    /// Allocates from a spare for order `of`, of any CPU.
    pub fn anyones_spare(&mut self, of: Order) -> Option<Slot> {
        let clusters = self.clusters;
        clusters.per_cpu.iter().find_map(|cpu| self.spare_of(cpu, of))
    }

    fn spare_of(&mut self, cpu: &PerCpu, of: Order) -> Option<Slot> {
        if !self.clusters.has_spares() {
            return None;
        }
        let mut spares = cpu.spares();
        let number = spares[of.index()].take()?;
        let mut cluster = self.clusters.table.get(number).lock();
        if cluster.place != Place::Spare || cluster.order != of {
            return None;
        }
        let found = cluster.find_free(self.order, SlotIndex::FIRST);
        debug_assert!(found.is_some(), "{number:?} is a spare without room");
        found.map(|at| self.hit(number, &mut cluster, at))
    }

    /// Takes slots of a cluster that was found without the list lock.
    #[inline]
    fn hit(&mut self, number: ClusterNumber, cluster: &mut Cluster, at: SlotIndex) -> Slot {
        self.take(number, cluster, at);
        let place = self.clusters.policy.after_try(cluster, self.order);
        self.clusters.relocate(number, cluster, place);
        let is_stolen = cluster.order != self.order;
        if is_stolen || self.scanned > 0 {
            let counters = &mut self.clusters.lists.lock().counters;
            counters.stolen += u64::from(is_stolen);
            counters.clusters_scanned += self.scanned;
        }
        self.cpu.count_hit(self.order);
        number.slot(at)
    }

    /// Allocates at the start of a wholly free cluster.
    pub fn free_cluster(&mut self) -> Option<Slot> {
        let (mut lists, first) = self.look_at(Place::Free);
        let (number, mut cluster) = first?;
        cluster.order = self.order;
        self.take(number, &mut cluster, SlotIndex::FIRST);
        self.leave(&mut lists, number, &mut cluster);
        self.count_alloc(&mut lists, &cluster);
        Some(number.slot(SlotIndex::FIRST))
    }

    /// Allocates from a cluster at `place`.
    pub fn listed(&mut self, place: Place, tries: Tries) -> Option<Slot> {
        let mut left = match tries {
            Tries::One => 1,
            Tries::All => u32::MAX,
        };
        while left > 0 {
            let (mut lists, first) = self.look_at(place);
            left = left.min(lists.len(place)).saturating_sub(1);
            let (number, mut cluster) = first?;
            self.scanned += 1;
            let found = cluster.find_free(self.order, SlotIndex::FIRST);
            match found {
                Some(at) => self.take(number, &mut cluster, at),
                None => self.note_reclaimable(number, &cluster),
            }
            self.leave(&mut lists, number, &mut cluster);
            if let Some(at) = found {
                self.count_alloc(&mut lists, &cluster);
                return Some(number.slot(at));
            }
        }
        None
    }

    /// Allocates one slot for order 0 from a cluster that serves a higher order. That cluster must
    /// not become this CPU's current one.
    pub fn steal(&mut self) -> Option<Slot> {
        if self.order > Order::ZERO {
            return None;
        }
        let mut of_higher = Order::all().filter(|&of| of > Order::ZERO);
        let slot = of_higher.find_map(|of| {
            let mut places = [Place::Frag(of), Place::Nonfull(of)].into_iter();
            places.find_map(|place| self.listed(place, Tries::One)).or_else(|| self.anyones_spare(of))
        })?;
        self.cpu.set_current(Order::ZERO, None);
        Some(slot)
    }

    /// Allocates from any cluster in use; scans all of them, starting after this CPU's last one.
    pub fn linear(&mut self) -> Option<Slot> {
        let clusters = self.clusters.lists.lock().clusters();
        let from = self.left.map_or(0, |left| left.0 + 1);
        for number in (from..clusters).chain(0..from.min(clusters)).map(ClusterNumber) {
            let mut cluster = self.clusters.table.get(number).lock();
            if cluster.place != Place::InUse {
                continue;
            }
            self.scanned += 1;
            if let Some(at) = cluster.find_free(self.order, SlotIndex::FIRST) {
                self.take(number, &mut cluster, at);
                self.count_alloc(&mut self.clusters.lists.lock(), &cluster);
                return Some(number.slot(at));
            }
            self.note_reclaimable(number, &cluster);
        }
        None
    }

    /// Returns why the search found no room. Returns `None` if it may have missed room that was
    /// there all the time: another thread had locked a cluster, or moved one from a list not yet
    /// searched to a list already searched.
    pub fn fail(mut self) -> Option<NoSlots> {
        let (mut lists, full) = self.look_at(Place::FullCacheOnly);
        if let Some((number, mut cluster)) = full
            && self.reclaimable.is_none()
        {
            self.scanned += 1;
            self.note_reclaimable(number, &cluster);
            lists.move_to_end(number, &mut cluster, Place::FullCacheOnly);
            self.own_moves += 1;
        }
        lists.counters.clusters_scanned += self.scanned;
        // Higher orders fall back instead of trying hard, as in the kernel.
        if self.order == Order::ZERO {
            if let Some(number) = self.contended {
                drop(lists);
                drop(self.clusters.table.get(number).lock());
                return None;
            }
            if self.moves.is_some_and(|before| before + self.own_moves != lists.moves()) {
                return None;
            }
        }
        lists.counters.fallbacks[self.order.index()] += 1;
        if lists.len(Place::AwaitsDiscard) > 0 {
            lists.counters.reclaims += 1;
            return Some(NoSlots::Discard);
        }
        match self.reclaimable {
            Some(slots) => {
                lists.counters.reclaims += 1;
                Some(NoSlots::Reclaim(slots))
            }
            None => Some(NoSlots::Full),
        }
    }

    fn look_at(&mut self, place: Place) -> (LockedLists<'a>, Option<LockedCluster<'a>>) {
        let Look { lists, first, contended } = self.clusters.look_at(place);
        self.contended = self.contended.or(contended);
        self.moves.get_or_insert(lists.moves());
        (lists, first)
    }

    /// Takes free slots of a cluster and makes it this CPU's current one unless it is full now.
    #[inline]
    fn take(&mut self, number: ClusterNumber, cluster: &mut Cluster, at: SlotIndex) {
        cluster.take(at, self.order.pages());
        let next = match SlotIndex::new(at.get() + self.order.pages()) {
            _ if cluster.is_full() => None,
            None if self.clusters.policy.goes_round() => Some(SlotIndex::FIRST),
            next => next,
        };
        self.cpu.set_current(self.order, next.map(|next| Current { cluster: number, next }));
    }

    /// Moves a tried cluster to the end of the list where it belongs.
    fn leave(&mut self, lists: &mut Lists, number: ClusterNumber, cluster: &mut Cluster) {
        let place = self.clusters.policy.after_try(cluster, self.order);
        lists.move_to_end(number, cluster, place);
        self.own_moves += 1;
    }

    /// Counts an allocation that was not a hit.
    fn count_alloc(&self, lists: &mut Lists, cluster: &Cluster) {
        lists.counters.allocs[self.order.index()] += 1;
        lists.counters.clusters_scanned += self.scanned;
        lists.counters.stolen += u64::from(cluster.order != self.order);
    }

    /// Remembers slots whose reclaim makes room in this cluster, unless it serves another order and
    /// would not become free.
    fn note_reclaimable(&mut self, number: ClusterNumber, cluster: &Cluster) {
        if self.reclaimable.is_some() {
            return;
        }
        if cluster.order == self.order || self.order == Order::ZERO {
            let found = cluster.find_reclaimable(self.order).map(|at| number.slot(at));
            self.reclaimable = found.map(|first| first..first.offset(self.order.pages()));
        } else if cluster.find_reclaimable(MAX_ORDER).is_some() {
            self.reclaimable = Some(number.slots());
        }
    }
}
