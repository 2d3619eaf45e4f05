//! The compressed store: the pieces, and the frames that hold them.
//!
//! A *piece* is a granule (4 KiB to 2 MiB of content) compressed as one unit, or kept raw. The
//! store decides where a piece's bytes go and never touches them: the caller copies. It is to
//! foliomem what zsmalloc is to zram, except that a piece may be far larger than a page.
//!
//! # Representation
//! - A piece of up to 32 KiB takes a slot of a *zspage*: 1 to 16 frames divided into slots of one
//!   size class. The number of frames is chosen for each class so that the slots leave little over.
//!   If that number is not a power of two, the frames are several runs ([`classes`], [`extent`]).
//! - A larger piece owns a chain of *extents* of 16 frames (64 KiB) each, except the last. Such a
//!   chain wastes less than a page, and a raw 2 MiB piece needs no run above order 4.
//! - A piece takes 16 bytes: one 64-bit word (place, length, references, pins: [`word`]) and its
//!   checksum. The descriptor of a zspage takes 32 bytes, plus 4 for each slot: the id of the piece
//!   in the slot, which compaction needs. All tables grow as they are used ([`crate::sparse`]) and
//!   never shrink; entries are recycled.
//! - A granule that repeats one 64-bit word takes no frames.
//! - If there is a swap file, the oldest pieces can be written back to it ([`backing`]). Only the
//!   place of such a piece changes.
//!
//! # Life of a piece
//! | state | references | pins | left by |
//! |---|---|---|---|
//! | free | 0 | 0 | `insert`, `insert_filled` |
//! | live | 1..=pages | 0..=31 | `release` of the last reference |
//! | dying | 0 | 1..=31 | `unpin` of the last pin, which frees it |
//!
//! References count pages of content that still need the piece. A pin keeps the piece in its place.
//! Compaction may move a piece only between [`Store::seal`] and its death, and only while no other
//! thread pins it. Every transition is one compare-and-swap of the piece's word, except
//! recompression ([`recompress`]), which needs two.
//!
//! There are two kinds of compaction: of the store, which frees frames ([`compact`]), and of the
//! arena, for which the store leaves certain frames ([`evacuate`]).
//!
//! # Locks
//! Each size class has one lock, a leaf, over its zspages; a thread never holds two. The tables of
//! pieces are lock-free. [`RunSource`]'s frame methods and [`PieceMover`] are called with no lock
//! held.

mod backing;
mod check;
mod classes;
mod compact;
mod evacuate;
mod extent;
mod file_slots;
mod pieces;
mod place;
mod recompress;
#[cfg(test)]
mod tests;
mod word;
mod zspages;

pub use backing::{BatchPieces, FilePlace, MAX_FILE_PIECE_ORDER, NoBatch, Seal, Which, WriteBatch};
pub use compact::PieceMover;
pub use evacuate::HolderId;
pub use place::{Fragment, FragmentMut, FragmentRef, Fragments, Place, PlaceMut, UniquePlace};
pub use recompress::{NewPlace, PassOver};

use crate::sync::Shared;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use backing::Backing;
use classes::{EXTENT_FRAMES, class_of};
use extent::Extent;
use foliomem_types::units::{ClusterNumber, FrameRun, Order, PAGE_BYTES, Slot};
use pieces::{PieceRef, Pieces};
use recompress::ClockHand;
use std::num::NonZeroU32;
use std::ops::Range;
use word::{Location, Mark, PieceWord, ZspageId};
use zspages::{TakenSlot, Zspages};

/// The source of the store's frames, and of clusters of the swap file, which several processes may
/// share. (Without a swap file the cluster methods are not called.)
pub trait RunSource: Shared {
    /// Allocates a populated run of `order`. Called with no lock of the store held.
    fn alloc_run(&self, order: Order) -> Option<FrameRun>;
    /// Frees a run that `alloc_run` returned. Called with no lock of the store held.
    fn free_run(&self, run: FrameRun);
    /// Records that `holder` holds the run from now on.
    fn note_holder(&self, _run: FrameRun, _holder: HolderId) {}
    /// Makes this process the holder of a cluster of the swap file unless the cluster has one.
    /// Returns whether it did. Does not block.
    fn claim_cluster(&self, _cluster: ClusterNumber) -> bool {
        false
    }
    /// Ends this process's hold on the cluster. Does not block.
    fn release_cluster(&self, _cluster: ClusterNumber) {}
    /// Returns whether this process is the only holder of a cluster that it holds. If so, no other
    /// process can join the cluster any more by its present generation. Does not block.
    fn fence_cluster(&self, _cluster: ClusterNumber) -> bool {
        false
    }
    /// Makes this process a holder of a cluster that has holders, if its generation is
    /// `generation` still. Returns whether this process is a holder, and the generation is that
    /// one. Does not block.
    fn join_cluster(&self, _cluster: ClusterNumber, _generation: u64) -> bool {
        false
    }
    /// Counts this process as the only user of `slots`, which it has allocated. Only a shared store
    /// counts. Does not block.
    fn count_user(&self, _slots: Range<u32>) {}
    /// Counts one more user of a slot, of a cluster that this process holds. Returns `false` if the
    /// slot has none: its content is gone. Does not block.
    fn add_user(&self, _slot: Slot) -> bool {
        true
    }
    /// Counts one user of a slot less. Returns whether it was the last one. Does not block.
    fn drop_user(&self, _slot: Slot) -> bool {
        false
    }
    /// Gives the memory of `slots` without users back. Takes some microseconds.
    fn discard_slots(&self, _slots: Range<u32>) {}
}

/// The name of a piece. It stays valid as long as the piece has references, wherever the piece
/// moves.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId(NonZeroU32);

impl PieceId {
    /// Returns the id with this number, or `None` for 0.
    pub const fn new(number: u32) -> Option<PieceId> {
        match NonZeroU32::new(number) {
            Some(number) => Some(PieceId(number)),
            None => None,
        }
    }

    /// Returns the number of the id, for tables.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl std::fmt::Debug for PieceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "P{}", self.0)
    }
}

/// The description of a piece to store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PieceInfo {
    /// Number of bytes to store: 1 to the granule's size.
    pub len_bytes: u32,
    /// The size of the uncompressed content.
    pub granule: Order,
    /// Whether the bytes are the uncompressed content.
    pub raw: bool,
    /// Checksum of the bytes.
    pub checksum: u64,
    /// Initial number of references, one for each page of content that needs the piece: 1 to the
    /// granule's pages.
    pub pages: u16,
}

/// A stored piece, as [`Store::pin`] returns it. A borrowed piece is pinned, so its bytes may be
/// read.
#[derive(Debug)]
pub struct Piece<'a> {
    /// The size of the uncompressed content.
    pub granule: Order,
    /// Whether the bytes are the uncompressed content.
    pub raw: bool,
    /// Whether the second codec compressed the bytes.
    pub recompressed: bool,
    /// Checksum of the bytes; 0 for filled content.
    pub checksum: u64,
    /// The word that the content repeats; such a piece has no bytes.
    pub filled: Option<u64>,
    /// Number of references when it was pinned: the granule's pages as long as all of the content
    /// is needed.
    pub references: u16,
    /// The place of the bytes; empty for filled content.
    pub place: Place<'a>,
}

impl Piece<'_> {
    /// Returns the piece's only fragment, or `None` if it has several.
    pub fn only_fragment(&self) -> Option<FragmentRef<'_>> {
        match *self.place.fragments() {
            [only] => Some(FragmentRef::of(only, &self.place)),
            _ => None,
        }
    }

    /// Calls `act` with each fragment of the piece, in the order of its bytes.
    pub fn for_each_fragment(&self, mut act: impl FnMut(FragmentRef<'_>)) {
        self.place.fragments().iter().for_each(|&fragment| act(FragmentRef::of(fragment, &self.place)));
    }
}

/// A piece that stays at its place until [`Store::unpin`] takes it back.
#[must_use = "a pinned piece is never moved nor freed until it is unpinned"]
#[derive(Debug)]
pub struct Pinned<'a> {
    at: PieceRef<'a>,
    piece: Piece<'a>,
}

impl<'a> Pinned<'a> {
    /// Returns the pinned piece.
    pub fn piece(&self) -> &Piece<'a> {
        &self.piece
    }

    /// Returns the piece's id.
    pub fn id(&self) -> PieceId {
        self.at.id()
    }
}

/// Statistics of the store, in the terms of zram's `mm_stat`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreStats {
    /// Uncompressed bytes of content with references, including filled content.
    pub orig_data_bytes: u64,
    /// Bytes of all pieces in memory.
    pub compr_data_bytes: u64,
    /// Bytes of the store's frames and metadata.
    pub used_bytes: u64,
    /// Those of `used_bytes` that are metadata.
    pub metadata_bytes: u64,
    /// Number of pieces, including filled ones.
    pub pieces: u64,
    /// Pages of filled content.
    pub same_filled_pages: u64,
    /// Pages of content kept raw in memory.
    pub huge_pages: u64,
}

#[derive(Debug, Default)]
struct Gauges {
    content_pages: AtomicU64,
    compressed_bytes: AtomicU64,
    filled_pages: AtomicU64,
    raw_pages: AtomicU64,
    pieces: AtomicU64,
    held_frames: AtomicU32,
}

/// The compressed store.
#[derive(Debug)]
pub struct Store {
    pieces: Pieces,
    zspages: Zspages,
    gauges: Gauges,
    backing: Option<Backing>,
    clock_hand: ClockHand,
    /// The class with which compaction starts next, so that a small budget reaches all classes in
    /// turn.
    next_class: AtomicU32,
}

impl Store {
    /// Makes a store for at most `max_pieces` pieces. Allocates next to nothing.
    pub fn new(max_pieces: u32) -> Store {
        Store {
            pieces: Pieces::new(max_pieces),
            zspages: Zspages::new(),
            gauges: Gauges::default(),
            backing: None,
            clock_hand: ClockHand::default(),
            next_class: AtomicU32::new(0),
        }
    }

    /// Allocates room for a piece. The caller writes the bytes to the returned place and then calls
    /// [`seal`](Store::seal), which returns the id: no other thread can read the piece before.
    /// Returns `None` if frames or ids run out.
    ///
    /// # Panics
    /// If `info` contradicts itself: no bytes or more than its granule, no references or too many.
    #[inline]
    pub fn insert(&self, runs: &dyn RunSource, info: PieceInfo) -> Option<UniquePlace<'_>> {
        let PieceInfo { len_bytes, granule, raw, checksum, pages } = info;
        assert!((1..=granule.bytes() as u32).contains(&len_bytes), "{len_bytes} bytes of a granule {granule:?}");
        assert!((1..=granule.pages()).contains(&u32::from(pages)), "{pages} references to a granule {granule:?}");
        let new = self.pieces.allocate()?;
        let Some(location) = self.find_room(runs, new.id(), len_bytes) else {
            self.pieces.free(new);
            return None;
        };
        let word = PieceWord::new(location, pages, granule, raw);
        let place = self.place_of(location);
        debug_assert_eq!(place.len_bytes(), len_bytes);
        new.publish(word, checksum);
        self.gauges.pieces.fetch_add(1, Relaxed);
        self.gauges.content_pages.fetch_add(u64::from(pages), Relaxed);
        self.gauges.compressed_bytes.fetch_add(u64::from(len_bytes), Relaxed);
        if raw {
            self.gauges.raw_pages.fetch_add(u64::from(pages), Relaxed);
        }
        Some(UniquePlace { place, id: new.id() })
    }

    /// Records that the bytes of a piece are written. From now on compaction may move it and
    /// writeback may write it to the swap file. A piece that is not sealed never moves.
    #[inline]
    pub fn seal(&self, place: UniquePlace<'_>) -> PieceId {
        let at = self.pieces.at(place.id);
        at.seal();
        self.note_age(at);
        place.id
    }

    /// Stores content that repeats `word`. Returns `None` if ids run out.
    ///
    /// # Panics
    /// If `pages` is 0 or more than the granule's.
    pub fn insert_filled(&self, word: u64, granule: Order, pages: u16) -> Option<PieceId> {
        assert!((1..=granule.pages()).contains(&u32::from(pages)), "{pages} references to a granule {granule:?}");
        let new = self.pieces.allocate()?;
        new.publish(PieceWord::new(Location::FILLED, pages, granule, false), word);
        self.gauges.pieces.fetch_add(1, Relaxed);
        self.gauges.content_pages.fetch_add(u64::from(pages), Relaxed);
        self.gauges.filled_pages.fetch_add(u64::from(pages), Relaxed);
        Some(new.id())
    }

    /// Pins a piece for reading, so that it keeps its place. The caller must own a reference to it.
    ///
    /// # Panics
    /// If there is no such piece.
    #[inline]
    pub fn pin(&self, id: PieceId) -> Pinned<'_> {
        let at = self.pieces.at(id);
        let Some((word, extra)) = at.try_pin() else { panic!("{id:?} is no piece") };
        self.pinned(at, word, extra)
    }

    /// Makes the description of a piece that was just pinned.
    #[inline]
    fn pinned<'a>(&'a self, at: PieceRef<'a>, word: PieceWord, extra: u64) -> Pinned<'a> {
        let location = word.location();
        let (filled, checksum) = if location == Location::FILLED { (Some(extra), 0) } else { (None, extra) };
        let (granule, raw, place) = (word.granule(), word.raw(), self.place_of(location));
        let recompressed = word.mark() == Mark::Recompressed;
        let references = word.references();
        Pinned { at, piece: Piece { granule, raw, recompressed, checksum, filled, references, place } }
    }

    /// Unpins a piece, and frees it if all its references were released meanwhile.
    #[inline]
    pub fn unpin(&self, runs: &dyn RunSource, pinned: Pinned<'_>) {
        self.unpin_at(runs, pinned.at);
    }

    #[inline]
    fn unpin_at(&self, runs: &dyn RunSource, at: PieceRef<'_>) {
        let word = at.unpin();
        if word.is_dead() {
            self.reclaim_piece(runs, at, word);
        }
    }

    /// Drops `pages` references. The last one frees the piece, or leaves that to the last unpin.
    ///
    /// # Panics
    /// If the piece has fewer references.
    #[inline]
    pub fn release(&self, runs: &dyn RunSource, id: PieceId, pages: u16) {
        let at = self.pieces.at(id);
        let word = at.release(pages);
        self.gauges.content_pages.fetch_sub(u64::from(pages), Relaxed);
        if word.raw() && word.location().is_in_memory() {
            self.gauges.raw_pages.fetch_sub(u64::from(pages), Relaxed);
        }
        if word.location() == Location::FILLED {
            self.gauges.filled_pages.fetch_sub(u64::from(pages), Relaxed);
        }
        if word.is_dead() {
            self.reclaim_piece(runs, at, word);
        }
    }

    /// Returns the granule of a piece, or `None` if the piece has no bytes.
    #[inline]
    pub fn granule_of_bytes(&self, id: PieceId) -> Option<Order> {
        let word = self.pieces.at(id).load();
        (word.location() != Location::FILLED).then(|| word.granule())
    }

    /// Returns the checksum of a piece, or the word that its content repeats, and its granule. The
    /// caller must own a reference to the piece.
    pub fn content_of(&self, id: PieceId) -> (u64, Order) {
        let at = self.pieces.at(id);
        let word = at.load();
        (at.extra(), word.granule())
    }

    /// Returns the number of references of a piece.
    pub fn references(&self, id: PieceId) -> u16 {
        self.pieces.at(id).load().references()
    }

    /// Returns the number of frames that the store holds.
    pub fn held_frames(&self) -> u32 {
        self.gauges.held_frames.load(Relaxed)
    }

    /// Returns the statistics of the store.
    pub fn stats(&self) -> StoreStats {
        let gauges = &self.gauges;
        let backing_bytes = self.backing.as_ref().map_or(0, Backing::metadata_bytes);
        let metadata_bytes = (self.pieces.metadata_bytes() + self.zspages.metadata_bytes() + backing_bytes) as u64;
        StoreStats {
            orig_data_bytes: gauges.content_pages.load(Relaxed) * PAGE_BYTES as u64,
            compr_data_bytes: gauges.compressed_bytes.load(Relaxed),
            used_bytes: u64::from(self.held_frames()) * PAGE_BYTES as u64 + metadata_bytes,
            metadata_bytes,
            pieces: gauges.pieces.load(Relaxed),
            same_filled_pages: gauges.filled_pages.load(Relaxed),
            huge_pages: gauges.raw_pages.load(Relaxed),
        }
    }

    #[inline]
    fn find_room(&self, runs: &dyn RunSource, id: PieceId, len_bytes: u32) -> Option<Location> {
        match class_of(len_bytes) {
            Some(class) => {
                let (class, (zspage, slot)) = self.slot_for(runs, class, id)?;
                let last_byte = slot * class.shape().size_bytes + len_bytes - 1;
                Some(Location::new(zspage, last_byte as u16))
            }
            None => self.build_chain(runs, id, len_bytes),
        }
    }

    /// Takes a slot of `class` or of a slightly larger class; also returns that class.
    #[inline]
    fn slot_for(
        &self,
        runs: &dyn RunSource,
        class: classes::ClassId,
        id: PieceId,
    ) -> Option<(classes::ClassId, (ZspageId, u32))> {
        let take_slot = |class| self.zspages.take_slot(class, id).map(|slot| (class, slot));
        if let Some(found) = take_slot(class) {
            return Some(found);
        }
        let shape = class.shape();
        let few = self.zspages.has_few(class);
        if few && let Some(found) = class.larger_neighbours().find_map(take_slot) {
            return Some(found);
        }
        // If no run for a whole zspage is free, room for a single slot suffices.
        let extent = self
            .obtain(runs, u32::from(if few { shape.first_frames } else { shape.frames }))
            .or_else(|| self.obtain(runs, shape.size_bytes.div_ceil(PAGE_BYTES as u32)))?;
        Some((class, self.open_zspage(runs, class, extent, id)?))
    }

    /// Makes a zspage of `extent` and takes a slot of it for `id`.
    fn open_zspage(
        &self,
        runs: &dyn RunSource,
        class: classes::ClassId,
        extent: Extent,
        id: PieceId,
    ) -> Option<(ZspageId, u32)> {
        match self.zspages.open(class, extent, id) {
            Some((zspage, slot)) => {
                extent.runs().for_each(|run| runs.note_holder(run, HolderId::of(zspage)));
                Some((zspage, slot))
            }
            None => {
                self.give_back(runs, extent);
                None
            }
        }
    }

    /// Allocates extents for a piece that gets no slot: all but the last have [`EXTENT_FRAMES`]
    /// frames.
    fn build_chain(&self, runs: &dyn RunSource, id: PieceId, len_bytes: u32) -> Option<Location> {
        let mut rest_frames = len_bytes.div_ceil(PAGE_BYTES as u32);
        let mut chain: Option<(ZspageId, ZspageId)> = None;
        while rest_frames > 0 {
            let frames = rest_frames.min(EXTENT_FRAMES);
            let link = self.obtain(runs, frames).and_then(|extent| {
                let link = self.zspages.add_extent(extent, id);
                match link {
                    Some(link) => extent.runs().for_each(|run| runs.note_holder(run, HolderId::of(link))),
                    None => self.give_back(runs, extent),
                }
                link
            });
            let Some(link) = link else {
                if let Some((first, _)) = chain {
                    self.free_chain(runs, first);
                }
                return None;
            };
            chain = match chain {
                None => Some((link, link)),
                Some((first, last)) => {
                    self.zspages.link_extents(last, link);
                    Some((first, link))
                }
            };
            rest_frames -= frames;
        }
        let last_byte = (len_bytes - 1) % (EXTENT_FRAMES * PAGE_BYTES as u32);
        chain.map(|(first, _)| Location::new(first, last_byte as u16))
    }

    fn free_chain(&self, runs: &dyn RunSource, first: ZspageId) {
        let mut next = Some(first);
        while let Some(link) = next {
            let extent;
            (extent, next) = self.zspages.remove_extent(link);
            self.give_back(runs, extent);
        }
    }

    /// Frees a piece without references and pins. Only one thread sees that state.
    fn reclaim_piece(&self, runs: &dyn RunSource, at: PieceRef<'_>, word: PieceWord) {
        let location = word.location();
        if let Some(record) = location.record() {
            self.free_record(runs, record);
        } else if location != Location::FILLED {
            let forget = |len_bytes: u32| self.gauges.compressed_bytes.fetch_sub(u64::from(len_bytes), Relaxed);
            if let Some(taken) = self.zspages.slot_at(location) {
                forget(taken.len_bytes);
                self.free_slot(runs, taken);
            } else {
                forget(self.place_of(location).len_bytes());
                self.free_chain(runs, location.zspage());
            }
        }
        self.gauges.pieces.fetch_sub(1, Relaxed);
        self.pieces.free(at);
    }

    /// Frees the bytes at `location`; returns the number of frames freed with them.
    fn vacate(&self, runs: &dyn RunSource, location: Location) -> u32 {
        let Some(taken) = self.zspages.slot_at(location) else {
            self.free_chain(runs, location.zspage());
            return 0;
        };
        self.free_slot(runs, taken)
    }

    /// Frees a slot; returns the number of frames freed with it.
    #[inline]
    fn free_slot(&self, runs: &dyn RunSource, taken: TakenSlot<'_>) -> u32 {
        match self.zspages.free_slot(taken) {
            Some(extent) => {
                self.give_back(runs, extent);
                extent.frames
            }
            None => 0,
        }
    }

    /// Returns the place of the bytes at `location`. The caller must pin or exclusively own the
    /// piece while it uses the place.
    fn place_of(&self, location: Location) -> Place<'_> {
        Place::new(self, location)
    }

    /// Allocates an extent of `frames` frames.
    fn obtain(&self, runs: &dyn RunSource, frames: u32) -> Option<Extent> {
        let extent = Extent::obtain(frames, |order| runs.alloc_run(order), |run| runs.free_run(run))?;
        self.gauges.held_frames.fetch_add(frames, Relaxed);
        Some(extent)
    }

    fn give_back(&self, runs: &dyn RunSource, extent: Extent) {
        self.gauges.held_frames.fetch_sub(extent.frames, Relaxed);
        extent.runs().for_each(|run| runs.free_run(run));
    }
}
