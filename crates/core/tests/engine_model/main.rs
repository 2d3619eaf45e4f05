//! Tests of the whole engine against a naive model. A program maps, writes, reads, discards, remaps
//! and unmaps at random under a small budget, with pinned and shared pages, and must read what it
//! wrote; also with a swap file that fails, fills up, and is shared with other processes. `check()`
//! walks the whole engine after every step.

#[path = "../double/mod.rs"]
mod double;
mod folios;
mod partially_mapped;
#[cfg(not(fuzzing))]
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod room;
mod shared_store;
mod step;
mod stored_pieces;
mod swap_file;
mod world;

use foliomem_core::compaction::Variant;
use foliomem_core::engine::{BackingConfig, EngineConfig, NoRoom};
use foliomem_core::locality::SwapIn;
use foliomem_types::discard::Discard;
use foliomem_types::units::OrderSet;
use proptest::prelude::*;
use step::step;
use world::{World, config};

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
        is_shared_store: bool,
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
        world.engine.ports().state.lock().is_shared_store = is_shared_store && file_clusters > 0;
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
