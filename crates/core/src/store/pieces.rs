//! The table of pieces: one word and one extra word each (checksum, or the repeated word of filled
//! content).
//!
//! Free ids form a stack that is linked through the extra words. Its head carries a tag that
//! changes with every push, so that an overtaken pop fails. Ids never used come from a counter.
//!
//! Orderings: `publish` releases the writes before it (the extra word, the zspage's descriptor) to
//! the acquire of the word in `try_pin`, `release` or `unpin`. Those release their caller's reads
//! to the thread that frees or moves the piece.

use super::PieceId;
use super::word::{Location, Mark, PieceWord};
use crate::sparse::SparseTable;
use crate::sync;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Maximum id: the top bit of a slot's element in a zspage marks a free slot.
pub(super) const MAX_ID: u32 = (1 << 31) - 1;

#[derive(Debug, Default)]
struct Entry {
    word: AtomicU64,
    /// Checksum, or the repeated word of filled content; the next free id while the piece is free.
    extra: AtomicU64,
}

const _: () = assert!(cfg!(feature = "shuttle") || size_of::<Entry>() == 16);

impl Entry {
    fn load(&self) -> PieceWord {
        // Acquire pairs with the Release in `publish` and `update`.
        PieceWord::from_bits(self.word.load(Ordering::Acquire))
    }

    /// Changes the word atomically and returns the new one, or `None` if `change` refuses.
    fn update(&self, change: impl Fn(PieceWord) -> Option<PieceWord>) -> Option<PieceWord> {
        let mut before = self.load();
        loop {
            let after = change(before)?;
            // AcqRel pairs with itself and with the Release in `publish`: see the module
            // header.
            match self.word.compare_exchange_weak(before.bits(), after.bits(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(after),
                Err(now) => before = PieceWord::from_bits(now),
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Pieces {
    table: SparseTable<Entry>,
    max_pieces: u32,
    /// Ids from 1 to this were used before.
    used: AtomicU32,
    /// The stack of free ids: its top in the low half (0: empty), its tag in the high half.
    free: AtomicU64,
}

/// A piece's entry in the table, looked up once for several operations.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceRef<'a> {
    id: PieceId,
    entry: &'a Entry,
}

impl Pieces {
    pub(super) fn new(max_pieces: u32) -> Pieces {
        let max_pieces = max_pieces.min(MAX_ID);
        Pieces { table: SparseTable::new(max_pieces), max_pieces, used: AtomicU32::new(0), free: AtomicU64::new(0) }
    }

    /// Returns the entry of `id`.
    #[inline]
    pub(super) fn at(&self, id: PieceId) -> PieceRef<'_> {
        debug_assert!(id.get() <= self.max_pieces);
        PieceRef { id, entry: self.table.get(id.get() - 1) }
    }

    /// Allocates an entry for a new piece. Its word says *free* until it is published.
    #[inline]
    pub(super) fn allocate(&self) -> Option<PieceRef<'_>> {
        // Acquire pairs with the Release in `free`, for the link and the free word.
        let mut head = self.free.load(Ordering::Acquire);
        while let Some(id) = PieceId::new(head as u32) {
            let top = self.at(id);
            let next = top.extra() & u64::from(u32::MAX);
            let popped = head & !u64::from(u32::MAX) | next;
            // A failure's Acquire pairs with the Release in `free`, for the new top.
            match self.free.compare_exchange_weak(head, popped, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(top),
                Err(now) => head = now,
            }
        }
        let fresh = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            if used < self.max_pieces { Some(used + 1) } else { None }
        });
        fresh.ok().and_then(|used| PieceId::new(used + 1)).map(|id| self.at(id))
    }

    /// Frees an entry.
    #[inline]
    pub(super) fn free(&self, PieceRef { id, entry }: PieceRef<'_>) {
        entry.word.store(PieceWord::FREE.bits(), Ordering::Relaxed);
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            entry.extra.store(head & u64::from(u32::MAX), Ordering::Relaxed);
            let tag = (head >> 32).wrapping_add(1) << 32;
            // Release pairs with the Acquire in `allocate`, for the link and the free word.
            match self.free.compare_exchange_weak(head, tag | u64::from(id.get()), Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Returns the highest id that was ever used.
    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Iterates over every id that was ever used.
    pub(super) fn ids(&self) -> impl Iterator<Item = PieceId> {
        (1..=self.used()).filter_map(PieceId::new)
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.table.bytes()
    }
}

impl PieceRef<'_> {
    pub(super) fn id(self) -> PieceId {
        self.id
    }

    /// Turns an allocated entry into a live piece.
    #[inline]
    pub(super) fn publish(self, word: PieceWord, extra: u64) {
        self.entry.extra.store(extra, Ordering::Relaxed);
        // Release pairs with the Acquire in `load` and `update`, for the extra word.
        self.entry.word.store(word.bits(), Ordering::Release);
    }

    pub(super) fn load(self) -> PieceWord {
        self.entry.load()
    }

    /// Returns the extra word of a published piece.
    pub(super) fn extra(self) -> u64 {
        self.entry.extra.load(Ordering::Relaxed)
    }

    /// Pins a piece that has references; returns its word and its extra word.
    #[inline]
    pub(super) fn try_pin(self) -> Option<(PieceWord, u64)> {
        loop {
            let pinned = self.entry.update(|word| if word.references() == 0 { None } else { word.pinned() });
            if let Some(word) = pinned {
                return Some((word, self.extra()));
            }
            if self.load().references() == 0 {
                return None;
            }
            // All pins are taken: a reader will unpin within microseconds.
            sync::back_off();
        }
    }

    #[inline]
    pub(super) fn unpin(self) -> PieceWord {
        match self.entry.update(PieceWord::unpinned) {
            Some(word) => word,
            None => panic!("{:?} is not pinned", self.id),
        }
    }

    #[inline]
    pub(super) fn release(self, pages: u16) -> PieceWord {
        match self.entry.update(|word| word.released(pages)) {
            Some(word) => word,
            None => panic!("{:?} has fewer than {pages} references, or none were named", self.id),
        }
    }

    #[inline]
    pub(super) fn seal(self) {
        let sealed = self.entry.update(|word| if word.references() == 0 { None } else { Some(word.sealed()) });
        assert!(sealed.is_some(), "{:?} is no piece", self.id);
    }

    /// Switches the location of a piece that only the caller pins, and drops that pin. Returns the
    /// new word. Fails if another thread pins the piece or no reference is left.
    pub(super) fn switch(self, to: Location) -> Option<PieceWord> {
        self.entry
            .update(|word| if word.pins() != 1 || word.references() == 0 { None } else { word.moved(to).unpinned() })
    }

    /// Switches the location and the checksum of a recompressed piece. No thread can pin the piece
    /// meanwhile, so no reader combines an old value with a new one.
    pub(super) fn replace(self, to: Location, checksum: u64) -> Option<PieceWord> {
        self.entry
            .update(|word| if word.pins() != 1 || word.references() == 0 { None } else { Some(word.locked()) })?;
        // The release of the word below publishes the checksum.
        self.entry.extra.store(checksum, Ordering::Relaxed);
        self.entry.update(|word| Some(word.replaced(to)))
    }

    /// Marks a piece if it still has references.
    pub(super) fn mark(self, mark: Mark) {
        self.entry.update(|word| if word.references() == 0 { None } else { Some(word.marked(mark)) });
    }
}
