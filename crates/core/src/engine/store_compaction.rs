//! Compaction of the store: pieces of its emptiest zspages move into others, and the freed frames
//! serve the program again.
//!
//! Pieces are freed in another order than they were stored, so zspages get holes that new pieces do
//! not always fill. Copying some bytes is cheaper than compressing a folio that may be touched
//! next. So if the store wastes more than [`WASTE_PERCENT`], reclaim compacts first, and
//! maintenance compacts now and then, so that there is room when it is needed.

use super::Engine;
use crate::ports::{Pieces, Ports};
use crate::store::{FragmentMut, FragmentRef, PieceMover};

/// Waste of the store, in percent of its memory, above which compaction has something to gain.
/// Waste is all memory except the compressed bytes; slot sizes, slack and metadata alone are 5 to 8
/// percent.
const WASTE_PERCENT: u64 = 9;
/// Minimum waste for compaction: a store of a few MiB has a half-empty zspage in many classes,
/// which is no reason to copy.
const WASTE_MIN_BYTES: u64 = 256 << 10;

/// Pages copied at a time: 256 KiB, a few tens of microseconds.
const STEP_PAGES: u32 = 64;

/// The mover of pieces that lets the codec copy the bytes.
pub(super) struct Mover<'a, P: Ports>(pub(super) &'a P);

impl<P: Ports> PieceMover for Mover<'_, P> {
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.0.pieces().copy(from, to);
    }
}

impl<P: Ports> Engine<P> {
    /// Returns whether compaction of the store is likely to free something.
    pub fn store_is_wasteful(&self) -> bool {
        let stats = self.store.stats();
        let waste_bytes = stats.used_bytes.saturating_sub(stats.compr_data_bytes);
        waste_bytes > (stats.used_bytes * WASTE_PERCENT / 100).max(WASTE_MIN_BYTES)
    }

    /// Compacts the store a little if that is likely to free something; returns the number of freed
    /// frames.
    pub fn compact_wasteful_store(&self) -> u32 {
        if self.store_is_wasteful() { self.compact_store(STEP_PAGES) } else { 0 }
    }

    /// Compacts the store until about `most_pages` pages of compressed bytes are copied or nothing
    /// is left to gain. Returns the number of freed frames; takes no time if there is nothing to
    /// gain.
    pub fn compact_store(&self, most_pages: u32) -> u32 {
        let freed_frames = self.store.compact(&self.runs(), &Mover(&self.ports), most_pages);
        self.counters().store.pages_compacted.add(u64::from(freed_frames));
        freed_frames
    }
}
