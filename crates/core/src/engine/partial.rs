//! Partially mapped folios: resident ones of which the program has unmapped or discarded a part.
//!
//! Such a folio keeps its order and its place in the queues of reclaim. The pages it has lost are holes, whose homes
//! stay reserved for it. When the last of its pages goes, it is gone whole, and nothing was ever split. When the program
//! touches a hole, pages of zeros join the folio, which is whole again when the last hole is filled.
//!
//! It is split into the largest folios that are left of it when a whole one is needed: when reclaim reaches it, when its
//! pages move to other addresses or are paged out, when a hole is touched and no folio of its size may be there any
//! more; and when no run of frames is left. Linux splits such folios when memory is short, because it keeps all of a folio
//! as long as some of it is mapped. Here what the program gives up is free at once, and holes keep nothing but
//! frames without pages, of which there are plenty. So only who finds no run goes through the queue.
//!
//! The queue of partially mapped folios names blocks, not folios: each is in it once, however often its folios lose
//! parts and are healed. Its lock is a leaf.

use super::Engine;
use crate::machine::{Machine, Mapping};
use crate::page_table::{Entries, PageState};
use crate::queue::{Claim, FolioName, Ticket};
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::{FrameRun, MAX_ORDER, Order, PageNumber};
use std::ops::Range;

/// Folios of fewer pages are split at once, as in Linux: of two pages there is nothing to keep together.
const LEAST_PAGES: u32 = 4;

/// Whether a folio with such a page stays together when it loses a part.
pub(super) fn is_deferrable(state: PageState) -> bool {
    matches!(state, PageState::Resident { order, .. } | PageState::Hole { order, .. } if order.pages() >= LEAST_PAGES)
}

impl<M: Machine> Engine<M> {
    /// The resident folio at `head` has lost `part`, but not all of it.
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
            self.drop_copy(frame);
        }
        if order == MAX_ORDER {
            self.machine.split_huge(head, if part.start == head { part.end } else { part.start });
        }
        self.counters().of(order).split_deferred.inc();
        self.counters().of(order).nr_anon_partially_mapped.inc();
        if !entries.set_deferred(true) {
            let folio = FolioName { head: entries.first(), order: MAX_ORDER };
            self.deferred.push(Claim { folio, ticket: Ticket::default() });
        }
    }

    /// Whether `page` is a hole of a folio that may be there in `mapping`. Where it may not, the folio is split.
    pub(super) fn keep_holes(&self, entries: &mut Entries, page: PageNumber, mapping: &Mapping) -> bool {
        let PageState::Hole { order, .. } = entries.get(page) else { return false };
        let may_stay = mapping.allows(page.head(order), order);
        if !may_stay {
            self.split_partial(entries, page.folio(Order::ZERO));
        }
        may_stay
    }

    /// The holes in `pages`, which are of one folio, have pages in the program now.
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

    /// Splits the partially mapped folios that have some of `pages`, which are of one block; whether there was one.
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

    /// What is left of a partially mapped folio stays in the largest folios, the frames of its holes are free.
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

    /// Splits the partially mapped folios of the block that has waited longest; whether there were any. Called with no
    /// lock held.
    pub(super) fn split_deferred(&self) -> bool {
        while let Some(Claim { folio: FolioName { head, order }, .. }) = self.deferred.pop() {
            let Some(block) = self.table.get(head) else { unreachable!("{head:?} was queued") };
            let mut entries = block.lock();
            entries.set_deferred(false);
            if self.split_partial(&mut entries, head.folio(order)) {
                return true;
            }
        }
        false
    }
}
