//! The whole engine against a naive model: a program that maps, writes, reads, discards, remaps and
//! unmaps at random, under a small budget, with pinned and shared pages, must read what it wrote; also with a swap file
//! that fails, fills up, and is shared with other processes.
//! `check()` walks the whole engine after every step.

mod double;

use double::{Double, Worker};
use foliomem_core::cluster::{Discard, Strategy as SlotStrategy};
use foliomem_core::compaction::Variant;
use foliomem_core::engine::{BackingConfig, Engine, EngineConfig, NoRoom, Served};
use foliomem_core::locality::SwapIn;
use foliomem_core::machine::MOST_WRITES;
use foliomem_core::policy::{Advice, Disabled, SizePolicy};
use foliomem_core::units::{ClusterNumber, MAX_ORDER, Order, OrderSet, PageNumber};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The test's address space: 4 blocks of 512 pages, from a base that is not special.
const BASE: u64 = 512 * 1000;
const PAGES: u64 = 2048;

#[derive(Clone, Debug)]
enum Step {
    Map { start: u64, pages: u64 },
    NativeTouch { start: u64, pages: u64, value: u64 },
    Write { page: u64, pages: u64, value: u64 },
    Read { page: u64, pages: u64 },
    Reclaim { pages: u64 },
    PageOut { start: u64, pages: u64 },
    Discard { start: u64, pages: u64 },
    Unmap { start: u64, pages: u64 },
    Remap { from: u64, to: u64, pages: u64 },
    Pin { page: u64 },
    Unpin,
    Share,
    Refuse { start: u64, pages: u64 },
    Shrink { pages: u32 },
    CompactStore { pages: u32 },
    Compact { order: u8 },
    FailWrites { count: u32 },
    DiscardFile,
    FailReads { count: u32 },
    OthersClaim { cluster: ClusterNumber },
    OthersGo,
    Fork { child: bool },
    Sizes { policy: SizePolicy },
    Advise { start: u64, pages: u64, advice: Advice },
    Disable { how: Disabled },
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    let short = 1u64..80;
    prop_oneof![
        2 => (page.clone(), 1u64..700).prop_map(|(start, pages)| Step::Map { start, pages }),
        1 => (page.clone(), short.clone(), 0u64..40).prop_map(|(start, pages, value)| Step::NativeTouch { start, pages, value }),
        6 => (page.clone(), short.clone(), 0u64..40).prop_map(|(page, pages, value)| Step::Write { page, pages, value }),
        4 => (page.clone(), short.clone()).prop_map(|(page, pages)| Step::Read { page, pages }),
        3 => (1u64..300).prop_map(|pages| Step::Reclaim { pages }),
        3 => (page.clone(), 1u64..300).prop_map(|(start, pages)| Step::PageOut { start, pages }),
        2 => (page.clone(), short.clone()).prop_map(|(start, pages)| Step::Discard { start, pages }),
        2 => (page.clone(), 1u64..300).prop_map(|(start, pages)| Step::Unmap { start, pages }),
        2 => (page.clone(), page.clone(), 1u64..200).prop_map(|(from, to, pages)| Step::Remap { from, to, pages }),
        1 => page.clone().prop_map(|page| Step::Pin { page }),
        1 => Just(Step::Unpin),
        1 => Just(Step::Share),
        1 => (page, short).prop_map(|(start, pages)| Step::Refuse { start, pages }),
        1 => (1u32..200).prop_map(|pages| Step::Shrink { pages }),
        2 => (1u32..100).prop_map(|pages| Step::CompactStore { pages }),
        3 => (1u8..10).prop_map(|order| Step::Compact { order }),
        1 => (1u32..4).prop_map(|count| Step::FailWrites { count }),
        1 => Just(Step::DiscardFile),
        1 => (1u32..4).prop_map(|count| Step::FailReads { count }),
        1 => (0u32..8).prop_map(|cluster| Step::OthersClaim { cluster: ClusterNumber(cluster) }),
        1 => Just(Step::OthersGo),
        1 => any::<bool>().prop_map(|child| Step::Fork { child }),
        1 => any::<u32>().prop_map(|bits| Step::Sizes { policy: SizePolicy::from_bits(bits) }),
        2 => (0..PAGES, 1u64..700, prop::sample::select(vec![Advice::None, Advice::Huge, Advice::NoHuge]))
            .prop_map(|(start, pages, advice)| Step::Advise { start, pages, advice }),
        1 => prop::sample::select(vec![Disabled::No, Disabled::No, Disabled::ExceptAdvised, Disabled::Yes])
            .prop_map(|how| Step::Disable { how }),
    ]
}

/// Writes to `page` what does not compress in the double: a multiple of 7.
fn incompressible(page: u64) -> Step {
    Step::Write { page, pages: 1, value: 7 * (page + 1) - (BASE + page) % 3 }
}

fn config(granule: u8) -> EngineConfig {
    EngineConfig {
        granule: Order::new(granule).unwrap(),
        arena_frames: 16384,
        swap_slots: 512 * 64,
        strategy: SlotStrategy::default(),
        swap_in: SwapIn::default(),
        no_room: NoRoom::default(),
        keep_copies: true,
        compaction: Variant::default(),
        cpus: 1,
        floor_pages: 0,
        backing: None,
    }
}

/// The program, the engine and what the program must read.
struct World {
    engine: Engine<Double>,
    worker: Worker,
    /// Content of every mapped page.
    model: BTreeMap<u64, u64>,
}

impl World {
    fn new(sizes: u16, granule: u8, limit_pages: i64, swap_clusters: u32) -> World {
        World::with(EngineConfig { swap_slots: 512 * swap_clusters, ..config(granule) }, sizes, limit_pages)
    }

    fn with_backing(limit_pages: i64, backing: BackingConfig) -> World {
        World::with(EngineConfig { backing: Some(backing), ..config(4) }, 1 << 4, limit_pages)
    }

    fn with(config: EngineConfig, sizes: u16, limit_pages: i64) -> World {
        let engine = Engine::new(Double::new(limit_pages), config);
        engine.machine().state.lock().sizes = SizePolicy::always(OrderSet::from_bits(sizes));
        World { engine, worker: Worker::default(), model: BTreeMap::new() }
    }

    fn write_incompressible(&mut self, pages: u64) {
        (0..pages).for_each(|page| self.run(&incompressible(page)));
    }

    fn mapped(&self, start: u64, pages: u64) -> Vec<u64> {
        let start = BASE + start;
        self.model.range(start..(start + pages).min(BASE + PAGES)).map(|(&page, _)| page).collect()
    }

    /// Makes sure `page` is in the program, as a touch does. False if the touch ends the program: then what cannot be read
    /// is unmapped instead.
    fn touch(&mut self, page: u64) -> bool {
        let present = self.engine.machine().state.lock().program.contains_key(&page);
        if !present {
            let before = self.allocated();
            self.engine.machine().state.lock().woken.clear();
            let served = self.engine.fault(&mut self.worker, PageNumber(page));
            assert!(matches!(served, Served::Done(_)), "{served:?}");
            assert!(self.engine.machine().state.lock().woken.contains(&page), "who waits for {page:x} sleeps on");
            let allowed = self.allowed(page);
            let is_new = |order: &Order| self.allocated()[order.index()] > before[order.index()];
            assert!(Order::all().filter(is_new).all(|order| allowed.contains(order)), "{allowed:?} at {page:x}");
            while self.engine.read_ahead(&mut self.worker, PageNumber(page)) {}
        }
        let lost = std::mem::take(&mut self.engine.machine().state.lock().poisoned);
        lost.iter().for_each(|&page| self.unmap(page - BASE, 1));
        let state = self.engine.machine().state.lock();
        assert_ne!(
            state.program.contains_key(&page),
            lost.contains(&page),
            "page {page:x} is not there after its fault, and not said to be lost"
        );
        !lost.contains(&page)
    }

    /// First touches so far, by the order they were served with.
    fn allocated(&self) -> Vec<u64> {
        Order::all().map(|order| self.engine.counters().of(order).anon_fault_alloc.get()).collect()
    }

    /// The orders a folio at `page` may have.
    fn allowed(&self, page: u64) -> OrderSet {
        let state = self.engine.machine().state.lock();
        let advice = state.mapping(page).map_or(Advice::None, |(_, advice)| *advice);
        state.sizes.allowed(advice, state.disabled)
    }

    fn map(&mut self, start: u64, pages: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        if self.model.range(start..end).next().is_some() {
            return;
        }
        self.model.extend((start..end).map(|page| (page, 0)));
        self.engine.machine().state.lock().mappings.push((start..end, Advice::None));
    }

    /// What the program touched before its mapping was registered: then it is adopted.
    fn native_touch(&mut self, start: u64, pages: u64, value: u64) {
        for page in self.mapped(start, pages) {
            let mut state = self.engine.machine().state.lock();
            // Only pages nobody knows yet can still be touched natively.
            if self.model[&page] == 0 && !state.program.contains_key(&page) && state.homes.is_empty() {
                state.program.insert(page, value);
                state.charged += 1;
                self.model.insert(page, value);
            }
        }
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        assert_eq!(self.engine.adopt(PageNumber(start)..PageNumber(end)), Ok(()));
    }

    fn unmap(&mut self, start: u64, pages: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        self.engine.machine().state.lock().unmap(start..end);
        self.model.retain(|page, _| !(start..end).contains(page));
        self.engine.unmapped(PageNumber(start)..PageNumber(end));
    }

    fn discard(&mut self, start: u64, pages: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        self.engine.discarded(PageNumber(start)..PageNumber(end));
        {
            let mut state = self.engine.machine().state.lock();
            (start..end).for_each(|page| {
                state.drop_page(page);
                state.shared.remove(&page);
            });
        }
        self.model.range_mut(start..end).for_each(|(_, value)| *value = 0);
        self.engine.tend();
    }

    fn remap(&mut self, from: u64, to: u64, pages: u64) {
        let (from, to) = (BASE + from, BASE + to);
        let inside = |start: u64| start + pages <= BASE + PAGES;
        let overlap = from < to + pages && to < from + pages;
        let whole = (from..from + pages).all(|page| self.model.contains_key(&page));
        let clear = {
            let state = self.engine.machine().state.lock();
            state.pinned.range(from..from + pages).next().is_none()
        };
        if !inside(from) || !inside(to) || overlap || !whole || !clear {
            return;
        }
        self.unmap(to - BASE, pages);
        self.engine.machine().state.lock().remap(from..from + pages, to);
        for index in 0..pages {
            let value = self.model.remove(&(from + index)).unwrap();
            self.model.insert(to + index, value);
        }
        self.engine.remapped(PageNumber(from), PageNumber(to), pages as u32);
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Map { start, pages } => self.map(start, pages),
            Step::NativeTouch { start, pages, value } => self.native_touch(start, pages, value),
            Step::Write { page, pages, value } => {
                for page in self.mapped(page, pages) {
                    if !self.model.contains_key(&page) || !self.touch(page) {
                        continue;
                    }
                    self.engine.machine().state.lock().program.insert(page, value + page % 3);
                    self.model.insert(page, value + page % 3);
                }
            }
            Step::Read { page, pages } => self.mapped(page, pages).into_iter().for_each(|page| self.verify(page)),
            Step::Reclaim { pages } => {
                self.engine.reclaim(&mut self.worker, pages);
            }
            Step::PageOut { start, pages } => {
                self.engine.page_out(&mut self.worker, PageNumber(BASE + start)..PageNumber(BASE + start + pages));
            }
            Step::Discard { start, pages } => self.discard(start, pages),
            Step::Unmap { start, pages } => self.unmap(start, pages),
            Step::Remap { from, to, pages } => self.remap(from, to, pages),
            Step::Pin { page } => {
                let mut state = self.engine.machine().state.lock();
                if state.program.contains_key(&(BASE + page)) {
                    state.pinned.insert(BASE + page);
                }
            }
            Step::Unpin => self.engine.machine().state.lock().pinned.clear(),
            Step::Share => {
                let mut state = self.engine.machine().state.lock();
                state.shared = state.program.keys().copied().collect();
            }
            Step::Refuse { start, pages } => {
                let pages = self.mapped(start, pages);
                self.engine.machine().state.lock().refusing.extend(pages);
            }
            Step::Shrink { pages } => {
                self.engine.shrink(0, pages);
            }
            Step::CompactStore { pages } => {
                let before = self.engine.free_frames();
                let freed = self.engine.compact_store(pages);
                assert_eq!(self.engine.free_frames(), before + freed);
            }
            Step::DiscardFile => while self.engine.discard_one() {},
            Step::Compact { order } => {
                self.engine.compact(Order::new(order).unwrap());
            }
            Step::FailWrites { count } => self.engine.machine().state.lock().failing_writes = count,
            Step::FailReads { count } => self.engine.machine().state.lock().failing_reads = count,
            Step::OthersClaim { cluster } => {
                let mut state = self.engine.machine().state.lock();
                if !state.clusters.contains(&cluster) {
                    state.foreign_clusters.insert(cluster);
                }
            }
            Step::Sizes { policy } => self.engine.machine().state.lock().sizes = policy,
            Step::Advise { start, pages, advice } => {
                let range = BASE + start..(BASE + start + pages).min(BASE + PAGES);
                self.engine.machine().state.lock().advise(&range, advice);
            }
            Step::Disable { how } => self.engine.machine().state.lock().disabled = how,
            Step::OthersGo => self.engine.machine().state.lock().foreign_clusters.clear(),
            Step::Fork { child } => {
                self.engine.lend_file();
                if child {
                    self.engine.borrow_file();
                }
                let mut state = self.engine.machine().state.lock();
                let held = state.clusters.clone();
                state.foreign_clusters.extend(held);
            }
        }
    }

    fn verify(&mut self, page: u64) {
        if !self.model.contains_key(&page) || !self.touch(page) {
            return;
        }
        let state = self.engine.machine().state.lock();
        assert_eq!(state.program[&page], self.model[&page], "content of page {page:x}");
    }

    fn check(&self) {
        self.engine.check();
        assert!(self.worker.writes.is_empty(), "a write is under way");
        let state = self.engine.machine().state.lock();
        let taken = (state.homes.len() + state.program.len()) as i64;
        assert_eq!(state.charged, taken, "what is charged is what is there");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_program_reads_what_it_wrote(
        sizes in prop_oneof![Just(0u16), Just(1 << 4), Just(0x3fe), Just(1 << 2 | 1 << 9), any::<u16>()],
        granule in 0u8..10,
        limit_pages in 300i64..3000,
        // Too few slots for all pages, or so many that they never run short.
        swap_clusters in prop_oneof![1u32..5, Just(64)],
        file_clusters in 0u32..8,
        discard in prop::sample::select(vec![Discard::Never, Discard::ForRoom, Discard::ForDevice]),
        // As small as what may be in it allows, or so large that runs never run short.
        arena_frames in prop_oneof![Just(6144u32), Just(16384)],
        compaction in prop::sample::select(&Variant::ALL[..]),
        swap_in in prop::sample::select(vec![SwapIn::Adaptive, SwapIn::Whole, SwapIn::Page]),
        no_room in prop::sample::select(vec![NoRoom::Reclaim, NoRoom::FallBack]),
        keep_copies: bool,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let backing = BackingConfig { slots: file_clusters * 512, discard, store_pages: limit_pages as u32 / 4 };
        let backing = (file_clusters > 0).then_some(backing);
        let swap_slots = 512 * swap_clusters;
        let config = EngineConfig { swap_slots, arena_frames, compaction, backing, ..config(granule) };
        let config = EngineConfig { swap_in, no_room, keep_copies, ..config };
        let mut world = World::with(config, sizes, limit_pages);
        world.map(0, 600);
        world.native_touch(0, 100, 3);
        for step in &steps {
            world.run(step);
            world.check();
        }
        let pages: Vec<u64> = world.model.keys().copied().collect();
        for page in pages {
            world.verify(page);
        }
        world.check();
    }
}

#[test]
fn a_folio_goes_out_and_comes_back_whole() {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 512);
    for page in 0..512 {
        world.run(&Step::Write { page, pages: 1, value: 11 });
    }
    let order = Order::new(4).unwrap();
    assert_eq!(world.engine.counters().of(order).anon_fault_alloc.get(), 32);
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 512));
    assert_eq!(world.engine.counters().of(order).swpout.get(), 32);
    assert_eq!(world.engine.swapped_pages(), 512);
    world.run(&Step::Read { page: 0, pages: 512 });
    assert_eq!(world.engine.counters().of(order).swpin.get(), 32);
    assert_eq!(world.engine.counters().vm.pswpin.get(), 512);
    world.check();
}

#[test]
fn folios_are_as_large_as_the_mapping_may_have_now() {
    let allocated = |world: &World| -> Vec<usize> {
        Order::all().map(Order::index).filter(|&order| world.allocated()[order] > 0).collect()
    };
    let mut world = World::new(1 << 4, 4, 8000, 64);
    world.map(0, 2048);
    world.run(&Step::Write { page: 0, pages: 16, value: 11 });
    assert_eq!(allocated(&world), [4]);
    world.run(&Step::Sizes { policy: SizePolicy::always(OrderSet::from_bits(1 << 9)) });
    world.run(&Step::Write { page: 512, pages: 512, value: 11 });
    assert_eq!(allocated(&world), [4, 9]);
    assert_eq!(world.engine.counters().of(MAX_ORDER).anon_fault_alloc.get(), 1);
    world.run(&Step::Advise { start: 1024, pages: 512, advice: Advice::NoHuge });
    world.run(&Step::Write { page: 1000, pages: 100, value: 11 });
    assert_eq!(allocated(&world), [0, 4, 9], "single pages where it was asked for");
    // What is out comes back in the size that is allowed then.
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 2048));
    world.run(&Step::Sizes { policy: SizePolicy::always(OrderSet::from_bits(1 << 2)) });
    world.run(&Step::Read { page: 0, pages: 1000 });
    let swpin = |order| world.engine.counters().of(Order::new(order).unwrap()).swpin.get();
    assert!(swpin(2) > 0 && swpin(4) == 0 && swpin(9) == 0);
    world.check();
}

#[test]
fn a_store_full_of_holes_is_compacted() {
    let mut world = World::new(0, 0, 4000, 64);
    world.map(0, 2000);
    // Lengths of about half a page, in few size classes; three pages in four are then discarded.
    for page in 0..2000 {
        world.run(&Step::Write { page, pages: 1, value: 2101 + page % 16 * 7 });
    }
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 2000));
    assert!(!world.engine.store_is_wasteful());
    for page in (0..2000).filter(|page| page % 4 > 0) {
        world.run(&Step::Unmap { start: page, pages: 1 });
    }
    assert!(world.engine.store_is_wasteful());
    let steps: Vec<u32> =
        std::iter::from_fn(|| Some(world.engine.compact_wasteful_store())).take_while(|&frames| frames > 0).collect();
    assert!(steps.len() > 1 && !world.engine.store_is_wasteful(), "{steps:?}");
    let rest = world.engine.compact_store(u32::MAX);
    assert_eq!(world.engine.counters().store.pages_compacted.get(), u64::from(steps.iter().sum::<u32>() + rest));
    world.check();
    world.run(&Step::Read { page: 0, pages: 2000 });
}

/// Every second of 1533 pages, each a folio of its own, in an arena that has no free run of 512 frames any more.
fn scattered() -> World {
    let config = EngineConfig { arena_frames: 3 * 512 + 256, ..config(4) };
    let mut world = World::with(config, 1 << 9, 4000);
    for block in 0..3 {
        // Too short for a folio of 2 MiB.
        world.map(512 * block, 511);
        world.run(&Step::Write { page: 512 * block, pages: 511, value: 2101 });
    }
    for page in (0..1533).filter(|page| page % 2 == 1) {
        world.run(&Step::Unmap { start: page + page / 511, pages: 1 });
    }
    assert_eq!(world.engine.resident_pages(), 767);
    world
}

/// A first touch finds a run of 512 frames, and what the program wrote is still there.
fn touch_2m(world: &mut World) {
    let order = Order::new(9).unwrap();
    let before = world.engine.counters().of(order).anon_fault_alloc.get();
    world.map(1536, 512);
    world.run(&Step::Write { page: 1700, pages: 1, value: 9 });
    let (size, vm) = (world.engine.counters().of(order), &world.engine.counters().vm);
    assert_eq!((size.anon_fault_alloc.get() - before, size.anon_fault_fallback.get()), (1, 0));
    assert_eq!((vm.compact_stall.get(), vm.compact_success.get(), vm.compact_fail.get()), (1, 1, 0));
    assert!(vm.pgmigrate_success.get() >= 100 && vm.pgmigrate_fail.get() == 0, "{vm:?}");
    world.check();
    world.run(&Step::Read { page: 0, pages: PAGES });
    world.check();
}

#[test]
fn a_fault_moves_homes_for_a_run_it_needs_even_of_pinned_pages() {
    let mut world = scattered();
    (0..1536).for_each(|page| world.run(&Step::Pin { page }));
    assert_eq!(world.engine.machine().state.lock().pinned.len(), 767);
    touch_2m(&mut world);
}

#[test]
fn a_fault_moves_what_is_staged_for_a_run_it_needs() {
    let mut world = scattered();
    assert_eq!(world.engine.stage_oldest(2000), 767);
    touch_2m(&mut world);
}

#[test]
fn the_store_leaves_its_frames_for_a_run() {
    // Many pieces to a zspage, and raw pieces of 256 KiB that are chains of extents.
    for (sizes, granule, value) in [(0, 0, 2101), (1 << 6, 6, 7 * 300)] {
        // One that goes over the arena from the bottom, where the store is.
        let mut world = World::with(EngineConfig { compaction: Variant::FreeSplit, ..config(granule) }, sizes, 4000);
        world.map(0, 1024);
        (0..1024).step_by(64).for_each(|page| world.run(&Step::Write { page, pages: 64, value: value + page * 7 }));
        world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 1024));
        assert_eq!(world.engine.swapped_pages(), 1024);
        let vm = &world.engine.counters().vm;
        assert!((0..3).all(|_| world.engine.compact(Order::new(9).unwrap())), "{vm:?}");
        assert!(vm.pgmigrate_success.get() >= 512, "{vm:?}");
        world.check();
        world.run(&Step::Read { page: 0, pages: 1024 });
        world.check();
    }
}

#[test]
fn runs_beyond_need_go_back_and_smaller_ones_stay() {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 1600);
    world.run(&Step::Write { page: 0, pages: 1600, value: 5 });
    assert_eq!(world.engine.stage_oldest(1600), 1600);
    world.unmap(0, 1600);
    assert_eq!(world.engine.free_frames(), 1600);
    assert_eq!(world.engine.give_back_runs(600), 512, "another would leave too few");
    assert_eq!(world.engine.give_back_runs(0), 1024);
    assert_eq!(world.engine.give_back_runs(0), 0, "there is none of 512");
    assert_eq!(world.engine.machine().state.lock().charged, 64);
    world.check();
}

#[test]
fn pages_that_cannot_be_moved_do_not_hide_those_that_can() {
    let mut world = World::new(0, 0, 4000, 64);
    world.map(0, 700);
    // Touched while they are staged, these are active; the others are on probation, and may not be moved.
    world.run(&Step::Write { page: 400, pages: 300, value: 5 });
    assert_eq!(world.engine.stage_oldest(300), 300);
    world.run(&Step::Read { page: 400, pages: 300 });
    world.run(&Step::Write { page: 0, pages: 400, value: 6 });
    world.run(&Step::Refuse { start: 0, pages: 400 });
    let staged: u64 = (0..3).map(|_| world.engine.stage_oldest(100)).sum();
    assert!(staged >= 100, "{staged} pages");
    world.check();
}

#[test]
fn copies_give_their_slots_to_folios_that_go_out() {
    let mut world = World::new(1 << 4, 4, 4000, 1);
    world.map(0, 1024);
    let out = |world: &mut World, start: u64| {
        let pages = PageNumber(BASE + start)..PageNumber(BASE + start + 512);
        world.engine.page_out(&mut world.worker, pages);
    };
    world.run(&Step::Write { page: 0, pages: 512, value: 11 });
    out(&mut world, 0);
    world.run(&Step::Read { page: 0, pages: 512 });
    world.engine.publish_store();
    assert_eq!(world.engine.counters().vm.nr_swapcached.get(), 512, "every slot is of a copy");
    world.run(&Step::Write { page: 512, pages: 512, value: 22 });
    out(&mut world, 512);
    let counters = world.engine.counters().of(Order::new(4).unwrap());
    assert_eq!((counters.swpout.get(), counters.swpout_fallback.get()), (64, 0));
    assert_eq!(world.engine.counters().vm.nr_swapcached.get(), 0);
    world.run(&Step::Read { page: 0, pages: 1024 });
    world.check();
}

#[test]
fn a_folio_without_contiguous_slots_is_paged_out_page_by_page() {
    let mut world = World::new(1 << 4, 4, 4000, 1);
    world.map(0, 512);
    world.map(512, 16);
    (0..33).for_each(|folio| world.run(&Step::Write { page: folio * 16, pages: 16, value: 3 }));
    world.run(&Step::PageOut { start: 0, pages: 512 });
    // Room for a folio, but never for two pages next to each other.
    (0..16).for_each(|folio| world.unmap(folio * 32 + 5, 1));
    world.run(&Step::PageOut { start: 512, pages: 16 });
    let size = world.engine.counters().of(Order::new(4).unwrap());
    assert_eq!((size.swpout.get(), size.swpout_fallback.get()), (32, 1));
    assert_eq!((world.engine.resident_pages(), world.engine.staged_pages()), (0, 0));
    assert_eq!(world.engine.swapped_pages(), 512);
    world.engine.check();
}

#[test]
fn a_corrupted_piece_is_never_handed_over() {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 64);
    world.run(&Step::Write { page: 0, pages: 64, value: 11 });
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 64));
    world.engine.machine().state.lock().corrupt_next = true;
    let served = world.engine.fault(&mut world.worker, PageNumber(BASE + 16));
    assert!(matches!(served, Served::Done(_)));
    let state = world.engine.machine().state.lock();
    assert_eq!(state.poisoned.len(), 16, "the whole folio is poisoned");
    assert!((16..32).all(|page| !state.program.contains_key(&(BASE + page))));
    drop(state);
    assert_eq!(world.engine.counters().vm.store_corrupted.get(), 1);
    world.check();
}

#[test]
fn what_does_not_fit_goes_over_the_limit_rather_than_be_lost() {
    let mut world = World::new(0, 0, 300, 64);
    world.map(0, 1000);
    world.write_incompressible(1000);
    world.run(&Step::Read { page: 0, pages: 1000 });
    world.check();
}

#[test]
fn what_does_not_compress_goes_to_the_swap_file_instead_of_over_the_limit() {
    let backing = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 100 };
    let mut world = World::with_backing(400, backing);
    world.map(0, 2000);
    for page in 0..2000 {
        world.run(&incompressible(page));
        let charged = world.engine.machine().state.lock().charged;
        assert!(charged <= 420, "{charged} pages");
    }
    world.engine.publish_store();
    let backing = &world.engine.counters().backing;
    assert!(backing.bd_count.get() >= 1500 && backing.bd_writes.get() >= 1500, "{backing:?}");
    world.check();
    world.run(&Step::Read { page: 0, pages: 2000 });
    assert!(world.engine.counters().backing.bd_reads.get() >= 1500);
    assert_eq!(world.engine.counters().backing.failed_reads.get(), 0);
    world.check();
    world.unmap(0, 2000);
    world.check();
    assert!(world.engine.awaits_discard());
    while world.engine.discard_one() {}
    assert!(world.engine.machine().state.lock().clusters.is_empty(), "an empty file holds no clusters");
    assert!(world.engine.counters().backing.bd_discards.get() >= 1500);
}

#[test]
fn a_file_that_cannot_be_written_or_is_full_is_as_none() {
    for (clusters, failing) in [(8, u32::MAX), (1, 0)] {
        let backing = BackingConfig { slots: 512 * clusters, discard: Discard::ForRoom, store_pages: 100 };
        let mut world = World::with_backing(400, backing);
        world.engine.machine().state.lock().failing_writes = failing;
        world.map(0, 1500);
        world.write_incompressible(1500);
        world.check();
        world.run(&Step::Read { page: 0, pages: 1500 });
        let backing = &world.engine.counters().backing;
        assert_eq!(backing.failed_writes.get() > 0, failing > 0);
        assert_eq!(backing.full.get() > 0, failing == 0);
    }
}

#[test]
fn the_next_batch_is_made_while_one_is_written_and_both_survive_a_failure() {
    for failing in [0, 1, 2] {
        let backing = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 600 };
        let mut world = World::with_backing(2000, backing);
        world.map(0, 1000);
        world.write_incompressible(1000);
        world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 1000));
        world.engine.machine().state.lock().failing_writes = failing;
        world.run(&Step::Reclaim { pages: 300 });
        let most = world.engine.machine().state.lock().most_writes;
        assert_eq!(most, if failing == 0 { MOST_WRITES } else { most }, "the next is made while one is under way");
        let failed = world.engine.counters().backing.failed_writes.get();
        assert!(failed <= failing.into() && (failing == 0 || failed > 0), "{failed} failures of {failing}");
        world.check();
        world.run(&Step::Read { page: 0, pages: 1000 });
        world.check();
    }
}

#[test]
fn what_the_file_does_not_give_back_ends_the_program_there() {
    let backing = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 0 };
    let mut world = World::with_backing(400, backing);
    world.map(0, 1000);
    world.write_incompressible(1000);
    world.engine.machine().state.lock().failing_reads = 1;
    let served = world.engine.fault(&mut world.worker, PageNumber(BASE));
    assert!(matches!(served, Served::Done(_)));
    let state = world.engine.machine().state.lock();
    assert_eq!(state.poisoned.len(), 16, "the whole folio is poisoned");
    assert!((0..16).all(|page| !state.program.contains_key(&(BASE + page))));
    drop(state);
    assert_eq!(world.engine.counters().backing.failed_reads.get(), 1);
    world.check();
}
