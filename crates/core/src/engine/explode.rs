//! Exploding pieces: a piece returns as a whole, in parts.
//!
//! If only parts of folios are fetched, a piece that was compressed as one stays in the store as
//! long as one of its pages is swapped out: memory that nothing uses. Each of its parts costs the
//! decompression of everything before it. So the first fault on such a piece, or step of a strided
//! stream, fetches all that is left of it. The touched part is mapped into the program; the others
//! are staged, and are swapped out again one by one unless they are touched.
//!
//! Locks: as for any fault ([`super::fault`]).

use super::Engine;
use super::fault::Changing;
use super::swap_in::{Fetches, mark_fetching};
use crate::homes::Urgency;
use crate::locality::SwapIn;
use crate::page_table::{Block, Entries, PageState};
use crate::ports::Ports;
use crate::queue::FolioName;
use crate::readahead::LikelyUse;
use crate::run_tokens::UniqueRun;
use crate::store::PieceId;
use foliomem_types::units::{Order, PageNumber, Slot};
use std::ops::Range;

/// Maximum order of an exploded piece, 64 KiB: decompressing more takes longer than some faults.
const MAX_EXPLODED_ORDER: Order = Order::new(4).unwrap();
/// Maximum number of pages of an exploded piece.
const MAX_EXPLODED_PAGES: usize = MAX_EXPLODED_ORDER.pages() as usize;

/// The remaining parts of a piece, being fetched.
pub(super) struct ExplodedPiece {
    piece: PieceId,
    /// The frames for the whole piece.
    run: UniqueRun,
    /// The part with the faulting page.
    touched: FolioName,
    parts: Fetches,
}

impl ExplodedPiece {
    /// Returns the part that is mapped into the program.
    pub fn touched(&self) -> FolioName {
        self.touched
    }

    /// Returns the pages of that part.
    pub fn touched_pages(&self) -> Range<PageNumber> {
        self.touched.head.folio(self.touched.order)
    }

    /// Returns the range from the first fetched page to the last.
    pub fn pages(&self) -> Range<PageNumber> {
        self.parts.first().head..self.parts.end()
    }
}

impl<P: Ports> Engine<P> {
    /// Marks the remaining pages of the piece of `page`, which is swapped out, as being fetched, in
    /// parts of `order`. Returns `None` if fetching whole folios costs less (unless `page` is
    /// wanted `alone`), if the piece is no larger than `order` or too large, if there is no room
    /// for it, or if it was moved so that its alignment changed.
    pub(super) fn start_explode(
        &self,
        entries: &mut Entries,
        page: PageNumber,
        order: Order,
        alone: bool,
    ) -> Option<ExplodedPiece> {
        if self.config.swap_in != SwapIn::Adaptive {
            return None;
        }
        let PageState::Swapped { slot, .. } = entries.get(page) else { unreachable!("checked by the caller") };
        let piece = self.slot_map.get(slot);
        let granule = self.store.granule_of_bytes(piece)?;
        let index = slot.0 % granule.pages();
        if granule <= order
            || granule > MAX_EXPLODED_ORDER
            || page != page.head(granule).offset(index)
            || !alone && self.locality.part_order(page).is_none()
        {
            return None;
        }
        let (run, _) = self.homes.alloc_full(&self.ports, granule, Urgency::Normal).ok()?;
        let (first, first_slot) = (page.head(granule), Slot(slot.0 - index));
        // A page that returned may have been swapped out again to its old slot, as another piece.
        let is_out = |entries: &Entries, mut part: Range<u32>| {
            part.all(|index| {
                let slot = first_slot.offset(index);
                matches!(entries.get(first.offset(index)), PageState::Swapped { slot: now, fetching: false, .. } if now == slot)
                    && self.slot_map.get(slot) == piece
            })
        };
        let (mut parts, mut touched): (Option<Fetches>, _) = (None, FolioName { head: page, order: Order::ZERO });
        let mut next = 0;
        while next < granule.pages() {
            let fits =
                |order: &Order| next.is_multiple_of(order.pages()) && is_out(entries, next..next + order.pages());
            let Some(order) = [order, Order::ZERO].into_iter().find(fits) else {
                next += 1;
                continue;
            };
            let pages = first.offset(next).folio(order);
            self.split_borders(entries, pages.clone());
            let part = mark_fetching(entries, pages.start, run.part(next, order), LikelyUse::Part);
            if pages.contains(&page) {
                touched = FolioName { head: pages.start, order };
            }
            match &mut parts {
                Some(parts) => parts.push(part),
                None => parts = Some(Fetches::of(part)),
            }
            next += order.pages();
        }
        parts.map(|parts| ExplodedPiece { piece, run, touched, parts })
    }

    /// Maps the touched part into the program, and stages the others. The caller wakes waiting
    /// threads.
    pub(super) fn explode(&self, worker: &mut P::Worker, block: &Block, piece: ExplodedPiece) -> Result<(), Changing> {
        let (parts, touched_pages) = (piece.parts.marked(), piece.touched_pages());
        let mut run = piece.run;
        let (piece_head, piece_end) = (run.head, run.head.offset(run.frames()));
        let pinned = self.store.pin(piece.piece);
        let read = self.read_piece(worker, pinned.piece(), 0, run.as_mut());
        self.store.unpin(&self.runs(), pinned);
        if read.is_err() {
            self.counters().vm.store_corrupted.inc();
        }
        // The loops free the frames of pages that are not fetched.
        let (mut frames, mut next) = (run.split(), piece_head);
        let runs: [Option<UniqueRun>; MAX_EXPLODED_PAGES] = std::array::from_fn(|index| {
            let part = parts.get(index)?;
            while next < part.run.head {
                self.free_content(frames.take(Order::ZERO));
                next = next.offset(1);
            }
            next = next.offset(part.run.frames());
            Some(frames.take(part.run.order))
        });
        while next < piece_end {
            self.free_content(frames.take(Order::ZERO));
            next = next.offset(1);
        }
        let fetched = parts.iter().zip(runs.into_iter().flatten()).map(|(part, run)| (part, run, read.map(|()| None)));
        let corrupted = self.finish_fetches(block, fetched, &touched_pages);
        self.map_in_fetched(block, parts, touched_pages, corrupted)
    }
}
