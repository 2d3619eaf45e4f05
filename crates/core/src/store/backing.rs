//! Writeback to the swap file: which pieces go there, and their places in it.
//!
//! The oldest pieces go first: a touched page leaves the store, so the age of a piece is the time
//! since its last use. Pieces are written as they are, compressed, several at a time into
//! contiguous slots in order of age, so that pieces swapped out together are stored together. The
//! [`crate::ports::SwapDevice`] writes and protects the bytes. The [`Seal`], which it needs to
//! authenticate its own writes, is kept here.
//!
//! A piece in the file has a *record*: 32 bytes for its place and seal. Its word names the record
//! instead of a zspage; its checksum stays. A piece moves to the file as in compaction: it is
//! pinned and written, and its word is switched if no other thread pins it then.
//!
//! Ages are a queue of pieces in the order of their sealing, 8 bytes an element. An element is only
//! a claim: it is valid while its piece is in memory and has the checksum that the element records.
//! When more than half of the elements are stale, the stale ones are dropped.

use super::file_slots::{FileSlots, PIECE_ALIGN_BYTES};
use super::pieces::PieceRef;
use super::word::{Location, Mark, RecordId};
use super::{Piece, PieceId, Pinned, RunSource, Store};
use crate::cluster::SwapClusters;
use crate::sparse::SparseTable;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use foliomem_types::units::{ClusterNumber, CpuNumber, MAX_ORDER, Order, PAGE_BYTES, Slot};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// Maximum bytes of a batch: large enough that the fixed cost of a write does not matter, small
/// enough that a fault that waits for one does not wait long.
const BATCH_BYTES: u32 = 256 << 10;
/// The largest piece that can go to the file: it fits into a cluster even if it is raw.
pub const MAX_FILE_PIECE_ORDER: Order = match Order::new(8) {
    Some(order) => order,
    None => unreachable!(),
};
/// Number of stale elements of the age queue that are kept.
const FEW_ELEMENTS: usize = 4096;

/// The proof that bytes read from the file are those that the swap device wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Seal {
    /// A number that is used only once.
    pub nonce: u64,
    /// The authentication tag: only the holder of the key can compute it for these bytes, this
    /// place and this nonce.
    pub tag: [u64; 2],
}

/// The place of a piece in the swap file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilePlace {
    /// The slot in which the piece begins.
    pub first: Slot,
    /// The offset in that slot.
    pub offset_bytes: u32,
    /// The length of the piece.
    pub len_bytes: u32,
    /// The seal with which it was written.
    pub seal: Seal,
}

impl FilePlace {
    /// Returns whether a piece can begin at this offset in a slot.
    pub const fn may_begin_at(offset_bytes: u32) -> bool {
        offset_bytes < PAGE_BYTES as u32 && offset_bytes.is_multiple_of(PIECE_ALIGN_BYTES)
    }

    /// Returns the number of slots that hold bytes of the piece.
    pub const fn slots(&self) -> u32 {
        (self.offset_bytes + self.len_bytes).div_ceil(PAGE_BYTES as u32)
    }

    /// Returns the numbers of these slots.
    const fn slot_numbers(&self) -> Range<u32> {
        self.first.0..self.first.0 + self.slots()
    }
}

const LEN_BITS: u32 = 22;
const OFFSET_BITS: u32 = 7;
const _: () = assert!(PAGE_BYTES as u32 / PIECE_ALIGN_BYTES == 1 << OFFSET_BITS);
const _: () = assert!(MAX_ORDER.bytes() < 1 << LEN_BITS);

/// A [`FilePlace`] in four words. It is written before its piece names it, and constant while the
/// piece lives.
#[derive(Debug, Default)]
struct Record {
    /// Bits 0..22 length, 22..29 offset in units of [`PIECE_ALIGN_BYTES`], 32..64 slot.
    place: AtomicU64,
    nonce: AtomicU64,
    tag: [AtomicU64; 2],
}

const _: () = assert!(cfg!(feature = "shuttle") || size_of::<Record>() == 32);

impl Record {
    fn set(&self, place: &FilePlace) {
        let grains = place.offset_bytes / PIECE_ALIGN_BYTES;
        let word = u64::from(place.len_bytes) | u64::from(grains) << LEN_BITS | u64::from(place.first.0) << 32;
        self.place.store(word, Relaxed);
        self.nonce.store(place.seal.nonce, Relaxed);
        (0..2).for_each(|half| self.tag[half].store(place.seal.tag[half], Relaxed));
    }

    fn get(&self) -> FilePlace {
        let word = self.place.load(Relaxed);
        FilePlace {
            first: Slot((word >> 32) as u32),
            offset_bytes: (word >> LEN_BITS & ((1 << OFFSET_BITS) - 1)) as u32 * PIECE_ALIGN_BYTES,
            len_bytes: (word & ((1 << LEN_BITS) - 1)) as u32,
            seal: Seal { nonce: self.nonce.load(Relaxed), tag: [0, 1].map(|half| self.tag[half].load(Relaxed)) },
        }
    }
}

/// The ids of unused records.
#[derive(Debug, Default)]
struct FreeRecords {
    ids: Vec<u32>,
    /// Ids below this were used before.
    used: u32,
}

/// An element of the age queue: a piece and the low half of its checksum.
type Aged = (PieceId, u32);

/// The swap file behind a store.
#[derive(Debug)]
pub(super) struct Backing {
    slots: FileSlots,
    records: SparseTable<Record>,
    free: Mutex<FreeRecords>,
    ages: Mutex<VecDeque<Aged>>,
}

impl Backing {
    pub(super) fn metadata_bytes(&self) -> usize {
        self.slots.metadata_bytes() + self.records.bytes() + self.ages.lock().capacity() * size_of::<Aged>()
    }

    fn new_record(&self, place: &FilePlace) -> RecordId {
        let id = {
            let mut free = self.free.lock();
            free.ids.pop().unwrap_or_else(|| {
                free.used += 1;
                free.used - 1
            })
        };
        self.records.get(id).set(place);
        RecordId(id)
    }
}

/// The reason why there is no batch to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoBatch {
    /// No piece in memory can be written.
    Empty,
    /// The file is full.
    Full,
}

/// The pieces that may be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    /// Any.
    All,
    /// Those that the slower codec was tried on: they keep their bytes.
    Tried,
}

/// Pieces for a batch that has no slots yet.
#[must_use = "its pieces are pinned"]
#[derive(Debug, Default)]
pub struct BatchPieces<'a> {
    pieces: Vec<(Pinned<'a>, u32)>,
    end_bytes: u32,
}

impl<'a> BatchPieces<'a> {
    /// Adds a piece.
    ///
    /// # Errors
    /// The batch is full; the error is the piece.
    pub fn push(&mut self, pinned: Pinned<'a>) -> Result<(), Pinned<'a>> {
        let start_bytes = aligned(self.end_bytes);
        let next_end = start_bytes + pinned.piece.place.len_bytes();
        if !self.pieces.is_empty() && next_end > BATCH_BYTES {
            return Err(pinned);
        }
        self.pieces.push((pinned, start_bytes));
        self.end_bytes = next_end;
        Ok(())
    }
}

/// A batch of pieces to write to the swap file, into contiguous slots. The pieces stay in memory
/// meanwhile.
#[must_use = "its pieces are pinned and its slots taken until it is handed back"]
#[derive(Debug)]
pub struct WriteBatch<'a> {
    /// The pieces, each with the byte of the batch at which it begins.
    pieces: Vec<(Pinned<'a>, u32)>,
    first: Slot,
    slots: u32,
}

impl<'a> WriteBatch<'a> {
    /// Returns the first slot.
    pub fn first(&self) -> Slot {
        self.first
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Iterates over the pieces, each with its start in bytes from the first slot.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = (&Piece<'a>, u32)> {
        self.pieces.iter().map(|(pinned, start_bytes)| (pinned.piece(), *start_bytes))
    }

    /// Returns the place of the piece that begins at `start_bytes`.
    pub fn place(&self, piece: &Piece<'_>, start_bytes: u32, seal: Seal) -> FilePlace {
        FilePlace {
            first: self.first.offset(start_bytes / PAGE_BYTES as u32),
            offset_bytes: start_bytes % PAGE_BYTES as u32,
            len_bytes: piece.place.len_bytes(),
            seal,
        }
    }
}

/// Returns the start of the piece after one that ends at `end_bytes`.
const fn aligned(end_bytes: u32) -> u32 {
    end_bytes.next_multiple_of(PIECE_ALIGN_BYTES)
}

impl Store {
    /// Makes a store for at most `max_pieces` pieces with a swap file, whose slots `slots` manages.
    pub fn with_backing(max_pieces: u32, slots: SwapClusters) -> Store {
        let backing = Backing {
            slots: FileSlots::new(slots),
            records: SparseTable::new(max_pieces),
            free: Mutex::default(),
            ages: Mutex::default(),
        };
        Store { backing: Some(backing), ..Store::new(max_pieces) }
    }

    /// Returns the number of slots of the swap file in use.
    pub fn file_slots(&self) -> u32 {
        self.backing.as_ref().map_or(0, |backing| backing.slots.live_slots())
    }

    /// Returns the number of clusters of the swap file that wait for discard.
    pub fn awaiting_discard(&self) -> u32 {
        self.backing.as_ref().map_or(0, |backing| backing.slots.awaiting_discard())
    }

    /// Discards one cluster of the swap file that waits for discard. Returns whether there was one.
    pub fn discard_one(&self, runs: &dyn RunSource, discard: impl FnOnce(ClusterNumber)) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.slots.discard_one(runs, discard))
    }

    /// Prepares for a fork of the process. No other call may be in progress.
    pub fn lend_file(&self) {
        self.backing.iter().for_each(|backing| backing.slots.lend());
    }

    /// Counts the child of the next fork as a user of the shared store's slots, as this process is.
    pub fn count_child(&self, runs: &dyn RunSource) {
        self.backing.iter().for_each(|backing| backing.slots.count_child(runs));
    }

    /// Counts this process, or a child that was not forked, as a user of no slot.
    pub fn drop_users(&self, runs: &dyn RunSource) {
        self.backing.iter().for_each(|backing| backing.slots.drop_users(runs));
    }

    /// Prepares the child of a fork. No other call may be in progress.
    pub fn borrow_file(&self) {
        self.backing.iter().for_each(|backing| backing.slots.borrow());
    }

    fn backing(&self) -> &Backing {
        let Some(backing) = &self.backing else { unreachable!("a record without a swap file") };
        backing
    }

    pub(super) fn file_place(&self, record: RecordId) -> FilePlace {
        self.backing().records.get(record.0).get()
    }

    /// Frees the record and the slots of a piece in the file without references and pins.
    pub(super) fn free_record(&self, runs: &dyn RunSource, record: RecordId) {
        let backing = self.backing();
        backing.slots.drop_piece(runs, self.file_place(record).slot_numbers());
        backing.free.lock().ids.push(record.0);
    }

    /// Queues a sealed piece as the youngest.
    #[inline]
    pub(super) fn note_age(&self, at: PieceRef<'_>) {
        let Some(backing) = &self.backing else { return };
        self.note_age_in(backing, at.id(), at.extra() as u32);
    }

    /// Queues a piece as the youngest in the age queue of `backing`.
    fn note_age_in(&self, backing: &Backing, id: PieceId, stamp: u32) {
        let stale = {
            let mut ages = backing.ages.lock();
            ages.push_back((id, stamp));
            let pieces = self.gauges.pieces.load(Relaxed) as usize;
            (ages.len() > FEW_ELEMENTS + pieces).then(|| std::mem::take(&mut *ages))
        };
        if let Some(mut kept) = stale {
            kept.retain(|&(id, stamp)| {
                let at = self.pieces.at(id);
                let word = at.load();
                word.references() > 0 && word.location().is_in_memory() && at.extra() as u32 == stamp
            });
            let mut ages = backing.ages.lock();
            kept.append(&mut ages);
            *ages = kept;
        }
    }

    /// Queues a recompressed piece as the oldest: an idle piece is old.
    pub(super) fn note_old_age(&self, id: PieceId, checksum: u64) {
        self.backing.iter().for_each(|backing| backing.ages.lock().push_front((id, checksum as u32)));
    }

    /// Removes the oldest piece in memory from the queue and pins it, if it is one of `which`.
    pub fn take_oldest(&self, runs: &dyn RunSource, which: Which) -> Option<Pinned<'_>> {
        let backing = self.backing.as_ref()?;
        loop {
            let (id, stamp) = backing.ages.lock().pop_front()?;
            let at = self.pieces.at(id);
            let Some((word, extra)) = at.try_pin() else { continue };
            let is_meant = word.is_sealed() && word.location().is_in_memory() && extra as u32 == stamp;
            if !is_meant || word.granule() > MAX_FILE_PIECE_ORDER {
                self.unpin_at(runs, at);
                continue;
            }
            let pinned = self.pinned(at, word, extra);
            if which == Which::Tried && !matches!(word.mark(), Mark::Settled | Mark::Recompressed) {
                self.put_back(runs, std::iter::once(pinned));
                return None;
            }
            return Some(pinned);
        }
    }

    /// Unpins pieces that stay in memory, and queues them as the oldest again.
    pub fn put_back<'a>(&self, runs: &dyn RunSource, pieces: impl DoubleEndedIterator<Item = Pinned<'a>>) {
        let backing = self.backing();
        for pinned in pieces.rev() {
            backing.ages.lock().push_front((pinned.id(), pinned.piece.checksum as u32));
            self.unpin(runs, pinned);
        }
    }

    /// Takes the oldest pieces and allocates slots for them.
    ///
    /// # Errors
    /// There are no pieces, or no slots.
    pub fn begin_write_back(&self, runs: &dyn RunSource, cpu: CpuNumber) -> Result<WriteBatch<'_>, NoBatch> {
        let mut pieces = BatchPieces::default();
        while let Some(pinned) = self.take_oldest(runs, Which::All) {
            if let Err(pinned) = pieces.push(pinned) {
                self.put_back(runs, std::iter::once(pinned));
                break;
            }
        }
        self.place_batch(runs, cpu, pieces)
    }

    /// Allocates slots for pieces. If no long run of slots is free, fewer pieces go into a shorter
    /// one, and the others stay in memory.
    ///
    /// # Errors
    /// There are no pieces, or no slots.
    pub fn place_batch<'a>(
        &'a self,
        runs: &dyn RunSource,
        cpu: CpuNumber,
        batch: BatchPieces<'a>,
    ) -> Result<WriteBatch<'a>, NoBatch> {
        let mut pieces = batch.pieces;
        while let Some((last, start_bytes)) = pieces.last() {
            let slots = (start_bytes + last.piece.place.len_bytes()).div_ceil(PAGE_BYTES as u32);
            let order =
                Order::new(slots.next_power_of_two().trailing_zeros() as u8).filter(|&order| order <= MAX_ORDER);
            let Some(order) = order else { unreachable!("a batch fits a cluster") };
            let backing = self.backing();
            if let Some(first) = backing.slots.alloc(runs, cpu, order) {
                backing.slots.give_back(runs, first.0 + slots..first.0 + order.pages());
                return Ok(WriteBatch { pieces, first, slots });
            }
            let shorter_bytes = order.bytes() as u32 / 2;
            let fitting =
                pieces.partition_point(|(pinned, start)| start + pinned.piece.place.len_bytes() <= shorter_bytes);
            self.put_back(runs, pieces.drain(fitting..).map(|(pinned, _)| pinned));
            if pieces.is_empty() {
                return Err(NoBatch::Full);
            }
        }
        Err(NoBatch::Empty)
    }

    /// Switches the pieces of a written batch to the file, each with its seal. A piece that another
    /// thread pins at this moment stays in memory. Returns the total length of the switched pieces
    /// in bytes.
    pub fn finish_write_back(&self, runs: &dyn RunSource, batch: WriteBatch<'_>, seals: &[Seal]) -> u64 {
        let backing = self.backing();
        let (first, slots) = (batch.first, batch.slots);
        let places: Vec<FilePlace> =
            batch.pieces().zip(seals).map(|((piece, start), &seal)| batch.place(piece, start, seal)).collect();
        let mut moved_bytes = 0;
        for ((pinned, _), place) in batch.pieces.into_iter().zip(&places) {
            backing.slots.add_piece(place.slot_numbers());
            moved_bytes += self.switch_to_file(runs, pinned, place);
        }
        backing.slots.drop_piece(runs, first.0..first.0 + slots);
        moved_bytes
    }

    /// Switches a pinned piece to `place`, whose slots count it already. If another thread pins it
    /// at this moment, it stays in memory, and the slots count it no more. Returns the bytes that
    /// this frees.
    fn switch_to_file(&self, runs: &dyn RunSource, pinned: Pinned<'_>, place: &FilePlace) -> u64 {
        let from = pinned.at.load().location();
        let record = self.backing().new_record(place);
        let Some(word) = pinned.at.switch(Location::in_file(record)) else {
            self.free_record(runs, record);
            self.put_back(runs, std::iter::once(pinned));
            return 0;
        };
        if word.raw() {
            self.gauges.raw_pages.fetch_sub(u64::from(word.references()), Relaxed);
        }
        self.gauges.compressed_bytes.fetch_sub(u64::from(place.len_bytes), Relaxed);
        self.vacate(runs, from);
        u64::from(place.len_bytes)
    }

    /// Switches a pinned piece to `place`, where a process of the run has published equal bytes
    /// while the cluster had `generation`: if it may, and `is_equal` says that the bytes there are
    /// the piece's. Returns the bytes that this frees, or the piece if it stays as it is.
    ///
    /// # Errors
    /// The place is in use for something else by now, or its bytes differ.
    pub fn join<'a>(
        &self,
        runs: &dyn RunSource,
        pinned: Pinned<'a>,
        place: &FilePlace,
        generation: u64,
        is_equal: impl FnOnce(&Piece<'_>) -> bool,
    ) -> Result<u64, Pinned<'a>> {
        let slots = &self.backing().slots;
        if place.len_bytes != pinned.piece.place.len_bytes() || !slots.join(runs, place.slot_numbers(), generation) {
            return Err(pinned);
        }
        // From here on nobody overwrites the slots.
        if !is_equal(pinned.piece()) {
            slots.drop_piece(runs, place.slot_numbers());
            return Err(pinned);
        }
        Ok(self.switch_to_file(runs, pinned, place))
    }

    /// Drops a batch that could not be written: its pieces stay in memory.
    pub fn abandon_write_back(&self, runs: &dyn RunSource, batch: WriteBatch<'_>) {
        let backing = self.backing();
        let WriteBatch { pieces, first, slots } = batch;
        self.put_back(runs, pieces.into_iter().map(|(pinned, _)| pinned));
        backing.slots.drop_piece(runs, first.0..first.0 + slots);
    }

    /// Checks that every record has one piece, and every slot the pieces that lie in it.
    pub(super) fn check_backing(&self) {
        let Some(backing) = &self.backing else { return };
        let mut pieces_in: HashMap<u32, u8> = HashMap::new();
        let mut records = Vec::new();
        let mut in_memory = Vec::new();
        for id in self.pieces.ids() {
            let at = self.pieces.at(id);
            let word = at.load();
            if let Some(record) = word.location().record().filter(|_| !word.is_dead()) {
                let place = self.file_place(record);
                place.slot_numbers().for_each(|slot| *pieces_in.entry(slot).or_default() += 1);
                records.push(record.0);
            } else if !word.is_dead() && word.location().is_in_memory() && word.is_sealed() {
                in_memory.push((id, at.extra() as u32));
            }
        }
        backing.slots.check(&pieces_in);
        let free = backing.free.lock();
        records.extend(&free.ids);
        records.sort_unstable();
        assert!(records.iter().copied().eq(0..free.used), "every record is free or has exactly one piece");
        drop(free);
        let ages = backing.ages.lock();
        let queued: std::collections::HashSet<_> = ages.iter().collect();
        for aged in in_memory.iter().filter(|(id, _)| self.pieces.at(*id).load().granule() <= MAX_FILE_PIECE_ORDER) {
            assert!(queued.contains(aged), "{aged:?} has no age");
        }
    }
}
