//! Which piece of the store holds the content of a swap slot.
//!
//! Every slot of a piece names it; the page's place within the piece is the slot's number modulo the
//! piece's granule, because slots of a folio are naturally aligned. 4 bytes a slot (0.1%), in chunks
//! that are made when first used. A slot's element is changed only by whoever holds the block lock of
//! the page that owns the slot, or has just allocated it.

use crate::store::PieceId;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::units::Slot;
use std::sync::OnceLock;

const CHUNK_SLOTS: usize = 4096;

type Chunk = Box<[AtomicU32]>;

/// Slot to piece.
pub struct SlotMap {
    chunks: Box<[OnceLock<Chunk>]>,
}

impl SlotMap {
    /// A map for a device of `slots` slots.
    pub fn new(slots: u32) -> SlotMap {
        SlotMap { chunks: (0..(slots as usize).div_ceil(CHUNK_SLOTS)).map(|_| OnceLock::new()).collect() }
    }

    fn element(&self, slot: Slot) -> &AtomicU32 {
        let (chunk, index) = (slot.0 as usize / CHUNK_SLOTS, slot.0 as usize % CHUNK_SLOTS);
        &self.chunks[chunk].get_or_init(|| (0..CHUNK_SLOTS).map(|_| AtomicU32::new(0)).collect())[index]
    }

    /// Says that `slots` slots from `first` on are held by `piece`.
    pub fn set(&self, first: Slot, slots: u32, piece: PieceId) {
        for index in 0..slots {
            // Relaxed: the block lock orders this before whoever reads the slot out of the page table.
            self.element(first.offset(index)).store(piece.get(), Ordering::Relaxed);
        }
    }

    /// The piece that holds `slot`.
    ///
    /// # Panics
    /// If the slot is not in use.
    pub fn get(&self, slot: Slot) -> PieceId {
        match PieceId::new(self.element(slot).load(Ordering::Relaxed)) {
            Some(piece) => piece,
            None => panic!("{slot:?} holds no piece"),
        }
    }

    /// Forgets what `slot` holds, and returns it.
    pub fn take(&self, slot: Slot) -> PieceId {
        match PieceId::new(self.element(slot).swap(0, Ordering::Relaxed)) {
            Some(piece) => piece,
            None => panic!("{slot:?} holds no piece"),
        }
    }
}
