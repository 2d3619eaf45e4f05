//! One allocation on its way through the clusters: the steps that strategies are made of.
//!
//! A step that looks through a cluster on a list holds both locks meanwhile (eight words are looked through
//! faster than a lock is let go and taken again), and leaves the cluster at the end of the list where its
//! strategy wants it. Clusters that somebody else has locked are passed over.
//! Ranges that only the swap cache holds are remembered: they are what the caller is told to reclaim when
//! no step finds room. (The kernel reclaims them as it meets them, if the device is over half full; here a
//! copy is worth a compression, so it goes only when there is no other way.)

use super::current::{Current, PerCpu};
use super::lists::{Lists, Place};
use super::table::Cluster;
use super::{NoSlots, SwapClusters};
use crate::sync::MutexGuard;
use crate::sync::ranks::{SlotCluster, SlotLists};
use crate::units::{ClusterNumber, MAX_ORDER, Order, Slot, SlotIndex};
use std::ops::Range;

/// How many clusters of a list are looked through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tries {
    /// The first.
    One,
    /// As many as there are now.
    All,
}

/// A look at a list, which stays locked with all others.
pub(super) struct Look<'a> {
    pub lists: MutexGuard<'a, Lists, SlotLists>,
    /// Its first cluster that nobody else has locked.
    pub first: Option<(ClusterNumber, MutexGuard<'a, Cluster, SlotCluster>)>,
    /// One that was passed over.
    pub contended: Option<ClusterNumber>,
}

/// See the module.
pub(super) struct Search<'a> {
    clusters: &'a SwapClusters,
    cpu: &'a PerCpu,
    order: Order,
    /// Clusters looked through, but for the one that had room.
    scanned: u64,
    reclaimable: Option<Range<Slot>>,
    contended: Option<ClusterNumber>,
    /// How often clusters had been moved at the first look, and how many of those since are ours.
    moves: Option<u64>,
    own_moves: u64,
    /// The current cluster, when it had no room.
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

    /// Room where this CPU found some the last time.
    #[inline]
    pub fn current(&mut self) -> Option<Slot> {
        let Current { cluster: number, next } = self.cpu.current(self.order)?;
        let mut cluster = self.clusters.table.get(number).lock();
        let usable = match cluster.place {
            Place::Nonfull(_) | Place::Frag(_) | Place::Spare => cluster.order == self.order,
            Place::InUse => cluster.order == self.order || self.order == Order::ZERO,
            // Its last slot was freed, and nobody else has taken it since.
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

    /// Room in this CPU's spare.
    pub fn spare(&mut self) -> Option<Slot> {
        self.spare_of(self.cpu, self.order)
    }

    /// Room in a spare for `of`, of whichever CPU.
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

    /// Takes slots of a cluster that was found without a look at the lists.
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

    /// The beginning of a wholly free cluster.
    pub fn free_cluster(&mut self) -> Option<Slot> {
        let (mut lists, first) = self.look_at(Place::Free);
        let (number, mut cluster) = first?;
        cluster.order = self.order;
        self.take(number, &mut cluster, SlotIndex::FIRST);
        self.leave(&mut lists, number, &mut cluster);
        self.count_alloc(&mut lists, &cluster);
        Some(number.slot(SlotIndex::FIRST))
    }

    /// Room in a cluster at `place`.
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

    /// For order 0, one slot of a cluster that serves a higher order. It is not to become this CPU's current one.
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

    /// Room in any cluster in use, all of them looked through one after the other from this CPU's last on.
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

    /// After a search that found no room: why, or `None` if it may have missed room that was there all the time, because
    /// somebody had locked a cluster, or moved one from a list that was to be looked at yet to one that had been.
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
        // As in the kernel, higher orders fall back rather than try hard.
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

    fn look_at(
        &mut self,
        place: Place,
    ) -> (MutexGuard<'a, Lists, SlotLists>, Option<(ClusterNumber, MutexGuard<'a, Cluster, SlotCluster>)>) {
        let Look { lists, first, contended } = self.clusters.look_at(place);
        self.contended = self.contended.or(contended);
        self.moves.get_or_insert(lists.moves());
        (lists, first)
    }

    /// Puts free slots of a cluster to use, and makes it this CPU's current one, unless it is full now.
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

    /// Puts a cluster that was tried where it belongs, behind all others there.
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

    /// Remembers what would make room in this cluster, unless it serves another order and would not become free.
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
