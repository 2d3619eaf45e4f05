//! Pieces that are taken apart.
//!
//! Where only parts of folios come back, a piece that was compressed as one stays in the store as long as a single page of it
//! is out, which is memory that nobody uses; and each of its parts costs the decompression of what is before it. So the
//! first fault on one, or step of a walk, fetches all that is left of it. The part that is touched goes to the program; the others are staged,
//! and go out again one by one unless they are touched.
//!
//! Locks: as for any fault ([`super::fault`]).

use super::Engine;
use super::fault::{Changing, Fetches, mark_fetching};
use crate::homes::Urgency;
use crate::locality::SwapIn;
use crate::machine::Machine;
use crate::page_table::{Block, Entries, PageState};
use crate::queue::FolioName;
use crate::run_tokens::UniqueRun;
use crate::store::PieceId;
use crate::units::{Order, PageNumber, Slot};
use std::ops::Range;

/// The largest piece that is taken apart: 64 KiB. To decompress more takes longer than some faults.
const MOST_ORDER: Order = Order::new(4).unwrap();
/// Its pages.
const MOST_PAGES: usize = MOST_ORDER.pages() as usize;

/// What is left of a piece, being fetched.
pub(super) struct InParts {
    piece: PieceId,
    /// Where the whole piece goes.
    run: UniqueRun,
    /// The part that is touched.
    touched: FolioName,
    parts: Fetches,
}

impl InParts {
    /// What the program gets.
    pub fn touched(&self) -> FolioName {
        self.touched
    }

    /// Its pages.
    pub fn touched_pages(&self) -> Range<PageNumber> {
        self.touched.head.folio(self.touched.order)
    }

    /// From the first page that is fetched to the last.
    pub fn pages(&self) -> Range<PageNumber> {
        self.parts.first().head..self.parts.end()
    }
}

impl<M: Machine> Engine<M> {
    /// Marks what is left of the piece of `page`, which is out, as being fetched, in parts of `order`. `None` where whole folios
    /// pay, unless the page is wanted `alone`, where the piece is no larger than that, too large, or there is no room for it; or where it
    /// was moved so that it lies otherwise now.
    pub(super) fn start_taking_apart(
        &self,
        entries: &mut Entries,
        page: PageNumber,
        order: Order,
        alone: bool,
    ) -> Option<InParts> {
        if self.config.swap_in != SwapIn::Adaptive {
            return None;
        }
        let PageState::Swapped { slot, .. } = entries.get(page) else { unreachable!("checked by the caller") };
        let piece = self.slot_map.get(slot);
        let granule = self.store.granule_of_bytes(piece)?;
        let index = slot.0 % granule.pages();
        if granule <= order
            || granule > MOST_ORDER
            || page != page.head(granule).offset(index)
            || !alone && self.locality.part_order(page).is_none()
        {
            return None;
        }
        let (run, _) = self.homes.alloc_full(&self.machine, granule, Urgency::Normal).ok()?;
        let (first, first_slot) = (page.head(granule), Slot(slot.0 - index));
        // A page that has come back may have gone out anew, to its old slot: as another piece.
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
            self.carve(entries, pages.clone());
            let part = mark_fetching(entries, pages.start, run.part(next, order), false);
            if pages.contains(&page) {
                touched = FolioName { head: pages.start, order };
            }
            match &mut parts {
                Some(parts) => parts.push(part),
                None => parts = Some(Fetches::of(part)),
            }
            next += order.pages();
        }
        parts.map(|parts| InParts { piece, run, touched, parts })
    }

    /// Brings the part that is touched into the program, and the others home. The caller wakes who waits.
    pub(super) fn take_apart(&self, worker: &mut M::Worker, block: &Block, piece: InParts) -> Result<(), Changing> {
        let (parts, touched_pages) = (piece.parts.marked(), piece.touched_pages());
        let mut run = piece.run;
        let (piece_head, piece_end) = (run.head, run.head.offset(run.frames()));
        let pinned = self.store.pin(piece.piece);
        let read = self.read_piece(worker, pinned.piece(), 0, run.as_mut());
        self.store.unpin(&self.runs(), pinned);
        if read.is_err() {
            self.counters().vm.store_corrupted.inc();
        }
        // Frames of pages that are not fetched are free.
        let (mut frames, mut next) = (run.split(), piece_head);
        let runs: [Option<UniqueRun>; MOST_PAGES] = std::array::from_fn(|index| {
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
        self.bring_in_fetched(block, parts, touched_pages, corrupted)
    }
}
