//! What the program has swapped out, by page and checksum: relatives that have equal content at a
//! page share it since a fork.
//!
//! Locks: one block at a time.

use super::Engine;
use crate::page_table::PageState;
use crate::ports::Ports;
use foliomem_types::units::PageNumber;

/// Swapped-out pages that lie in one piece, in sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredContent {
    /// The first of the pages.
    pub page: PageNumber,
    /// Number of the pages.
    pub pages: u32,
    /// The checksum of the piece, or the word that its content repeats.
    pub content: u64,
}

impl<P: Ports> Engine<P> {
    /// Passes everything that is swapped out in the first `blocks` blocks from that of `from` on to
    /// `note`. Returns the page from which to go on; `None` at the end.
    pub fn for_each_stored(
        &self,
        from: PageNumber,
        blocks: u32,
        mut note: impl FnMut(StoredContent),
    ) -> Option<PageNumber> {
        let mut next = from;
        for _ in 0..blocks {
            let entries = self.table.get(self.table.first_from(next)?)?.lock();
            for (head, state) in entries.folios() {
                let PageState::Swapped { slot, order, .. } = state else { continue };
                let mut index = 0;
                while index < order.pages() {
                    let first = slot.offset(index);
                    let (content, granule) = self.store.content_of(self.slot_map.get(first));
                    let left_in_piece = granule.pages() - first.0 % granule.pages();
                    let pages = left_in_piece.min(order.pages() - index);
                    note(StoredContent { page: head.offset(index), pages, content });
                    index += pages;
                }
            }
            next = entries.end();
        }
        Some(next)
    }
}
