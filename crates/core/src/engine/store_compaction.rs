//! Compaction of the store: its emptiest zspages are emptied into others, and their frames serve the program again.
//!
//! Pieces die in another order than they came, so zspages are left with holes that the next pieces do not always fit.
//! Making room by copying some bytes is cheaper than by compressing a folio that may be touched next; so wherever the
//! store wastes more than [`WASTE_PERCENT`], reclaimers compact first, and who tends the engine compacts now and then, so that
//! there is room when it is needed.

use super::Engine;
use crate::machine::Machine;
use crate::store::{FragmentMut, FragmentRef, PieceMover};

/// Waste is what the store takes without the compressed bytes themselves, in percent of all it takes. Above this there
/// is something to gain: sizes of slots, slack and metadata alone come to 5 to 8.
const WASTE_PERCENT: u64 = 9;
/// A store of a few MiB has a half-empty zspage in many of its classes, which is no reason to copy.
const WASTE_MIN_BYTES: u64 = 256 << 10;

/// Pages copied at a time: a quarter of a MiB, a few tens of microseconds.
const STEP_PAGES: u32 = 64;

/// The machine copies the bytes.
pub(super) struct Mover<'a, M: Machine>(pub(super) &'a M);

impl<M: Machine> PieceMover for Mover<'_, M> {
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.0.copy_piece(from, to);
    }
}

impl<M: Machine> Engine<M> {
    /// Whether compaction of the store is likely to free something.
    pub fn store_is_wasteful(&self) -> bool {
        let stats = self.store.stats();
        let waste_bytes = stats.used_bytes.saturating_sub(stats.compr_data_bytes);
        waste_bytes > (stats.used_bytes * WASTE_PERCENT / 100).max(WASTE_MIN_BYTES)
    }

    /// Compacts the store a little if that is likely to free something; returns how many frames it did.
    pub fn compact_wasteful_store(&self) -> u32 {
        if self.store_is_wasteful() { self.compact_store(STEP_PAGES) } else { 0 }
    }

    /// Compacts the store until about `most_pages` pages of compressed bytes were copied or nothing is left to gain;
    /// returns how many frames that freed. Takes no time where there is nothing to gain.
    pub fn compact_store(&self, most_pages: u32) -> u32 {
        let freed_frames = self.store.compact(&self.runs(), &Mover(&self.machine), most_pages);
        self.counters().store.pages_compacted.add(u64::from(freed_frames));
        freed_frames
    }
}
