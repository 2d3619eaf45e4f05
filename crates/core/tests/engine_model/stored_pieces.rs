//! Tests of stored pieces: compaction of the store, recompression, explosion and corruption.

use super::step::Step;
use super::world::{BASE, World, config};
use foliomem_core::compaction::Variant;
use foliomem_core::engine::{BackingConfig, EngineConfig, Served};
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::{Order, OrderSet, PageNumber};

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

/// Returns a world with 1600 pages in pieces of 64 KiB that compress to half, swapped out, after
/// two passes of recompression.
pub fn recompressed(backing: Option<BackingConfig>) -> World {
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
    assert_eq!(world.engine.free_frames(), 0, "what is saved goes back to the system, for there is room");
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
