//! Tests of the swap file: room, failures and batches.

use super::step::{Step, incompressible};
use super::stored_pieces::recompressed;
use super::world::{BASE, World};
use foliomem_core::engine::{BackingConfig, Served};
use foliomem_core::ports::MAX_WRITES;
use foliomem_types::discard::Discard;
use foliomem_types::units::PageNumber;

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
