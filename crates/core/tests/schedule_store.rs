//! Schedules of the store: a pinned piece keeps its place and content, whatever other threads
//! release, compact or insert meanwhile; an id names one piece at a time; at the end everything is
//! free.
//!
//! The frames are a double with units of 16 bytes (grains). A piece is written, read and copied
//! grain by grain, with other threads in between, and freed frames are overwritten.
#![cfg(feature = "shuttle")]

mod schedules;

use foliomem_core::buddy::Buddy;
use foliomem_core::store::{
    Fragment, FragmentMut, FragmentRef, HolderId, Piece, PieceId, PieceInfo, PieceMover, Place, RunSource, Store,
};
use foliomem_core::sync::ranks::Unchecked;
use foliomem_types::units::{Frame, FrameRun, Order, PAGE_BYTES};
use schedules::explore;
use shuttle::sync::Arc;
use shuttle::thread;
use std::collections::{HashMap, HashSet};

/// A lock of the tests, outside the lock order.
type Mutex<T> = foliomem_core::sync::Mutex<T, Unchecked>;

const FRAMES: u32 = 128;
const GRAIN_BYTES: usize = 16;
const FREE: u64 = u64::MAX;
/// Added to the content of recompressed pieces.
const RECOMPRESSED: u64 = 1 << 32;

struct Frames {
    free: Buddy,
    grains: Vec<u64>,
    /// The last reported holder of each frame.
    holders: HashMap<Frame, HolderId>,
}

struct Arena(Mutex<Frames>);

/// Returns the grains of a fragment that are used: the first, a middle one and the last.
fn grains(fragment: &Fragment) -> [usize; 3] {
    let (first, last) = (fragment.start_bytes() as usize, fragment.end_bytes() as usize - 1);
    [first, (first + last) / 2, last].map(|byte| byte / GRAIN_BYTES)
}

impl Arena {
    fn new() -> Arena {
        let mut free = Buddy::new(FRAMES);
        free.add_free(Frame(0), FRAMES);
        Arena(Mutex::new(Frames {
            free,
            grains: vec![FREE; FRAMES as usize * PAGE_BYTES / GRAIN_BYTES],
            holders: HashMap::new(),
        }))
    }

    fn write(&self, place: &Place<'_>, content: u64) {
        for grain in place.fragments().iter().flat_map(grains) {
            self.0.lock().grains[grain] = content;
        }
    }

    fn verify(&self, place: &Place<'_>, content: u64) {
        for grain in place.fragments().iter().flat_map(grains) {
            assert_eq!(self.0.lock().grains[grain], content, "grain {grain:x} of {place:?}");
        }
    }

    fn fill(&self, run: FrameRun, content: u64) {
        let per_frame = PAGE_BYTES / GRAIN_BYTES;
        let first = run.head.0 as usize * per_frame;
        self.0.lock().grains[first..first + run.frames() as usize * per_frame].fill(content);
    }
}

impl RunSource for Arena {
    fn alloc_run(&self, order: Order) -> Option<FrameRun> {
        self.0.lock().free.alloc(order)
    }

    fn note_holder(&self, run: FrameRun, holder: HolderId) {
        self.0.lock().holders.extend((0..run.frames()).map(|index| (run.head.offset(index), holder)));
    }

    fn free_run(&self, run: FrameRun) {
        self.fill(run, FREE);
        self.0.lock().free.free(run);
    }
}

impl PieceMover for Arena {
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        assert_eq!(from.len_bytes, to.len_bytes);
        let grain = |byte: u64| byte as usize / GRAIN_BYTES;
        let (first, end) = (grain(from.start_bytes()), grain(from.end_bytes() - 1) + 1);
        let to = grain(to.start_bytes());
        // The first grain is copied separately, with other threads in between.
        for range in [first..first + 1, first + 1..end] {
            let to = to + (range.start - first);
            self.0.lock().grains.copy_within(range, to);
        }
    }
}

struct World {
    store: Store,
    arena: Arena,
}

impl World {
    fn new(max_pieces: u32) -> Arc<World> {
        Arc::new(World { store: Store::new(max_pieces), arena: Arena::new() })
    }

    /// Inserts `len_bytes` of `content` with two references.
    fn insert(&self, len_bytes: u32, content: u64) -> PieceId {
        let granule = Order::from_bytes(u64::from(len_bytes.next_power_of_two()).max(2 * PAGE_BYTES as u64)).unwrap();
        let info = PieceInfo { len_bytes, granule, raw: false, checksum: content, pages: 2 };
        let place = self.store.insert(&self.arena, info).expect("frames for the piece");
        self.arena.write(&place, content);
        self.store.seal(place)
    }

    fn verify(&self, id: PieceId, content: u64) {
        let pinned = self.store.pin(id);
        self.verify_pinned(pinned.piece(), content);
        self.store.unpin(&self.arena, pinned);
    }

    fn verify_pinned(&self, piece: &Piece<'_>, content: u64) {
        let stored = if piece.recompressed { content + RECOMPRESSED } else { content };
        assert_eq!(piece.checksum, stored);
        self.arena.verify(&piece.place, stored);
    }

    /// Halves the length of all pieces if possible, in two passes; the first only marks them.
    fn recompress_all(&self) {
        for _ in 0..2 {
            while let Ok(found) = self.store.next_idle(&self.arena, 0, 0) {
                let Some(pinned) = found else { continue };
                let (content, len_bytes) = (pinned.piece().checksum, pinned.piece().place.len_bytes() / 2);
                assert!(!pinned.piece().recompressed && self.store.is_smaller(&pinned, len_bytes));
                match self.store.new_place(&self.arena, &pinned, len_bytes) {
                    Some(mut to) => {
                        self.arena.write(&to.as_mut(), content + RECOMPRESSED);
                        self.store.replace(&self.arena, pinned, to, content + RECOMPRESSED);
                    }
                    None => self.store.unpin(&self.arena, pinned),
                }
            }
        }
    }

    /// Makes the store leave every frame that it can.
    fn evacuate_all(&self) {
        for frame in (0..FRAMES).map(Frame) {
            let holder = self.arena.0.lock().holders.get(&frame).copied();
            if let Some(holder) = holder
                && let Some(run) = self.store.run_of(holder, frame)
            {
                self.store.evacuate(&self.arena, &self.arena, holder, run.head);
            }
        }
    }

    /// Drops the reference while the piece is pinned, and then reads it.
    fn verify_to_the_end(&self, id: PieceId, content: u64) {
        let pinned = self.store.pin(id);
        self.store.release(&self.arena, id, 1);
        self.verify_pinned(pinned.piece(), content);
        self.store.unpin(&self.arena, pinned);
    }

    fn verify_empty(&self) {
        self.store.check();
        assert_eq!(self.store.stats().pieces, 0);
        assert_eq!(self.store.held_frames(), 0);
        let frames = self.arena.0.lock();
        assert_eq!(frames.free.free_frames(), FRAMES);
        assert!(frames.grains.iter().all(|&grain| grain == FREE), "freed frames were written");
    }
}

/// Pops and pushes of the stack of free ids overtake each other; no id is allocated twice.
#[test]
fn an_id_names_one_piece_at_a_time() {
    explore(4000, || {
        let world = World::new(4);
        let in_use = Arc::new(Mutex::new(HashSet::new()));
        let insert = |world: &World, content| world.store.insert_filled(content, Order::ZERO, 1);
        let first: Vec<_> = (0..3).filter_map(|content| insert(&world, content)).collect();
        first.into_iter().for_each(|id| world.store.release(&world.arena, id, 1));
        let threads: Vec<_> = (0..3)
            .map(|thread| {
                let (world, in_use) = (Arc::clone(&world), Arc::clone(&in_use));
                thread::spawn(move || {
                    let mut held: Vec<(PieceId, u64)> = Vec::new();
                    for round in 0..4 {
                        let content = 100 * thread + round;
                        // Two ids at a time: a pop that is overtaken then finds the old top again,
                        // with another id below.
                        if held.len() < 2
                            && let Some(id) = insert(&world, content)
                        {
                            assert!(in_use.lock().insert(id), "{id:?} was given out twice");
                            held.push((id, content));
                        } else if let Some((id, content)) = held.pop() {
                            let pinned = world.store.pin(id);
                            assert_eq!(pinned.piece().filled, Some(content), "{id:?}");
                            world.store.unpin(&world.arena, pinned);
                            in_use.lock().remove(&id);
                            world.store.release(&world.arena, id, 1);
                        }
                    }
                    for (id, _) in held {
                        in_use.lock().remove(&id);
                        world.store.release(&world.arena, id, 1);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.verify_empty();
    });
}

/// Two readers own a reference each while compaction moves the pieces and other pieces come and go.
#[test]
fn a_pinned_piece_does_not_move() {
    explore(1000, || {
        let world = World::new(64);
        // Some zspages of one class have half of their slots free, so that there is something to
        // compact.
        const LEN_BYTES: u32 = 1500;
        let all: Vec<_> = (0..12).map(|content| (world.insert(LEN_BYTES, content), content)).collect();
        let (kept, dropped): (Vec<_>, Vec<_>) = all.into_iter().partition(|&(_, content)| content % 4 == 0);
        dropped.into_iter().for_each(|(id, _)| world.store.release(&world.arena, id, 2));
        let readers = (0..2).map(|reader| {
            let (world, mut mine) = (Arc::clone(&world), kept.clone());
            if reader == 1 {
                mine.reverse();
            }
            thread::spawn(move || {
                mine.iter().for_each(|&(id, content)| world.verify(id, content));
                mine.iter().for_each(|&(id, content)| world.verify_to_the_end(id, content));
            })
        });
        let mut threads: Vec<_> = readers.collect();
        let compactor = Arc::clone(&world);
        threads.push(thread::spawn(move || {
            for _ in 0..2 {
                compactor.store.compact(&compactor.arena, &compactor.arena, u32::MAX);
            }
        }));
        // Two writers open zspages of one class and fill those being emptied.
        threads.extend((1..=2).map(|writer| {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                for (content, len_bytes) in [(100, LEN_BYTES), (101, 70_000), (102, LEN_BYTES - 8)] {
                    let content = writer * 1000 + content;
                    let id = world.insert(len_bytes, content);
                    world.verify(id, content);
                    world.store.release(&world.arena, id, 1);
                    world.verify_to_the_end(id, content);
                }
            })
        }));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.verify_empty();
    });
}

/// Starts two readers of pieces in zspages and of one in a chain of extents.
fn start_readers(world: &Arc<World>) -> Vec<thread::JoinHandle<()>> {
    let pieces = [1500, 1500, 70_000].into_iter().zip(1..);
    let pieces: Vec<_> = pieces.map(|(len, content)| (world.insert(len, content), content)).collect();
    let start = |_| {
        let (world, pieces) = (Arc::clone(world), pieces.clone());
        thread::spawn(move || {
            pieces.iter().for_each(|&(id, content)| world.verify(id, content));
            pieces.iter().rev().for_each(|&(id, content)| world.verify_to_the_end(id, content));
        })
    };
    (0..2).map(start).collect()
}

/// Readers own a reference each while the store leaves the frames.
#[test]
fn a_pinned_piece_keeps_its_frames() {
    explore(1000, || {
        let world = World::new(16);
        let mut threads = start_readers(&world);
        for compacts in [false, true] {
            let world = Arc::clone(&world);
            threads.push(thread::spawn(move || {
                world.evacuate_all();
                if compacts {
                    world.store.compact(&world.arena, &world.arena, u32::MAX);
                }
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.verify_empty();
    });
}

/// Readers own a reference each while two threads recompress and others compact. No reader combines
/// the bytes of one version with the checksum of another.
#[test]
fn a_pinned_piece_is_not_replaced() {
    explore(1000, || {
        let world = World::new(16);
        let mut threads = start_readers(&world);
        threads.extend((0..2).map(|_| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.recompress_all())
        }));
        let compactor = Arc::clone(&world);
        threads.push(thread::spawn(move || {
            compactor.evacuate_all();
            compactor.store.compact(&compactor.arena, &compactor.arena, u32::MAX);
        }));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.verify_empty();
    });
}

/// A zspage holds only a piece that is still being written when room for that piece appears
/// elsewhere.
#[test]
fn an_unsealed_piece_does_not_move() {
    explore(1000, || {
        let world = World::new(64);
        // The number of pieces that fill the first zspage of their class.
        const LEN_BYTES: u32 = 1500;
        const FILLING: usize = 5;
        let mut first: Vec<_> = (0..FILLING).map(|_| world.insert(LEN_BYTES, 1)).collect();
        let compactor = Arc::clone(&world);
        let compacting = thread::spawn(move || {
            for _ in 0..2 {
                compactor.store.compact(&compactor.arena, &compactor.arena, u32::MAX);
            }
        });
        let writer = Arc::clone(&world);
        let writing = thread::spawn(move || {
            let id = writer.insert(LEN_BYTES, 2);
            writer.verify(id, 2);
            writer.store.release(&writer.arena, id, 2);
        });
        first.drain(..2).for_each(|id| world.store.release(&world.arena, id, 2));
        writing.join().unwrap();
        compacting.join().unwrap();
        first.into_iter().for_each(|id| world.store.release(&world.arena, id, 2));
        world.verify_empty();
    });
}
