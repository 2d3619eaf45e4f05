//! The swap cluster allocator: contiguous, naturally aligned slots for folios of any order.
//!
//! The device is divided into clusters of 512 slots. A cluster is *free*, or serves one order from
//! its first allocation until its last slot is freed. A partly used cluster is on exactly one list
//! (`lists`): *nonfull* of its order (a slot was freed since it was last tried) or *frag* of its
//! order (it was tried). A full cluster is on a list only if the swap cache holds some of its
//! slots. A CPU's current cluster stays on its list; the CPU only remembers its position
//! (`current`). A cluster that was full until a slot was freed may become a *spare*, which is on no
//! list. The CPU that freed the slot owns the spare and allocates there next; other CPUs use the
//! spare when they find no room on the lists. Source: `mm/swapfile.c` of Linux 6.18 and the cluster
//! series of 2024 and 2025.
//!
//! Allocation tries the CPU's current cluster, then the steps of its [`Strategy`] (`search` has the
//! steps). Order 9 needs a free cluster. Slots that only the swap cache uses are *cache-only*: a
//! search that finds no room returns a range of them for the caller to free ([`NoSlots::Reclaim`]),
//! so that no callback runs under a lock. On a device that wants discard, a freed cluster is first
//! queued for it (`discard`).
//!
//! Slots are bits (`bits`), 1 = used; scanning a cluster takes eight words. Clusters never used
//! cost nothing, others 208 bytes: 0.01% of the memory they hold.
//!
//! Locks: one for each CPU's spares, one for each cluster and one for all lists, in this order. The
//! holder of a later lock only *tries* earlier ones, and no thread holds two cluster locks. A
//! cluster joins or leaves a list only under its own lock and the list lock, so either lock
//! suffices to read where it is. Other per-CPU state has no lock. An allocation takes the lock of
//! its CPU's current cluster or spare. It takes the list lock only if neither has room, or to move
//! a cluster. If each thread uses its own CPU number, threads contend only for the list lock and
//! for clusters into which they free slots.

mod bits;
mod check;
mod current;
mod discard;
mod lists;
mod search;
mod strategy;
mod table;
#[cfg(test)]
mod tests;

pub use discard::PendingDiscard;
pub use strategy::{Strategy, UnknownStrategy};

use crate::sync::{Mutex, ranks};
use current::PerCpu;
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_SLOTS, ClusterNumber, CpuNumber, MAX_ORDER, ORDERS, Order, Slot};
use lists::{Lists, Place};
use search::{Look, Search};
use std::ops::Range;
use strategy::Policy;
use table::{Cluster, ClusterTable};
use thiserror::Error;

/// The device whose slots are allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwapDevice {
    /// Number of slots; only whole clusters are used.
    pub slots: u32,
    /// When the device wants discards.
    pub discard: Discard,
}

impl SwapDevice {
    fn wants_discard(self) -> bool {
        self.discard != Discard::Never
    }
}

/// The reason why an allocation got no slots.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum NoSlots {
    /// These slots are free or cache-only. The caller frees those that still are cache-only and
    /// retries.
    #[error("no room unless the cached slots {0:?} are given back")]
    Reclaim(Range<Slot>),
    /// Free clusters wait for discard. The caller discards one and retries.
    #[error("no room until freed clusters are discarded")]
    Discard,
    /// The device is full.
    #[error("no room")]
    Full,
}

/// The use of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// The slot is free.
    Free,
    /// The slot belongs to the caller that allocated it.
    InUse,
    /// The slot is allocated, but only the swap cache refers to it.
    CacheOnly,
}

/// Counters of the allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlotCounters {
    /// Successful allocations by order.
    pub allocs: [u64; ORDERS],
    /// Failed allocations by order.
    pub fallbacks: [u64; ORDERS],
    /// Clusters whose slots were scanned.
    pub clusters_scanned: u64,
    /// Slots that order 0 took from clusters of higher orders.
    pub stolen: u64,
    /// Those of `fallbacks` whose caller must reclaim cache-only slots, or discard, and retry.
    pub reclaims: u64,
}

/// The slot allocator of one device.
pub struct SwapClusters {
    device: SwapDevice,
    policy: &'static dyn Policy,
    table: ClusterTable,
    lists: Mutex<Lists, ranks::SlotLists>,
    per_cpu: Box<[PerCpu]>,
}

impl SwapClusters {
    /// Makes an allocator for the slots of `device` and `cpus` CPUs.
    pub fn new(device: SwapDevice, cpus: u16, strategy: Strategy) -> SwapClusters {
        SwapClusters {
            device,
            policy: strategy.policy(),
            table: ClusterTable::new(device.slots / CLUSTER_SLOTS),
            lists: Mutex::default(),
            per_cpu: (0..cpus.max(1)).map(|_| PerCpu::default()).collect(),
        }
    }

    /// Returns the number of slots in whole clusters.
    pub fn slots(&self) -> u32 {
        self.table.len() * CLUSTER_SLOTS
    }

    /// Returns whether clusters are discarded before they are used again.
    pub fn wants_discard(&self) -> bool {
        self.device.wants_discard()
    }

    /// Allocates 2^order contiguous, naturally aligned slots. `cpu` is the caller's CPU, modulo the
    /// number of CPUs.
    ///
    /// # Errors
    /// This strategy finds no room. Order 0 finds every slot that is free during the whole search,
    /// except that [`Strategy::PerCpuLinear`] may miss slots that others free and allocate
    /// meanwhile.
    #[inline]
    pub fn alloc(&self, cpu: CpuNumber, order: Order) -> Result<Slot, NoSlots> {
        let cpu = self.cpu(cpu);
        loop {
            let mut search = Search::new(self, cpu, order);
            let found = if order == MAX_ORDER {
                search.free_cluster()
            } else {
                search.current().or_else(|| search.spare()).or_else(|| self.policy.find(&mut search))
            };
            match found {
                Some(slot) => return Ok(slot),
                None => {
                    if let Some(reason) = search.fail() {
                        return Err(reason);
                    }
                }
            }
        }
    }

    /// Frees `slots` slots from `first` on, in use or cache-only, in one pass
    /// (`swap_entries_free`). `cpu` is the caller's CPU, as for [`alloc`](Self::alloc).
    ///
    /// # Panics
    /// If one of them is free.
    #[inline]
    pub fn free(&self, cpu: CpuNumber, first: Slot, slots: u32) {
        let cpu = self.cpu(cpu);
        self.each_cluster(first, slots, |number, cluster, part| {
            let (at, slots) = (part.start.index_in_cluster(), part.end.0 - part.start.0);
            cluster.free(at, slots);
            let mut place = match (cluster.is_empty(), self.device.wants_discard()) {
                (true, true) => Place::AwaitsDiscard,
                (true, false) => Place::Free,
                (false, _) => self.policy.after_free(cluster, at, slots),
            };
            let may_be_spare = cluster.place == Place::Full && place == Place::Nonfull(cluster.order);
            if may_be_spare && self.has_spares() && cpu.keep_spare(cluster.order, number) {
                place = Place::Spare;
            }
            self.relocate(number, cluster, place);
            cpu.count_freed(slots);
        });
    }

    #[inline]
    fn cpu(&self, cpu: CpuNumber) -> &PerCpu {
        let cpu = usize::from(cpu.0);
        // A division costs as much as a lock.
        self.per_cpu.get(cpu).unwrap_or_else(|| &self.per_cpu[cpu % self.per_cpu.len()])
    }

    /// Returns whether CPUs keep spares. They do not on a device on which the allocator spreads
    /// writes.
    fn has_spares(&self) -> bool {
        self.policy.keeps_spares() && !self.spreads_writes()
    }

    fn spreads_writes(&self) -> bool {
        self.device.discard == Discard::ForDevice
    }

    /// Marks `slots` slots from `first` on, which must be in use, as cache-only. A search may then
    /// return them in [`NoSlots::Reclaim`] (the kernel's `SWAP_HAS_CACHE` with a count of 0).
    ///
    /// # Panics
    /// If one of them is not in use.
    pub fn mark_cache_only(&self, first: Slot, slots: u32) {
        self.each_cluster(first, slots, |number, cluster, part| {
            cluster.mark_cache_only(part.start.index_in_cluster(), part.end.0 - part.start.0);
            self.relocate(number, cluster, self.policy.after_mark(cluster));
        });
    }

    /// Marks `slots` slots from `first` on, which must be cache-only, as in use again.
    ///
    /// # Panics
    /// If one of them is not cache-only.
    pub fn mark_in_use(&self, first: Slot, slots: u32) {
        self.each_cluster(first, slots, |number, cluster, part| {
            cluster.mark_in_use(part.start.index_in_cluster(), part.end.0 - part.start.0);
            self.relocate(number, cluster, self.policy.after_mark(cluster));
        });
    }

    /// Returns the number of slots in use or cache-only. Concurrent allocations may be counted or
    /// not.
    pub fn used_slots(&self) -> u32 {
        // Freed slots are read first, so that every slot counted as freed is also counted as
        // allocated.
        let freed: u64 = self.per_cpu.iter().map(PerCpu::freed_slots).sum();
        let allocs = Order::all().zip(self.counters().allocs);
        let allocated: u64 = allocs.map(|(order, allocs)| allocs << order.get()).sum();
        (allocated - freed) as u32
    }

    /// Returns the counters of the allocator.
    pub fn counters(&self) -> SlotCounters {
        let mut all = self.lists.lock().counters;
        self.per_cpu.iter().for_each(|cpu| cpu.add_to(&mut all));
        all
    }

    /// Returns [`SlotCounters::clusters_scanned`] without adding up the per-CPU counters.
    pub fn clusters_scanned(&self) -> u64 {
        self.lists.lock().counters.clusters_scanned
    }

    /// Calls `act` with each cluster of these slots, locked, and with its part of the slots.
    #[inline]
    fn each_cluster(&self, first: Slot, slots: u32, mut act: impl FnMut(ClusterNumber, &mut Cluster, Range<Slot>)) {
        let (mut at, end) = (first, first.offset(slots));
        while at < end {
            let number = at.cluster();
            let part = at..number.slots().end.min(end);
            at = part.end;
            act(number, &mut self.table.get(number).lock(), part);
        }
    }

    /// Locks the lists, and the first cluster at `place` that no other thread has locked. If
    /// `place` is the free list and none can be locked, takes a cluster that was never used.
    fn look_at(&self, place: Place) -> Look<'_> {
        let mut lists = self.lists.lock();
        let mut contended = None;
        let mut lock = |number| match self.table.get(number).try_lock() {
            Some(cluster) => Some((number, cluster)),
            None => {
                contended = Some(number);
                None
            }
        };
        let mut first = lists.iter(place).find_map(&mut lock);
        if first.is_none() && place == Place::Free && lists.clusters() < self.table.len() {
            first = lock(lists.add_fresh());
        }
        Look { lists, first, contended }
    }

    /// Moves a cluster, which the caller has locked, to `to` unless it is there.
    #[inline]
    fn relocate(&self, number: ClusterNumber, cluster: &mut Cluster, to: Place) {
        if cluster.place != to {
            self.move_to(number, cluster, to);
        }
    }

    fn move_to(&self, number: ClusterNumber, cluster: &mut Cluster, to: Place) {
        if cluster.place.is_listed() || to.is_listed() {
            self.lists.lock().move_to_end(number, cluster, to);
        } else {
            cluster.place = to;
        }
    }
}
