//! Tests of room: reclaim, the arena, compaction, and limits that the data exceed.

use super::step::{Step, incompressible};
use super::world::{BASE, COMPRESSIBLE, INCOMPRESSIBLE, PAGES, World, config, fill};
use foliomem_core::engine::{EngineConfig, NoRoom};
use foliomem_core::locality::SwapIn;
use foliomem_core::ports::Budget;
use foliomem_types::units::{Order, PageNumber};
use std::ops::Range;

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
fn a_folio_that_the_limit_has_no_room_for_returns_by_a_page() {
    let mut world = World::with(EngineConfig { swap_in: SwapIn::Whole, ..config(4) }, 1 << 4, 4000);
    world.map(0, 32);
    world.run(&Step::Write { page: 0, pages: 32, value: COMPRESSIBLE });
    world.run(&Step::PageOut { start: 0, pages: 32 });
    world.engine.shrink(0, u32::MAX);
    let room = 4000 - world.engine.ports().state.lock().charged;
    world.engine.ports().state.lock().charged += room;
    world.run(&Step::Read { page: 3, pages: 1 });
    let size = world.engine.counters().of(Order::new(4).unwrap());
    assert_eq!((size.swpin_fallback.get(), size.swpin_fallback_charge.get()), (1, 1));
    world.engine.ports().state.lock().charged -= room;
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
fn data_that_do_not_fit_exceed_the_limit_instead_of_being_lost() {
    let mut world = World::new(0, 0, 300, 64);
    world.map(0, 1000);
    world.write_incompressible(1000);
    world.run(&Step::Read { page: 0, pages: 1000 });
    world.check();
}

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
