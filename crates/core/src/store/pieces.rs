//! The table of pieces: one word and one extra word (checksum, or what filled content repeats) each.
//!
//! Free ids form a stack linked through the extra words; its head carries a tag that changes with every
//! push, so that a pop that was overtaken fails. Ids never used come from a counter.
//!
//! Orderings: `publish` releases what was written before it (the extra word, the zspage's descriptor) to
//! whoever acquires the word in `try_pin`, `release` or `unpin`; those release what their caller read, to
//! whoever frees or moves the piece.

use super::PieceId;
use super::word::{Location, Mark, PieceWord};
use crate::sparse::SparseTable;
use crate::sync;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The highest id: the top bit of a slot's element in a zspage says that the slot is free.
pub(super) const MAX_ID: u32 = (1 << 31) - 1;

#[derive(Debug, Default)]
struct Entry {
    word: AtomicU64,
    /// Checksum, or what filled content repeats; the next free id while free.
    extra: AtomicU64,
}

const _: () = assert!(cfg!(feature = "shuttle") || size_of::<Entry>() == 16);

impl Entry {
    fn load(&self) -> PieceWord {
        // Acquire pairs with the Release in `publish` and `update`.
        PieceWord::from_bits(self.word.load(Ordering::Acquire))
    }

    /// Changes the word, retrying until nobody interfered; returns what it was changed to, or `None` where `change`
    /// refuses.
    fn update(&self, change: impl Fn(PieceWord) -> Option<PieceWord>) -> Option<PieceWord> {
        let mut before = self.load();
        loop {
            let after = change(before)?;
            // AcqRel pairs with itself and with the Release in `publish`, as the module's head
            // says.
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
    /// Ids from 1 to this have been used.
    used: AtomicU32,
    /// Top of the stack of free ids (0: empty) in the low half, its tag in the high half.
    free: AtomicU64,
}

/// A piece's place in the table: looked up once for all that is done with it.
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

    /// Where the piece is, or may be.
    #[inline]
    pub(super) fn at(&self, id: PieceId) -> PieceRef<'_> {
        debug_assert!(id.get() <= self.max_pieces);
        PieceRef { id, entry: self.table.get(id.get() - 1) }
    }

    /// A place for a new piece. Its word says *free* until it is published.
    #[inline]
    pub(super) fn allocate(&self) -> Option<PieceRef<'_>> {
        // Acquire pairs with the Release in `free`: the link and the free word.
        let mut head = self.free.load(Ordering::Acquire);
        while let Some(id) = PieceId::new(head as u32) {
            let top = self.at(id);
            let next = top.extra() & u64::from(u32::MAX);
            let popped = head & !u64::from(u32::MAX) | next;
            // Acquire pairs with the Release in `free`, too, where another top is found.
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

    /// Takes a place back.
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

    /// Ids from 1 to this have been used.
    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Every id that was ever used.
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

    /// Turns an allocated place into a live piece.
    #[inline]
    pub(super) fn publish(self, word: PieceWord, extra: u64) {
        self.entry.extra.store(extra, Ordering::Relaxed);
        // Release pairs with the Acquire in `load` and `update`: the extra word.
        self.entry.word.store(word.bits(), Ordering::Release);
    }

    pub(super) fn load(self) -> PieceWord {
        self.entry.load()
    }

    /// The extra word of a piece that was published.
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
            // As many readers as can be counted: one of them will be done in microseconds.
            sync::yield_now();
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

    /// Changes the location of a piece that only the caller has pinned, and drops that pin; returns its word since. Fails
    /// if somebody else has it pinned or it has no references left.
    pub(super) fn switch(self, to: Location) -> Option<PieceWord> {
        self.entry
            .update(|word| if word.pins() != 1 || word.references() == 0 { None } else { word.moved(to).unpinned() })
    }

    /// The same, of a piece that is recompressed. Meanwhile nobody can pin it: neither the place nor the checksum is read
    /// without the other.
    pub(super) fn replace(self, to: Location, checksum: u64) -> Option<PieceWord> {
        self.entry
            .update(|word| if word.pins() != 1 || word.references() == 0 { None } else { Some(word.locked()) })?;
        // The word's release publishes it.
        self.entry.extra.store(checksum, Ordering::Relaxed);
        self.entry.update(|word| Some(word.replaced(to)))
    }

    /// Marks a piece, if it is still one.
    pub(super) fn mark(self, mark: Mark) {
        self.entry.update(|word| if word.references() == 0 { None } else { Some(word.marked(mark)) });
    }
}
