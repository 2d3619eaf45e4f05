//! First touches: a fault on a page without content maps in zeros.
//!
//! Locks: as for any fault ([`super::fault`]).

use super::Engine;
use super::fault::{Served, Step, Tries, step};
use crate::homes::{Content, NoRun, Urgency};
use crate::page_table::{Entries, PageState};
use crate::ports::{AddressSpace, Arena, MoveError, Ports, Steady};
use crate::run_tokens::UniqueRun;
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::counters::FaultKind;
use foliomem_types::units::{Order, PageNumber};
use std::ops::Range;

impl<P: Ports> Engine<P> {
    /// Serves a first touch with a folio of the highest order that fits the mapping and is wholly
    /// untouched, or else of a lower one. In a partially mapped folio, the holes are untouched.
    pub(super) fn first_touch(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        page: PageNumber,
        tries: Tries,
    ) -> Step {
        let Some(mapping) = self.ports.address_space().mapping(page) else {
            return Step::Served(Served::Done(FaultKind::Spurious), page.folio(Order::ZERO));
        };
        let is_hole = self.keep_holes(entries, page, &mapping);
        for order in mapping.sizes.descending() {
            let head = page.head(order);
            let is_untouched =
                if is_hole { entries.holes(head, order) == order.pages() } else { entries.all_none(head, order) };
            if !is_untouched || !mapping.allows(head, order) || !tries.may_take(order) {
                continue;
            }
            let urgency = if tries.may_exceed(order) { Urgency::Reclaim } else { self.urgency() };
            match self.homes.alloc_full(&self.ports, order, urgency) {
                Ok((mut run, content)) => {
                    if content == Content::Dirty {
                        self.ports.arena().zero(run.as_mut());
                    }
                    if is_hole {
                        return self.heal(steady, entries, head, run);
                    }
                    let run = run.into_run();
                    let state = PageState::Home { frame: run.head, order, writeback: false };
                    self.rmap.set_folio(run, head);
                    entries.set_folio(head, order, state);
                    self.staged_pages.fetch_add(u64::from(order.pages()), Relaxed);
                    self.counters().of(order).anon_fault_alloc.inc();
                    let pages = head.folio(order);
                    if self.config.make_ahead {
                        self.readahead.touched(pages.clone());
                    }
                    let served = self.map_in_valid(steady, entries, head);
                    self.leave_present(entries, pages.clone());
                    return step(served, FaultKind::FirstTouch, pages);
                }
                Err(NoRun::OverLimit) if tries.may_reclaim(order) => return Step::OverLimit(order.pages().into()),
                Err(NoRun::Exhausted) if self.may_make_run(order, tries) => return Step::Fragmented(order),
                Err(reason) => {
                    let counters = self.counters().of(order);
                    counters.anon_fault_fallback.inc();
                    if reason == NoRun::OverLimit {
                        counters.anon_fault_fallback_charge.inc();
                    }
                }
            }
        }
        if tries.is_last() && is_hole {
            // Splitting frees the frames of the holes.
            self.split_partial(entries, page.folio(Order::ZERO));
            return Step::LookAgain;
        }
        if tries.is_last() { self.zero_unmanaged(steady, entries, page) } else { Step::OverLimit(1) }
    }

    /// Drops those pages of a new folio, whose content is zeros, that could not be mapped in
    /// because the program has pages there: they are not adopted yet. The program does not fault on
    /// them, so no later fault would find them.
    fn leave_present(&self, entries: &mut Entries, pages: Range<PageNumber>) {
        for page in self.out_but_present(entries, pages) {
            self.drop_pages(entries, page.folio(Order::ZERO));
        }
    }

    /// Returns whether a run of `order` may become available soon.
    pub(super) fn may_make_run(&self, order: Order, tries: Tries) -> bool {
        tries.may_compact(order) || self.deferred.claims() > 0
    }

    /// Moves `run`, zeros, to the holes of a partially mapped folio from `head` on. The holes have
    /// their own home frames.
    fn heal(&self, steady: &Steady<'_, P>, entries: &mut Entries, head: PageNumber, run: UniqueRun) -> Step {
        let pages = head.folio(run.order);
        let moved = self.ports.address_space().move_in(steady, entries, *run, head);
        let moved_pages = moved.map_or_else(|stopped| stopped.moved_pages, |()| run.frames());
        self.fill_holes(entries, head..head.offset(moved_pages));
        let Err(stopped) = moved else {
            self.homes.free_empty(run.into_run());
            return Step::Served(Served::Done(FaultKind::FirstTouch), pages);
        };
        for (index, part) in (0..).zip(run.into_parts(Order::ZERO)) {
            if index < moved_pages { self.homes.free_empty(part.into_run()) } else { self.homes.free_full(part) }
        }
        if stopped.error == MoveError::Changing {
            return Step::Served(Served::Again, pages);
        }
        // Another page is there already, or only a copy is possible: the pages become folios of
        // their own.
        self.split_partial(entries, pages);
        Step::LookAgain
    }
}
