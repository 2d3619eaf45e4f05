//! Tests of folios in memory and in swap: sizes, readahead, staging, and what guards discard.

use super::step::Step;
use super::world::{BASE, COMPRESSIBLE, PAGES, World, fill};
use foliomem_core::engine::Served;
use foliomem_core::ports::MoveError;
use foliomem_types::counters::FaultKind;
use foliomem_types::size_policy::{Advice, SizePolicy};
use foliomem_types::units::{MAX_ORDER, Order, OrderSet, PageNumber};
use std::ops::Range;

/// Returns a world with 512 pages in folios of these `sizes`, all swapped out.
fn swapped_out(sizes: u16) -> World {
    let mut world = World::new(sizes, 4, 4000, 64);
    fill(&mut world, 0..512, COMPRESSIBLE);
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + 512));
    world
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
        let mut world = swapped_out(sizes);
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
fn a_child_has_its_content_and_not_the_zeros_that_came_first() {
    for sizes in [1 << 0, 1 << 4, 1 << 9] {
        let mut world = swapped_out(sizes);
        // Some of the pages are staged.
        world.run(&Step::Read { page: 0, pages: 64 });
        world.engine.stage_oldest(64);
        assert!(world.add_strays(2) > 200);
        world.engine.remove_strays().unwrap();
        world.check();
        (0..512).for_each(|page| world.verify(BASE + page));
        world.check();
    }
}

#[test]
fn strays_that_cannot_be_removed_are_reported() {
    for (error, refuse) in [(MoveError::Refused, 100), (MoveError::Busy, 0)] {
        let mut world = swapped_out(1 << 4);
        world.add_strays(1);
        {
            let mut state = world.engine.ports().state.lock();
            let set = if error == MoveError::Busy { &mut state.pinned } else { &mut state.refusing };
            set.insert(BASE + refuse);
        }
        assert_eq!(world.engine.remove_strays(), Err(error));
        let state = world.engine.ports().state.lock();
        assert_eq!(state.program.keys().copied().collect::<Vec<_>>(), [BASE + refuse], "the others are removed");
    }
}

#[test]
fn a_page_that_a_child_shares_with_its_parent_is_its_content() {
    for sizes in [1 << 0, 1 << 4, 1 << 9] {
        let mut world = swapped_out(sizes);
        // Another thread's new mapping, of which no event is received.
        let newer = BASE + 30..BASE + 40;
        {
            let mut state = world.engine.ports().state.lock();
            state.program.extend(newer.clone().map(|page| (page, 9)));
            state.shared.extend(newer.clone());
            state.charged += 10;
        }
        world.model.extend(newer.map(|page| (page, 9)));
        world.add_strays(3);
        world.engine.remove_strays().unwrap();
        assert_eq!(world.engine.swapped_pages(), 502);
        world.check();
        world.bring_all_in();
        (0..512).for_each(|page| world.verify(BASE + page));
    }
}

#[test]
fn a_new_folio_does_not_cover_pages_that_the_program_has() {
    for order in [4, 9] {
        let mut world = World::new(1 << order, 4, 4000, 64);
        world.map(0, 512);
        // They are not adopted yet.
        let native = BASE + 4..BASE + 7;
        {
            let mut state = world.engine.ports().state.lock();
            state.program.extend(native.clone().map(|page| (page, 9)));
            state.charged += 3;
            state.changes = 1;
        }
        world.model.extend(native.map(|page| (page, 9)));
        assert_eq!(world.engine.fault(&mut world.worker, PageNumber(BASE)), Served::Again);
        assert_eq!(world.engine.staged_pages(), (1 << order) - 3);
        world.engine.ports().state.lock().changes = 0;
        assert_eq!(world.engine.adopt(PageNumber(BASE)..PageNumber(BASE + 512)), Ok(()));
        world.check();
        world.bring_all_in();
        (0..512).for_each(|page| world.verify(BASE + page));
    }
}

#[test]
fn pages_return_alone_while_content_may_be_discarded_unheard() {
    let mut world = swapped_out(1 << 4);
    world.engine.expect_unheard_discards();
    let resident = |world: &World| world.engine.resident_pages();
    let before = resident(&world);
    for touched in 1..=64 {
        world.verify(BASE + touched - 1);
        assert_eq!(resident(&world) - before, touched, "no neighbour returns, and none ahead of its touch");
    }
    world.check();
}

#[test]
fn pages_of_a_strided_stream_are_fetched_before_their_touch() {
    let mut world = World::new(0, 4, 4000, 64);
    world.map(0, PAGES);
    world.run(&Step::Write { page: 0, pages: PAGES, value: 11 });
    world.engine.page_out(&mut world.worker, PageNumber(BASE)..PageNumber(BASE + PAGES));
    world.run(&Step::Stride { page: 3, step: 17, pages: 120 });
    let vm = &world.engine.counters().vm;
    // Three steps make a stream; 4, 8, and then always 16 steps are fetched ahead.
    assert!(vm.swap_ra.get() >= 109, "{} of 120 pages", vm.swap_ra.get());
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
    assert_eq!(world.engine.fault(&mut world.worker, home), Served::Done(FaultKind::Staged));
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

#[test]
fn memory_that_is_not_touched_for_some_rounds_is_swapped_out() {
    for sizes in [1 << 0, 1 << 4, 1 << 9] {
        let mut world = World::new(sizes, 4, 4000, 64);
        fill(&mut world, 0..2048, COMPRESSIBLE);
        let swapped_pages = |world: &World| world.engine.swapped_pages();
        let frames = world.engine.resident_pages() + u64::from(world.engine.free_frames());
        // The first half is in use.
        let round = |world: &mut World| {
            world.find_cold(2048, 4);
            world.run(&Step::Read { page: 0, pages: 1024 });
        };
        (0..4).for_each(|_| round(&mut world));
        assert_eq!(swapped_pages(&world), 0, "staged for three rounds");
        round(&mut world);
        assert_eq!(swapped_pages(&world), 1024);
        (0..10).for_each(|_| round(&mut world));
        assert_eq!(swapped_pages(&world), 1024);
        assert!(world.engine.resident_pages() + u64::from(world.engine.free_frames()) < frames, "released");
        world.run(&Step::Read { page: 0, pages: 2048 });
        world.check();
    }
}

#[test]
fn the_next_page_returns_with_a_touched_one_where_objects_lie_across_two() {
    let mut world = World::new(0, 4, 4000, 64);
    world.map(0, PAGES);
    world.run(&Step::Write { page: 0, pages: PAGES, value: 11 });
    let all = PageNumber(BASE)..PageNumber(BASE + PAGES);
    let fetched = |world: &World| (world.engine.counters().vm.swap_ra.get(), world.engine.counters().vm.pswpin.get());
    let mut random = 1u64;
    let mut touch_objects = |world: &mut World, count: u64| {
        for _ in 0..count {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let first = BASE + (random >> 33) % (PAGES - 1);
            world.verify(first);
            world.verify(first + 1);
            world.engine.page_out(&mut world.worker, all.clone());
        }
    };
    touch_objects(&mut world, 2000);
    let (ahead, pages) = fetched(&world);
    touch_objects(&mut world, 1000);
    let (ahead, pages) = (fetched(&world).0 - ahead, fetched(&world).1 - pages);
    assert!(ahead > 800, "{ahead} of 1000 second pages came with the first");
    assert!((2000..2200).contains(&pages), "{pages} pages for 1000 objects of two");
    world.check();
}
