//! The slot map: swap slot to the piece of the store that holds its content.
//!
//! Every slot of a piece names that piece. The page's index in the piece is the slot number modulo
//! the piece's granule, because the slots of a folio are naturally aligned. A slot takes 4 bytes
//! (0.1%), allocated at first use. A thread changes a slot's element only while it holds the block
//! lock of the page that owns the slot, or right after it allocated the slot.

use crate::sparse::SparseTable;
use crate::store::PieceId;
use crate::sync::atomic::{AtomicU32, Ordering};
use foliomem_types::units::Slot;

/// A map from slots to pieces.
pub struct SlotMap(SparseTable<AtomicU32>);

impl SlotMap {
    /// Makes a map for a device of `slots` slots.
    pub fn new(slots: u32) -> SlotMap {
        SlotMap(SparseTable::new(slots))
    }

    /// Records that `piece` holds the `slots` slots from `first` on.
    #[inline]
    pub fn set(&self, first: Slot, slots: u32, piece: PieceId) {
        // Relaxed: the block lock orders this store before any thread that reads the slot from the
        // page table.
        self.0.for_each(first.0..first.0 + slots, |_, word| word.store(piece.get(), Ordering::Relaxed));
    }

    /// Returns the piece that holds `slot`.
    ///
    /// # Panics
    /// If the slot is not in use.
    pub fn get(&self, slot: Slot) -> PieceId {
        match PieceId::new(self.0.get(slot.0).load(Ordering::Relaxed)) {
            Some(piece) => piece,
            None => panic!("{slot:?} holds no piece"),
        }
    }

    /// Clears the entry of `slot` and returns the piece that held it.
    pub fn take(&self, slot: Slot) -> PieceId {
        match PieceId::new(self.0.get(slot.0).swap(0, Ordering::Relaxed)) {
            Some(piece) => piece,
            None => panic!("{slot:?} holds no piece"),
        }
    }
}
