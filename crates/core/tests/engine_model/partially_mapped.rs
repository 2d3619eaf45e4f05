//! Tests of partially mapped folios.

use super::step::Step;
use super::world::{BASE, World, config};
use foliomem_core::engine::EngineConfig;
use foliomem_types::counters::Counter;
use foliomem_types::size_policy::{Advice, SizePolicy};
use foliomem_types::units::{MAX_ORDER, Order, OrderSet};

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
