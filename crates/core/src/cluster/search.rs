//! One allocation on its way through the clusters: the steps that strategies are made of.
//!
//! A step that looks through a cluster holds that cluster's lock meanwhile, and leaves the cluster at the
//! end of the list where its strategy wants it. Clusters that somebody else has locked are passed over.
//! Ranges that only the swap cache holds are remembered: they are what the caller is told to reclaim when
//! no step finds room. (The kernel reclaims them as it meets them, if the device is over half full; here a
//! copy is worth a compression, so it goes only when there is no other way.)

use super::SwapClusters;
use super::current::{Current, PerCpu};
use super::lists::Place;
use super::table::Cluster;
use crate::sync::MutexGuard;
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

/// A look at a list.
pub(super) struct Look<'a> {
    /// Its first cluster that nobody else has locked.
    pub first: Option<(ClusterNumber, MutexGuard<'a, Cluster>)>,
    /// One that was passed over.
    pub contended: Option<ClusterNumber>,
    /// Clusters on the list.
    pub len: u32,
    /// How often a cluster was moved until then, by anybody.
    pub moves: u64,
}

/// See the module.
pub(super) struct Search<'a> {
    clusters: &'a SwapClusters,
    cpu: &'a PerCpu,
    order: Order,
    scanned: u64,
    reclaimable: Option<Range<Slot>>,
    contended: Option<ClusterNumber>,
    /// What [`Look::moves`] was at the first look, and how many of those since are ours.
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

    pub fn wants_discard(&self) -> bool {
        self.clusters.device.wants_discard
    }

    /// Clusters looked through.
    pub fn scanned(&self) -> u64 {
        self.scanned
    }

    /// What may be reclaimed to make room, if something was met.
    pub fn into_reclaimable(self) -> Option<Range<Slot>> {
        self.reclaimable
    }

    /// Room where this CPU found some the last time.
    pub fn current(&mut self) -> Option<Slot> {
        let Current { cluster: number, next } = self.cpu.current(self.order)?;
        let mut cluster = self.clusters.table.get(number).lock();
        let usable = match cluster.place {
            Place::Nonfull(of) | Place::Frag(of) => of == self.order,
            Place::InUse => cluster.order == self.order || self.order == Order::ZERO,
            _ => false,
        };
        if usable {
            self.scanned += 1;
            let mut found = cluster.find_free(self.order, next);
            if found.is_none() && self.clusters.policy.keeps_lists() {
                found = cluster.find_free(self.order, SlotIndex::FIRST);
            }
            if let Some(at) = found {
                let slot = self.take(number, &mut cluster, at);
                let place = self.clusters.policy.after_try(&cluster, self.order);
                self.clusters.relocate(number, &mut cluster, place);
                return Some(slot);
            }
            if self.clusters.policy.keeps_lists() {
                self.note_reclaimable(number, &cluster);
            }
        }
        self.left = Some(number);
        self.cpu.set_current(self.order, None);
        None
    }

    /// The beginning of a wholly free cluster.
    pub fn free_cluster(&mut self) -> Option<Slot> {
        let (number, mut cluster) = self.look_at(Place::Free).first?;
        cluster.order = self.order;
        let slot = self.take(number, &mut cluster, SlotIndex::FIRST);
        self.leave(number, &mut cluster);
        Some(slot)
    }

    /// Room in a cluster at `place`.
    pub fn listed(&mut self, place: Place, tries: Tries) -> Option<Slot> {
        let mut left = match tries {
            Tries::One => 1,
            Tries::All => u32::MAX,
        };
        while left > 0 {
            let Look { first, len, .. } = self.look_at(place);
            let (number, mut cluster) = first?;
            left = left.min(len) - 1;
            self.scanned += 1;
            let found = cluster.find_free(self.order, SlotIndex::FIRST);
            let slot = found.map(|at| self.take(number, &mut cluster, at));
            if slot.is_none() {
                self.note_reclaimable(number, &cluster);
            }
            self.leave(number, &mut cluster);
            if slot.is_some() {
                return slot;
            }
        }
        None
    }

    /// One slot of a cluster that serves a higher order. It is not to become this CPU's current one.
    pub fn steal(&mut self) -> Option<Slot> {
        let of_higher = Order::all().filter(|&of| of > Order::ZERO);
        let slot = of_higher
            .flat_map(|of| [Place::Frag(of), Place::Nonfull(of)])
            .find_map(|place| self.listed(place, Tries::One))?;
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
                return Some(self.take(number, &mut cluster, at));
            }
            self.note_reclaimable(number, &cluster);
        }
        None
    }

    /// Looks for something to reclaim in a full cluster, if nothing was met so far.
    pub fn look_at_full(&mut self) {
        if self.reclaimable.is_none()
            && let Some((number, mut cluster)) = self.look_at(Place::FullCacheOnly).first
        {
            self.scanned += 1;
            self.note_reclaimable(number, &cluster);
            self.move_to_end(number, &mut cluster, Place::FullCacheOnly);
        }
    }

    /// After a search that failed: whether it may have missed room that was there all the time, because somebody had
    /// locked a cluster, or moved one from a list that was to be looked at yet to one that had been. Waits for the former.
    pub fn missed_some(&self) -> bool {
        if let Some(number) = self.contended {
            drop(self.clusters.table.get(number).lock());
            return true;
        }
        let moves = self.clusters.lists.lock().moves();
        self.moves.is_some_and(|before| before + self.own_moves != moves)
    }

    fn look_at(&mut self, place: Place) -> Look<'a> {
        let look = self.clusters.look_at(place);
        self.contended = self.contended.or(look.contended);
        self.moves.get_or_insert(look.moves);
        look
    }

    /// Puts free slots of a cluster to use, and makes it this CPU's current one.
    fn take(&mut self, number: ClusterNumber, cluster: &mut Cluster, at: SlotIndex) -> Slot {
        let pages = self.order.pages();
        cluster.take(at, pages);
        if cluster.order != self.order {
            self.cpu.count_stolen();
        }
        let next = match SlotIndex::new(at.get() + pages) {
            None if self.clusters.policy.keeps_lists() => Some(SlotIndex::FIRST),
            next => next,
        };
        self.cpu.set_current(self.order, next.map(|next| Current { cluster: number, next }));
        number.slot(at)
    }

    /// Puts a cluster that was tried where it belongs, behind all others there.
    fn leave(&mut self, number: ClusterNumber, cluster: &mut Cluster) {
        let place = self.clusters.policy.after_try(cluster, self.order);
        self.move_to_end(number, cluster, place);
    }

    fn move_to_end(&mut self, number: ClusterNumber, cluster: &mut Cluster, place: Place) {
        self.clusters.move_to_end(number, cluster, place);
        self.own_moves += 1;
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
