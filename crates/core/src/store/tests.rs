//! Tests of the store against a naive model: an arena of bytes, and the expected content of every
//! piece.

use super::*;
use foliomem_types::units::{Frame, MAX_ORDER};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A lock of the tests, outside the lock order.
type Mutex<T> = crate::sync::Mutex<T, crate::sync::ranks::Unchecked>;

/// The frames, and which of them the store holds.
struct Arena {
    held: Mutex<Vec<bool>>,
    /// The highest order of runs that can be allocated.
    highest: Mutex<Order>,
    bytes: Mutex<Vec<u8>>,
    /// The last reported holder of each frame.
    holders: Mutex<BTreeMap<u32, HolderId>>,
}

impl Arena {
    fn new(frames: usize) -> Arena {
        Arena {
            held: Mutex::new(vec![false; frames]),
            highest: Mutex::new(MAX_ORDER),
            bytes: Mutex::new(vec![0; frames * PAGE_BYTES]),
            holders: Mutex::default(),
        }
    }

    /// Makes an arena for tests that copy nothing.
    fn without_bytes(frames: usize) -> Arena {
        Arena { bytes: Mutex::new(Vec::new()), ..Arena::new(0).with_frames(frames) }
    }

    fn with_frames(self, frames: usize) -> Arena {
        Arena { held: Mutex::new(vec![false; frames]), ..self }
    }

    fn held_frames(&self) -> usize {
        self.held.lock().iter().filter(|&&held| held).count()
    }

    fn write(&self, place: &Place<'_>, content: &[u8]) {
        let (mut bytes, mut rest) = (self.bytes.lock(), content);
        for fragment in &*place.fragments() {
            let (now, later) = rest.split_at(fragment.len_bytes as usize);
            bytes[fragment.start_bytes() as usize..fragment.end_bytes() as usize].copy_from_slice(now);
            rest = later;
        }
        assert!(rest.is_empty(), "the place is shorter than the piece");
    }

    fn read(&self, place: &Place<'_>) -> Vec<u8> {
        let (bytes, held) = (self.bytes.lock(), self.held.lock());
        let mut content = Vec::new();
        for fragment in &*place.fragments() {
            let range = fragment.start_bytes() as usize..fragment.end_bytes() as usize;
            let frames = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
            assert!(held[frames].iter().all(|&held| held), "{fragment:?} is not in frames the store holds");
            content.extend_from_slice(&bytes[range]);
        }
        content
    }
}

impl RunSource for Arena {
    fn alloc_run(&self, order: Order) -> Option<FrameRun> {
        if order > *self.highest.lock() {
            return None;
        }
        let mut held = self.held.lock();
        let run = held.chunks_exact_mut(order.pages() as usize).enumerate().find(|(_, run)| !run.contains(&true));
        run.map(|(index, run)| {
            run.fill(true);
            FrameRun::new(Frame(index as u32 * order.pages()), order)
        })
    }

    fn note_holder(&self, run: FrameRun, holder: HolderId) {
        self.holders.lock().extend((run.head.0..run.head.0 + run.frames()).map(|frame| (frame, holder)));
    }

    fn free_run(&self, run: FrameRun) {
        assert!(run.head.0.is_multiple_of(run.frames()));
        for frame in run.head.0..run.head.0 + run.frames() {
            assert!(std::mem::replace(&mut self.held.lock()[frame as usize], false), "frame {frame:x} was free");
        }
    }
}

impl PieceMover for Arena {
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        assert_eq!(from.len_bytes, to.len_bytes);
        assert!(from.end_bytes() <= to.start_bytes() || to.end_bytes() <= from.start_bytes());
        let mut bytes = self.bytes.lock();
        if !bytes.is_empty() {
            bytes.copy_within(from.start_bytes() as usize..from.end_bytes() as usize, to.start_bytes() as usize);
        }
    }
}

/// A small generator: contents and sizes must follow from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ self.0 >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ mixed >> 29
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

fn content_of(seed: u64, len_bytes: u32) -> Vec<u8> {
    let mut random = Random(seed);
    (0..len_bytes).map(|_| random.next() as u8).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Insert { granule: u8, part: u32, raw: bool, pages: u16, sealed: bool },
    Filled { word: u64, granule: u8, pages: u16 },
    Release { which: usize, pages: u16 },
    Pin { which: usize },
    Unpin { which: usize },
    Compact { budget_pages: u32 },
    Evacuate { which: usize },
    Shortage { highest: u8 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let granule = prop_oneof![4 => Just(0u8), 3 => Just(2), 3 => Just(4), 1 => Just(6), 1 => 0u8..=9];
    let insert = (granule.clone(), 1..=1000u32, prop::bool::weighted(0.1), 1..=512u16, prop::bool::weighted(0.9))
        .prop_map(|(granule, part, raw, pages, sealed)| Step::Insert { granule, part, raw, pages, sealed });
    let step = prop_oneof![
        10 => insert,
        1 => (any::<u64>(), granule, 1..=512u16).prop_map(|(word, granule, pages)| Step::Filled { word, granule, pages }),
        9 => (any::<usize>(), 1..=512u16).prop_map(|(which, pages)| Step::Release { which, pages }),
        2 => any::<usize>().prop_map(|which| Step::Pin { which }),
        2 => any::<usize>().prop_map(|which| Step::Unpin { which }),
        2 => (0..200u32).prop_map(|budget_pages| Step::Compact { budget_pages }),
        3 => any::<usize>().prop_map(|which| Step::Evacuate { which }),
        1 => prop_oneof![3 => Just(9u8), 1 => 0u8..=3].prop_map(|highest| Step::Shortage { highest }),
    ];
    prop::collection::vec(step, 1..200)
}

/// The expected state of a piece.
struct Expected {
    info: PieceInfo,
    filled: Option<u64>,
    content: Vec<u8>,
    references: u16,
    sealed: bool,
}

struct Model<'a> {
    arena: Arena,
    store: &'a Store,
    live: BTreeMap<PieceId, Expected>,
    /// Pinned pieces with their content, which must stay readable after the last reference is
    /// dropped.
    pinned: Vec<(Pinned<'a>, Vec<u8>)>,
    inserted: u64,
}

impl Model<'_> {
    fn new(store: &Store) -> Model<'_> {
        Model { arena: Arena::new(4096), store, live: BTreeMap::new(), pinned: Vec::new(), inserted: 0 }
    }

    fn nth(&self, which: usize) -> Option<PieceId> {
        self.live.keys().nth(which % self.live.len().max(1)).copied()
    }

    fn insert(&mut self, granule: u8, part: u32, raw: bool, pages: u16, sealed: bool) {
        let granule = Order::new(granule).unwrap();
        let whole = granule.bytes() as u32;
        let len_bytes = if raw { whole } else { (u64::from(whole) * u64::from(part) / 1000).max(1) as u32 };
        let references = pages.clamp(1, granule.pages() as u16);
        self.inserted += 1;
        let info = PieceInfo { len_bytes, granule, raw, checksum: self.inserted * 77, pages: references };
        let Some(place) = self.store.insert(&self.arena, info) else { return };
        let id = place.id;
        assert_eq!(place.len_bytes(), len_bytes);
        assert!(len_bytes > 64 << 10 || place.fragments().len() <= extent::MAX_RUNS);
        let content = content_of(self.inserted, len_bytes);
        self.arena.write(&place, &content);
        if sealed {
            self.store.seal(place);
        }
        let before = self.live.insert(id, Expected { info, filled: None, content, references, sealed });
        assert!(before.is_none(), "{id:?} names two pieces");
    }

    fn insert_filled(&mut self, word: u64, granule: u8, pages: u16) {
        let granule = Order::new(granule).unwrap();
        let references = pages.clamp(1, granule.pages() as u16);
        let Some(id) = self.store.insert_filled(word, granule, references) else { return };
        let info = PieceInfo { len_bytes: 0, granule, raw: false, checksum: 0, pages: references };
        let expected = Expected { info, filled: Some(word), content: Vec::new(), references, sealed: true };
        assert!(self.live.insert(id, expected).is_none());
    }

    fn release(&mut self, id: PieceId, pages: u16) {
        let expected = self.live.get_mut(&id).unwrap();
        let pages = pages.clamp(1, expected.references);
        expected.references -= pages;
        self.store.release(&self.arena, id, pages);
        if expected.references == 0 {
            self.live.remove(&id);
        } else {
            assert_eq!(self.store.references(id), expected.references);
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Insert { granule, part, raw, pages, sealed } => self.insert(granule, part, raw, pages, sealed),
            Step::Filled { word, granule, pages } => self.insert_filled(word, granule, pages),
            Step::Release { which, pages } => {
                if let Some(id) = self.nth(which) {
                    self.release(id, pages);
                }
            }
            Step::Pin { which } => {
                if let Some(id) = self.nth(which) {
                    self.pinned.push((self.store.pin(id), self.live[&id].content.clone()));
                }
            }
            Step::Unpin { which } => {
                if !self.pinned.is_empty() {
                    let (pinned, _) = self.pinned.swap_remove(which % self.pinned.len());
                    self.store.unpin(&self.arena, pinned);
                }
            }
            Step::Compact { budget_pages } => {
                let before = self.arena.held_frames();
                let freed = self.store.compact(&self.arena, &self.arena, budget_pages);
                assert_eq!(before - self.arena.held_frames(), freed as usize);
            }
            Step::Evacuate { which } => self.evacuate(which),
            Step::Shortage { highest } => *self.arena.highest.lock() = Order::new(highest).unwrap(),
        }
    }

    /// Evacuates one of the held frames, and those that go with it.
    fn evacuate(&self, which: usize) {
        let held: Vec<u32> =
            (0..).zip(&*self.arena.held.lock()).filter(|&(_, &held)| held).map(|(frame, _)| frame).collect();
        let Some(&frame) = held.get(which % held.len().max(1)) else { return };
        let holder = self.arena.holders.lock()[&frame];
        let run = self.store.run_of(holder, Frame(frame)).expect("the holder of a held frame");
        let evacuated = self.store.evacuate(&self.arena, &self.arena, holder, run.head);
        let is_held = |frame: u32| self.arena.held.lock()[frame as usize];
        assert_eq!(
            evacuated,
            (run.head.0..run.head.0 + run.frames()).all(|frame| !is_held(frame)),
            "frames of {holder:?}"
        );
        let nothing_in_the_way = self.pinned.is_empty() && self.live.values().all(|piece| piece.sealed);
        assert!(evacuated || !nothing_in_the_way || *self.arena.highest.lock() < MAX_ORDER, "{holder:?} stays");
    }

    fn verify(&self) {
        self.store.check();
        assert_eq!(self.arena.held_frames(), self.store.held_frames() as usize);
        for (&id, expected) in &self.live {
            let pinned = self.store.pin(id);
            let piece = pinned.piece();
            assert_eq!((piece.granule, piece.raw, piece.checksum, piece.filled), {
                (expected.info.granule, expected.info.raw, expected.info.checksum, expected.filled)
            });
            assert!(self.arena.read(&piece.place) == expected.content, "{id:?} has other bytes");
            self.store.unpin(&self.arena, pinned);
        }
        for (pinned, content) in &self.pinned {
            assert!(self.arena.read(&pinned.piece().place) == *content, "a pinned piece has other bytes");
        }
    }

    fn drain(mut self) {
        for (id, expected) in std::mem::take(&mut self.live) {
            self.store.release(&self.arena, id, expected.references);
        }
        for (pinned, content) in std::mem::take(&mut self.pinned) {
            assert!(self.arena.read(&pinned.piece().place) == content);
            self.store.unpin(&self.arena, pinned);
        }
        self.store.check();
        assert_eq!(self.arena.held_frames(), 0, "frames are left in an empty store");
        let stats = self.store.stats();
        assert_eq!(
            stats,
            StoreStats { used_bytes: stats.metadata_bytes, metadata_bytes: stats.metadata_bytes, ..Default::default() }
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn every_piece_reads_back_until_its_last_release(steps in steps()) {
        let store = Store::new(1000);
        let mut model = Model::new(&store);
        for (index, step) in steps.into_iter().enumerate() {
            model.apply(step);
            if index % 4 == 0 {
                model.verify();
            }
        }
        model.verify();
        model.drain();
    }
}

/// Sizes as lz4 makes of granules of real memory at a ratio of about 2: some nearly empty, most
/// about half their size, some hardly smaller, and one in sixteen incompressible.
fn realistic_len(random: &mut Random, granule: Order) -> (u32, bool) {
    let whole = granule.bytes() as u64;
    let percent = match random.below(16) {
        0 => return (whole as u32, true),
        1..=3 => 3 + random.below(20),
        4..=12 => 25 + random.below(20) + random.below(20),
        _ => 60 + random.below(33),
    };
    let len_bytes = whole * percent / 100 + random.below(whole / 100 + 1);
    (len_bytes as u32, false)
}

struct Filling {
    store: Store,
    arena: Arena,
    random: Random,
    granule: Order,
    pieces: Vec<PieceId>,
}

impl Filling {
    fn new(granule: Order, compressed_mib: u64) -> Filling {
        let mut filling = Filling {
            store: Store::new(1 << 20),
            arena: Arena::without_bytes((compressed_mib as usize * 2) << 8),
            random: Random(u64::from(granule.get()) + 1),
            granule,
            pieces: Vec::new(),
        };
        while filling.store.stats().compr_data_bytes < compressed_mib << 20 {
            filling.insert();
        }
        filling
    }

    fn insert(&mut self) {
        let (len_bytes, raw) = realistic_len(&mut self.random, self.granule);
        let info = PieceInfo { len_bytes, granule: self.granule, raw, checksum: 0, pages: 1 };
        let place = self.store.insert(&self.arena, info).expect("an arena that is large enough");
        self.pieces.push(self.store.seal(place));
    }

    fn release_one(&mut self) {
        let which = self.random.below(self.pieces.len() as u64) as usize;
        self.store.release(&self.arena, self.pieces.swap_remove(which), 1);
    }

    /// Returns the share of the store's memory that is not compressed data, in percent.
    fn waste(&self) -> f64 {
        let stats = self.store.stats();
        100.0 * (1.0 - stats.compr_data_bytes as f64 / stats.used_bytes as f64)
    }
}

const GRANULES: [u8; 5] = [0, 2, 4, 6, 9];

#[test]
fn waste_stays_below_12_percent() {
    for granule in GRANULES.map(|order| Order::new(order).unwrap()) {
        let mut filling = Filling::new(granule, 32);
        let fresh = filling.waste();
        for _ in 0..filling.pieces.len() * 2 {
            filling.release_one();
            filling.insert();
        }
        let churned = filling.waste();
        (0..filling.pieces.len() / 2).for_each(|_| filling.release_one());
        let halved = filling.waste();
        filling.store.compact(&filling.arena, &filling.arena, u32::MAX);
        let compacted = filling.waste();
        filling.store.check();
        let metadata = filling.store.stats().metadata_bytes as f64 / filling.store.stats().used_bytes as f64;
        println!(
            "{:5} KiB: fresh {fresh:.1}%, churned {churned:.1}%, halved {halved:.1}%, compacted {compacted:.1}%, \
             of which metadata {:.2}%",
            granule.kib(),
            100.0 * metadata
        );
        for waste in [fresh, churned, compacted] {
            assert!(waste <= 12.0, "{} KiB: {waste:.1}% waste", granule.kib());
        }
    }
}

#[test]
fn a_small_store_wastes_little() {
    for granule in GRANULES.map(|order| Order::new(order).unwrap()) {
        let filling = Filling::new(granule, 4);
        println!("{:5} KiB: {:.1}% of 4 MiB", granule.kib(), filling.waste());
        assert!(filling.waste() <= 18.5, "{} KiB: {:.1}% waste in a store of 4 MiB", granule.kib(), filling.waste());
    }
    assert!(Store::new(u32::MAX).stats().used_bytes < 64 << 10);
}

#[test]
fn metadata_of_a_piece_is_small() {
    let mut filling = Filling::new(Order::ZERO, 64);
    (0..1000).for_each(|_| filling.insert());
    let per_piece = filling.store.stats().metadata_bytes as f64 / filling.pieces.len() as f64;
    println!("{per_piece:.1} bytes per piece of 4 KiB, all tables together");
    assert!(per_piece < 28.0, "{per_piece}");
}

#[test]
fn a_raw_2_mib_piece_needs_no_run_above_order_4() {
    let arena = Arena::new(2048);
    *arena.highest.lock() = Order::new(4).unwrap();
    // No two runs of 64 KiB are adjacent: every second one is taken.
    for frame in 0..2048 {
        arena.held.lock()[frame] = frame / 16 % 2 == 1;
    }
    let store = Store::new(10);
    let info = PieceInfo { len_bytes: 2 << 20, granule: MAX_ORDER, raw: true, checksum: 5, pages: 512 };
    let place = store.insert(&arena, info).unwrap();
    assert_eq!(place.fragments().len(), 32);
    assert_eq!(store.stats().huge_pages, 512);
    store.release(&arena, place.id, 512);
    store.check();
    assert_eq!(arena.held_frames(), 1024);
}

#[test]
fn adjacent_extents_are_one_fragment() {
    let arena = Arena::new(2048);
    let store = Store::new(10);
    let info = PieceInfo { len_bytes: 1_000_000, granule: MAX_ORDER, raw: false, checksum: 5, pages: 512 };
    let place = store.insert(&arena, info).unwrap();
    assert_eq!(*place.fragments(), [Fragment::new(Frame(0), 0, 1_000_000)]);
    assert_eq!(store.held_frames(), 245);
}

#[test]
fn a_failed_insert_leaves_nothing_behind() {
    let arena = Arena::new(64);
    let store = Store::new(2);
    let info = |len_bytes| PieceInfo { len_bytes, granule: MAX_ORDER, raw: false, checksum: 0, pages: 1 };
    assert!(store.insert(&arena, info(300 << 10)).is_none(), "there are no frames");
    assert_eq!(arena.held_frames(), 0);
    let first = store.insert(&arena, info(100)).unwrap();
    assert!(store.insert_filled(7, Order::ZERO, 1).is_some());
    assert!(store.insert(&arena, info(100)).is_none(), "there are no ids");
    assert_eq!(store.insert_filled(7, Order::ZERO, 1), None);
    store.release(&arena, first.id, 1);
    assert!(store.insert(&arena, info(100)).is_some());
    store.check();
}

#[test]
fn a_piece_released_while_pinned_is_freed_by_the_unpin() {
    let (arena, store) = (Arena::new(64), Store::new(2));
    let info = PieceInfo { len_bytes: 40_000, granule: Order::new(4).unwrap(), raw: false, checksum: 9, pages: 16 };
    let place = store.insert(&arena, info).unwrap();
    arena.write(&place, &content_of(1, 40_000));
    let id = store.seal(place);
    let (first, second) = (store.pin(id), store.pin(id));
    store.release(&arena, id, 16);
    store.unpin(&arena, first);
    assert!(arena.read(&second.piece().place) == content_of(1, 40_000));
    assert_eq!(store.stats().pieces, 1);
    store.unpin(&arena, second);
    assert_eq!((store.stats().pieces, arena.held_frames()), (0, 0));
}

#[test]
#[should_panic(expected = "is no piece")]
fn pinning_a_freed_piece_is_refused() {
    let (arena, store) = (Arena::new(64), Store::new(2));
    let id = store.insert_filled(0, Order::ZERO, 1).unwrap();
    store.release(&arena, id, 1);
    drop(store.pin(id));
}

#[test]
fn pinned_and_unsealed_pieces_stay_where_they_are() {
    let (arena, store) = (Arena::new(1024), Store::new(1000));
    let info = PieceInfo { len_bytes: 2048, granule: Order::ZERO, raw: false, checksum: 0, pages: 1 };
    let mut kept: Vec<_> = (0..200).map(|_| store.insert(&arena, info).unwrap()).collect();
    let mut index = 0;
    kept.retain(|place| {
        index += 1;
        let is_kept = index % 2 == 0;
        if !is_kept {
            store.release(&arena, place.id, 1);
        }
        is_kept
    });
    let held = store.held_frames();
    assert_eq!(store.compact(&arena, &arena, u32::MAX), 0, "no piece is sealed");
    let kept: Vec<_> = kept.into_iter().map(|place| store.seal(place)).collect();
    let pinned: Vec<_> = kept.iter().map(|&id| store.pin(id)).collect();
    assert_eq!(store.compact(&arena, &arena, u32::MAX), 0, "every piece is pinned");
    for (id, pinned) in kept.iter().zip(pinned) {
        store.unpin(&arena, pinned);
        assert_eq!(store.references(*id), 1);
    }
    assert!(store.compact(&arena, &arena, u32::MAX) >= held * 2 / 5);
    store.check();
}

/// A source of frames that inserts a piece during each allocation, which leaves free slots of that
/// size.
struct Overtaken<'a> {
    arena: &'a Arena,
    store: &'a Store,
    info: PieceInfo,
    others: Mutex<Vec<PieceId>>,
}

impl RunSource for Overtaken<'_> {
    fn alloc_run(&self, order: Order) -> Option<FrameRun> {
        let run = self.arena.alloc_run(order);
        self.others.lock().extend(self.store.insert(self.arena, self.info).map(|place| self.store.seal(place)));
        run
    }

    fn free_run(&self, run: FrameRun) {
        self.arena.free_run(run);
    }
}

#[test]
fn two_zspages_opened_at_the_same_time_are_both_used() {
    let (arena, store) = (Arena::without_bytes(64), Store::new(8));
    let info = PieceInfo { len_bytes: 1000, granule: Order::ZERO, raw: false, checksum: 0, pages: 1 };
    let overtaken = Overtaken { arena: &arena, store: &store, info, others: Mutex::default() };
    let id = store.seal(store.insert(&overtaken, info).unwrap());
    store.check();
    store.release(&arena, id, 1);
    overtaken.others.lock().iter().for_each(|&other| store.release(&arena, other, 1));
    assert_eq!((store.held_frames(), arena.held_frames()), (0, 0));
}
