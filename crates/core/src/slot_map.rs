//! Which piece of the store holds the content of a swap slot.
//!
//! Every slot of a piece names it; the page's place within the piece is the slot's number modulo the
//! piece's granule, because slots of a folio are naturally aligned. 4 bytes a slot (0.1%), made when first
//! used. A slot's element is changed only by whoever holds the block lock of the page that owns the slot, or
//! has just allocated it.

use crate::sparse::SparseTable;
use crate::store::PieceId;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::units::Slot;

/// Slot to piece.
pub struct SlotMap(SparseTable<AtomicU32>);

impl SlotMap {
    /// A map for a device of `slots` slots.
    pub fn new(slots: u32) -> SlotMap {
        SlotMap(SparseTable::new(slots))
    }

    /// Says that `slots` slots from `first` on are held by `piece`.
    #[inline]
    pub fn set(&self, first: Slot, slots: u32, piece: PieceId) {
        // Relaxed: the block lock orders this before whoever reads the slot out of the page table.
        self.0.for_each(first.0..first.0 + slots, |_, word| word.store(piece.get(), Ordering::Relaxed));
    }

    /// The piece that holds `slot`.
    ///
    /// # Panics
    /// If the slot is not in use.
    pub fn get(&self, slot: Slot) -> PieceId {
        match PieceId::new(self.0.get(slot.0).load(Ordering::Relaxed)) {
            Some(piece) => piece,
            None => panic!("{slot:?} holds no piece"),
        }
    }

    /// Forgets what `slot` holds, and returns it.
    pub fn take(&self, slot: Slot) -> PieceId {
        match PieceId::new(self.0.get(slot.0).swap(0, Ordering::Relaxed)) {
            Some(piece) => piece,
            None => panic!("{slot:?} holds no piece"),
        }
    }
}
