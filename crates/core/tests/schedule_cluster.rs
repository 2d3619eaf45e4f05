//! Schedules of the swap cluster allocator, chosen by shuttle. Whatever threads do to each other
//! between two locks or atomics, no slot has two owners, and order 0 finds free slots.
//!
//!     cargo test -p foliomem-core --features shuttle --test 'schedule_*'
#![cfg(feature = "shuttle")]

use foliomem_core::cluster::{NoSlots, SlotState, Strategy, SwapClusters, SwapDevice};
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_SLOTS, CpuNumber, Order, Slot};
use std::sync::{Arc, Mutex};

/// Number of schedules of each kind: enough to find every lock that was removed on purpose, within
/// seconds each.
const SCHEDULES: usize = 400;
/// Number of preemptions in a run: most races need two.
const PREEMPTIONS: usize = 3;

/// Runs random schedules, then schedules with few preemptions at unlikely places.
fn explore(test: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(test, SCHEDULES);
    shuttle::check_pct(test, SCHEDULES, PREEMPTIONS);
}

fn order(order: u8) -> Order {
    Order::new(order).unwrap()
}

/// The allocator, and the owned slots. The lock of `owned` is not shuttle's, and the allocator is
/// not called under it, so it adds no order to the schedules.
struct World {
    swap: SwapClusters,
    owned: Mutex<Vec<bool>>,
}

impl World {
    fn new(clusters: u32, strategy: Strategy, discard: Discard) -> Arc<World> {
        let device = SwapDevice { slots: clusters * CLUSTER_SLOTS, discard };
        let owned = Mutex::new(vec![false; device.slots as usize]);
        Arc::new(World { swap: SwapClusters::new(device, 2, strategy), owned })
    }

    fn alloc(&self, cpu: u16, order: Order) -> Result<Slot, NoSlots> {
        let slot = self.swap.alloc(CpuNumber(cpu), order)?;
        assert_eq!(slot.0 % order.pages(), 0);
        let mut owned = self.owned.lock().unwrap();
        for owned in &mut owned[slot.0 as usize..(slot.0 + order.pages()) as usize] {
            assert!(!std::mem::replace(owned, true), "{slot:?} of {order:?} has two owners");
        }
        Ok(slot)
    }

    fn free(&self, cpu: u16, slot: Slot, slots: u32) {
        self.owned.lock().unwrap()[slot.0 as usize..(slot.0 + slots) as usize].fill(false);
        self.swap.free(CpuNumber(cpu), slot, slots);
    }

    /// Checks the state after all threads ended.
    fn check(&self) {
        self.swap.check();
        for (slot, &owned) in (0..).map(Slot).zip(self.owned.lock().unwrap().iter()) {
            assert_eq!(self.swap.slot_state(slot) != SlotState::Free, owned, "{slot:?}");
        }
    }
}

fn run(world: &Arc<World>, threads: Vec<Box<dyn FnOnce(&World) + Send>>) {
    let threads: Vec<_> = threads
        .into_iter()
        .map(|act| {
            let world = Arc::clone(world);
            shuttle::thread::spawn(move || act(&world))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    world.check();
}

/// Runs two CPUs, and a third thread on one of them, with mixed orders in more clusters than they
/// fill.
fn mixed_orders(strategy: Strategy, discard: Discard) {
    let world = World::new(3, strategy, discard);
    let churn = |cpu: u16, orders: [u8; 3]| {
        move |world: &World| {
            let mut held = Vec::new();
            for of in orders {
                if let Ok(slot) = world.alloc(cpu, order(of)) {
                    held.push((slot, order(of).pages()));
                }
            }
            if let Some((slot, slots)) = held.pop() {
                world.free(cpu, slot, slots);
            }
            if let Ok(slot) = world.alloc(cpu, order(orders[0])) {
                world.free(cpu, slot, order(orders[0]).pages());
            }
        }
    };
    run(&world, vec![Box::new(churn(0, [8, 0, 8])), Box::new(churn(1, [8, 8, 0])), Box::new(churn(1, [4, 8, 9]))]);
}

#[test]
fn no_slot_has_two_owners() {
    explore(|| mixed_orders(Strategy::NonfullFirst, Discard::Never));
    explore(|| mixed_orders(Strategy::NonfullFirst, Discard::ForDevice));
}

#[test]
fn no_slot_has_two_owners_with_the_older_strategies() {
    explore(|| mixed_orders(Strategy::PerCpuLinear, Discard::Never));
    explore(|| mixed_orders(Strategy::ClusterLists, Discard::Never));
    explore(|| mixed_orders(Strategy::OneFragment, Discard::Never));
}

/// The device is full except for one slot a thread, in clusters of different orders. The threads
/// free and allocate these slots repeatedly, and every allocation must succeed.
#[test]
fn order_0_finds_free_slots() {
    explore(|| {
        let world = World::new(2, Strategy::NonfullFirst, Discard::Never);
        let large = world.alloc(0, order(8)).unwrap();
        world.alloc(0, order(8)).unwrap();
        let small: Vec<Slot> = (0..CLUSTER_SLOTS).map(|_| world.alloc(1, order(0)).unwrap()).collect();
        let juggle = |cpu: u16, first: Slot| {
            move |world: &World| {
                let mut slot = first;
                for _ in 0..3 {
                    world.free(cpu, slot, 1);
                    slot = world.alloc(cpu, order(0)).expect("a slot is free all the time");
                }
            }
        };
        run(
            &world,
            vec![Box::new(juggle(0, large.offset(7))), Box::new(juggle(1, small[9])), Box::new(juggle(0, small[300]))],
        );
    });
}

/// One thread marks a run cache-only and takes it back; another reclaims the slots that it is told.
/// Only the owner by their own agreement (here a flag, in the engine the swap cache) frees the
/// slots.
#[test]
fn cache_only_slots_are_freed_once() {
    explore(|| {
        let world = World::new(1, Strategy::NonfullFirst, Discard::Never);
        let cached = world.alloc(0, order(8)).unwrap();
        world.alloc(0, order(8)).unwrap();
        let copy = Arc::new(shuttle::sync::Mutex::new(None));
        let take = |copy: &shuttle::sync::Mutex<Option<Slot>>| copy.lock().unwrap().take();
        let (kept, wanted) = (Arc::clone(&copy), Arc::clone(&copy));
        let keep = move |world: &World| {
            world.swap.mark_cache_only(cached, 256);
            *kept.lock().unwrap() = Some(cached);
            if let Some(slot) = take(&kept) {
                world.swap.mark_in_use(slot, 256);
            }
        };
        let want = move |world: &World| {
            for _ in 0..2 {
                match world.alloc(1, order(8)) {
                    Ok(slot) => assert_eq!(slot, cached),
                    Err(NoSlots::Reclaim(slots)) => {
                        assert_eq!(slots, cached..cached.offset(256));
                        if let Some(slot) = take(&wanted) {
                            world.free(1, slot, 256);
                        }
                    }
                    Err(error) => assert_eq!(error, NoSlots::Full),
                }
            }
        };
        run(&world, vec![Box::new(keep), Box::new(want)]);
    });
}

/// Different threads free, discard and reuse clusters.
#[test]
fn no_cluster_is_used_before_it_is_discarded() {
    explore(|| {
        let world = World::new(2, Strategy::NonfullFirst, Discard::ForDevice);
        let clusters: Vec<Slot> = (0..2).map(|_| world.alloc(0, order(9)).unwrap()).collect();
        let discarded = Arc::new(Mutex::new(vec![false; 2]));
        let free = |slot: Slot| move |world: &World| world.free(0, slot, CLUSTER_SLOTS);
        let discards = Arc::clone(&discarded);
        let discard = move |world: &World| {
            while let Some(pending) = world.swap.take_discard() {
                discards.lock().unwrap()[pending.cluster().0 as usize] = true;
                world.swap.discarded(pending);
            }
        };
        let alloc = move |world: &World| {
            if let Ok(slot) = world.alloc(1, order(4)) {
                assert!(discarded.lock().unwrap()[slot.cluster().0 as usize], "{slot:?} is not discarded");
            }
        };
        let threads: Vec<Box<dyn FnOnce(&World) + Send>> =
            vec![Box::new(free(clusters[0])), Box::new(free(clusters[1])), Box::new(discard), Box::new(alloc)];
        run(&world, threads);
    });
}
