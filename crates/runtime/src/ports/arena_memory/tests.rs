//! Tests of slices of an arena under threads, with tokens of real free lists and a real store.
//!
//! Under miri (`scripts/soundness`) they show that no writable slice overlaps another, and that
//! there is no race. Without miri they show that readers see the written bytes.

use super::*;
use foliomem_core::buddy::Buddy;
use foliomem_core::homes::Homes;
use foliomem_core::run_tokens::UniqueRun;
use foliomem_core::store::{PieceId, PieceInfo, PieceMover, RunSource, Store};
use foliomem_sync::Mutex;
use foliomem_types::units::{Frame, Order};
use std::thread;

const FRAMES: u32 = 256;
/// Number of rounds. Miri takes a thousand times as long.
const ROUNDS: u64 = if cfg!(miri) { 1 } else { 200 };

fn arena() -> ArenaMemory {
    ArenaMemory::new(Region::reserve(FRAMES as usize * PAGE_BYTES).unwrap())
}

/// An arena with a store in it.
struct World {
    arena: ArenaMemory,
    store: Store,
    free: Mutex<Buddy>,
}

impl RunSource for World {
    fn alloc_run(&self, order: Order) -> Option<FrameRun> {
        self.free.lock().alloc(order)
    }

    fn free_run(&self, run: FrameRun) {
        self.free.lock().free(run);
    }
}

impl PieceMover for World {
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.arena.copy_stored(from, to);
    }
}

impl World {
    fn new() -> World {
        let mut free = Buddy::new(FRAMES);
        free.add_free(Frame(0), FRAMES);
        World { arena: arena(), store: Store::new(1000), free: Mutex::new(free) }
    }

    /// Stores `len_bytes` bytes that are computed from `content`, with `pages` references.
    fn insert(&self, len_bytes: u32, content: u64, pages: u16) -> PieceId {
        let granule = Order::new(4).unwrap();
        let info = PieceInfo { len_bytes, granule, raw: false, checksum: content, pages };
        let mut place = self.store.insert(self, info).expect("room");
        self.arena.scatter(&bytes_of(content, len_bytes), place.as_mut());
        self.store.seal(place)
    }

    fn verify(&self, id: PieceId) {
        let pinned = self.store.pin(id);
        let piece = pinned.piece();
        let len_bytes = piece.place.len_bytes();
        let mut gathered = vec![0; len_bytes as usize];
        let stored = self.arena.gather(&mut gathered, piece);
        assert!(stored == bytes_of(piece.checksum, len_bytes), "{id:?}");
        self.store.unpin(self, pinned);
    }
}

fn bytes_of(content: u64, len_bytes: u32) -> Vec<u8> {
    (0..u64::from(len_bytes)).map(|index| (content * 31 + index) as u8).collect()
}

#[test]
fn readers_of_a_piece_share_it_while_its_neighbours_are_written_and_moved() {
    let world = World::new();
    // In one zspage; in a zspage of several runs, across their border; in a chain of extents.
    let lengths = [300, 300, 20_000, 20_000, 40_000];
    let ids: Vec<PieceId> = (0..).zip(lengths).map(|(content, len)| world.insert(len, content, 4)).collect();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..ROUNDS).for_each(|_| ids.iter().for_each(|&id| world.verify(id))));
        }
        scope.spawn(|| {
            for round in 0..ROUNDS {
                let written = [300, 20_000].map(|len| world.insert(len, 100 + round, 1));
                written.into_iter().for_each(|id| world.store.release(&world, id, 1));
            }
        });
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                world.store.compact(&world, &world, 64);
            }
        });
    });
    ids.iter().for_each(|&id| world.verify(id));
}

#[test]
fn a_recompressed_piece_is_written_to_a_place_without_readers() {
    let world = World::new();
    let ids = [world.insert(3000, 1, 1), world.insert(40_000, 2, 1)];
    thread::scope(|scope| {
        scope.spawn(|| (0..ROUNDS).for_each(|_| ids.iter().for_each(|&id| world.verify(id))));
        scope.spawn(|| {
            for _ in 0..2 {
                while let Ok(found) = world.store.next_idle(&world, 0, 0) {
                    let Some(pinned) = found else { continue };
                    let (content, len_bytes) = (pinned.piece().checksum + 7, pinned.piece().place.len_bytes() / 2);
                    let mut to = world.store.new_place(&world, &pinned, len_bytes).expect("room");
                    world.arena.scatter(&bytes_of(content, len_bytes), to.as_mut());
                    world.store.replace(&world, pinned, to, content);
                }
            }
        });
    });
    ids.iter().for_each(|&id| world.verify(id));
}

#[test]
fn a_run_is_read_by_many_or_written_by_one() {
    let (arena, homes) = (arena(), Homes::populated(FRAMES));
    let take = || homes.alloc_ready(Order::new(1).unwrap()).expect("a free run");
    let mut read: UniqueRun = take();
    arena.bytes_mut(read.as_mut()).fill(7);
    // A folio under writeback: its worker reads it, a fault copies it, and other threads write
    // other runs.
    let shared = read.as_ref();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let mut copy = take();
                    arena.bytes_mut(copy.as_mut()).copy_from_slice(arena.bytes(shared));
                    arena.bytes_mut(copy.as_mut().part(1, Order::ZERO)).fill(9);
                    let content = arena.bytes(copy.as_ref());
                    assert!(content[..PAGE_BYTES].iter().all(|&byte| byte == 7));
                    assert!(content[PAGE_BYTES..].iter().all(|&byte| byte == 9));
                    homes.free_full(copy);
                }
            });
        }
        scope.spawn(|| (0..ROUNDS).for_each(|_| assert!(arena.bytes(shared).iter().all(|&byte| byte == 7))));
    });
    arena.bytes_mut(read.as_mut()).fill(1);
}
