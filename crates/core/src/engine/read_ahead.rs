//! Readahead: folios are fetched or made before the program touches them, as far as there is room.
//!
//! Locks: as for any fault ([`super::fault`]).

use super::Engine;
use super::map_in::each_staged;
use super::swap_in::{Fetch, Fetches, MAX_TOGETHER, mark_fetching};
use crate::homes::Urgency;
use crate::locality::SwapIn;
use crate::page_table::{Block, Entries, PageState};
use crate::ports::{AddressSpace, Arena, Ports};
use crate::readahead::{Ahead, LikelyUse};
use crate::run_tokens::UniqueRun;
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{MAX_ORDER, Order, PageNumber};
use std::ops::Range;

impl<P: Ports> Engine<P> {
    /// Claims what to fetch or make next after the fault on `page`; also returns the order of the
    /// fault's folio. The caller must then call [`Engine::read_ahead`].
    pub fn claim_ahead(&self, page: PageNumber) -> Option<(Ahead, Order)> {
        if !self.readahead.may_claim(page) || self.returns_alone() {
            return None;
        }
        let order = self.table.get(page)?.lock().get(page).order()?;
        Some((self.readahead.claim(page, page.head(order).offset(order.pages()))?, order))
    }

    /// Returns whether to fetch the next pages of a strided stream before the fault on `page` wakes
    /// the program.
    pub fn reads_ahead_first(&self, page: PageNumber) -> bool {
        self.readahead.has_stepped_far(page)
    }

    /// Fetches the claimed pages, or makes them in folios of `order`, as far as there is room now.
    /// Returns whether there was room for all.
    pub fn read_ahead(&self, worker: &mut P::Worker, ahead: Ahead, order: Order) -> bool {
        match ahead {
            Ahead::Stream(pages) => self.read_ahead_all(worker, pages),
            Ahead::Step { page, alone } => self.read_ahead_step(worker, page, alone),
            Ahead::New(pages) => self.touch_ahead(pages, order),
        }
    }

    pub(super) fn read_ahead_all(&self, worker: &mut P::Worker, pages: Range<PageNumber>) -> bool {
        let mut page = pages.start;
        while page < pages.end {
            if let Some(end) = self.locality.sampled_until(page) {
                page = end;
                continue;
            }
            let Some(block) = self.table.get(page) else { break };
            let Some(steady) = self.ports.address_space().steady() else { return false };
            let mut entries = block.lock();
            let state = entries.get(page);
            let order = state.order().unwrap_or(Order::ZERO);
            let head = page.head(order);
            match state {
                // The rest of the folio lies in a sampling window.
                PageState::Swapped { fetching: false, .. } | PageState::Home { writeback: false, .. }
                    if head < page =>
                {
                    self.split_borders(&mut entries, page..head.offset(order.pages()));
                    continue;
                }
                PageState::Swapped { fetching: false, .. } => {
                    let Some((fetches, run)) = self.mark_next(&mut entries, head..pages.end) else { return false };
                    drop(entries);
                    drop(steady);
                    page = fetches.end();
                    self.swap_in_ahead(worker, block, fetches.marked(), run);
                    continue;
                }
                PageState::Home { writeback: false, .. } => {
                    let _ = self.map_in(&steady, &mut entries, head);
                    drop(entries);
                    drop(steady);
                    self.wake(head.folio(order));
                }
                _ => {}
            }
            page = head.offset(order.pages());
        }
        true
    }

    /// Makes folios of `order` in `pages` that are untouched, from free populated frames in a row.
    /// Returns whether it made all.
    fn touch_ahead(&self, pages: Range<PageNumber>, order: Order) -> bool {
        let mut page = pages.start;
        while page < pages.end {
            let Some(made) = self.make_new(page..pages.end, order) else { return false };
            self.wake(made.clone());
            page = made.end;
        }
        true
    }

    /// Makes the first of these folios, as many as one run holds. Returns `None` if it made none or
    /// not all of the run: pages unknown to the engine may be there.
    fn make_new(&self, pages: Range<PageNumber>, order: Order) -> Option<Range<PageNumber>> {
        let block = self.table.get(pages.start)?;
        let steady = self.ports.address_space().steady()?;
        let mapping = self.ports.address_space().mapping(pages.start)?;
        let mut entries = block.lock();
        let fits = |head: PageNumber, order| mapping.allows(head, order) && entries.all_none(head, order);
        // A first touch must bring a larger folio where one fits.
        let larger = |head: PageNumber| {
            let larger = mapping.sizes.descending().take_while(|&larger| larger > order);
            larger.into_iter().any(|larger| fits(head.head(larger), larger))
        };
        let is_new = |&head: &PageNumber| head.head(order) == head && fits(head, order) && !larger(head);
        let end = pages.end.min(entries.end());
        let heads = (pages.start.0..end.0).step_by(order.pages() as usize).map(PageNumber);
        let new = heads.take(MAX_TOGETHER).take_while(is_new).count() as u32 * order.pages();
        let together = Order::all().rev().filter(|&most| most >= order && most.pages() <= new);
        let mut run = together.into_iter().find_map(|most| self.homes.alloc_ready(most))?;
        self.ports.arena().zero(run.as_mut());
        let run = run.into_run();
        let folios = (0..run.frames()).step_by(order.pages() as usize);
        let folios = folios.map(|index| (pages.start.offset(index), run.part(index, order)));
        for (head, run) in folios.clone() {
            self.rmap.set_folio(run, head);
            entries.set_folio(head, order, PageState::Home { frame: run.head, order, writeback: false });
            self.staged_pages.fetch_add(u64::from(order.pages()), Relaxed);
        }
        let made = pages.start..pages.start.offset(run.frames());
        let are_all_there = self.map_in_together(&steady, &mut entries, folios.clone());
        if !are_all_there {
            // No fault asked for the others.
            each_staged(&mut entries, made.clone(), |entries, head, _| {
                self.drop_folio(entries, head, entries.get(head))
            });
        }
        let is_there =
            |&(head, _): &_| matches!(entries.get(head), PageState::Resident { order: now, .. } if now == order);
        self.counters().of(order).anon_fault_alloc.add(folios.filter(is_there).count() as u64);
        are_all_there.then_some(made)
    }

    /// Fetches as much with `page` as a fault would, or only the page if `alone`, as far as there
    /// is room now.
    fn read_ahead_step(&self, worker: &mut P::Worker, page: PageNumber, alone: bool) -> bool {
        if self.locality.sampled_until(page).is_some() {
            return true;
        }
        let Some(block) = self.table.get(page) else { return false };
        let Some(steady) = self.ports.address_space().steady() else { return false };
        let mut entries = block.lock();
        let PageState::Swapped { fetching: false, order: whole, .. } = entries.get(page) else { return true };
        let alone = alone && self.config.swap_in == SwapIn::Adaptive;
        let part = if alone { Order::ZERO } else { self.locality.part_order(page).unwrap_or(MAX_ORDER) };
        let order = self.orders_of_return(page, whole).up_to(part).highest();
        if let Some(piece) = self.start_explode(&mut entries, page, order, alone) {
            drop(entries);
            drop(steady);
            let (touched_pages, pages) = (piece.touched_pages(), piece.pages());
            let _ = self.explode(worker, block, piece);
            self.came_ahead(1, touched_pages);
            self.wake(pages);
            return true;
        }
        let Ok((run, _)) = self.homes.alloc_full(&self.ports, order, Urgency::Normal) else { return false };
        let head = page.head(order);
        self.split_borders(&mut entries, head.folio(order));
        let likely_use = if order == whole { LikelyUse::WholeFolio } else { LikelyUse::Part };
        let fetch = mark_fetching(&mut entries, head, *run, likely_use);
        drop(entries);
        drop(steady);
        self.swap_in_ahead(worker, block, &[fetch], run);
        true
    }

    /// Swaps in folios ahead of faults, into the consecutive frames of `run`. A thread that faults
    /// on one of them waits until it is there, or faults again if it cannot be fetched.
    fn swap_in_ahead(&self, worker: &mut P::Worker, block: &Block, fetches: &[Fetch], run: UniqueRun) {
        let (Some(first), Some(last)) = (fetches.first(), fetches.last()) else { unreachable!("something was marked") };
        let pages = first.head..last.pages().end;
        let _ = self.swap_in(worker, block, fetches, run);
        self.came_ahead(fetches.len(), pages.clone());
        self.wake(pages);
    }

    /// Counts `folios` folios with these pages as fetched without a fault.
    pub(super) fn came_ahead(&self, folios: usize, pages: Range<PageNumber>) {
        self.locality.fetched_ahead(folios);
        self.counters().vm.swap_ra.add(pages.end.0 - pages.start.0);
    }

    /// Marks the first folio of `pages`, which is swapped out, as being fetched, and as many folios
    /// of its order behind it as fit into one run. Returns `None` if there is no room.
    fn mark_next(&self, entries: &mut Entries, pages: Range<PageNumber>) -> Option<(Fetches, UniqueRun)> {
        let whole = entries.get(pages.start).order()?;
        let order = self.orders_of_return(pages.start, whole).highest();
        if order < whole {
            self.split_to(entries, pages.start, whole, order);
        }
        let is_alike = |&page: &PageNumber| {
            matches!(entries.get(page), PageState::Swapped { order: now, fetching: false, .. } if now == order)
                && self.locality.sampled_until(page).is_none()
        };
        let end = pages.end.min(entries.end());
        let heads = (pages.start.0..end.0).step_by(order.pages() as usize).map(PageNumber);
        let alike = heads.take(MAX_TOGETHER).take_while(is_alike).count() as u32 * order.pages();
        let together = Order::all().rev().filter(|&most| most > order && most.pages() <= alike);
        let run = match together.into_iter().find_map(|most| self.homes.alloc_ready(most)) {
            Some(run) => run,
            None => self.homes.alloc_full(&self.ports, order, Urgency::Normal).ok()?.0,
        };
        let mut fetches = Fetches::of(mark_fetching(entries, pages.start, run.part(0, order), LikelyUse::WholeFolio));
        for index in (0..run.frames()).step_by(order.pages() as usize).skip(1) {
            fetches.push(mark_fetching(
                entries,
                pages.start.offset(index),
                run.part(index, order),
                LikelyUse::WholeFolio,
            ));
        }
        Some((fetches, run))
    }
}
