//! Tests of the whole engine against a naive model. A program maps, writes, reads, discards, remaps
//! and unmaps at random under a small budget, with pinned and shared pages, and must read what it
//! wrote; also with a swap file that fails, fills up, and is shared with other processes. `check()`
//! walks the whole engine after every step.

mod double;
#[cfg(not(fuzzing))]
#[path = "../../../fuzz/replay.rs"]
mod replay;

use double::{Double, Worker};
use foliomem_core::cluster::Strategy as SlotStrategy;
use foliomem_core::compaction::Variant;
use foliomem_core::discards::GRACE_NS;
use foliomem_core::engine::{BackingConfig, Engine, EngineConfig, NoRoom, Served};
use foliomem_core::locality::SwapIn;
use foliomem_core::pacing::Pacing;
use foliomem_core::ports::{Budget, MAX_WRITES};
use foliomem_types::counters::{Counter, FaultKind};
use foliomem_types::discard::Discard;
use foliomem_types::size_policy::{Advice, Disabled, SizePolicy};
use foliomem_types::units::{ClusterNumber, MAX_ORDER, Order, OrderSet, PageNumber};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// The test's address space: 4 blocks of 512 pages, from an arbitrary base.
const BASE: u64 = 512 * 1000;
const PAGES: u64 = 2048;

#[derive(Clone, Debug)]
enum Step {
    Map { start: u64, pages: u64 },
    NativeTouch { start: u64, pages: u64, value: u64 },
    Write { page: u64, pages: u64, value: u64 },
    Read { page: u64, pages: u64 },
    Stride { page: u64, step: u64, pages: u64 },
    Reclaim { pages: u64 },
    PageOut { start: u64, pages: u64 },
    Discard { start: u64, pages: u64, every: u64 },
    Guard { start: u64, pages: u64, every: u64 },
    Wait,
    Unmap { start: u64, pages: u64 },
    Remap { from: u64, to: u64, pages: u64 },
    Pin { page: u64 },
    Unpin,
    Share,
    Refuse { start: u64, pages: u64 },
    Shrink { pages: u32 },
    CompactStore { pages: u32 },
    Recompress { steps: u32 },
    Compact { order: u8 },
    FailWrites { count: u32 },
    DiscardFile,
    FailReads { count: u32 },
    OthersClaim { cluster: ClusterNumber },
    OthersGo,
    Fork { child: bool },
    BringAllIn,
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
        2 => (page.clone(), 2u64..40, 1u64..80).prop_map(|(page, step, pages)| Step::Stride { page, step, pages }),
        3 => (1u64..300).prop_map(|pages| Step::Reclaim { pages }),
        3 => (page.clone(), 1u64..300).prop_map(|(start, pages)| Step::PageOut { start, pages }),
        3 => (page.clone(), short.clone(), 1u64..4)
            .prop_map(|(start, pages, every)| Step::Discard { start, pages, every }),
        2 => (page.clone(), short.clone(), 1u64..4)
            .prop_map(|(start, pages, every)| Step::Guard { start, pages, every }),
        1 => Just(Step::Wait),
        2 => (page.clone(), 1u64..300).prop_map(|(start, pages)| Step::Unmap { start, pages }),
        2 => (page.clone(), page.clone(), 1u64..200).prop_map(|(from, to, pages)| Step::Remap { from, to, pages }),
        1 => page.clone().prop_map(|page| Step::Pin { page }),
        1 => Just(Step::Unpin),
        1 => Just(Step::Share),
        1 => (page, short).prop_map(|(start, pages)| Step::Refuse { start, pages }),
        1 => (1u32..200).prop_map(|pages| Step::Shrink { pages }),
        2 => (1u32..100).prop_map(|pages| Step::CompactStore { pages }),
        3 => (1u32..60).prop_map(|steps| Step::Recompress { steps }),
        3 => (1u8..10).prop_map(|order| Step::Compact { order }),
        1 => (1u32..4).prop_map(|count| Step::FailWrites { count }),
        1 => Just(Step::DiscardFile),
        1 => (1u32..4).prop_map(|count| Step::FailReads { count }),
        1 => (0u32..8).prop_map(|cluster| Step::OthersClaim { cluster: ClusterNumber(cluster) }),
        1 => Just(Step::OthersGo),
        1 => any::<bool>().prop_map(|child| Step::Fork { child }),
        1 => Just(Step::BringAllIn),
        1 => any::<u32>().prop_map(|bits| Step::Sizes { policy: SizePolicy::from_bits(bits) }),
        2 => (0..PAGES, 1u64..700, prop::sample::select(vec![Advice::None, Advice::Huge, Advice::NoHuge]))
            .prop_map(|(start, pages, advice)| Step::Advise { start, pages, advice }),
        1 => prop::sample::select(vec![Disabled::No, Disabled::No, Disabled::ExceptAdvised, Disabled::Yes])
            .prop_map(|how| Step::Disable { how }),
    ]
}

/// Returns a write to `page` that does not compress in the double: a multiple of 7.
fn incompressible(page: u64) -> Step {
    Step::Write { page, pages: 1, value: 7 * (page + 1) - (BASE + page) % 3 }
}

fn config(granule: u8) -> EngineConfig {
    EngineConfig {
        granule: Order::new(granule).unwrap(),
        // The last frame is the spare one.
        arena_frames: 16385,
        swap_slots: 512 * 64,
        strategy: SlotStrategy::default(),
        swap_in: SwapIn::default(),
        no_room: NoRoom::default(),
        whole_out: OrderSet::ALL,
        keep_copies: true,
        make_ahead: true,
        pacing: Pacing::Watermarks,
        compaction: Variant::default(),
        cpus: 1,
        protected_pages: 0,
        backing: None,
        recompress_idle_ns: Some(0),
    }
}

/// The program, the engine and the expected content of every page.
struct World {
    engine: Engine<Double>,
    worker: Worker,
    /// The content of every mapped page.
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
        engine.ports().state.lock().sizes = SizePolicy::always(OrderSet::from_bits(sizes));
        World { engine, worker: Worker::default(), model: BTreeMap::new() }
    }

    fn write_incompressible(&mut self, pages: u64) {
        (0..pages).for_each(|page| self.run(&incompressible(page)));
    }

    fn mapped(&self, start: u64, pages: u64) -> Vec<u64> {
        let start = BASE + start;
        self.model.range(start..(start + pages).min(BASE + PAGES)).map(|(&page, _)| page).collect()
    }

    /// Makes `page` resident, as a touch does. Returns false if the touch ends the program; the
    /// unreadable pages are then unmapped.
    fn touch(&mut self, page: u64) -> bool {
        let present = self.engine.ports().state.lock().program.contains_key(&page);
        if !present {
            let before = self.allocated();
            self.engine.ports().state.lock().woken.clear();
            let unheard = || self.engine.counters().vm.discarded_unheard.get();
            let before_fault = unheard();
            let mut served = self.engine.fault(&mut self.worker, PageNumber(page));
            let is_there = || self.engine.ports().state.lock().program.contains_key(&page);
            if unheard() > before_fault && !is_there() {
                // The woken thread faults again and finds no content to map in.
                served = self.engine.fault(&mut self.worker, PageNumber(page));
            }
            assert!(matches!(served, Served::Done(_)), "{served:?}");
            assert!(
                self.engine.ports().state.lock().woken.contains(&page),
                "a thread that waits for {page:x} was not woken"
            );
            let allowed = self.allowed(page);
            let is_new = |order: &Order| self.allocated()[order.index()] > before[order.index()];
            assert!(Order::all().filter(is_new).all(|order| allowed.contains(order)), "{allowed:?} at {page:x}");
            while self
                .engine
                .claim_ahead(PageNumber(page))
                .is_some_and(|(ahead, order)| self.engine.read_ahead(&mut self.worker, ahead, order))
            {}
        }
        let lost = std::mem::take(&mut self.engine.ports().state.lock().poisoned);
        lost.iter().for_each(|&page| self.unmap(page - BASE, 1));
        let state = self.engine.ports().state.lock();
        assert_ne!(
            state.program.contains_key(&page),
            lost.contains(&page),
            "page {page:x} is neither resident nor poisoned after its fault"
        );
        !lost.contains(&page)
    }

    /// Returns the number of first touches by the order that served them.
    fn allocated(&self) -> Vec<u64> {
        Order::all().map(|order| self.engine.counters().of(order).anon_fault_alloc.get()).collect()
    }

    /// Returns the orders that a folio at `page` may have.
    fn allowed(&self, page: u64) -> OrderSet {
        let state = self.engine.ports().state.lock();
        let advice = state.mapping(page).map_or(Advice::None, |(_, advice)| *advice);
        state.sizes.allowed(advice, state.disabled)
    }

    fn map(&mut self, start: u64, pages: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        if self.model.range(start..end).next().is_some() {
            return;
        }
        self.model.extend((start..end).map(|page| (page, 0)));
        self.engine.ports().state.lock().mappings.push((start..end, Advice::None));
    }

    /// Touches pages before their mapping is registered, so that they are adopted.
    fn native_touch(&mut self, start: u64, pages: u64, value: u64) {
        for page in self.mapped(start, pages) {
            let mut state = self.engine.ports().state.lock();
            // Only pages unknown to the engine can be touched without a fault.
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
        self.engine.ports().state.lock().unmap(start..end);
        self.model.retain(|page, _| !(start..end).contains(page));
        self.engine.unmapped(PageNumber(start)..PageNumber(end));
    }

    /// Discards a range; the kernel drops one in `every` of its resident pages: all for
    /// MADV_DONTNEED, some for MADV_FREE.
    fn discard(&mut self, start: u64, pages: u64, every: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        self.engine.discarded(PageNumber(start)..PageNumber(end));
        {
            let mut state = self.engine.ports().state.lock();
            for page in start..end {
                let stays = state.program.contains_key(&page) && !page.is_multiple_of(every);
                if !stays {
                    state.drop_page(page);
                    state.shared.remove(&page);
                    self.model.entry(page).and_modify(|value| *value = 0);
                }
            }
        }
        self.engine.maintain();
    }

    /// Maps in all content, whatever the limit is: the program continues without the engine.
    fn bring_all_in(&mut self) {
        let limit_pages = std::mem::replace(&mut self.engine.ports().state.lock().limit_pages, i64::MAX / 2);
        self.engine.bring_all_in(&mut self.worker);
        let lost = {
            let mut state = self.engine.ports().state.lock();
            state.limit_pages = limit_pages;
            for (page, &value) in &self.model {
                let content = state.program.get(page).copied();
                assert!(state.poisoned.contains(page) || content.unwrap_or(0) == value, "{page:x}: {content:?}");
            }
            std::mem::take(&mut state.poisoned)
        };
        lost.iter().for_each(|&page| self.unmap(page - BASE, 1));
    }

    /// Installs and removes a guard on one page in `every`, without a message. A staged or
    /// swapped-out page loses its content.
    fn guard(&mut self, start: u64, pages: u64, every: u64) {
        let mut state = self.engine.ports().state.lock();
        for page in (BASE + start..(BASE + start + pages).min(BASE + PAGES)).filter(|page| page.is_multiple_of(every)) {
            if state.marks.remove(&page) && !state.program.contains_key(&page) {
                self.model.entry(page).and_modify(|value| *value = 0);
            }
        }
    }

    /// Waits until discarded pages are gone or managed again.
    fn wait(&mut self) {
        self.engine.ports().state.lock().now_ns += 2 * GRACE_NS;
        self.engine.maintain();
    }

    fn remap(&mut self, from: u64, to: u64, pages: u64) {
        let (from, to) = (BASE + from, BASE + to);
        let inside = |start: u64| start + pages <= BASE + PAGES;
        let overlap = from < to + pages && to < from + pages;
        let whole = (from..from + pages).all(|page| self.model.contains_key(&page));
        let clear = {
            let state = self.engine.ports().state.lock();
            state.pinned.range(from..from + pages).next().is_none()
        };
        if !inside(from) || !inside(to) || overlap || !whole || !clear {
            return;
        }
        self.unmap(to - BASE, pages);
        self.engine.ports().state.lock().remap(from..from + pages, to);
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
                    self.engine.ports().state.lock().program.insert(page, value + page % 3);
                    self.model.insert(page, value + page % 3);
                }
            }
            Step::Read { page, pages } => self.mapped(page, pages).into_iter().for_each(|page| self.verify(page)),
            Step::Stride { page, step, pages } => {
                (0..pages).map(|n| BASE + page + n * step).for_each(|page| self.verify(page));
            }
            Step::Reclaim { pages } => {
                self.engine.reclaim(&mut self.worker, pages);
            }
            Step::PageOut { start, pages } => {
                self.engine.page_out(&mut self.worker, PageNumber(BASE + start)..PageNumber(BASE + start + pages));
            }
            Step::Discard { start, pages, every } => self.discard(start, pages, every),
            Step::Guard { start, pages, every } => self.guard(start, pages, every),
            Step::Wait => self.wait(),
            Step::Unmap { start, pages } => self.unmap(start, pages),
            Step::Remap { from, to, pages } => self.remap(from, to, pages),
            Step::Pin { page } => {
                let mut state = self.engine.ports().state.lock();
                if state.program.contains_key(&(BASE + page)) {
                    state.pinned.insert(BASE + page);
                }
            }
            Step::Unpin => self.engine.ports().state.lock().pinned.clear(),
            Step::Share => {
                let mut state = self.engine.ports().state.lock();
                state.shared = state.program.keys().copied().collect();
            }
            Step::Refuse { start, pages } => {
                let pages = self.mapped(start, pages);
                self.engine.ports().state.lock().refusing.extend(pages);
            }
            Step::Shrink { pages } => {
                self.engine.shrink(0, pages);
            }
            Step::CompactStore { pages } => {
                let before = self.engine.free_frames();
                let freed = self.engine.compact_store(pages);
                assert_eq!(self.engine.free_frames(), before + freed);
            }
            Step::Recompress { steps } => (0..steps).for_each(|_| {
                self.engine.recompress(&mut self.worker);
            }),
            Step::DiscardFile => while self.engine.discard_one() {},
            Step::Compact { order } => {
                self.engine.compact(Order::new(order).unwrap());
            }
            Step::FailWrites { count } => self.engine.ports().state.lock().failing_writes = count,
            Step::FailReads { count } => self.engine.ports().state.lock().failing_reads = count,
            Step::OthersClaim { cluster } => {
                let mut state = self.engine.ports().state.lock();
                if !state.clusters.contains(&cluster) {
                    state.foreign_clusters.insert(cluster);
                }
            }
            Step::Sizes { policy } => self.engine.ports().state.lock().sizes = policy,
            Step::Advise { start, pages, advice } => {
                let range = BASE + start..(BASE + start + pages).min(BASE + PAGES);
                self.engine.ports().state.lock().advise(&range, advice);
            }
            Step::Disable { how } => self.engine.ports().state.lock().disabled = how,
            Step::OthersGo => self.engine.ports().state.lock().foreign_clusters.clear(),
            Step::BringAllIn => self.bring_all_in(),
            Step::Fork { child } => {
                self.engine.lend_file();
                if child {
                    self.engine.borrow_file();
                }
                let mut state = self.engine.ports().state.lock();
                let held = state.clusters.clone();
                state.foreign_clusters.extend(held);
            }
        }
    }

    fn verify(&mut self, page: u64) {
        if !self.model.contains_key(&page) || !self.touch(page) {
            return;
        }
        let state = self.engine.ports().state.lock();
        assert_eq!(state.program[&page], self.model[&page], "content of page {page:x}");
    }

    fn check(&self) {
        self.engine.check();
        assert!(self.worker.writes.is_empty(), "a write is unfinished");
        let state = self.engine.ports().state.lock();
        let taken = (state.homes.len() + state.program.len()) as i64;
        assert_eq!(state.charged, taken, "the charge equals the pages present");
    }
}

/// Random programs that the model runs: `FOLIOMEM_CASES=n`, 200 without it.
fn cases() -> u32 {
    std::env::var("FOLIOMEM_CASES").map_or(200, |cases| cases.parse().expect("a number of cases"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_program_reads_what_it_wrote(
        sizes in prop_oneof![Just(0u16), Just(1 << 4), Just(0x3fe), Just(1 << 2 | 1 << 9), any::<u16>()],
        granule in 0u8..10,
        limit_pages in 300i64..3000,
        // Either fewer slots than pages, or always enough.
        swap_clusters in prop_oneof![1u32..5, Just(64)],
        file_clusters in 0u32..8,
        discard in prop::sample::select(vec![Discard::Never, Discard::ForRoom, Discard::ForDevice]),
        // Too small, just large enough for the content, or so large that runs never run short.
        arena_frames in prop_oneof![Just(700u32), Just(6145), Just(16385)],
        compaction in prop::sample::select(&Variant::ALL[..]),
        swap_in in prop::sample::select(vec![SwapIn::Adaptive, SwapIn::Whole, SwapIn::Page]),
        no_room in prop::sample::select(vec![NoRoom::Reclaim, NoRoom::FallBack]),
        whole_out in prop_oneof![3 => Just(OrderSet::ALL), 1 => any::<u16>().prop_map(OrderSet::from_bits)],
        keep_copies: bool,
        make_ahead: bool,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let backing = BackingConfig { slots: file_clusters * 512, discard, store_pages: limit_pages as u32 / 4 };
        let backing = (file_clusters > 0).then_some(backing);
        let swap_slots = 512 * swap_clusters;
        let config = EngineConfig { swap_slots, arena_frames, compaction, backing, ..config(granule) };
        let config = EngineConfig { swap_in, no_room, whole_out, keep_copies, make_ahead, ..config };
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

/// A target of the fuzzer (`fuzz/`): each four bytes are the seed of a step, the first four that of
/// the world, so that what the fuzzer cuts and joins stays the same steps.
pub fn fuzz(data: &[u8]) {
    fn of_seed<S: Strategy>(strategy: &S, bytes: &[u8]) -> S::Value {
        use proptest::strategy::ValueTree;
        use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
        let mut seed = [0; 32];
        seed[..bytes.len()].copy_from_slice(bytes);
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), random);
        strategy.new_tree(&mut runner).expect("it refuses nothing").current()
    }
    let mut seeds = data.chunks(4).take(100);
    let Some(first) = seeds.next() else { return };
    let (sizes, granule, limit_pages, clusters) = of_seed(&(any::<u16>(), 0u8..10, 300i64..3000, 1u32..5), first);
    let mut world = World::new(sizes, granule, limit_pages, clusters);
    world.map(0, 600);
    world.native_touch(0, 100, 3);
    let step = step();
    for seed in seeds {
        world.run(&of_seed(&step, seed));
        world.check();
    }
    let pages: Vec<u64> = world.model.keys().copied().collect();
    pages.into_iter().for_each(|page| world.verify(page));
}

#[test]
fn the_corpus_of_the_fuzzer_is_replayed() {
    replay::replay("engine", fuzz);
}

#[test]
fn a_folio_is_swapped_out_and_in_whole() {
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
fn content_that_a_guard_discarded_does_not_return() {
    // The cases are folios, single pages, and content that is dropped before a fork.
    for (sizes, forks) in [(1 << 4, false), (1 << 0, false), (1 << 4, true)] {
        let mut world = World::new(sizes, 4, 4000, 64);
        fill(&mut world, 0..512, COMPRESSIBLE);
        world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 512));
        world.guard(0, 512, 4);
        let unheard = |world: &World| world.engine.counters().vm.discarded_unheard.get();
        if forks {
            world.engine.drop_all_lost();
            assert_eq!(world.engine.swapped_pages(), 384);
            // The child has no marks.
            world.engine.ports().state.lock().marks.clear();
            world.engine.mark_all();
        }
        (0..512).for_each(|page| world.verify(BASE + page));
        assert_eq!(unheard(&world), if forks { 0 } else { 128 });
        world.check();
    }
}

#[test]
fn pages_of_a_strided_stream_are_fetched_before_their_touch() {
    let mut world = World::new(0, 4, 4000, 64);
    world.map(0, PAGES);
    world.run(&Step::Write { page: 0, pages: PAGES, value: 11 });
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + PAGES));
    world.run(&Step::Stride { page: 3, step: 17, pages: 120 });
    let vm = &world.engine.counters().vm;
    assert!(vm.swap_ra.get() >= 110, "{} of 120 pages", vm.swap_ra.get());
    let mapped_in = vm.pswpin.get();
    assert!(mapped_in <= 121, "{mapped_in}: pages between the steps or after the mapping were fetched");
    world.check();
}

#[test]
fn where_parts_are_used_a_staged_folio_is_mapped_in_by_parts() {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    let half = PAGES / 2;
    world.map(0, PAGES);
    world.run(&Step::Write { page: 0, pages: half, value: 11 });
    for n in 0..4000u64 {
        if n.is_multiple_of(16) {
            world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + half));
        }
        // Touches one page of each folio.
        world.run(&Step::Read { page: (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % (half / 16) * 16, pages: 1 });
    }
    world.run(&Step::Write { page: half, pages: half, value: 11 });
    world.engine.stage_oldest(PAGES);
    let (staged, home) = (world.engine.staged_pages(), PageNumber(BASE + half + 100));
    assert_eq!(world.engine.fault(&mut world.worker, home), Served::Done(FaultKind::Home));
    assert_eq!(world.engine.staged_pages(), staged - 1);
    world.check();
}

#[test]
fn adjacent_folios_are_staged_in_one_move_except_pinned_ones() {
    let mut world = World::new(0, 4, 4000, 64);
    world.map(0, PAGES);
    world.run(&Step::Write { page: 0, pages: 256, value: 11 });
    assert_eq!(world.engine.stage_oldest(256), 256);
    assert_eq!(world.engine.ports().state.lock().moves_out, 16);
    world.run(&Step::Read { page: 0, pages: 256 });
    world.run(&Step::Pin { page: 100 });
    assert_eq!(world.engine.stage_oldest(256), 255);
    assert_eq!(world.engine.resident_pages(), 1);
    world.check();
}

#[test]
fn adjacent_folios_are_staged_together_despite_interleaved_touches() {
    let mut world = World::new(0, 4, 4000, 64);
    world.map(0, PAGES);
    let fill = |world: &mut World, value| {
        for page in 0..32 {
            world.run(&Step::Write { page, pages: 1, value });
            world.run(&Step::Write { page: 256 + page, pages: 1, value });
        }
    };
    fill(&mut world, 11);
    assert_eq!(world.engine.stage_oldest(64), 64);
    assert_eq!(world.engine.ports().state.lock().moves_out, 4, "each move takes 16 pages");
    world.check();
    // They return one by one to their present addresses, and MADV_PAGEOUT stages them again.
    fill(&mut world, 12);
    world.run(&Step::PageOut { start: 0, pages: 32 });
    assert_eq!(world.engine.ports().state.lock().moves_out, 6);
    assert_eq!(world.engine.resident_pages(), 32);
    world.run(&Step::Read { page: 0, pages: 32 });
    world.check();
}

#[test]
fn new_memory_written_in_order_is_made_ahead() {
    let mut world = World::new(1 << 4, 4, 8000, 64);
    world.map(0, 512);
    let faults = |world: &mut World, pages: Range<u64>| {
        let is_there = |world: &World, page| world.engine.ports().state.lock().program.contains_key(&(BASE + page));
        pages
            .filter(|&page| {
                let is_fault = !is_there(world, page);
                world.run(&Step::Write { page, pages: 1, value: page });
                is_fault
            })
            .count()
    };
    // No populated frame is free yet.
    assert_eq!(faults(&mut world, 0..256), 16);
    world.run(&Step::PageOut { start: 0, pages: 256 });
    let ready = world.engine.free_frames();
    assert!(ready > 192, "{ready}");
    assert!(faults(&mut world, 256..400) < 6);
    world.run(&Step::Discard { start: 384, pages: 128, every: 1 });
    world.check();
    // Only free populated frames are used, and the end of the mapping ends the stream.
    assert!(world.engine.free_frames() < ready - 128);
    assert!(faults(&mut world, 400..512) > 0);
    world.run(&Step::Read { page: 0, pages: 512 });
    world.check();
}

#[test]
fn unevictable_pages_are_retried_seldom_and_staged_once_movable() {
    let mut world = World::new(1 << 4, 4, 2000, 64);
    world.map(0, 1024);
    world.run(&Step::Write { page: 0, pages: 1024, value: 11 });
    world.run(&Step::Refuse { start: 0, pages: 1024 });
    let culled = |world: &World| world.engine.counters().vm.unevictable_pgs_culled.get();
    while culled(&world) < 1024 {
        world.engine.reclaim(&mut world.worker, 64);
    }
    world.check();
    let before = culled(&world);
    for _ in 0..20 {
        world.engine.reclaim(&mut world.worker, 64);
    }
    let tried = culled(&world) - before;
    assert!((20..=200).contains(&tried), "{tried}");
    world.engine.ports().state.lock().refusing.clear();
    while world.engine.reclaim(&mut world.worker, 64) > 0 {}
    assert!(world.engine.resident_pages() < 64, "{}", world.engine.resident_pages());
    world.check();
}

#[test]
fn unevictable_pages_do_not_count_for_the_protected_minimum() {
    let mut world = World::with(EngineConfig { protected_pages: 128, ..config(4) }, 1 << 4, 2000);
    world.map(0, 1280);
    world.run(&Step::Write { page: 0, pages: 1280, value: COMPRESSIBLE });
    world.run(&Step::Refuse { start: 0, pages: 1024 });
    for _ in 0..200 {
        world.engine.reclaim(&mut world.worker, 64);
    }
    world.check();
    let resident_or_staged = world.engine.resident_pages() + world.engine.staged_pages() - 1024;
    assert!((100..=128).contains(&resident_or_staged), "{resident_or_staged} movable pages are resident or staged");
    world.engine.ports().state.lock().refusing.clear();
    while world.engine.reclaim(&mut world.worker, 64) > 0 {}
    let resident_or_staged = world.engine.resident_pages() + world.engine.staged_pages();
    assert!(
        (100..=128).contains(&resident_or_staged),
        "{resident_or_staged} pages are resident or staged once all are movable"
    );
    world.check();
}

#[test]
fn pages_made_ahead_leave_existing_pages_alone() {
    let mut world = World::new(1 << 4, 4, 8000, 64);
    world.map(0, 512);
    world.map(1024, 1024);
    world.run(&Step::Write { page: 1024, pages: 1024, value: 11 });
    world.run(&Step::PageOut { start: 1024, pages: 1024 });
    // The engine does not know of pages that MADV_FREE left.
    world.run(&Step::Write { page: 256, pages: 256, value: 11 });
    world.run(&Step::Discard { start: 256, pages: 256, every: u64::MAX });
    world.run(&Step::Write { page: 0, pages: 512, value: 12 });
    world.check();
    world.wait();
    for _ in 0..20 {
        world.engine.reclaim(&mut world.worker, 600);
        world.wait();
    }
    world.check();
    let present = world.engine.ports().state.lock().program.len() as u64;
    assert_eq!(present, world.engine.resident_pages(), "every page of the program is managed");
}

/// Writes the ranges `mapped`, which have no gaps, in order, with free populated frames if `ready`.
/// Returns the number of new folios by order.
fn made_of_new_memory(sizes: u16, ready: bool, mapped: &[Range<u64>]) -> Vec<u64> {
    let mut world = World::new(sizes, 4, 16000, 64);
    let (start, len) = (mapped[0].start, mapped[mapped.len() - 1].end - mapped[0].start);
    // The addresses were used before.
    world.map(start, len);
    world.run(&Step::Write { page: start, pages: len, value: 12 });
    world.unmap(start, len);
    if ready {
        world.map(1536, 512);
        world.run(&Step::Write { page: 1536, pages: 512, value: 11 });
        world.run(&Step::PageOut { start: 1536, pages: 512 });
    }
    mapped.iter().for_each(|mapped| world.map(mapped.start, mapped.end - mapped.start));
    let before = world.allocated();
    world.run(&Step::Write { page: start, pages: len, value: 12 });
    world.check();
    world.allocated().iter().zip(before).map(|(now, before)| now - before).collect()
}

#[test]
fn folios_made_ahead_have_the_order_of_a_first_touch() {
    // Two mappings meet within a folio, where only single pages fit.
    let meeting = [0..295, 295..1024];
    let made = [false, true].map(|ready| made_of_new_memory(1 << 4, ready, &meeting));
    assert_eq!(made[0], made[1]);
    assert_eq!((made[0][0], made[0][4]), (16, 63));
    // The mapping starts within a block.
    for sizes in [1 << 9, 1 << 9 | 1 << 4] {
        let made = [false, true].map(|ready| made_of_new_memory(sizes, ready, std::slice::from_ref(&(300..1500))));
        assert_eq!(made[0], made[1]);
        assert_eq!(made[0][9], 1);
    }
}

#[test]
fn folios_with_a_swap_cache_entry_are_staged_before_older_ones() {
    let mut world = World::new(1 << 4, 4, 8000, 64);
    let (read, long_gone, written) = (0..64, 64..832, 1024..1088);
    for mapped in [0..832, written.clone()] {
        world.map(mapped.start, mapped.end - mapped.start);
    }
    for pages in [&read, &long_gone] {
        let (start, pages) = (pages.start, pages.end - pages.start);
        world.run(&Step::Write { page: start, pages, value: 11 });
        world.run(&Step::PageOut { start, pages });
    }
    world.run(&Step::Write { page: written.start, pages: 64, value: 12 });
    world.run(&Step::Read { page: read.start, pages: 64 });
    assert_eq!(world.engine.resident_pages(), 128);
    assert_eq!(world.engine.stage_oldest(64), 64);
    let is_there = |world: &World, page: u64| world.engine.ports().state.lock().program.contains_key(&(BASE + page));
    assert!(written.clone().all(|page| is_there(&world, page)));
    assert!(!read.clone().any(|page| is_there(&world, page)));
    world.check();
}

#[test]
fn folios_have_the_size_that_the_mapping_allows_now() {
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
    assert_eq!(allocated(&world), [0, 4, 9], "MADV_NOHUGEPAGE allows single pages only");
    // A swapped-out folio returns in the size that is allowed then.
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 2048));
    world.run(&Step::Sizes { policy: SizePolicy::always(OrderSet::from_bits(1 << 2)) });
    world.run(&Step::Read { page: 0, pages: 1000 });
    let swpin = |order| world.engine.counters().of(Order::new(order).unwrap()).swpin.get();
    assert!(swpin(2) > 0 && swpin(4) == 0 && swpin(9) == 0);
    world.check();
}

/// Returns a world with one written folio of 16 pages, without the parts in `lost` (their starts
/// and pages).
fn partially_mapped(lost: &[(u64, u64)]) -> World {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 16);
    world.run(&Step::Write { page: 0, pages: 16, value: 11 });
    lost.iter().for_each(|&(start, pages)| world.discard(start, pages, 1));
    world.check();
    world
}

/// Returns counters of folios of 16 pages: splits, deferred splits, folios now, and partially
/// mapped ones now.
fn splits(world: &World) -> [u64; 4] {
    let size = world.engine.counters().of(Order::new(4).unwrap());
    [&size.split, &size.split_deferred, &size.nr_anon, &size.nr_anon_partially_mapped].map(Counter::get)
}

#[test]
fn a_partially_mapped_folio_is_healed_and_swapped_out_whole() {
    let mut world = partially_mapped(&[(4, 4), (0, 1), (11, 2)]);
    assert_eq!((splits(&world), world.engine.resident_pages()), ([0, 1, 1, 1], 9));
    world.run(&Step::Write { page: 0, pages: 7, value: 21 });
    assert_eq!((splits(&world), world.engine.resident_pages()), ([0, 1, 1, 1], 13));
    world.run(&Step::Read { page: 0, pages: 16 });
    assert_eq!((splits(&world), world.engine.resident_pages()), ([0, 1, 1, 0], 16));
    assert_eq!(world.allocated()[0], 0, "no folio was allocated");
    world.run(&Step::PageOut { start: 0, pages: 16 });
    let size = world.engine.counters().of(Order::new(4).unwrap());
    assert_eq!((size.swpout.get(), size.split.get()), (1, 0));
    world.run(&Step::Read { page: 0, pages: 16 });
    world.check();
    // The folio counts again when it loses a part again.
    world.unmap(3, 1);
    assert_eq!(splits(&world), [0, 2, 1, 1]);
    world.check();
}

#[test]
fn a_hole_is_healed_by_the_order_of_a_first_touch() {
    let mut world = World::new(1 << 4 | 1 << 2, 4, 4000, 64);
    world.map(0, 16);
    world.run(&Step::Write { page: 0, pages: 16, value: 11 });
    world.discard(6, 9, 1);
    world.run(&Step::Write { page: 9, pages: 1, value: 11 });
    assert_eq!((world.engine.resident_pages(), splits(&world)), (7 + 4, [0, 1, 1, 1]));
    world.check();
}

#[test]
fn a_folio_unmapped_page_by_page_is_never_split() {
    let mut world = partially_mapped(&[]);
    for page in (0..16).map(|page| page * 7 % 16) {
        world.unmap(page, 1);
        world.check();
    }
    assert_eq!((splits(&world), world.engine.resident_pages()), ([0, 1, 0, 0], 0));
    assert_eq!(world.engine.ports().state.lock().charged, 0);
}

#[test]
fn discarding_whole_folios_splits_nothing() {
    let mut world = partially_mapped(&[]);
    world.map(16, 32);
    world.run(&Step::Write { page: 16, pages: 32, value: 11 });
    world.run(&Step::PageOut { start: 16, pages: 16 });
    world.discard(0, 16, 1);
    world.discard(16, 16, 1);
    world.discard(32, 16, BASE);
    world.wait();
    world.run(&Step::Read { page: 0, pages: 48 });
    assert_eq!(splits(&world), [0, 0, 3, 0]);
    world.check();
}

#[test]
fn reclaim_stages_the_rest_of_a_partially_mapped_folio() {
    for page_out in [false, true] {
        let mut world = partially_mapped(&[(4, 2)]);
        if page_out {
            world.run(&Step::PageOut { start: 12, pages: 1 });
            world.run(&Step::PageOut { start: 0, pages: 12 });
        } else {
            assert_eq!(world.engine.stage_oldest(1), 14);
            assert_eq!(world.engine.staged_pages(), 14);
            world.run(&Step::PageOut { start: 0, pages: 16 });
        }
        assert_eq!(splits(&world), [1, 1, 0, 0]);
        let out: Vec<u64> = Order::all().map(|order| world.engine.counters().of(order).swpout.get()).collect();
        assert_eq!(out, [0, 1, 1, 1, 0, 0, 0, 0, 0, 0], "the rest is split into the largest folios");
        world.check();
        world.run(&Step::Read { page: 0, pages: 16 });
        world.check();
    }
}

#[test]
fn a_folio_that_the_mapping_no_longer_allows_is_split_at_its_holes() {
    type Change = fn(&mut World);
    let forbid: Change = |world| world.run(&Step::Sizes { policy: SizePolicy::always(OrderSet::EMPTY) });
    let advise: Change = |world| world.run(&Step::Advise { start: 8, pages: 2, advice: Advice::NoHuge });
    let map_anew: Change = |world| {
        world.unmap(8, 8);
        world.map(8, 8);
    };
    for change in [forbid, advise, map_anew] {
        let mut world = partially_mapped(&[(4, 2)]);
        change(&mut world);
        assert_eq!(splits(&world), [0, 1, 1, 1]);
        world.run(&Step::Write { page: 5, pages: 1, value: 11 });
        assert_eq!(splits(&world), [1, 1, 0, 0]);
        assert_eq!(world.allocated()[0], 1);
        world.run(&Step::Read { page: 0, pages: 16 });
        world.check();
    }
}

#[test]
fn pages_that_madv_free_left_fill_their_holes() {
    let mut world = partially_mapped(&[]);
    world.discard(4, 8, 2);
    assert_eq!((splits(&world), world.engine.resident_pages()), ([0, 1, 1, 1], 8));
    world.wait();
    world.check();
    assert_eq!((splits(&world), world.engine.resident_pages()), ([0, 1, 1, 1], 12));
    world.run(&Step::Read { page: 0, pages: 16 });
    assert_eq!(splits(&world), [0, 1, 1, 0]);
    world.check();
}

#[test]
fn a_partially_mapped_folio_that_moves_is_split() {
    let mut world = partially_mapped(&[(4, 2)]);
    world.map(64, 16);
    world.run(&Step::Write { page: 64, pages: 16, value: 12 });
    world.discard(64, 1, 1);
    // Moves it to where a part of another folio is.
    world.remap(0, 64, 8);
    assert_eq!(splits(&world), [2, 2, 0, 0]);
    world.check();
    world.run(&Step::Read { page: 0, pages: 128 });
    world.check();
}

#[test]
fn partially_mapped_folios_migrate_and_are_healed_there() {
    let mut world = World::with(config(4), 1 << 4, 4000);
    world.map(0, 1024);
    world.run(&Step::Write { page: 0, pages: 1024, value: 11 });
    (0..64).for_each(|folio| world.discard(folio * 16 + folio % 13, 4, 1));
    (0..64).step_by(2).for_each(|folio| world.unmap(folio * 16, 16));
    assert_eq!(splits(&world), [0, 64, 32, 32]);
    assert!(world.engine.compact(MAX_ORDER));
    let moved_pages = world.engine.counters().vm.pgmigrate_success.get();
    assert!(
        moved_pages >= 16 * 16 && moved_pages.is_multiple_of(16),
        "{moved_pages} pages were moved, including holes"
    );
    assert_eq!(splits(&world), [0, 64, 32, 32]);
    world.check();
    world.run(&Step::Read { page: 0, pages: 1024 });
    assert_eq!(splits(&world), [0, 64, 32, 0]);
    world.check();
}

#[test]
fn frames_of_holes_are_freed_when_no_run_is_left() {
    // All frames except the spare one belong to folios of which one page is left.
    let mut world = World::with(EngineConfig { arena_frames: 1025, ..config(4) }, 1 << 4 | 1 << 3, 4000);
    world.map(0, 1024);
    for folio in 0..64 {
        world.run(&Step::Write { page: folio * 16, pages: 16, value: 11 });
        world.discard(folio * 16 + 1, 15, 1);
    }
    assert_eq!((splits(&world), world.engine.resident_pages()), ([0, 64, 64, 64], 64));
    world.map(1024, 8);
    world.run(&Step::Write { page: 1024, pages: 8, value: 11 });
    assert_eq!(world.engine.counters().of(Order::new(3).unwrap()).anon_fault_alloc.get(), 1);
    assert_eq!(splits(&world), [32, 64, 32, 32], "the folios of the first block are split");
    world.check();
    world.run(&Step::Read { page: 0, pages: 1032 });
    world.check();
}

#[test]
fn a_store_full_of_holes_is_compacted() {
    let mut world = World::new(0, 0, 4000, 64);
    world.map(0, 2000);
    // The lengths are about half a page, in few size classes. Three pages in four are discarded
    // later.
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

/// Returns a world with every second of 1533 pages, each its own folio, in an arena without a free
/// run of 512 frames.
fn scattered() -> World {
    let config = EngineConfig { arena_frames: 3 * 512 + 257, ..config(4) };
    let mut world = World::with(config, 1 << 9, 4000);
    for block in 0..3 {
        // Each mapping is too short for a folio of 2 MiB.
        world.map(512 * block, 511);
        world.run(&Step::Write { page: 512 * block, pages: 511, value: 2101 });
    }
    for page in (0..1533).filter(|page| page % 2 == 1) {
        world.run(&Step::Unmap { start: page + page / 511, pages: 1 });
    }
    assert_eq!(world.engine.resident_pages(), 767);
    world
}

/// Checks that a first touch finds a run of 512 frames, and that the content of the program stays.
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
fn a_fault_migrates_home_frames_even_of_pinned_pages() {
    let mut world = scattered();
    (0..1536).for_each(|page| world.run(&Step::Pin { page }));
    assert_eq!(world.engine.ports().state.lock().pinned.len(), 767);
    touch_2m(&mut world);
}

#[test]
fn a_fault_migrates_staged_folios() {
    let mut world = scattered();
    assert_eq!(world.engine.stage_oldest(2000), 767);
    touch_2m(&mut world);
}

#[test]
fn the_store_evacuates_frames_for_a_run() {
    // Many pieces in a zspage, and raw pieces of 256 KiB that are chains of extents.
    for (sizes, granule, value) in [(0, 0, 2101), (1 << 6, 6, 7 * 300)] {
        // This variant scans the arena from the bottom, where the store is.
        let mut world = World::with(EngineConfig { compaction: Variant::FreeSplit, ..config(granule) }, sizes, 4000);
        world.map(0, 1024);
        (0..1024).step_by(64).for_each(|page| world.run(&Step::Write { page, pages: 64, value: value + page * 7 }));
        world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 1024));
        assert_eq!(world.engine.swapped_pages(), 1024);
        // There is room in runs smaller than the wanted one.
        world.engine.ports().state.lock().sizes = SizePolicy::always(OrderSet::from_bits(0));
        world.map(1024, 1024);
        world.run(&Step::Write { page: 1024, pages: 1024, value: 9 });
        (1024..2048).step_by(2).for_each(|page| world.run(&Step::Unmap { start: page, pages: 1 }));
        let vm = &world.engine.counters().vm;
        assert!(world.engine.compact(Order::new(9).unwrap()), "{vm:?}");
        assert!(vm.pgmigrate_success.get() >= 512 && vm.pgmigrate_fail.get() == 0, "{vm:?}");
        world.check();
        world.run(&Step::Read { page: 0, pages: 1024 });
        world.check();
    }
}

#[test]
fn spare_runs_of_the_highest_order_go_back_and_smaller_ones_stay() {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 1600);
    world.run(&Step::Write { page: 0, pages: 1600, value: 5 });
    assert_eq!(world.engine.stage_oldest(1600), 1600);
    world.unmap(0, 1600);
    assert_eq!(world.engine.free_frames(), 1600);
    assert_eq!(world.engine.give_back_runs(600), 512, "a second run would leave too few frames");
    assert_eq!(world.engine.give_back_runs(0), 1024);
    assert_eq!(world.engine.give_back_runs(0), 0, "no run of 512 frames is left");
    assert_eq!(world.engine.ports().state.lock().charged, 64);
    world.check();
}

#[test]
fn unevictable_pages_do_not_hide_evictable_ones() {
    let mut world = World::new(0, 0, 4000, 64);
    world.map(0, 700);
    // These pages are active, because they were touched while staged. The others are on probation
    // and cannot move.
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
fn swap_cache_entries_give_their_slots_to_folios_being_swapped_out() {
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
    assert_eq!(world.engine.counters().vm.nr_swapcached.get(), 512, "every slot belongs to an entry");
    world.run(&Step::Write { page: 512, pages: 512, value: 22 });
    out(&mut world, 512);
    let counters = world.engine.counters().of(Order::new(4).unwrap());
    assert_eq!((counters.swpout.get(), counters.swpout_fallback.get()), (64, 0));
    assert_eq!(world.engine.counters().vm.nr_swapcached.get(), 0);
    world.run(&Step::Read { page: 0, pages: 1024 });
    world.check();
}

#[test]
fn copy_on_write_after_a_fork_waits_for_room() {
    let mut world = World::new(1 << 4, 4, 1000, 64);
    world.map(0, 1600);
    world.run(&Step::Write { page: 0, pages: 900, value: 5 });
    (0..20).for_each(|_| world.engine.charge_copies(&mut world.worker, 16));
    let charged = |world: &World| world.engine.ports().state.lock().charged;
    assert!(charged(&world) <= 1000, "{} pages", charged(&world));
    assert!(world.engine.resident_pages() < 700);
    let vm = &world.engine.counters().vm;
    let (stalls, stolen) = (vm.allocstall.get(), vm.pgsteal_direct.get());
    assert!(stalls > 0 && stolen > 200, "{stalls} stalls, {stolen} pages: they must count as direct reclaim");
    world.engine.ports().uncharge(320);
    world.run(&Step::Read { page: 0, pages: 900 });
    // Incompressible data exceed the limit, and the wait for room ends.
    (0..1600).for_each(|page| world.run(&incompressible(page)));
    world.run(&Step::Share);
    (0..20).for_each(|_| world.engine.charge_copies(&mut world.worker, 16));
    assert!(charged(&world) > 1600);
    world.engine.ports().uncharge(320);
    world.check();
}

#[test]
fn a_folio_without_contiguous_slots_is_swapped_out_page_by_page() {
    let mut world = World::new(1 << 4, 4, 4000, 1);
    world.map(0, 512);
    world.map(512, 16);
    (0..33).for_each(|folio| world.run(&Step::Write { page: folio * 16, pages: 16, value: 3 }));
    world.run(&Step::PageOut { start: 0, pages: 512 });
    // There is room for a folio, but never for two adjacent pages.
    (0..16).for_each(|folio| world.unmap(folio * 32 + 5, 1));
    world.run(&Step::PageOut { start: 512, pages: 16 });
    let size = world.engine.counters().of(Order::new(4).unwrap());
    assert_eq!((size.swpout.get(), size.swpout_fallback.get()), (32, 1));
    assert_eq!((world.engine.resident_pages(), world.engine.staged_pages()), (0, 0));
    assert_eq!(world.engine.swapped_pages(), 512);
    world.engine.check();
}

/// Returns a world with 1600 pages in pieces of 64 KiB that compress to half, swapped out, after
/// two passes of recompression.
fn recompressed(backing: Option<BackingConfig>) -> World {
    let mut world = World::with(EngineConfig { backing, ..config(4) }, 1 << 4, 4000);
    world.map(0, 1600);
    (0..1600).for_each(|page| world.run(&Step::Write { page, pages: 1, value: 31_000 + page / 16 * 7 }));
    world.run(&Step::PageOut { start: 0, pages: 1600 });
    world.run(&Step::Recompress { steps: 200 });
    world.engine.publish_store();
    world.check();
    world
}

#[test]
fn idle_pieces_are_recompressed_once_and_keep_their_content() {
    let mut world = recompressed(None);
    let store = &world.engine.counters().store;
    let (tried, recompressed, saved) =
        (store.recompress_tried.get(), store.recompressed.get(), store.recompress_saved.get());
    assert_eq!(tried, 100, "each piece is tried once");
    assert!((60..70).contains(&recompressed), "{recompressed} pieces became smaller with the second codec");
    let size = |world: &World| {
        world.engine.publish_store();
        world.engine.counters().store.compr_data_size.get()
    };
    assert!(saved > recompressed * 7000, "{saved} bytes");
    let before = size(&world);
    world.run(&Step::Recompress { steps: 200 });
    assert_eq!(world.engine.counters().store.recompress_tried.get(), 100);
    // Pages written again count as new.
    world.run(&Step::Read { page: 0, pages: 1600 });
    (0..1600).for_each(|page| world.run(&Step::Write { page, pages: 1, value: 31_001 + page / 16 * 7 }));
    world.run(&Step::PageOut { start: 0, pages: 1600 });
    assert!(size(&world) > before);
    world.run(&Step::Recompress { steps: 200 });
    // Sampling windows are swapped in and out page by page.
    let tried = world.engine.counters().store.recompress_tried.get();
    assert!((200..240).contains(&tried), "{tried}");
    world.run(&Step::Read { page: 0, pages: 1600 });
    world.check();
}

#[test]
fn recompressed_pieces_go_to_the_swap_file_and_back() {
    let backing = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 100 };
    let mut world = recompressed(Some(backing));
    assert!(world.engine.counters().store.recompressed.get() > 60);
    world.run(&Step::Reclaim { pages: 800 });
    assert!(world.engine.counters().backing.bd_writes.get() > 200);
    world.check();
    world.run(&Step::Read { page: 0, pages: 1600 });
    assert!(world.engine.counters().backing.bd_reads.get() > 200);
    world.check();
}

#[test]
fn a_corrupted_recompressed_piece_is_never_mapped_in() {
    let mut world = recompressed(None);
    // Flips one bit of each piece.
    world.engine.ports().state.lock().pieces.values_mut().for_each(|words| words[3] ^= 1);
    (0..1600).step_by(16).for_each(|page| assert!(!world.touch(BASE + page)));
    assert_eq!(world.engine.counters().vm.store_corrupted.get(), 100);
    world.check();
}

/// Returns a world with 1600 pages in pieces of 64 KiB, swapped out, where only one page of each of
/// the first 75 pieces was touched.
fn touched_singly() -> World {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 1600);
    (0..1600).for_each(|page| world.run(&Step::Write { page, pages: 1, value: 41_000 + page }));
    world.run(&Step::PageOut { start: 0, pages: 1600 });
    for touch in 1..1000u64 {
        if touch.is_multiple_of(50) {
            world.run(&Step::PageOut { start: 0, pages: 1200 });
        }
        let piece = (touch.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 75;
        // No read-ahead, because so few pages contain strided streams by chance.
        world.engine.fault(&mut world.worker, PageNumber(BASE + piece * 16 + 5));
    }
    world.check();
    world
}

#[test]
fn where_parts_pay_a_large_piece_is_exploded() {
    for gone in [0, 3] {
        let mut world = touched_singly();
        world.run(&Step::Discard { start: 1420, pages: gone, every: 1 });
        let vm = |world: &World| world.engine.counters().vm.pswpin.get();
        let (in_before, staged_before) = (vm(&world), world.engine.staged_pages());
        let size = |world: &World| {
            world.engine.publish_store();
            world.engine.counters().store.compr_data_size.get()
        };
        let before_bytes = size(&world);
        assert!(world.touch(BASE + 1410));
        assert_eq!(vm(&world) - in_before, 16 - gone, "the whole piece is read at once");
        assert_eq!(world.engine.staged_pages() - staged_before, 15 - gone, "one page is resident");
        assert!(size(&world) < before_bytes);
        world.check();
        // The other pages return from the arena; untouched ones are swapped out one by one.
        assert!(world.touch(BASE + 1411));
        assert_eq!(vm(&world) - in_before, 16 - gone);
        world.run(&Step::PageOut { start: 1200, pages: 400 });
        world.check();
        assert!(world.touch(BASE + 1412));
        assert_eq!(vm(&world) - in_before, 17 - gone);
        world.run(&Step::Read { page: 0, pages: 1600 });
        world.check();
    }
}

#[test]
fn a_corrupted_exploded_piece_costs_only_the_touched_page() {
    let mut world = touched_singly();
    world.engine.ports().state.lock().corrupt_next = true;
    assert!(!world.touch(BASE + 1410));
    assert_eq!(world.engine.counters().vm.store_corrupted.get(), 1);
    // The other pages can be read again.
    (1408..1410).for_each(|page| assert!(world.touch(BASE + page)));
    world.check();
}

#[test]
fn queues_stay_short_without_memory_pressure() {
    let mut world = World::new(0, 4, 4000, 64);
    for _ in 0..20 {
        world.map(0, 1000);
        world.run(&Step::Write { page: 0, pages: 1000, value: 51_000 });
        world.run(&Step::Unmap { start: 0, pages: 1000 });
        world.engine.maintain();
        assert!(world.engine.queued_claims() < 7000);
    }
    world.map(0, 1000);
    world.run(&Step::Write { page: 0, pages: 1000, value: 52_000 });
    world.engine.maintain();
    // The remaining pages are swapped out as usual.
    world.run(&Step::Reclaim { pages: 900 });
    assert!(world.engine.swapped_pages() >= 500, "{} pages", world.engine.swapped_pages());
    world.run(&Step::Read { page: 0, pages: 1000 });
    world.check();
}

#[test]
fn a_new_folio_at_an_old_address_is_the_youngest() {
    let mut world = World::new(0, 4, 4000, 64);
    world.map(0, 200);
    world.run(&Step::Write { page: 0, pages: 100, value: 53_000 });
    world.run(&Step::Write { page: 100, pages: 100, value: 54_000 });
    world.run(&Step::Unmap { start: 0, pages: 100 });
    world.map(0, 100);
    world.run(&Step::Write { page: 0, pages: 100, value: 55_000 });
    world.engine.stage_oldest(100);
    let state = world.engine.ports().state.lock();
    let in_program = |pages: Range<u64>| pages.filter(|page| state.program.contains_key(&(BASE + page))).count();
    assert_eq!((in_program(0..100), in_program(100..200)), (100, 0));
    drop(state);
    world.check();
}

#[test]
fn a_corrupted_piece_is_never_mapped_in() {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 64);
    world.run(&Step::Write { page: 0, pages: 64, value: 11 });
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 64));
    world.engine.ports().state.lock().corrupt_next = true;
    let served = world.engine.fault(&mut world.worker, PageNumber(BASE + 16));
    assert!(matches!(served, Served::Done(_)));
    let state = world.engine.ports().state.lock();
    assert_eq!(state.poisoned.len(), 16, "the whole folio is poisoned");
    assert!((16..32).all(|page| !state.program.contains_key(&(BASE + page))));
    drop(state);
    assert_eq!(world.engine.counters().vm.store_corrupted.get(), 1);
    world.check();
}

/// Returns a world with a folio of 16 pages that is swapped out.
fn swapped_out() -> World {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 64);
    world.run(&Step::Write { page: 0, pages: 64, value: 11 });
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 64));
    world
}

/// The canary: if this test does not fail, the model notices nothing.
#[test]
#[should_panic(expected = "content of page")]
fn the_model_notices_one_wrong_bit() {
    let mut world = swapped_out();
    world.engine.ports().state.lock().flip_next = true;
    (0..64).for_each(|page| world.verify(BASE + page));
}

#[test]
fn one_wrong_bit_of_a_stored_piece_is_never_mapped_in() {
    let mut world = swapped_out();
    for words in world.engine.ports().state.lock().pieces.values_mut() {
        words[0] ^= 1 << 63;
    }
    let served = world.engine.fault(&mut world.worker, PageNumber(BASE + 16));
    assert!(matches!(served, Served::Done(_)));
    assert!((16..32).all(|page| !world.engine.ports().state.lock().program.contains_key(&(BASE + page))));
    assert_eq!(world.engine.counters().vm.store_corrupted.get(), 1);
}

#[test]
fn pages_of_one_repeated_word_are_counted_both_ways() {
    let mut world = World::new(1 << 4, 4, 4000, 64);
    world.map(0, 16);
    world.run(&Step::NativeTouch { start: 0, pages: 16, value: 0 });
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 16));
    let vm = &world.engine.counters().vm;
    assert_eq!((vm.swpout_zero.get(), vm.pswpout.get()), (16, 16));
    (0..16).for_each(|page| world.verify(BASE + page));
    let vm = &world.engine.counters().vm;
    assert_eq!((vm.swpin_zero.get(), vm.pswpin.get()), (16, 16));
}

#[test]
fn data_that_do_not_fit_exceed_the_limit_instead_of_being_lost() {
    let mut world = World::new(0, 0, 300, 64);
    world.map(0, 1000);
    world.write_incompressible(1000);
    world.run(&Step::Read { page: 0, pages: 1000 });
    world.check();
}

/// Writes `value` to pages never touched before; returns the maximum charge meanwhile.
fn fill(world: &mut World, pages: Range<u64>, value: u64) -> i64 {
    world.engine.ports().state.lock().mappings.push((BASE + pages.start..BASE + pages.end, Advice::None));
    let mut most = 0;
    for page in pages {
        world.model.insert(BASE + page, value);
        assert!(world.touch(BASE + page));
        let mut state = world.engine.ports().state.lock();
        state.program.insert(BASE + page, value);
        most = most.max(state.charged);
    }
    most
}

/// A value that is neither filled nor raw in the double, and compresses well.
const COMPRESSIBLE: u64 = 11;
/// A value that is raw in the double: a multiple of 7.
const INCOMPRESSIBLE: u64 = 7;

#[test]
fn reclaim_backs_off_from_incompressible_data_and_recovers() {
    let config = EngineConfig { arena_frames: 1 << 17, swap_slots: 512 * 256, protected_pages: 64, ..config(4) };
    let mut world = World::with(config, 1 << 4, 2000);
    // 2500 compressible folios: the charge never exceeds the limit, and the excess is compressed
    // once.
    let most = fill(&mut world, 0..40_000, COMPRESSIBLE);
    assert!(most <= 2064 && !world.engine.reclaim_is_futile(), "{most} pages");
    world.engine.ports().state.lock().compressions = 0;
    // The next 2500 folios do not compress.
    let stalls = world.engine.counters().vm.allocstall.get();
    fill(&mut world, 40_000..80_000, INCOMPRESSIBLE);
    assert!(world.engine.reclaim_is_futile());
    let compressions = world.engine.ports().state.lock().compressions;
    let stalls = world.engine.counters().vm.allocstall.get() - stalls;
    assert!(compressions < 1500 && stalls < 150, "{compressions} pieces compressed, {stalls} stalls for 2500 folios");
    // The next folios compress again; they are swapped out after a few faults.
    let before = world.engine.ports().state.lock().charged;
    let most = fill(&mut world, 80_000..100_000, COMPRESSIBLE);
    assert!(most - before < 100 * 16, "{} pages more", most - before);
    world.check();
    (0..100_000).step_by(97).for_each(|page| world.verify(BASE + page));
    world.check();
}

#[test]
fn bringing_all_in_with_a_full_arena_evicts_nothing() {
    for (no_room, swap_in) in [(NoRoom::Reclaim, SwapIn::Adaptive), (NoRoom::FallBack, SwapIn::Whole)] {
        for value in [COMPRESSIBLE, INCOMPRESSIBLE] {
            let config = EngineConfig { arena_frames: 700, no_room, swap_in, ..config(4) };
            let mut world = World::with(config, 1 << 4, 400);
            fill(&mut world, 0..2048, value);
            world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 2048));
            world.bring_all_in();
            assert_eq!(world.engine.staged_pages() + world.engine.swapped_pages(), 0);
            world.check();
        }
    }
}

#[test]
fn a_full_arena_loses_nothing_and_still_serves_faults() {
    let mut world = World::with(EngineConfig { arena_frames: 1200, ..config(4) }, 1 << 4, 400);
    // Some folios are swapped out and must return when no frame is free.
    fill(&mut world, 0..512, INCOMPRESSIBLE);
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 512));
    fill(&mut world, 512..2048, INCOMPRESSIBLE + 7);
    assert!(world.engine.ports().state.lock().arena_is_full);
    let first_touches = world.engine.counters().vm.unmanaged_arena_full.get();
    assert!((800..1400).contains(&first_touches), "{first_touches} pages");
    world.check();
    world.engine.ports().state.lock().corrupt_next = true;
    assert!(!world.touch(BASE + 40), "a corrupted page is not mapped in");
    (0..2048).for_each(|page| world.verify(BASE + page));
    let swapped_in = world.engine.counters().vm.unmanaged_arena_full.get() - first_touches;
    // These are the pages of the first folio; after that the frames of its piece are free.
    assert_eq!(swapped_in, 16);
    world.check();
    // Once there is room, the pages are managed again.
    world.unmap(0, 1400);
    world.engine.shrink(0, 1200);
    assert_eq!(world.engine.adopt(PageNumber(BASE)..PageNumber(BASE + 2048)), Ok(()));
    assert_eq!(world.engine.resident_pages() + world.engine.staged_pages() + world.engine.swapped_pages(), 648);
    world.check();
}

#[test]
fn incompressible_data_go_to_the_swap_file_instead_of_exceeding_the_limit() {
    let backing = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 100 };
    let mut world = World::with_backing(400, backing);
    world.map(0, 2000);
    for page in 0..2000 {
        world.run(&incompressible(page));
        let charged = world.engine.ports().state.lock().charged;
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
    assert!(world.engine.ports().state.lock().clusters.is_empty(), "an empty file holds no clusters");
    assert!(world.engine.counters().backing.bd_discards.get() >= 1500);
}

#[test]
fn a_failing_or_full_swap_file_is_ignored() {
    for (clusters, failing) in [(8, u32::MAX), (1, 0)] {
        let backing = BackingConfig { slots: 512 * clusters, discard: Discard::ForRoom, store_pages: 100 };
        let mut world = World::with_backing(400, backing);
        world.engine.ports().state.lock().failing_writes = failing;
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
fn batches_overlap_and_survive_failed_writes() {
    for failing in [0, 1, 2] {
        let backing = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 600 };
        let mut world = World::with_backing(2000, backing);
        world.map(0, 1000);
        world.write_incompressible(1000);
        world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 1000));
        world.engine.ports().state.lock().failing_writes = failing;
        world.run(&Step::Reclaim { pages: 300 });
        let most = world.engine.ports().state.lock().most_writes;
        assert_eq!(most, if failing == 0 { MAX_WRITES } else { most }, "the next batch starts while one is in flight");
        let failed = world.engine.counters().backing.failed_writes.get();
        assert!(failed <= failing.into() && (failing == 0 || failed > 0), "{failed} failures of {failing}");
        world.check();
        world.run(&Step::Read { page: 0, pages: 1000 });
        world.check();
    }
}

#[test]
fn an_unreadable_piece_of_the_swap_file_poisons_its_pages() {
    let backing = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 0 };
    let mut world = World::with_backing(400, backing);
    world.map(0, 1000);
    world.write_incompressible(1000);
    world.engine.ports().state.lock().failing_reads = 1;
    let served = world.engine.fault(&mut world.worker, PageNumber(BASE));
    assert!(matches!(served, Served::Done(_)));
    let state = world.engine.ports().state.lock();
    assert_eq!(state.poisoned.len(), 16, "the whole folio is poisoned");
    assert!((0..16).all(|page| !state.program.contains_key(&(BASE + page))));
    drop(state);
    assert_eq!(world.engine.counters().backing.failed_reads.get(), 1);
    world.check();
}
