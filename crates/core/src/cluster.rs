//! The swap cluster allocator: contiguous, naturally aligned slots for folios of any order.
//!
//! The device is cut into clusters of 512 slots. A cluster is *free*, or serves one order, taken from its
//! first allocation until its last slot is freed. One that is not free is on exactly one list of its order:
//! *nonfull* (a slot was freed since it was last tried), *frag* (tried, partly used), or *full*; a CPU's
//! current cluster is on *frag* or *nonfull* like any other, the CPU only remembers where it was. Source:
//! `mm/swapfile.c` of Linux 6.18 and the cluster series of 2024 and 2025.
//!
//! Allocation tries, in the order of the [`Strategy`]: the CPU's current cluster; nonfull clusters; a free
//! one; fragmented ones (all, or only the first, which then goes to the end of the list); order 0 finally
//! takes from clusters of higher orders. Slots are bits, 1 = used; a scan steps through a cluster's 512
//! bits by the order. Order 9 needs an empty cluster.
//!
//! Lock: one leaf for the device. Clusters never used before cost nothing but their zeroed entry.

use crate::sync::Mutex;
use crate::units::{BLOCK_PAGES, CpuNumber, MAX_ORDER, ORDERS, Order, Slot};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

const WORDS: usize = BLOCK_PAGES / 64;
const NONE: u32 = u32::MAX;

/// How clusters are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Strategy {
    /// Late 2024: a free cluster before nonfull ones, then every fragmented one.
    ClusterLists,
    /// 2025-08, first patch: a free cluster before nonfull ones, then only the first fragmented one.
    OneFragment,
    /// 2025-08, second patch, Linux 6.18: nonfull clusters before a free one, then one fragmented one.
    #[default]
    NonfullFirst,
}

impl Strategy {
    /// All of them, oldest first.
    pub const ALL: [Strategy; 3] = [Strategy::ClusterLists, Strategy::OneFragment, Strategy::NonfullFirst];
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strategy::ClusterLists => "cluster-lists",
            Strategy::OneFragment => "one-fragment",
            Strategy::NonfullFirst => "nonfull-first",
        })
    }
}

/// There is no strategy of that name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("unknown swap strategy {0:?}: use cluster-lists, one-fragment or nonfull-first")]
pub struct UnknownStrategy(String);

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Strategy, UnknownStrategy> {
        let found = Strategy::ALL.into_iter().find(|strategy| strategy.to_string() == name);
        found.ok_or_else(|| UnknownStrategy(name.to_owned()))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    /// Never used, or free again and on the free list.
    #[default]
    Free,
    Nonfull,
    Frag,
    Full,
}

#[derive(Clone, Default)]
struct Cluster {
    used_bits: [u64; WORDS],
    used_slots: u16,
    order: Order,
    state: State,
    next: u32,
    prev: u32,
}

/// A list of clusters through their `next` and `prev`.
#[derive(Clone, Copy)]
struct List {
    first: u32,
    last: u32,
    len: u32,
}

impl Default for List {
    fn default() -> List {
        List { first: NONE, last: NONE, len: 0 }
    }
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
}

struct Inner {
    clusters: Vec<Cluster>,
    /// Clusters from here on were never used.
    fresh: u32,
    free: List,
    nonfull: [List; ORDERS],
    frag: [List; ORDERS],
    full: List,
    /// Per CPU and order: the cluster used last and where to go on in it.
    current: Vec<[(u32, u16); ORDERS]>,
    used_slots: u32,
    counters: SlotCounters,
}

/// See the module.
pub struct SwapClusters {
    inner: Mutex<Inner>,
    slots: u32,
    strategy: Strategy,
}

fn mask(order: Order) -> u64 {
    if order.pages() >= 64 { u64::MAX } else { (1 << order.pages()) - 1 }
}

impl Cluster {
    fn is_range_free(&self, at: usize, order: Order) -> bool {
        match order.pages() as usize {
            small @ ..64 => self.used_bits[at / 64] >> (at % 64) & mask(order) == 0 || small == 0,
            large => self.used_bits[at / 64..(at + large) / 64].iter().all(|&word| word == 0),
        }
    }

    fn set_range(&mut self, at: usize, slots: usize, used: bool) {
        for slot in at..at + slots {
            let bit = 1 << (slot % 64);
            let word = &mut self.used_bits[slot / 64];
            debug_assert_eq!(*word & bit == 0, used, "slot {slot} of the cluster");
            *word = if used { *word | bit } else { *word & !bit };
        }
    }

    /// The first free aligned range at or behind `from`, else the first before.
    fn find(&self, order: Order, from: usize) -> Option<usize> {
        if usize::from(self.used_slots) + order.pages() as usize > BLOCK_PAGES {
            return None;
        }
        let step = order.pages() as usize;
        let candidates = (from..BLOCK_PAGES).step_by(step).chain((0..from).step_by(step));
        let mut candidates = candidates.filter(|&at| at % 64 == 0 || step >= 64 || self.used_bits[at / 64] != u64::MAX);
        candidates.find(|&at| self.is_range_free(at, order))
    }
}

impl Inner {
    fn list(&mut self, state: State, order: Order) -> &mut List {
        match state {
            State::Free => &mut self.free,
            State::Nonfull => &mut self.nonfull[order.index()],
            State::Frag => &mut self.frag[order.index()],
            State::Full => &mut self.full,
        }
    }

    fn unlink(&mut self, number: u32) {
        let Cluster { next, prev, state, order, .. } = self.clusters[number as usize];
        if prev != NONE {
            self.clusters[prev as usize].next = next;
        }
        if next != NONE {
            self.clusters[next as usize].prev = prev;
        }
        let list = self.list(state, order);
        list.len -= 1;
        if list.first == number {
            list.first = next;
        }
        if list.last == number {
            list.last = prev;
        }
    }

    fn append(&mut self, number: u32, state: State) {
        let order = self.clusters[number as usize].order;
        let list = self.list(state, order);
        let last = std::mem::replace(&mut list.last, number);
        list.len += 1;
        if last == NONE {
            list.first = number;
        } else {
            self.clusters[last as usize].next = number;
        }
        let cluster = &mut self.clusters[number as usize];
        (cluster.state, cluster.prev, cluster.next) = (state, last, NONE);
    }

    /// A free cluster, off every list, now of `order`.
    fn take_free(&mut self, order: Order) -> Option<u32> {
        let number = if self.free.first != NONE {
            let number = self.free.first;
            self.unlink(number);
            number
        } else if (self.fresh as usize) < self.clusters.len() {
            self.fresh += 1;
            self.fresh - 1
        } else {
            return None;
        };
        self.clusters[number as usize].order = order;
        Some(number)
    }

    /// Looks for room in a cluster, which is on a list, and takes it. A cluster that was tried goes to the
    /// end of frag, or of full.
    fn try_cluster(&mut self, cpu: usize, number: u32, order: Order, from: usize) -> Option<Slot> {
        self.counters.clusters_scanned += 1;
        let found = self.clusters[number as usize].find(order, from);
        self.unlink(number);
        self.settle(cpu, number, order, found)
    }

    /// Takes `found` in a cluster that is on no list, and puts the cluster on one.
    fn settle(&mut self, cpu: usize, number: u32, order: Order, found: Option<usize>) -> Option<Slot> {
        if let Some(at) = found {
            let pages = order.pages() as usize;
            let cluster = &mut self.clusters[number as usize];
            cluster.set_range(at, pages, true);
            cluster.used_slots += pages as u16;
            self.used_slots += pages as u32;
            self.current[cpu][order.index()] = (number, ((at + pages) % BLOCK_PAGES) as u16);
        }
        let full = usize::from(self.clusters[number as usize].used_slots) == BLOCK_PAGES;
        self.append(number, if full { State::Full } else { State::Frag });
        found.map(|at| Slot(number * BLOCK_PAGES as u32 + at as u32))
    }

    fn take_current(&mut self, cpu: usize, order: Order) -> Option<Slot> {
        let (number, from) = self.current[cpu][order.index()];
        if number == NONE {
            return None;
        }
        let cluster = &self.clusters[number as usize];
        let usable = cluster.order == order && matches!(cluster.state, State::Nonfull | State::Frag);
        let found = if usable { self.try_cluster(cpu, number, order, usize::from(from)) } else { None };
        if found.is_none() {
            self.current[cpu][order.index()] = (NONE, 0);
        }
        found
    }

    fn take_from_free(&mut self, cpu: usize, order: Order) -> Option<Slot> {
        let number = self.take_free(order)?;
        self.settle(cpu, number, order, Some(0))
    }

    /// From the first `most` clusters of a list.
    fn take_listed(&mut self, cpu: usize, state: State, of: Order, order: Order, most: u32) -> Option<Slot> {
        let tries = self.list(state, of).len.min(most);
        for _ in 0..tries {
            let number = self.list(state, of).first;
            if number == NONE {
                return None;
            }
            let found = self.try_cluster(cpu, number, order, 0);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    fn steal(&mut self, cpu: usize) -> Option<Slot> {
        for of in Order::all().filter(|&of| of > Order::ZERO) {
            for state in [State::Frag, State::Nonfull] {
                if let Some(slot) = self.take_listed(cpu, state, of, Order::ZERO, u32::MAX) {
                    self.counters.stolen += 1;
                    self.current[cpu][0] = (NONE, 0);
                    return Some(slot);
                }
            }
        }
        None
    }

    fn alloc(&mut self, cpu: usize, order: Order, strategy: Strategy) -> Option<Slot> {
        if let Some(slot) = self.take_current(cpu, order) {
            return Some(slot);
        }
        if order == MAX_ORDER {
            return self.take_from_free(cpu, order);
        }
        let nonfull = |inner: &mut Inner| inner.take_listed(cpu, State::Nonfull, order, order, u32::MAX);
        let free = |inner: &mut Inner| inner.take_from_free(cpu, order);
        let found = match strategy {
            Strategy::NonfullFirst => nonfull(self).or_else(|| free(self)),
            Strategy::ClusterLists | Strategy::OneFragment => free(self).or_else(|| nonfull(self)),
        };
        let most_frag = if strategy == Strategy::ClusterLists { u32::MAX } else { 1 };
        found
            .or_else(|| self.take_listed(cpu, State::Frag, order, order, most_frag))
            .or_else(|| if order == Order::ZERO { self.steal(cpu) } else { None })
    }

    fn free_in_cluster(&mut self, slot: Slot, slots: u32) {
        let number = slot.0 / BLOCK_PAGES as u32;
        let cluster = &mut self.clusters[number as usize];
        cluster.set_range(slot.0 as usize % BLOCK_PAGES, slots as usize, false);
        cluster.used_slots -= slots as u16;
        self.used_slots -= slots;
        let empty = cluster.used_slots == 0;
        if empty || cluster.state != State::Nonfull {
            self.unlink(number);
            self.append(number, if empty { State::Free } else { State::Nonfull });
        }
    }
}

impl SwapClusters {
    /// An allocator for `slots` slots (whole clusters are used) and `cpus` CPUs.
    pub fn new(slots: u32, cpus: u16, strategy: Strategy) -> SwapClusters {
        let clusters = slots as usize / BLOCK_PAGES;
        let inner = Inner {
            clusters: vec![Cluster::default(); clusters],
            fresh: 0,
            free: List::default(),
            nonfull: Default::default(),
            frag: Default::default(),
            full: List::default(),
            current: vec![[(NONE, 0); ORDERS]; usize::from(cpus.max(1))],
            used_slots: 0,
            counters: SlotCounters::default(),
        };
        SwapClusters { inner: Mutex::new(inner), slots: (clusters * BLOCK_PAGES) as u32, strategy }
    }

    /// Slots of the device.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// 2^order contiguous slots, naturally aligned.
    pub fn alloc(&self, cpu: CpuNumber, order: Order) -> Option<Slot> {
        let mut inner = self.inner.lock();
        let cpu = usize::from(cpu.0) % inner.current.len();
        let found = inner.alloc(cpu, order, self.strategy);
        let counters = &mut inner.counters;
        *if found.is_some() { &mut counters.allocs } else { &mut counters.fallbacks }
            .get_mut(order.index())
            .expect("an order is an index") += 1;
        found
    }

    /// Frees `slots` slots from `first` on, in one pass.
    pub fn free(&self, first: Slot, slots: u32) {
        let mut inner = self.inner.lock();
        let (mut at, end) = (first.0, first.0 + slots);
        while at < end {
            let cluster_end = (at / BLOCK_PAGES as u32 + 1) * BLOCK_PAGES as u32;
            let part = cluster_end.min(end) - at;
            inner.free_in_cluster(Slot(at), part);
            at += part;
        }
    }

    /// Slots in use.
    pub fn used_slots(&self) -> u32 {
        self.inner.lock().used_slots
    }

    /// What it has done.
    pub fn counters(&self) -> SlotCounters {
        self.inner.lock().counters
    }

    /// Walks everything: each cluster is on the one list that its slots call for.
    pub fn check(&self) {
        let inner = self.inner.lock();
        let mut seen = vec![false; inner.clusters.len()];
        let mut walk = |list: &List, state: State, order: Option<Order>| {
            let (mut at, mut prev, mut len) = (list.first, NONE, 0);
            while at != NONE {
                let cluster = &inner.clusters[at as usize];
                assert!(!std::mem::replace(&mut seen[at as usize], true), "cluster {at} is on two lists");
                assert_eq!((cluster.state, cluster.prev), (state, prev), "cluster {at}");
                assert!(order.is_none_or(|order| cluster.order == order), "cluster {at} is of another order");
                (prev, at, len) = (at, cluster.next, len + 1);
            }
            assert_eq!((list.last, list.len), (prev, len));
        };
        walk(&inner.free, State::Free, None);
        walk(&inner.full, State::Full, None);
        for order in Order::all() {
            walk(&inner.nonfull[order.index()], State::Nonfull, Some(order));
            walk(&inner.frag[order.index()], State::Frag, Some(order));
        }
        let mut used = 0;
        for (number, cluster) in inner.clusters.iter().enumerate() {
            assert_eq!(seen[number], number < inner.fresh as usize, "cluster {number} is on no list");
            let ones: u32 = cluster.used_bits.iter().map(|word| word.count_ones()).sum();
            assert_eq!(ones, u32::from(cluster.used_slots), "cluster {number}");
            match cluster.state {
                State::Free => assert_eq!(ones, 0),
                State::Full => assert_eq!(ones as usize, BLOCK_PAGES),
                State::Nonfull | State::Frag => assert!(ones > 0 && (ones as usize) < BLOCK_PAGES, "cluster {number}"),
            }
            used += ones;
        }
        assert_eq!(used, inner.used_slots);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{ProptestConfig, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
    use proptest::strategy::Strategy as _;
    use std::collections::BTreeSet;

    fn strategy() -> impl proptest::strategy::Strategy<Value = Strategy> {
        prop::sample::select(Strategy::ALL.to_vec())
    }

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u16, u8),
        Free(prop::sample::Index),
        FreePart(prop::sample::Index, u32, u32),
    }

    fn step() -> impl proptest::strategy::Strategy<Value = Step> {
        prop_oneof![
            4 => (0u16..3, 0u8..10).prop_map(|(cpu, order)| Step::Alloc(cpu, order)),
            2 => any::<prop::sample::Index>().prop_map(Step::Free),
            1 => (any::<prop::sample::Index>(), 0u32..512, 1u32..512).prop_map(|(i, at, n)| Step::FreePart(i, at, n)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(150))]
        #[test]
        fn slots_are_contiguous_aligned_and_nobody_elses(
            strategy in strategy(),
            clusters in 1u32..12,
            steps in prop::collection::vec(step(), 1..200),
        ) {
            let swap = SwapClusters::new(clusters * 512, 3, strategy);
            let mut used: BTreeSet<u32> = BTreeSet::new();
            let mut held: Vec<(u32, u32)> = Vec::new();
            for step in steps {
                match step {
                    Step::Alloc(cpu, order) => {
                        let order = Order::new(order).unwrap();
                        match swap.alloc(CpuNumber(cpu), order) {
                            Some(slot) => {
                                prop_assert_eq!(slot.0 % order.pages(), 0);
                                for slot in slot.0..slot.0 + order.pages() {
                                    prop_assert!(slot < clusters * 512 && used.insert(slot));
                                }
                                held.push((slot.0, order.pages()));
                            }
                            None => prop_assert!(order > Order::ZERO || used.len() as u32 == clusters * 512),
                        }
                    }
                    Step::Free(index) if !held.is_empty() => {
                        let (slot, slots) = held.swap_remove(index.index(held.len()));
                        swap.free(Slot(slot), slots);
                        (slot..slot + slots).for_each(|slot| { used.remove(&slot); });
                    }
                    Step::FreePart(index, at, slots) if !held.is_empty() => {
                        let (slot, all) = held.swap_remove(index.index(held.len()));
                        let at = at % all;
                        let slots = slots.min(all - at);
                        swap.free(Slot(slot + at), slots);
                        (slot + at..slot + at + slots).for_each(|slot| { used.remove(&slot); });
                        held.push((slot, at));
                        held.push((slot + at + slots, all - at - slots));
                        held.retain(|&(_, slots)| slots > 0);
                    }
                    Step::Free(_) | Step::FreePart(..) => {}
                }
                swap.check();
                prop_assert_eq!(swap.used_slots() as usize, used.len());
            }
        }
    }

    #[test]
    fn the_default_scans_a_bounded_number_of_clusters() {
        let swap = SwapClusters::new(512 * 256, 1, Strategy::NonfullFirst);
        let order = Order::new(4).unwrap();
        let slots: Vec<Slot> = std::iter::from_fn(|| swap.alloc(CpuNumber(0), order)).collect();
        assert_eq!(slots.len(), 32 * 256);
        // One page of each folio is freed: every cluster is fragmented, none has room for a folio.
        slots.iter().for_each(|slot| swap.free(*slot, 1));
        for _ in 0..256 {
            assert!(swap.alloc(CpuNumber(0), order).is_none());
        }
        let before = swap.counters().clusters_scanned;
        for _ in 0..100 {
            assert!(swap.alloc(CpuNumber(0), order).is_none());
        }
        assert!(swap.counters().clusters_scanned - before <= 200);
    }

    #[test]
    fn names_of_strategies_are_read_back() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
        }
        assert!("first-fit".parse::<Strategy>().is_err());
    }
}
