//! Partially mapped folios: resident folios of which the program unmapped or discarded a part.
//!
//! Such a folio keeps its order and its place in the reclaim queues. The pages that it lost are
//! holes; their home frames stay reserved for it. A folio that loses its last page disappears
//! without ever being split. If the program touches a hole, pages of zeros join the folio, which is
//! whole again when the last hole is filled.
//!
//! The folio is split into the largest remaining folios when a whole one is needed: when reclaim
//! reaches it; when its pages move to other addresses or are paged out; when a hole is touched and
//! the mapping no longer allows a folio of its size; and when no run of frames is left. Linux
//! splits such folios when memory is short, because it keeps all of a folio while a part is mapped.
//! Here pages that the program gives up are free at once, and holes keep only unpopulated frames,
//! of which there are plenty. So only an allocation that finds no run processes the queue.
//!
//! The queue of partially mapped folios names blocks, not folios: each block is in it once, however
//! often its folios lose pages and get them back. The queue's lock is a leaf.

use super::Engine;
use crate::page_table::{Entries, PageState};
use crate::ports::{AddressSpace, Mapping, Ports};
use crate::queue::{Claim, FolioName, Ticket};
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{FrameRun, MAX_ORDER, Order, PageNumber};
use std::ops::Range;

/// Minimum pages of a folio that stays together. Smaller folios are split at once, as in Linux: a
/// folio of two pages that loses one page has only a single page left.
const LEAST_PAGES: u32 = 4;

/// Returns whether a folio with a page in this state stays together when it loses a part.
pub(super) fn is_deferrable(state: PageState) -> bool {
    matches!(state, PageState::Resident { order, .. } | PageState::Hole { order, .. } if order.pages() >= LEAST_PAGES)
}

impl<P: Ports> Engine<P> {
    /// Turns `part` of the resident folio at `head`, but not all of the folio, into holes.
    pub(super) fn drop_part(&self, entries: &mut Entries, head: PageNumber, order: Order, part: Range<PageNumber>) {
        let state = entries.get(head);
        let was_whole = entries.holes(head, order) == 0;
        let mut lost_pages = 0;
        for page in (part.start.0..part.end.0).map(PageNumber) {
            if let PageState::Resident { frame, order } = entries.get(page) {
                entries.set(page, PageState::Hole { frame, order });
                lost_pages += 1;
            }
        }
        self.resident_pages.fetch_sub(lost_pages, Relaxed);
        if !was_whole {
            if entries.holes(head, order) == order.pages() {
                self.drop_folio(entries, head, state);
            }
            return;
        }
        if let PageState::Resident { frame, .. } = state {
            self.drop_cache_entry(frame);
        }
        if order == MAX_ORDER {
            self.ports.address_space().split_huge(
                entries,
                head,
                if part.start == head { part.end } else { part.start },
            );
        }
        self.counters().of(order).split_deferred.inc();
        self.counters().of(order).nr_anon_partially_mapped.inc();
        if entries.set_deferred() {
            let folio = FolioName { head: entries.first(), order: MAX_ORDER };
            self.deferred.push(Claim { folio, ticket: Ticket::default() });
        }
    }

    /// Returns whether `page` is a hole of a folio that `mapping` still allows. Splits the folio if
    /// not.
    pub(super) fn keep_holes(&self, entries: &mut Entries, page: PageNumber, mapping: &Mapping) -> bool {
        let PageState::Hole { order, .. } = entries.get(page) else { return false };
        let may_stay = mapping.allows(page.head(order), order);
        if !may_stay {
            self.split_partial(entries, page.folio(Order::ZERO));
        }
        may_stay
    }

    /// Makes the holes in `pages`, which are of one folio, resident.
    pub(super) fn fill_holes(&self, entries: &mut Entries, pages: Range<PageNumber>) {
        let Some(order) = entries.get(pages.start).order() else { unreachable!("{pages:?} are holes") };
        for page in (pages.start.0..pages.end.0).map(PageNumber) {
            let PageState::Hole { frame, order } = entries.get(page) else { unreachable!("{page:?} is a hole") };
            entries.set(page, PageState::Resident { frame, order });
        }
        self.resident_pages.fetch_add(pages.end.0 - pages.start.0, Relaxed);
        if entries.holes(pages.start.head(order), order) == 0 {
            self.counters().of(order).nr_anon_partially_mapped.sub(1);
        }
    }

    /// Splits the partially mapped folios that overlap `pages`, which are of one block. Returns
    /// whether there were any.
    pub(super) fn split_partial(&self, entries: &mut Entries, pages: Range<PageNumber>) -> bool {
        let mut found = false;
        let mut page = pages.start;
        while page < pages.end {
            let Some(order) = entries.get(page).order() else {
                page = page.offset(1);
                continue;
            };
            let head = page.head(order);
            if entries.holes(head, order) > 0 {
                self.split_at_holes(entries, head, order);
                found = true;
            }
            page = head.offset(order.pages());
        }
        found
    }

    /// Splits a partially mapped folio: its pages stay in the largest possible folios, the frames
    /// of its holes become free.
    fn split_at_holes(&self, entries: &mut Entries, head: PageNumber, order: Order) {
        let size = self.counters().of(order);
        size.split.inc();
        size.nr_anon.sub(1);
        size.nr_anon_partially_mapped.sub(1);
        entries.set_unqueued(head);
        let end = head.offset(order.pages());
        let mut page = head;
        while page < end {
            let state = entries.get(page);
            let holes_in = |part: Order| if matches!(state, PageState::Hole { .. }) { part.pages() } else { 0 };
            let is_alike = |part: &Order| page.head(*part) == page && entries.holes(page, *part) == holes_in(*part);
            let part = Order::all().rev().filter(|&part| part < order).find(is_alike).unwrap_or(Order::ZERO);
            if let PageState::Hole { frame, .. } = state {
                entries.set_folio(page, part, PageState::None);
                self.homes.free_empty(FrameRun::new(frame, part));
            } else {
                entries.set_folio(page, part, state.with_order(part));
                self.counters().of(part).nr_anon.inc();
                self.enqueue(self.resident_queue(entries, page), entries, page, part);
            }
            page = page.offset(part.pages());
        }
    }

    /// Splits the partially mapped folios of the block that has been queued longest. Returns
    /// whether there were any. Called with no lock held.
    pub(super) fn split_deferred(&self) -> bool {
        while let Some(Claim { folio: FolioName { head, order }, .. }) = self.deferred.pop() {
            let Some(block) = self.table.get(head) else { unreachable!("{head:?} was queued") };
            let mut entries = block.lock();
            entries.set_not_deferred();
            if self.split_partial(&mut entries, head.folio(order)) {
                return true;
            }
        }
        false
    }
}
