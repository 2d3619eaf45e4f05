//! The swap cluster allocator: contiguous, naturally aligned slots for folios of any order.
//!
//! The device is cut into clusters of 512 slots. A cluster is *free*, or serves one order, taken from its
//! first allocation until its last slot is freed. One that is partly used is on exactly one list (`lists`):
//! *nonfull* of its order (a slot was freed since it was last tried) or *frag* of its order (tried); a full one is on
//! a list only if the swap cache has some of it. A CPU's current cluster is on frag or nonfull like any other, the CPU only
//! remembers where it was (`current`). One that was full until a slot was freed may be a *spare* of the CPU that freed
//! it, on no list: there that CPU allocates next, and others when they find no room on lists. Source: `mm/swapfile.c` of
//! Linux 6.18 and the cluster series of 2024 and 2025.
//!
//! Allocation tries the CPU's current cluster, then what its [`Strategy`] says (`search` has the steps).
//! Order 9 needs a free cluster. Slots that only the swap cache refers to are *cache-only*: a search that finds
//! no room answers with a range of them to give back ([`NoSlots::Reclaim`]), so that nobody is called
//! under a lock. On a device that wants discard a freed cluster is first queued for it (`discard`).
//!
//! Slots are bits (`bits`), 1 = used; looking through a cluster takes eight words. Clusters never used cost
//! nothing, others 208 bytes: 0.01% of what they hold.
//!
//! Locks: one for each CPU's spares, one for each cluster and one for all lists, in this order; whoever holds a later one only
//! *tries* earlier ones, and nobody holds two clusters'. A cluster comes to a list or leaves it while its lock and that of the lists
//! are held, so that either shows where it is. Other per-CPU state has no lock. A call that allocates takes the lock of
//! its CPU's current cluster or spare, and that of the lists only where those have no room, or to move one: with a CPU number
//! for each thread, threads meet there and at clusters they free into.

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
use crate::units::{CLUSTER_SLOTS, ClusterNumber, CpuNumber, MAX_ORDER, ORDERS, Order, Slot};
use current::PerCpu;
use lists::{Lists, Place};
use search::{Look, Search};
use std::ops::Range;
use strategy::Policy;
use table::{Cluster, ClusterTable};
use thiserror::Error;

/// Whether a cluster is to be discarded before it is used again (the kernel's `SWP_PAGE_DISCARD`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Discard {
    /// No.
    #[default]
    Never,
    /// It is, so that its room is somebody else's until then. The less is in use the better.
    ForRoom,
    /// It is, so that the device need not keep what is there. Such a device prefers writes to be spread.
    ForDevice,
}

/// What slots are allocated on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwapDevice {
    /// Its slots; whole clusters of them are used.
    pub slots: u32,
    /// Whether it wants discards.
    pub discard: Discard,
}

impl SwapDevice {
    fn wants_discard(self) -> bool {
        self.discard != Discard::Never
    }
}

/// Why an allocation got no slots.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum NoSlots {
    /// These slots are free or cache-only. Free those that still are, and try again.
    #[error("no room unless the cached slots {0:?} are given back")]
    Reclaim(Range<Slot>),
    /// Free clusters wait to be discarded. See to that, and try again.
    #[error("no room until freed clusters are discarded")]
    Discard,
    /// There is no room.
    #[error("no room")]
    Full,
}

/// What a slot is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// Anybody may get it.
    Free,
    /// It belongs to whoever allocated it.
    InUse,
    /// Likewise, but only the swap cache refers to it.
    CacheOnly,
}

/// What the allocator has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlotCounters {
    /// Allocations that got their slots, by order.
    pub allocs: [u64; ORDERS],
    /// Allocations that got none, by order.
    pub fallbacks: [u64; ORDERS],
    /// Clusters whose slots were looked through.
    pub clusters_scanned: u64,
    /// Slots that order 0 took from clusters of higher orders.
    pub stolen: u64,
    /// Those of `fallbacks` that were told to reclaim cache-only slots, or to discard, and try again.
    pub reclaims: u64,
}

/// See the module.
pub struct SwapClusters {
    device: SwapDevice,
    policy: &'static dyn Policy,
    table: ClusterTable,
    lists: Mutex<Lists, ranks::SlotLists>,
    per_cpu: Box<[PerCpu]>,
}

impl SwapClusters {
    /// An allocator for the slots of `device` and `cpus` CPUs.
    pub fn new(device: SwapDevice, cpus: u16, strategy: Strategy) -> SwapClusters {
        SwapClusters {
            device,
            policy: strategy.policy(),
            table: ClusterTable::new(device.slots / CLUSTER_SLOTS),
            lists: Mutex::default(),
            per_cpu: (0..cpus.max(1)).map(|_| PerCpu::default()).collect(),
        }
    }

    /// Slots of the device, whole clusters.
    pub fn slots(&self) -> u32 {
        self.table.len() * CLUSTER_SLOTS
    }

    /// Whether clusters are discarded before they are used again.
    pub fn wants_discard(&self) -> bool {
        self.device.wants_discard()
    }

    /// 2^order contiguous slots, naturally aligned; `cpu` is where the caller runs, modulo the CPUs there are.
    ///
    /// # Errors
    /// There is no room that this strategy finds. Order 0 finds whatever is free all the while it looks, except that
    /// [`Strategy::PerCpuLinear`] may miss slots freed and allocated by others meanwhile.
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

    /// Frees `slots` slots from `first` on, in use or cache-only, in one pass (`swap_entries_free`); `cpu` as for
    /// [`alloc`](Self::alloc).
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

    /// Whether CPUs have spares: not where writes are to be spread.
    fn has_spares(&self) -> bool {
        self.policy.keeps_spares() && !self.spreads_writes()
    }

    fn spreads_writes(&self) -> bool {
        self.device.discard == Discard::ForDevice
    }

    /// Says that only the swap cache refers to `slots` slots from `first` on, which are in use: they may be asked for
    /// by [`NoSlots::Reclaim`] (the kernel's `SWAP_HAS_CACHE` with a count of 0).
    ///
    /// # Panics
    /// If one of them is not in use.
    pub fn mark_cache_only(&self, first: Slot, slots: u32) {
        self.each_cluster(first, slots, |number, cluster, part| {
            cluster.mark_cache_only(part.start.index_in_cluster(), part.end.0 - part.start.0);
            self.relocate(number, cluster, self.policy.after_mark(cluster));
        });
    }

    /// Says that `slots` slots from `first` on, which are cache-only, are referred to again.
    ///
    /// # Panics
    /// If one of them is not cache-only.
    pub fn mark_in_use(&self, first: Slot, slots: u32) {
        self.each_cluster(first, slots, |number, cluster, part| {
            cluster.mark_in_use(part.start.index_in_cluster(), part.end.0 - part.start.0);
            self.relocate(number, cluster, self.policy.after_mark(cluster));
        });
    }

    /// Slots in use or cache-only; what threads allocate meanwhile may be counted or not.
    pub fn used_slots(&self) -> u32 {
        // In this order: what is seen as freed is seen as allocated.
        let freed: u64 = self.per_cpu.iter().map(PerCpu::freed_slots).sum();
        let allocs = Order::all().zip(self.counters().allocs);
        let allocated: u64 = allocs.map(|(order, allocs)| allocs << order.get()).sum();
        (allocated - freed) as u32
    }

    /// What it has done.
    pub fn counters(&self) -> SlotCounters {
        let mut all = self.lists.lock().counters;
        self.per_cpu.iter().for_each(|cpu| cpu.add_to(&mut all));
        all
    }

    /// [`SlotCounters::clusters_scanned`], without adding up what CPUs count for themselves.
    pub fn clusters_scanned(&self) -> u64 {
        self.lists.lock().counters.clusters_scanned
    }

    /// Calls `act` with each cluster that has some of the slots, locked, and which of the slots these are.
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

    /// The first cluster at `place` that can be had, locked.
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

    /// Moves a cluster, which the caller has locked, to where it belongs, unless it is there.
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
