//! Tests of the allocator: every strategy against a naive model, and the purpose of each strategy.

use super::*;
use proptest::prelude::{ProptestConfig, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::strategy::Strategy as _;
use proptest::test_runner::TestCaseError;
use std::collections::BTreeSet;

fn order(order: u8) -> Order {
    Order::new(order).unwrap()
}

fn device(clusters: u32, strategy: Strategy) -> SwapClusters {
    let device = SwapDevice { slots: clusters * CLUSTER_SLOTS, discard: Discard::Never };
    SwapClusters::new(device, 2, strategy)
}

const CPU: CpuNumber = CpuNumber(0);

#[derive(Clone, Debug)]
enum Step {
    Alloc(u16, u8),
    Free(u16, prop::sample::Index),
    FreePart(u16, prop::sample::Index, u32, u32),
    ToggleCacheOnly(prop::sample::Index),
    TakeDiscards,
    Discarded,
}

fn step() -> impl proptest::strategy::Strategy<Value = Step> {
    prop_oneof![
        6 => (0u16..3, 0u8..10).prop_map(|(cpu, order)| Step::Alloc(cpu, order)),
        3 => (0u16..3, any::<prop::sample::Index>()).prop_map(|(cpu, i)| Step::Free(cpu, i)),
        2 => (0u16..3, any::<prop::sample::Index>(), 0u32..512, 1u32..512)
            .prop_map(|(cpu, i, at, n)| Step::FreePart(cpu, i, at, n)),
        2 => any::<prop::sample::Index>().prop_map(Step::ToggleCacheOnly),
        1 => proptest::prelude::Just(Step::TakeDiscards),
        1 => proptest::prelude::Just(Step::Discarded),
    ]
}

/// A run of slots that a caller holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    first: u32,
    slots: u32,
    state: SlotState,
}

/// The allocator, and the expected state of every slot and cluster.
struct World {
    swap: SwapClusters,
    strategy: Strategy,
    discard: Discard,
    cpus: u16,
    slots: Vec<SlotState>,
    held: Vec<Held>,
    /// Wholly free clusters that are not discarded yet.
    undiscarded: BTreeSet<u32>,
    taken: Vec<PendingDiscard>,
    /// The order that each cluster serves, from its first allocation on.
    orders: Vec<Order>,
}

impl World {
    fn new(clusters: u32, cpus: u16, strategy: Strategy, discard: Discard) -> World {
        let device = SwapDevice { slots: clusters * CLUSTER_SLOTS + 3, discard };
        World {
            swap: SwapClusters::new(device, cpus, strategy),
            strategy,
            discard,
            cpus,
            slots: vec![SlotState::Free; (clusters * CLUSTER_SLOTS) as usize],
            held: Vec::new(),
            undiscarded: BTreeSet::new(),
            taken: Vec::new(),
            orders: vec![Order::ZERO; clusters as usize],
        }
    }

    fn cluster(&self, number: u32) -> &[SlotState] {
        let first = (number * CLUSTER_SLOTS) as usize;
        &self.slots[first..first + CLUSTER_SLOTS as usize]
    }

    fn is_empty(&self, number: u32) -> bool {
        self.cluster(number).iter().all(|&state| state == SlotState::Free)
    }

    fn clusters(&self) -> std::ops::Range<u32> {
        0..self.orders.len() as u32
    }

    fn has_free_cluster(&self) -> bool {
        self.clusters().any(|number| self.is_empty(number) && !self.undiscarded.contains(&number))
    }

    /// Returns whether a cluster in use of this order has room for it.
    fn has_room(&self, order: Order) -> bool {
        let mut of_order =
            self.clusters().filter(|&number| self.orders[number as usize] == order && !self.is_empty(number));
        of_order.any(|number| {
            let mut runs = self.cluster(number).chunks_exact(order.pages() as usize);
            runs.any(|run| run.iter().all(|&state| state == SlotState::Free))
        })
    }

    fn has_free_slot(&self) -> bool {
        self.has_free_cluster()
            || self.clusters().any(|number| !self.is_empty(number) && self.cluster(number).contains(&SlotState::Free))
    }

    fn alloc(&mut self, cpu: u16, order: Order) -> Result<(), TestCaseError> {
        let scanned_before = self.swap.counters().clusters_scanned;
        let answer = self.swap.alloc(CpuNumber(cpu), order);
        if self.strategy == Strategy::NonfullFirst {
            prop_assert!(self.swap.counters().clusters_scanned - scanned_before <= 3);
        }
        if order == MAX_ORDER {
            prop_assert_eq!(answer.is_ok(), self.has_free_cluster());
        }
        if order == Order::ZERO {
            prop_assert_eq!(answer.is_ok(), self.has_free_slot());
        }
        if self.strategy == Strategy::NonfullFirst && self.cpus == 1 && answer.is_err() {
            prop_assert!(!self.has_room(order) && !self.has_free_cluster());
        }
        match answer {
            Ok(slot) => self.got(slot, order),
            Err(NoSlots::Reclaim(slots)) => {
                self.reclaim(cpu, slots, order)?;
                match self.swap.alloc(CpuNumber(cpu), order) {
                    Ok(slot) => self.got(slot, order),
                    Err(NoSlots::Discard) if self.discard != Discard::Never => Ok(()),
                    Err(error) => Err(TestCaseError::fail(format!("{error} after reclaim"))),
                }
            }
            Err(NoSlots::Discard) => {
                prop_assert!(self.undiscarded.len() > self.taken.len());
                Ok(())
            }
            Err(NoSlots::Full) => {
                prop_assert_eq!(self.undiscarded.len(), self.taken.len());
                prop_assert!(order > Order::ZERO || !self.slots.contains(&SlotState::CacheOnly));
                Ok(())
            }
        }
    }

    fn got(&mut self, slot: Slot, order: Order) -> Result<(), TestCaseError> {
        prop_assert_eq!(slot.0 % order.pages(), 0);
        prop_assert!(!self.undiscarded.contains(&slot.cluster().0));
        if self.is_empty(slot.cluster().0) {
            self.orders[slot.cluster().0 as usize] = order;
        }
        for slot in slot.0..slot.0 + order.pages() {
            let before = std::mem::replace(&mut self.slots[slot as usize], SlotState::InUse);
            prop_assert_eq!(before, SlotState::Free);
        }
        self.held.push(Held { first: slot.0, slots: order.pages(), state: SlotState::InUse });
        Ok(())
    }

    /// Frees the cached slots among these, in whole entries, as the swap cache does.
    fn reclaim(&mut self, cpu: u16, slots: Range<Slot>, order: Order) -> Result<(), TestCaseError> {
        let states = &self.slots[slots.start.0 as usize..slots.end.0 as usize];
        prop_assert!(!states.contains(&SlotState::InUse) && states.contains(&SlotState::CacheOnly));
        prop_assert!(slots.end.0 - slots.start.0 >= order.pages());
        let overlaps = |held: &Held| held.first < slots.end.0 && held.first + held.slots > slots.start.0;
        let (gone, kept) = self.held.iter().partition(|held| overlaps(held));
        self.held = kept;
        Vec::into_iter(gone).for_each(|held: Held| self.free(cpu, held.first, held.slots));
        Ok(())
    }

    fn free(&mut self, cpu: u16, first: u32, slots: u32) {
        self.swap.free(CpuNumber(cpu), Slot(first), slots);
        self.slots[first as usize..(first + slots) as usize].fill(SlotState::Free);
        let number = first / CLUSTER_SLOTS;
        if slots > 0 && self.discard != Discard::Never && self.is_empty(number) {
            self.undiscarded.insert(number);
        }
    }

    fn toggle_cache_only(&mut self, index: prop::sample::Index) {
        let index = index.index(self.held.len());
        let Held { first, slots, state } = &mut self.held[index];
        if *state == SlotState::InUse {
            self.swap.mark_cache_only(Slot(*first), *slots);
            *state = SlotState::CacheOnly;
        } else {
            self.swap.mark_in_use(Slot(*first), *slots);
            *state = SlotState::InUse;
        }
        self.slots[*first as usize..(*first + *slots) as usize].fill(*state);
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Alloc(cpu, of) => self.alloc(cpu, order(of))?,
            Step::Free(cpu, index) if !self.held.is_empty() => {
                let Held { first, slots, .. } = self.held.swap_remove(index.index(self.held.len()));
                self.free(cpu, first, slots);
            }
            Step::FreePart(cpu, index, at, slots) if !self.held.is_empty() => {
                let whole = self.held.swap_remove(index.index(self.held.len()));
                let at = at % whole.slots;
                let slots = slots.min(whole.slots - at);
                self.free(cpu, whole.first + at, slots);
                let behind = at + slots;
                self.held.push(Held { slots: at, ..whole });
                self.held.push(Held { first: whole.first + behind, slots: whole.slots - behind, ..whole });
                self.held.retain(|held| held.slots > 0);
            }
            Step::ToggleCacheOnly(index) if !self.held.is_empty() => self.toggle_cache_only(index),
            Step::TakeDiscards => self.taken.extend(std::iter::from_fn(|| self.swap.take_discard())),
            Step::Discarded => {
                if let Some(pending) = self.taken.pop() {
                    prop_assert!(self.undiscarded.remove(&pending.cluster().0));
                    self.swap.discarded(pending);
                }
            }
            Step::Free(..) | Step::FreePart(..) | Step::ToggleCacheOnly(_) => {}
        }
        self.swap.check();
        let used = self.slots.iter().filter(|&&state| state != SlotState::Free).count();
        prop_assert_eq!(self.swap.used_slots() as usize, used);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn slots_are_contiguous_aligned_and_exclusive(
        strategy in prop::sample::select(Strategy::ALL.to_vec()),
        discard in prop::sample::select(vec![Discard::Never, Discard::ForRoom, Discard::ForDevice]),
        clusters in 1u32..8,
        cpus in 1u16..4,
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut world = World::new(clusters, cpus, strategy, discard);
        for step in &steps {
            world.step(step)?;
        }
        for (slot, state) in (0..).map(Slot).zip(&world.slots) {
            prop_assert_eq!(world.swap.slot_state(slot), *state);
        }
    }
}

/// Fills the device with folios of `order` and returns their slots.
fn fill(swap: &SwapClusters, order: Order) -> Vec<Slot> {
    std::iter::from_fn(|| swap.alloc(CPU, order).ok()).collect()
}

fn scanned_by(swap: &SwapClusters, act: impl FnOnce()) -> u64 {
    let before = swap.counters().clusters_scanned;
    act();
    swap.counters().clusters_scanned - before
}

#[test]
fn only_cluster_lists_scans_every_fragmented_cluster() {
    for (strategy, scanned) in [(Strategy::ClusterLists, 256), (Strategy::OneFragment, 1), (Strategy::NonfullFirst, 1)]
    {
        let swap = device(256, strategy);
        let slots = fill(&swap, order(4));
        assert_eq!(slots.len(), 32 * 256);
        // One page of each folio is freed: every cluster is fragmented and none has room for a
        // folio.
        slots.iter().for_each(|slot| swap.free(CPU, *slot, 1));
        let fails = || assert_eq!(swap.alloc(CPU, order(4)), Err(NoSlots::Full));
        fails();
        assert_eq!(scanned_by(&swap, fails), scanned, "{strategy}");
    }
}

#[test]
fn only_nonfull_first_skips_nonfull_clusters_without_room() {
    for (strategy, scanned) in [(Strategy::OneFragment, 257), (Strategy::NonfullFirst, 1)] {
        let swap = device(256, strategy);
        fill(&swap, order(4)).iter().for_each(|slot| swap.free(CPU, *slot, 1));
        assert_eq!(scanned_by(&swap, || assert!(swap.alloc(CPU, order(4)).is_err())), scanned, "{strategy}");
    }
}

#[test]
fn nonfull_first_opens_a_free_cluster_last() {
    for (strategy, in_first) in [(Strategy::OneFragment, false), (Strategy::NonfullFirst, true)] {
        let swap = device(4, strategy);
        let slots: Vec<Slot> = (0..64).map(|_| swap.alloc(CPU, order(4)).unwrap()).collect();
        swap.free(CPU, slots[0], 16);
        // The other CPU has no current cluster.
        let slot = swap.alloc(CpuNumber(1), order(4)).unwrap();
        assert_eq!(slot == slots[0], in_first, "{strategy}");
    }
}

#[test]
fn a_full_cluster_becomes_the_spare_of_the_cpu_that_frees_in_it() {
    let swap = device(4, Strategy::NonfullFirst);
    let slots = fill(&swap, order(4));
    swap.free(CpuNumber(1), slots[70], 16);
    swap.free(CPU, slots[5], 16);
    swap.check();
    // The CPU's own spare first, although the other one is older; then the other one. Each takes
    // one scan.
    let before = swap.counters().clusters_scanned;
    assert_eq!(swap.alloc(CPU, order(4)), Ok(slots[5]));
    assert_eq!(swap.alloc(CPU, order(4)), Ok(slots[70]));
    assert_eq!(swap.counters().clusters_scanned, before + 2);
    assert_eq!(swap.alloc(CPU, order(4)), Err(NoSlots::Full));
}

#[test]
fn a_free_cluster_precedes_a_nonfull_one_only_to_spread_writes() {
    for (discard, used) in [(Discard::Never, 0), (Discard::ForRoom, 0), (Discard::ForDevice, 2)] {
        let swap = SwapClusters::new(SwapDevice { slots: 4 * CLUSTER_SLOTS, discard }, 2, Strategy::NonfullFirst);
        let slots: Vec<Slot> = (0..64).map(|_| swap.alloc(CPU, order(4)).unwrap()).collect();
        swap.free(CPU, slots[0], 16);
        assert_eq!(swap.alloc(CpuNumber(1), order(4)).map(Slot::cluster), Ok(ClusterNumber(used)));
    }
}

#[test]
fn a_freed_cluster_is_free_only_after_its_discard() {
    let swap = SwapClusters::new(SwapDevice { slots: 1024, discard: Discard::ForRoom }, 1, Strategy::default());
    let slots = fill(&swap, order(9));
    slots.iter().for_each(|slot| swap.free(CPU, *slot, 512));
    assert_eq!(swap.alloc(CPU, order(0)), Err(NoSlots::Discard));
    let mut pending: Vec<PendingDiscard> = std::iter::from_fn(|| swap.take_discard()).collect();
    assert_eq!(pending.iter().map(|pending| pending.cluster().slots().start).collect::<Vec<_>>(), slots);
    assert_eq!(swap.alloc(CPU, order(0)), Err(NoSlots::Full));
    swap.discarded(pending.remove(1));
    assert_eq!(swap.alloc(CPU, order(0)), Ok(slots[1]));
    swap.check();
}

#[test]
fn without_lists_slots_freed_behind_a_cpu_are_lost_to_large_folios() {
    for (strategy, found) in [(Strategy::PerCpuLinear, false), (Strategy::ClusterLists, true)] {
        let swap = device(4, strategy);
        let slots = fill(&swap, order(4));
        swap.free(CPU, slots[5], 16);
        assert_eq!(swap.alloc(CPU, order(4)).is_ok(), found, "{strategy}");
        assert_eq!(swap.alloc(CPU, order(0)).is_ok(), !found, "{strategy}");
    }
}

#[test]
fn order_0_steals_as_a_last_resort() {
    for strategy in Strategy::ALL {
        let swap = device(2, strategy);
        let slots = fill(&swap, order(4));
        swap.free(CPU, slots[40], 16);
        for index in 0..16 {
            assert_eq!(swap.alloc(CPU, order(0)), Ok(slots[40].offset(index)), "{strategy}");
        }
        assert_eq!(swap.alloc(CPU, order(0)), Err(NoSlots::Full));
        assert_eq!(swap.counters().stolen, 16, "{strategy}");
        swap.check();
    }
}

#[test]
fn cache_only_slots_are_reclaimed_as_a_last_resort() {
    for strategy in [Strategy::ClusterLists, Strategy::OneFragment, Strategy::NonfullFirst] {
        let swap = device(8, strategy);
        let slots = fill(&swap, order(4));
        let cached = slots[100];
        swap.mark_cache_only(cached, 16);
        assert_eq!(swap.alloc(CPU, order(4)), Err(NoSlots::Reclaim(cached..cached.offset(16))), "{strategy}");
        assert_eq!(swap.alloc(CPU, order(9)), Err(NoSlots::Full));
        swap.mark_in_use(cached, 16);
        assert_eq!(swap.alloc(CPU, order(4)), Err(NoSlots::Full));
        swap.mark_cache_only(cached, 16);
        swap.free(CPU, cached, 16);
        assert_eq!(swap.alloc(CPU, order(4)), Ok(cached));
        swap.check();
    }
}

#[test]
fn a_whole_cache_only_cluster_is_reclaimed_for_another_order() {
    let swap = device(2, Strategy::default());
    let slots = fill(&swap, order(4));
    slots[..32].iter().for_each(|slot| swap.mark_cache_only(*slot, 16));
    for other in [2, 9] {
        assert_eq!(swap.alloc(CPU, order(other)), Err(NoSlots::Reclaim(Slot(0)..Slot(512))));
    }
}

#[test]
#[should_panic(expected = "not all set")]
fn a_slot_is_not_freed_twice() {
    let swap = device(1, Strategy::default());
    let slot = swap.alloc(CPU, order(2)).unwrap();
    swap.free(CPU, slot, 4);
    swap.free(CPU, slot, 4);
}
