//! Swap-in: the content of swapped-out folios is fetched from the store and mapped in.
//!
//! Locks: none while a folio is decompressed; its pages are marked as being fetched.

use super::Engine;
use super::explode::ExplodedPiece;
use super::fault::{Changing, Step, Tries};
use super::map_in::each_staged;
use crate::homes::{NoRun, Urgency};
use crate::locality::{Part, SwapIn};
use crate::page_table::{Block, Entries, PageState};
use crate::ports::{AddressSpace, Arena, Corrupted, MoveError, Ports, Steady};
use crate::queue::FolioName;
use crate::readahead::{Expected, LikelyUse};
use crate::run_tokens::{RunMut, UniqueRun};
use crate::swap_cache::CacheEntry;
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{FrameRun, Order, OrderSet, PageNumber, Slot};
use std::ops::Range;

/// The start of a swap-in.
pub(super) enum Start {
    /// A folio is being fetched into the frames of the run.
    Folio(Fetch, UniqueRun),
    /// The page and the next one are being fetched into the two frames of the run.
    Pair([Fetch; 2], UniqueRun),
    /// All pages left of a piece are being fetched.
    ExplodedPiece(Box<ExplodedPiece>),
    /// There is no frame to fetch into.
    ArenaFull,
}

/// A folio that is being fetched from the store.
#[derive(Clone, Copy)]
pub(super) struct Fetch {
    pub(super) head: PageNumber,
    pub(super) slot: Slot,
    pub(super) run: FrameRun,
    /// If the whole folio is likely to be used, a swap-cache entry may be worth its memory.
    pub(super) likely_use: LikelyUse,
}

impl Fetch {
    pub(super) fn pages(&self) -> Range<PageNumber> {
        self.head.folio(self.run.order)
    }
}

/// Maximum number of folios mapped in at once.
pub(super) const MAX_TOGETHER: usize = 16;

/// Up to [`MAX_TOGETHER`] folios that are being fetched.
pub(super) struct Fetches {
    fetches: [Fetch; MAX_TOGETHER],
    len: usize,
}

impl Fetches {
    pub fn of(fetch: Fetch) -> Fetches {
        Fetches { fetches: [fetch; MAX_TOGETHER], len: 1 }
    }

    pub fn push(&mut self, fetch: Fetch) {
        self.fetches[self.len] = fetch;
        self.len += 1;
    }

    pub fn first(&self) -> &Fetch {
        &self.fetches[0]
    }

    pub fn marked(&self) -> &[Fetch] {
        &self.fetches[..self.len]
    }

    pub fn end(&self) -> PageNumber {
        self.fetches[self.len - 1].pages().end
    }
}

impl<P: Ports> Engine<P> {
    /// Marks the swapped-out folio of `page` as being fetched, or only a part around `page` if the
    /// program is likely to touch little of the folio. If frames for that order are not available,
    /// marks the largest smaller part for which frames are available.
    pub(super) fn start_swap_in(&self, entries: &mut Entries, page: PageNumber, tries: Tries) -> Result<Start, Step> {
        let PageState::Swapped { order: whole, .. } = entries.get(page) else { unreachable!("checked by the caller") };
        let expected = self.readahead.expected(page);
        let part = self.locality.part_for_fault(page, expected);
        let orders = self.orders_of_return(page, whole).up_to(part.order().unwrap_or(whole));
        if expected != Expected::Stream
            && let Some(piece) = self.start_explode(entries, page, orders.highest(), expected == Expected::Step)
        {
            let FolioName { head, order } = piece.touched();
            self.note_refault(entries, head, order);
            return Ok(Start::ExplodedPiece(Box::new(piece)));
        }
        if part == Part::Pair
            && let Some((fetches, run)) = self.start_pair(entries, page)
        {
            return Ok(Start::Pair(fetches, run));
        }
        let mut orders = orders.descending().filter(|&order| tries.may_take(order));
        let run = loop {
            let Some(order) = orders.next() else {
                return if tries.is_last() { Ok(Start::ArenaFull) } else { Err(Step::OverLimit(1)) };
            };
            let urgency = if tries.may_exceed(order) { Urgency::Reclaim } else { self.urgency() };
            match self.homes.alloc_full(&self.ports, order, urgency) {
                Ok((run, _)) => break run,
                Err(NoRun::OverLimit) if tries.may_reclaim(order) => return Err(Step::OverLimit(1)),
                Err(NoRun::Exhausted) if self.may_make_run(order, tries) => return Err(Step::Fragmented(order)),
                Err(reason) => {
                    self.counters().of(order).swpin_fallback.inc();
                    if reason == NoRun::OverLimit {
                        self.counters().of(order).swpin_fallback_charge.inc();
                    }
                }
            }
        };
        let order = run.order;
        let head = page.head(order);
        if order < whole {
            self.split_borders(entries, head.folio(order));
        }
        self.note_refault(entries, head, order);
        let likely_use = if part == Part::Whole { LikelyUse::WholeFolio } else { LikelyUse::Part };
        Ok(Start::Folio(mark_fetching(entries, head, *run, likely_use), run))
    }

    /// Marks the swapped-out `page` and the next one as being fetched. Returns `None` if the next
    /// one is not swapped out, or is part of a larger piece, or if there is no room for both
    /// without reclaim: the page alone may do. Both are fetched into one run, so that one move maps
    /// them in.
    fn start_pair(&self, entries: &mut Entries, page: PageNumber) -> Option<([Fetch; 2], UniqueRun)> {
        let next = page.offset(1);
        if next >= entries.end() || self.returns_alone() || self.locality.sampled_until(next).is_some() {
            return None;
        }
        let PageState::Swapped { slot, fetching: false, .. } = entries.get(next) else { return None };
        if self.store.granule_of_bytes(self.slot_map.get(slot)).is_some_and(|granule| granule > Order::ZERO) {
            return None;
        }
        let (run, _) = self.homes.alloc_full(&self.ports, Order::new(1)?, Urgency::Normal).ok()?;
        for page in [page, next] {
            self.split_borders(entries, page.folio(Order::ZERO));
        }
        self.note_refault(entries, page, Order::ZERO);
        let mut mark = |page, frame| mark_fetching(entries, page, run.part(frame, Order::ZERO), LikelyUse::Part);
        Some(([mark(page, 0), mark(next, 1)], run))
    }

    /// Records a refault of the folio at `head`, which is swapped out. After a short refault
    /// distance the folio becomes active.
    pub(super) fn note_refault(&self, entries: &mut Entries, head: PageNumber, order: Order) {
        self.counters().vm.workingset_refault_anon.add(u64::from(order.pages()));
        if self.workingset.is_refault(entries.evicted(head), self.resident_pages()) {
            self.counters().vm.workingset_activate_anon.add(u64::from(order.pages()));
            entries.set_active(head, order);
        }
    }

    /// Returns the orders in which a folio that was swapped out with order `whole` may return to
    /// `page`: none above the sizes allowed now. (Lower orders may result from a split.)
    pub(super) fn orders_of_return(&self, page: PageNumber, whole: Order) -> OrderSet {
        if self.returns_alone() {
            return OrderSet::ALL.up_to(Order::ZERO);
        }
        let sizes = if whole > Order::ZERO { self.ports.address_space().sizes_of_return(page) } else { OrderSet::ALL };
        match self.config.swap_in {
            SwapIn::Whole => sizes.up_to(whole),
            SwapIn::Adaptive | SwapIn::Page => OrderSet::ALL.up_to(sizes.highest().min(whole)),
        }
    }

    /// Swaps in the marked folios (one, or several adjacent ones of one order) to the consecutive
    /// frames of `run`. The caller wakes waiting threads, also for pages whose state changed
    /// meanwhile, so that those threads fault again.
    pub(super) fn swap_in(
        &self,
        worker: &mut P::Worker,
        block: &Block,
        fetches: &[Fetch],
        mut run: UniqueRun,
    ) -> Result<(), Changing> {
        // Most calls have one folio, and an array for many takes longer to initialise than to use.
        let (mut one, mut many);
        let fetched = if fetches.len() == 1 {
            one = [Ok(None)];
            &mut one[..]
        } else {
            many = [Ok(None); MAX_TOGETHER];
            &mut many[..fetches.len()]
        };
        for (fetch, fetched) in fetches.iter().zip(&mut *fetched) {
            *fetched = self.fetch(worker, fetch, run.part_mut(fetch.run));
        }
        let failed = fetched.iter().filter(|fetched| fetched.is_err()).count();
        self.counters().vm.store_corrupted.add(failed as u64);
        let (Some(first), Some(last)) = (fetches.first(), fetches.last()) else { unreachable!("something was marked") };
        let pages = first.head..last.pages().end;
        let mut parts = run.split();
        let fetched = fetches.iter().zip(fetched.iter());
        let fetched = fetched.map(|(fetch, fetched)| (fetch, parts.take(fetch.run.order), *fetched));
        let corrupted = self.finish_fetches(block, fetched, &pages);
        self.map_in_fetched(block, fetches, pages, corrupted)
    }

    /// Makes the fetched folios staged, and queues those that are not `wanted`. The caller must not
    /// wait for anything before this call: a thread that moves a folio to another address waits for
    /// the end of the fetch while it holds off mapping events.
    pub(super) fn finish_fetches<'a>(
        &self,
        block: &Block,
        fetched: impl Iterator<Item = (&'a Fetch, UniqueRun, Result<Option<CacheEntry>, Corrupted>)>,
        wanted: &Range<PageNumber>,
    ) -> Option<Corrupted> {
        let mut entries = block.lock();
        let mut corrupted = None;
        for (fetch, run, fetched) in fetched {
            corrupted = self.finish_fetch(&mut entries, fetch, run, fetched).err().or(corrupted);
            if !wanted.contains(&fetch.head) {
                self.stage_fetched(&mut entries, fetch.pages());
            }
        }
        corrupted
    }

    /// Queues the staged folios of `pages`.
    pub(super) fn stage_fetched(&self, entries: &mut Entries, pages: Range<PageNumber>) {
        each_staged(entries, pages, |entries, head, order| self.enqueue(&self.staged, entries, head, order));
    }

    /// Maps in the fetched folios of `wanted`; the other folios stay staged. Gives up corrupted
    /// folios.
    pub(super) fn map_in_fetched(
        &self,
        block: &Block,
        fetches: &[Fetch],
        wanted: Range<PageNumber>,
        corrupted: Option<Corrupted>,
    ) -> Result<(), Changing> {
        let (Some(first), Some(last)) = (fetches.first(), fetches.last()) else { unreachable!("something was marked") };
        let steady = self.ports.address_space().steady();
        let mut entries = block.lock();
        let Some(steady) = &steady else {
            // The folios stay staged, where a fault finds them.
            self.stage_fetched(&mut entries, wanted);
            return Err(Changing);
        };
        // `map_in` looks for discarded pages itself if there is one folio.
        let are_together = fetches.len() > 1 && wanted == (first.head..last.pages().end);
        if are_together
            && !self.drop_lost(&mut entries, wanted.clone())
            && self.map_in_together(steady, &mut entries, fetches.iter().map(|fetch| (fetch.head, fetch.run)))
        {
            return Ok(());
        }
        let mut served = Ok(());
        // The folios there may have changed meanwhile.
        each_staged(&mut entries, wanted.clone(), |entries, head, _| {
            let mapped_in = if are_together {
                self.map_in_valid(steady, entries, head)
            } else {
                self.map_in(steady, entries, head)
            };
            served = mapped_in.and(served);
        });
        if let Some(corrupted) = corrupted {
            for fetch in fetches.iter().filter(|fetch| wanted.contains(&fetch.head)) {
                served = self.give_up_corrupted(steady, &mut entries, fetch, corrupted).and(served);
            }
        }
        served
    }

    /// Decompresses a folio. Its slots cannot be freed meanwhile, because its pages are marked
    /// *fetching*. Returns the swap-cache entry if it is worth keeping.
    pub(super) fn fetch(
        &self,
        worker: &mut P::Worker,
        fetch: &Fetch,
        mut run: RunMut<'_>,
    ) -> Result<Option<CacheEntry>, Corrupted> {
        let Fetch { slot, likely_use, .. } = *fetch;
        let may_keep = likely_use == LikelyUse::WholeFolio && self.config.keep_copies;
        let (mut done, mut stored_bytes, mut filled_pages) = (0, 0, 0);
        while done < run.frames() {
            let first = slot.offset(done);
            let pinned = self.store.pin(self.slot_map.get(first));
            let piece = pinned.piece();
            let granule_pages = piece.granule.pages();
            let skip = first.0 % granule_pages;
            let part_order = if skip == 0 && granule_pages <= run.frames() - done {
                piece.granule
            } else {
                run.order.min(piece.granule)
            };
            let into = run.part(done, part_order);
            if may_keep {
                stored_bytes += u64::from(piece.place.len_bytes());
            }
            if piece.filled.is_some() {
                filled_pages += part_order.pages();
            }
            let read = self.read_piece(worker, piece, skip, into);
            self.store.unpin(&self.runs(), pinned);
            read?;
            done += part_order.pages();
        }
        self.counters().vm.swpin_zero.add(u64::from(filled_pages));
        let wanted = may_keep && self.swap_cache.wants(run.order, stored_bytes);
        Ok(wanted.then(|| CacheEntry { slot, order: run.order, hash: self.ports.arena().hash(run.as_ref()) }))
    }

    /// Makes the pages of `fetch` staged if they are still marked for it. Pages of a corrupted
    /// piece become swapped out again.
    pub(super) fn finish_fetch(
        &self,
        entries: &mut Entries,
        fetch: &Fetch,
        run: UniqueRun,
        fetched: Result<Option<CacheEntry>, Corrupted>,
    ) -> Result<(), Corrupted> {
        let Fetch { head, slot, .. } = *fetch;
        let order = run.order;
        self.rmap.set_folio(*run, head);
        let whole = (0..order.pages()).all(|index| is_fetched(entries, head.offset(index), slot.offset(index)));
        let entry = match fetched {
            Ok(entry) => entry,
            Err(corrupted) => {
                for index in 0..order.pages() {
                    let (page, slot) = (head.offset(index), slot.offset(index));
                    if is_fetched(entries, page, slot) {
                        entries.set(page, PageState::Swapped { slot, order: Order::ZERO, fetching: false });
                    } else {
                        self.free_slots(slot, 1);
                    }
                }
                self.free_content(run);
                return Err(corrupted);
            }
        };
        self.counters().vm.pswpin.add(u64::from(order.pages()));
        match entry {
            Some(entry) if whole => {
                self.slots.mark_cache_only(slot, order.pages());
                self.swap_cache.keep(run.head, entry);
            }
            _ => self.free_slots(slot, order.pages()),
        }
        if whole {
            let frame = run.into_run().head;
            entries.set_folio(head, order, PageState::Home { frame, order, writeback: false });
            self.staged_pages.fetch_add(u64::from(order.pages()), Relaxed);
            self.counters().of(order).swpin.inc();
            return Ok(());
        }
        // A part of the folio was unmapped or discarded meanwhile.
        for (index, part) in (0..).zip(run.into_parts(Order::ZERO)) {
            let page = head.offset(index);
            if is_fetched(entries, page, slot.offset(index)) {
                let frame = part.into_run().head;
                entries.set(page, PageState::Home { frame, order: Order::ZERO, writeback: false });
                self.staged_pages.fetch_add(1, Relaxed);
            } else {
                self.free_content(part);
            }
        }
        Ok(())
    }

    /// Poisons the pages of a corrupted piece, so that the program gets SIGBUS there and never
    /// reads content with a wrong checksum. A page that cannot be poisoned now stays swapped out
    /// and out of reach. The caller wakes waiting threads.
    pub(super) fn give_up_corrupted(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        fetch: &Fetch,
        corrupted: Corrupted,
    ) -> Result<(), Changing> {
        let mut served = Ok(());
        for index in 0..fetch.run.frames() {
            let (page, slot) = (fetch.head.offset(index), fetch.slot.offset(index));
            if entries.get(page) != (PageState::Swapped { slot, order: Order::ZERO, fetching: false }) {
                continue;
            }
            match self.ports.address_space().poison(steady, entries, page, corrupted) {
                Ok(()) => {
                    entries.set(page, PageState::None);
                    self.free_slots(slot, 1);
                }
                Err(MoveError::Changing) => served = Err(Changing),
                Err(_) => {}
            }
        }
        served
    }
}

/// Marks the swapped-out folio at `head` as being fetched into `run`. From now on only the caller
/// frees its slots.
#[inline]
pub(super) fn mark_fetching(entries: &mut Entries, head: PageNumber, run: FrameRun, likely_use: LikelyUse) -> Fetch {
    let PageState::Swapped { slot, .. } = entries.get(head) else { unreachable!("the head of a swapped folio") };
    entries.set_folio(head, run.order, PageState::Swapped { slot, order: run.order, fetching: true });
    Fetch { head, slot, run, likely_use }
}

/// Returns whether `page` still waits for the content of `slot`, whatever happened to the rest of
/// its folio.
#[inline]
fn is_fetched(entries: &Entries, page: PageNumber, slot: Slot) -> bool {
    matches!(entries.get(page), PageState::Swapped { slot: now, fetching: true, .. } if now == slot)
}
