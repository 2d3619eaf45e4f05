//! Map-in: staged pages become resident.
//!
//! Locks: the caller holds off mapping events and holds the lock of the block.

use super::Engine;
use super::fault::Changing;
use crate::homes::Urgency;
use crate::page_table::{Entries, PageState};
use crate::ports::{AddressSpace, Arena, Marks, MoveError, Ports, SharedPages, Steady, Stopped};
use crate::queue::{Claim, FolioName, Queue};
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{Frame, FrameRun, Order, PAGE_BYTES, PageNumber};
use std::ops::Range;

impl<P: Ports> Engine<P> {
    /// Gives a folio under writeback other frames with a copy of its content; the compressing
    /// worker frees the old ones. Returns false if no frames are available.
    pub(super) fn copy_from_writeback(&self, entries: &mut Entries, head: PageNumber, order: Order) -> bool {
        let Ok((mut run, _)) = self.homes.alloc_full(&self.ports, order, Urgency::Reclaim) else { return false };
        let Some(from) = entries.staged(head) else { unreachable!("{head:?} is staged") };
        self.ports.arena().copy(from, run.as_mut());
        let run = run.into_run();
        self.rmap.set_folio(run, head);
        entries.set_folio(head, order, PageState::Home { frame: run.head, order, writeback: false });
        true
    }

    /// Maps in the folio at `head`, which is staged and not under writeback. Drops the pages that
    /// the program discarded meanwhile. The caller wakes waiting threads.
    #[inline]
    pub(super) fn map_in(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        head: PageNumber,
    ) -> Result<(), Changing> {
        let Some(order) = entries.get(head).order() else { unreachable!("{head:?} is staged") };
        if !self.drop_lost(entries, head.folio(order)) {
            return self.map_in_valid(steady, entries, head);
        }
        let mut served = Ok(());
        each_staged(entries, head.folio(order), |entries, head, _| {
            served = self.map_in_valid(steady, entries, head).and(served);
        });
        served
    }

    /// Drops those pages of `range` that the program has discarded without a message. All pages of
    /// `range` are staged and about to be mapped in. Returns whether any page was dropped.
    #[inline]
    pub(super) fn drop_lost(&self, entries: &mut Entries, range: Range<PageNumber>) -> bool {
        let mut has_lost = false;
        let Some(marks) = self.ports.marks() else { return false };
        marks.take(entries, range, &mut |entries, lost| {
            has_lost = true;
            self.counters().vm.discarded_unheard.add(lost.end.0 - lost.start.0);
            self.drop_pages(entries, lost);
        });
        has_lost
    }

    /// From now on, lets only touched pages return, because the program can discard pages without a
    /// message.
    pub fn expect_unheard_discards(&self) {
        self.discards_unheard.store(1, Relaxed);
    }

    /// Returns whether a fault may map in only the touched page, because the program can discard
    /// pages without a message. The engine would miss a discard between the check of a page and its
    /// return, and the program may discard a page that it does not touch at any time.
    #[inline]
    pub(super) fn returns_alone(&self) -> bool {
        self.discards_unheard.load(Relaxed) != 0
    }

    /// Maps in the folio at `head`, which is staged and not under writeback. The program has
    /// discarded none of its pages, or the folio is new.
    #[inline]
    pub(super) fn map_in_valid(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        head: PageNumber,
    ) -> Result<(), Changing> {
        let PageState::Home { frame, order, writeback: false } = entries.get(head) else {
            unreachable!("{head:?} is {:?}", entries.get(head))
        };
        let run = FrameRun::new(frame, order);
        let mut moved = self.ports.address_space().move_in(steady, entries, run, head);
        if moved == Err(Stopped { moved_pages: 0, error: MoveError::Busy })
            && let Some(shared) = self.ports.shared_pages()
        {
            shared.unshare_staged(run);
            moved = self.ports.address_space().move_in(steady, entries, run, head);
        }
        match moved {
            Ok(()) => self.make_resident(entries, head, frame, order),
            Err(Stopped { moved_pages: 0, error: MoveError::Changing }) => {
                self.enqueue(&self.staged, entries, head, order);
                return Err(Changing);
            }
            Err(Stopped { moved_pages, .. }) => return self.map_in_pages(steady, entries, head, run, moved_pages),
        }
        Ok(())
    }

    pub(super) fn make_resident(&self, entries: &mut Entries, head: PageNumber, frame: Frame, order: Order) {
        entries.set_folio(head, order, PageState::Resident { frame, order });
        let pages = u64::from(order.pages());
        self.staged_pages.fetch_sub(pages, Relaxed);
        self.resident_pages.fetch_add(pages, Relaxed);
        self.counters().of(order).nr_anon.inc();
        // The folio goes behind all folios that were resident before it, whatever queue it was in.
        entries.set_unqueued(head);
        self.enqueue(self.resident_queue(entries, head), entries, head, order);
    }

    /// Returns the queue for the resident folio at `head`.
    #[inline]
    pub(super) fn resident_queue(&self, entries: &Entries, head: PageNumber) -> &Queue {
        if entries.is_active(head) {
            return &self.active;
        }
        let is_cached = matches!(entries.get(head), PageState::Resident { frame, .. } if self.swap_cache.has(frame));
        if is_cached { &self.cached } else { &self.probation }
    }

    /// Maps in the rest of a folio page by page after only its first `moved_pages` could move;
    /// copies where a move is refused. The caller also wakes threads that wait for a page that
    /// stays staged, so that they retry.
    pub(super) fn map_in_pages(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        head: PageNumber,
        run: FrameRun,
        moved_pages: u32,
    ) -> Result<(), Changing> {
        if run.order > Order::ZERO {
            self.counters().of(run.order).split.inc();
            self.drop_cache_entry(run.head);
        }
        let mut served = Ok(());
        for index in 0..run.frames() {
            let (page, part) = (head.offset(index), run.part(index, Order::ZERO));
            entries.set_unqueued(page);
            entries.set(page, PageState::Home { frame: part.head, order: Order::ZERO, writeback: false });
            let outcome = if index < moved_pages { Ok(()) } else { self.map_in_page(steady, entries, page, part) };
            match outcome {
                Ok(()) => self.make_resident(entries, page, part.head, Order::ZERO),
                Err(MoveError::Exists) => {
                    // The program has a newer page there.
                    self.staged_pages.fetch_sub(1, Relaxed);
                    entries.take_staged(page).into_iter().for_each(|part| self.free_content(part));
                }
                Err(error) => {
                    self.enqueue(&self.staged, entries, page, Order::ZERO);
                    if error == MoveError::Changing {
                        served = Err(Changing);
                    }
                }
            }
        }
        served
    }

    pub(super) fn map_in_page(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        page: PageNumber,
        part: FrameRun,
    ) -> Result<(), MoveError> {
        let space = self.ports.address_space();
        match space.move_in(steady, entries, part, page) {
            Ok(()) => Ok(()),
            Err(Stopped { error: MoveError::Refused | MoveError::Busy, .. }) => {
                space.copy_in(steady, entries, part.head, page)?;
                entries.staged_mut(page).into_iter().for_each(|part| self.ports.arena().release(part));
                Ok(())
            }
            Err(stopped) => Err(stopped.error),
        }
    }

    /// Maps in folios of one order that are adjacent, as are their frames, with one move: a move
    /// has a fixed cost. Returns false if some could not move.
    pub(super) fn map_in_together(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        mut folios: impl Iterator<Item = (PageNumber, FrameRun)> + Clone,
    ) -> bool {
        let Some((first, run)) = folios.clone().next() else { return true };
        let are_home = folios.clone().all(|(head, FrameRun { head: frame, order })| {
            entries.get(head) == PageState::Home { frame, order, writeback: false }
        });
        let pages: u32 = folios.clone().map(|(_, run)| run.frames()).sum();
        let Some(order) = Order::from_bytes(u64::from(pages) * PAGE_BYTES as u64).filter(|_| are_home) else {
            return false;
        };
        let mut moved_pages =
            match self.ports.address_space().move_in(steady, entries, FrameRun::new(run.head, order), first) {
                Ok(()) => pages,
                Err(stopped) => stopped.moved_pages,
            };
        folios.all(|(head, run)| {
            let FrameRun { head: frame, order } = run;
            let is_moved = moved_pages >= order.pages();
            if is_moved {
                self.make_resident(entries, head, frame, order);
                moved_pages -= order.pages();
            } else if moved_pages > 0 {
                // Pages that stay behind because of a mapping change are left to the next fault.
                let _ = self.map_in_pages(steady, entries, head, run, moved_pages);
            }
            is_moved
        })
    }

    /// Appends a folio to a queue unless it is in one.
    pub(super) fn enqueue(&self, queue: &Queue, entries: &mut Entries, head: PageNumber, order: Order) {
        if let Some(ticket) = entries.set_queued(head) {
            queue.push(Claim { folio: FolioName { head, order }, ticket });
        }
    }
}

/// Calls `act` for each folio that begins in `pages`, is staged, and is not under writeback.
pub(super) fn each_staged(
    entries: &mut Entries,
    pages: Range<PageNumber>,
    mut act: impl FnMut(&mut Entries, PageNumber, Order),
) {
    let mut page = pages.start;
    while page < pages.end {
        let state = entries.get(page);
        let order = state.order().unwrap_or(Order::ZERO);
        let head = page.head(order);
        if head == page && matches!(state, PageState::Home { writeback: false, .. }) {
            act(entries, head, order);
        }
        page = head.offset(order.pages());
    }
}
