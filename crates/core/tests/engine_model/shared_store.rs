//! Tests of the shared store: what relatives have already is not written.

use super::step::Step;
use super::stored_pieces::recompressed;
use super::world::World;
use foliomem_core::engine::{BackingConfig, Sharing};
use foliomem_types::discard::Discard;
use foliomem_types::units::ClusterNumber;

const BACKING: BackingConfig = BackingConfig { slots: 512 * 8, discard: Discard::ForRoom, store_pages: 0 };
const RELATIVES: ClusterNumber = ClusterNumber(5);

/// Writes what [`recompressed`] writes, and swaps it out.
fn fill(world: &mut World) {
    (0..1600).for_each(|page| world.run(&Step::Write { page, pages: 1, value: 31_000 + page / 16 * 7 }));
    world.run(&Step::PageOut { start: 0, pages: 1600 });
    world.run(&Step::Recompress { steps: 200 });
}

/// Returns a world with 1600 pages in 100 pieces, most of them recompressed, in its own store.
fn world() -> World {
    let world = recompressed(Some(BACKING));
    world.engine.ports().state.lock().is_shared_store = true;
    world
}

fn share_all(world: &mut World) {
    while world.engine.share(&mut world.worker) == Sharing::More {}
    world.engine.publish_store();
    world.check();
}

fn read_all(world: &mut World) {
    world.run(&Step::Read { page: 0, pages: 1600 });
    assert_eq!(world.engine.counters().backing.failed_reads.get(), 0);
    world.check();
}

#[test]
fn a_process_without_relatives_writes_its_pieces_once() {
    let mut world = world();
    share_all(&mut world);
    let (backing, store) = (&world.engine.counters().backing, &world.engine.counters().store);
    assert_eq!((store.compr_data_size.get(), backing.joined.get()), (0, 0));
    let written = backing.bd_writes.get();
    assert!(backing.bd_count.get() > 0 && written >= backing.bd_count.get(), "{backing:?}");
    read_all(&mut world);
    // Whatever kept its slots is there still; the rest is written again.
    world.run(&Step::PageOut { start: 0, pages: 1600 });
    world.run(&Step::Recompress { steps: 200 });
    share_all(&mut world);
    read_all(&mut world);
}

#[test]
fn a_piece_that_a_relative_has_joins_it() {
    let mut world = world();
    world.run(&Step::RelativeStores { cluster: RELATIVES, differs: false });
    share_all(&mut world);
    let backing = &world.engine.counters().backing;
    assert_eq!(world.engine.counters().store.compr_data_size.get(), 0);
    // A cluster has no room for all pieces. What did not find an equal piece was written.
    assert!(backing.joined.get() > 50 && backing.bd_writes.get() < 512 / 2, "{backing:?}");
    assert!(world.engine.ports().state.lock().clusters.contains(&RELATIVES));
    // The relative goes first: the pieces stay.
    world.run(&Step::OthersGo);
    read_all(&mut world);
    world.unmap(0, 1600);
    world.check();
    while world.engine.discard_one() {}
    assert!(world.engine.ports().state.lock().clusters.is_empty(), "nothing is held any more");
}

#[test]
fn other_content_with_the_same_checksum_is_not_joined() {
    let mut world = world();
    world.run(&Step::RelativeStores { cluster: RELATIVES, differs: true });
    share_all(&mut world);
    let backing = &world.engine.counters().backing;
    assert_eq!(backing.joined.get(), 0);
    assert!(backing.bd_writes.get() > 0);
    assert!(!world.engine.ports().state.lock().clusters.contains(&RELATIVES), "it was joined in vain");
    read_all(&mut world);
}

#[test]
fn what_was_published_before_slots_were_reused_is_not_joined() {
    let mut world = world();
    world.run(&Step::RelativeStores { cluster: RELATIVES, differs: false });
    share_all(&mut world);
    let joined = world.engine.counters().backing.joined.get();
    world.unmap(0, 1600);
    world.map(0, 1600);
    {
        let mut state = world.engine.ports().state.lock();
        assert!(joined > 0 && !state.clusters.contains(&RELATIVES));
        // The relative uses freed slots again.
        state.begin_generation(RELATIVES);
        state.of_relative = None;
    }
    fill(&mut world);
    share_all(&mut world);
    let backing = &world.engine.counters().backing;
    assert_eq!(backing.joined.get(), joined);
    assert!(backing.bd_writes.get() > 0);
    read_all(&mut world);
}

#[test]
fn pieces_that_may_be_recompressed_are_not_shared_yet() {
    let mut world = world();
    world.run(&Step::Read { page: 0, pages: 1600 });
    (0..1600).for_each(|page| world.run(&Step::Write { page, pages: 1, value: 41_000 + page / 16 * 7 }));
    world.run(&Step::PageOut { start: 0, pages: 1600 });
    assert_eq!(world.engine.share(&mut world.worker), Sharing::Done);
    assert_eq!(world.engine.counters().backing.bd_writes.get(), 0);
    world.run(&Step::Recompress { steps: 200 });
    assert_eq!(world.engine.share(&mut world.worker), Sharing::More);
    read_all(&mut world);
}

#[test]
fn a_failed_write_leaves_pieces_where_they_are() {
    let mut world = world();
    world.engine.ports().state.lock().failing_writes = 1;
    share_all(&mut world);
    assert!(world.engine.counters().backing.failed_writes.get() == 1);
    assert!(world.engine.counters().store.compr_data_size.get() > 0);
    share_all(&mut world);
    assert_eq!(world.engine.counters().store.compr_data_size.get(), 0);
    read_all(&mut world);
}

#[test]
fn slots_count_their_users_over_forks_and_ends() {
    let mut world = world();
    share_all(&mut world);
    let users = |world: &World| world.engine.ports().state.lock().users.clone();
    let before = users(&world);
    assert!(!before.is_empty() && before.values().all(|&users| users == 1));
    // A fork that fails.
    world.engine.lend_file();
    assert!(users(&world).values().all(|&users| users == 2));
    world.engine.leave_file();
    assert_eq!(users(&world), before);
    // A child gives up what its parent keeps.
    world.run(&Step::Fork { child: true });
    read_all(&mut world);
    world.unmap(0, 1600);
    assert_eq!(users(&world), before);
    assert!(!world.engine.ports().state.lock().file.is_empty(), "the parent's pieces are gone");
}

#[test]
fn a_process_that_ends_gives_the_memory_of_its_slots_back() {
    let mut world = world();
    share_all(&mut world);
    world.engine.leave_file();
    let state = world.engine.ports().state.lock();
    assert!(state.users.is_empty() && state.file.is_empty());
}
