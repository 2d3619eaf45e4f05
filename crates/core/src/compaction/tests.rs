//! Tests of the compactor: its occupants are entries of a map, checked against a naive model.

use super::*;
use crate::run_tokens::UniqueRun;
use foliomem_types::counters::Counters;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// A lock of the tests, outside the lock order.
type Mutex<T> = crate::sync::Mutex<T, crate::sync::ranks::Unchecked>;

/// The folios by their first frame; some are pinned.
#[derive(Default)]
struct Notes {
    homes_frames: u32,
    folios: BTreeMap<u32, Order>,
    pinned: BTreeSet<u32>,
    /// The free populated frames.
    full: BTreeSet<u32>,
    splits: u32,
    /// The orders of the moved folios.
    moved: Vec<Order>,
}

struct World {
    homes: Homes,
    notes: Mutex<Notes>,
    counters: Counters,
}

fn order(order: u8) -> Order {
    Order::new(order).unwrap()
}

impl World {
    fn new(frames: u32) -> World {
        let notes = Notes { homes_frames: frames, ..Notes::default() };
        World { homes: Homes::new(frames), notes: Mutex::new(notes), counters: Counters::default() }
    }

    fn add(&self, order: Order) -> Option<FrameRun> {
        let run = self.homes.alloc_empty(order)?;
        self.notes.lock().folios.insert(run.head.0, order);
        Some(run)
    }

    fn remove(&self, run: FrameRun, leaves_pages: bool) {
        let mut notes = self.notes.lock();
        notes.folios.remove(&run.head.0);
        notes.pinned.remove(&run.head.0);
        if leaves_pages {
            notes.full.extend(run.head.0..run.head.0 + run.frames());
            self.homes.free_full(UniqueRun::mint(run));
        } else {
            self.homes.free_empty(run);
        }
    }

    fn compact(&self, variant: Variant, order: Order) -> bool {
        Compactor::new(variant).compact(&self.homes, self, &self.counters.vm, order)
    }

    fn folio_with(&self, frame: Frame) -> Option<FrameRun> {
        let notes = self.notes.lock();
        let (&head, &order) = notes.folios.range(..=frame.0).next_back()?;
        (frame.0 < head + order.pages()).then(|| FrameRun::new(Frame(head), order))
    }

    fn blocks(&self, order: Order) -> impl Iterator<Item = FrameRun> {
        let frames = self.notes.lock().homes_frames;
        (0..frames >> order.get()).map(move |index| FrameRun::new(Frame(index << order.get()), order))
    }

    /// Returns the number of free unpopulated runs of `order`, including those in larger ones.
    fn runs(&self, order: Order) -> u32 {
        self.blocks(order).filter(|&block| self.homes.free_in(block).1.covers(block)).count() as u32
    }

    /// Returns whether some block of `order` has no pinned occupant and none as large as the block,
    /// and enough room elsewhere outside of free runs of `order`.
    fn is_possible(&self, order: Order) -> bool {
        let empty = self.homes.empty_frames() - self.runs(order) * order.pages();
        self.blocks(order).any(|block| {
            let (full, free) = self.homes.free_in(block);
            let movable = (0..block.frames()).all(|index| {
                let frame = block.head.offset(index);
                full.contains(index)
                    || free.contains(index)
                    || self.occupant(frame).is_some_and(|occupant| occupant.run().order < order)
            });
            movable && !free.covers(block) && order.pages() - free.len() <= empty - free.len()
        })
    }

    /// Checks that every frame is free or in one folio, and that the populated free frames are the
    /// expected ones.
    fn check(&self) {
        self.homes.check();
        let notes = self.notes.lock();
        let mut used = BTreeSet::new();
        for (&head, &order) in &notes.folios {
            for frame in head..head + order.pages() {
                assert!(used.insert(frame) && !self.homes.is_free(Frame(frame)), "{frame:x}");
            }
        }
        assert_eq!(self.homes.full_frames() as usize, notes.full.len());
        assert_eq!(used.len() as u32 + self.homes.full_frames() + self.homes.empty_frames(), notes.homes_frames);
    }
}

impl Occupants for World {
    fn occupant(&self, frame: Frame) -> Option<Occupant> {
        let run = self.folio_with(frame)?;
        (!self.notes.lock().pinned.contains(&run.head.0)).then_some(Occupant::Folio(run))
    }

    fn migrate(&self, from: FrameRun, to: FrameRun) -> bool {
        let mut notes = self.notes.lock();
        assert_eq!(notes.folios.remove(&from.head.0), Some(from.order), "{from:?}");
        assert_eq!(from.order, to.order);
        notes.moved.push(to.order);
        notes.folios.insert(to.head.0, to.order);
        self.homes.free_empty(from);
        true
    }

    fn split(&self, run: FrameRun, to: Order) -> bool {
        let mut notes = self.notes.lock();
        assert_eq!(notes.folios.remove(&run.head.0), Some(run.order));
        notes.splits += 1;
        let parts = (0..run.frames()).step_by(to.pages() as usize);
        notes.folios.extend(parts.map(|index| (run.head.0 + index, to)));
        true
    }

    fn evacuate(&self, head: Frame) -> bool {
        unreachable!("no store at {head:?}")
    }

    fn move_free_page(&self, from: Frame, to: Frame) -> bool {
        let mut notes = self.notes.lock();
        assert!(notes.full.remove(&from.0) && notes.full.insert(to.0));
        true
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add(u8),
    Remove(prop::sample::Index, bool),
    Pin(prop::sample::Index),
    Compact(u8, prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u8..7).prop_map(Step::Add),
        5 => (any::<prop::sample::Index>(), any::<bool>()).prop_map(|(folio, pages)| Step::Remove(folio, pages)),
        1 => any::<prop::sample::Index>().prop_map(Step::Pin),
        3 => (1u8..7, any::<prop::sample::Index>()).prop_map(|(order, variant)| Step::Compact(order, variant)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn a_run_is_made_wherever_there_is_room(frames in 64u32..600, steps in prop::collection::vec(step(), 1..150)) {
        let world = World::new(frames);
        let nth = |index: &prop::sample::Index| {
            let notes = world.notes.lock();
            let folios: Vec<_> = notes.folios.iter().map(|(&head, &order)| FrameRun::new(Frame(head), order)).collect();
            (!folios.is_empty()).then(|| *index.get(&folios))
        };
        for step in &steps {
            match step {
                Step::Add(of) => { world.add(order(*of)); }
                Step::Remove(index, leaves_pages) => nth(index).into_iter().for_each(|run| world.remove(run, *leaves_pages)),
                Step::Pin(index) => nth(index).into_iter().for_each(|run| { world.notes.lock().pinned.insert(run.head.0); }),
                Step::Compact(of, variant) => {
                    let (order, variant) = (order(*of), *variant.get(&Variant::ALL));
                    let (possible, content) = (world.is_possible(order), world.notes.lock().folios.values().map(|order| order.pages()).sum::<u32>());
                    let (before, runs) = (world.homes.empty_frames(), world.runs(order));
                    let made = world.compact(variant, order);
                    if variant == Variant::default() {
                        prop_assert_eq!(made, possible, "{:?}", order);
                    }
                    if made {
                        let run = world.homes.alloc_empty(order);
                        prop_assert!(run.is_some());
                        world.homes.free_empty(run.unwrap());
                    }
                    prop_assert_eq!(world.runs(order), runs + u32::from(made), "one more run");
                    prop_assert_eq!(world.homes.empty_frames(), before);
                    prop_assert_eq!(world.notes.lock().folios.values().map(|order| order.pages()).sum::<u32>(), content);
                }
            }
            world.check();
        }
    }
}

/// Makes 64 frames of single pages and frees those in `free`.
fn singles_but(free: &[std::ops::Range<u32>]) -> World {
    let world = World::new(64);
    while world.add(Order::ZERO).is_some() {}
    for frame in free.iter().cloned().flatten() {
        world.remove(FrameRun::new(Frame(frame), Order::ZERO), false);
    }
    world
}

/// Merges single pages into folios of `order`.
fn merge(world: &World, heads: &[u32], order: Order) {
    let mut notes = world.notes.lock();
    for &head in heads {
        (head..head + order.pages()).for_each(|frame| assert!(notes.folios.remove(&frame).is_some()));
        notes.folios.insert(head, order);
    }
}

#[test]
fn split_folios_are_moved_page_by_page() {
    let world = singles_but(&[4..8, 17..18, 20..21, 24..25, 28..29]);
    merge(&world, &[0], order(2));
    assert!(world.compact(Variant::SplitFolios, order(3)));
    assert_eq!(world.notes.lock().splits, 1);
    assert_eq!(world.counters.vm.pgmigrate_success.get(), 4);
    assert_eq!(world.counters.vm.compact_migrate_scanned.get(), 8, "pages are counted, not folios");
    world.check();
}

#[test]
fn a_folio_without_a_run_of_its_order_stays_where_it_is() {
    let world = singles_but(&[4..8, 8..24]);
    merge(&world, &[0], order(2));
    // All other folios are pinned.
    let others: Vec<u32> = world.notes.lock().folios.keys().copied().filter(|&head| head != 0).collect();
    world.notes.lock().pinned.extend(others);
    for wanted in [3, 4] {
        assert!(!world.compact(Variant::MigrateWhole, order(wanted)), "the only free runs are two of order 3");
    }
    assert!(world.compact(Variant::FreeSplit, order(4)));
    assert_eq!(world.folio_with(Frame(20)), Some(FrameRun::new(Frame(20), order(2))), "it goes to the upper half");
    assert_eq!(world.homes.free_in(FrameRun::new(Frame(16), order(2))).1.len(), 4, "the rest is free");
    assert_eq!(world.notes.lock().splits, 0);
    world.check();
}

#[test]
fn nothing_moves_out_of_a_block_that_cannot_become_free() {
    // Frames 0 and 1 could go to 16 and 24, but the folio behind them has no target.
    let world = singles_but(&[2..4, 16..17, 24..25, 32..33, 40..41]);
    merge(&world, &[4], order(2));
    world.notes.lock().pinned.extend(8..64);
    assert!(!world.compact(Variant::MigrateWhole, order(3)));
    let vm = &world.counters.vm;
    assert_eq!((vm.pgmigrate_success.get(), vm.pgmigrate_fail.get(), vm.compact_isolated.get()), (0, 0, 0));
    assert!(world.notes.lock().folios.contains_key(&0));
    world.check();
}

#[test]
fn the_largest_sources_go_first() {
    for (variant, moved) in [(Variant::FreeSplit, [0, 0, 2]), (Variant::SortSources, [2, 0, 0])] {
        let world = singles_but(&[2..4, 16..22]);
        merge(&world, &[4], order(2));
        world.notes.lock().pinned.extend(22..64);
        assert!(world.compact(variant, order(3)));
        assert_eq!(world.notes.lock().moved, moved.map(order), "{variant}");
        world.check();
    }
}

#[test]
fn a_folio_is_split_only_where_no_run_is_left_for_it() {
    let world = singles_but(&[4..8, 17..18, 20..21, 24..26]);
    merge(&world, &[0], order(2));
    world.notes.lock().pinned.extend(8..64);
    assert!(world.compact(Variant::SortSources, order(3)));
    assert_eq!(world.notes.lock().splits, 2, "two halvings; one half finds a run");
    assert_eq!(world.folio_with(Frame(24)), Some(FrameRun::new(Frame(24), order(1))));
    world.check();
}

#[test]
fn a_folio_of_the_wanted_order_is_left_alone() {
    let world = singles_but(&[16..20, 28..32]);
    merge(&world, &[0, 8], order(3));
    world.notes.lock().pinned.extend(20..64);
    assert!(!world.compact(Variant::SortSources, order(3)));
    assert_eq!(world.counters.vm.pgmigrate_success.get(), 0);
    assert!(world.compact(Variant::SplitFolios, order(3)));
    world.check();
}

#[test]
fn no_run_is_made_at_the_expense_of_another() {
    let world = singles_but(&[0..8, 12..16, 32..33]);
    for variant in Variant::ALL {
        assert!(!world.compact(variant, order(3)), "{variant}");
        assert_eq!(world.runs(order(3)), 1, "{variant}");
    }
    assert_eq!(world.counters.vm.pgmigrate_success.get(), 0);
    assert!(Compactor::new(Variant::default()).churn(&world.homes, &world, &world.counters.vm, order(3)));
    assert!(world.runs(order(3)) == 1 && world.counters.vm.pgmigrate_success.get() > 0);
    world.check();
}

#[test]
fn failed_compaction_is_deferred_but_not_for_lower_orders() {
    let world = singles_but(&[0..1, 16..17, 32..33]);
    let heads: Vec<u32> = world.notes.lock().folios.keys().copied().filter(|head| head % 8 == 5).collect();
    world.notes.lock().pinned.extend(heads);
    let compactor = Compactor::new(Variant::default());
    let compact =
        |order| !compactor.defers(order) && compactor.compact(&world.homes, &world, &world.counters.vm, order);
    for _ in 0..200 {
        assert!(!compact(order(3)));
    }
    // After 1, 2, 4, … 64 requests, then every 64th.
    assert_eq!(world.counters.vm.compact_fail.get(), 1 + 5 + 2);
    assert!(compact(order(1)));
    world.check();
}
