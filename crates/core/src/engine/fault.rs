//! Faults: first touch, second chance and swap-in.

use super::explode::ExplodedPiece;
use super::reclaim::Attempt;
use super::{Engine, NoRoom};
use crate::homes::{Content, NoRun, RESERVE_FRAMES, Urgency};
use crate::locality::SwapIn;
use crate::page_table::{Block, Entries, PageState};
use crate::ports::{AddressSpace, Arena, Budget, Corrupted, Marks, MoveError, Ports, SharedPages, Steady, Stopped};
use crate::queue::{Claim, FolioName, Queue};
use crate::readahead::{Ahead, Expected};
use crate::run_tokens::{RunMut, UniqueRun};
use crate::swap_cache::CacheEntry;
use crate::sync;
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::counters::FaultKind;
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order, OrderSet, PAGE_BYTES, PageNumber, Slot};
use std::ops::Range;

/// The result of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Served {
    /// The page is resident, or the thread that fetches it wakes the program.
    Done(FaultKind),
    /// The program is changing its mappings. The caller must receive that event and retry.
    Again,
}

/// The result of one attempt to serve a fault.
pub(super) enum Step {
    /// The caller wakes the threads that wait for these pages once it holds no lock: a woken thread
    /// takes the CPU at once and may fault again. The pages are resident, or the threads fault
    /// again.
    Served(Served, Range<PageNumber>),
    /// Another thread fetches the page and wakes the program.
    Fetching,
    /// The program is changing its mappings.
    Changing,
    /// The limit is in the way. The caller reclaims at least this many pages and retries.
    OverLimit(u64),
    /// No run of this order is free. The caller splits partially mapped folios or compacts, and
    /// retries.
    Fragmented(Order),
    /// Another thread changed the page meanwhile. The caller retries.
    LookAgain,
}

/// The attempts that a fault has made so far.
#[derive(Clone, Copy)]
struct Tries {
    no_room: NoRoom,
    reclaims: u32,
    pauses: u32,
    compacted: bool,
    /// Whether reclaim is known to free nothing.
    is_futile: bool,
}

impl Tries {
    fn new(no_room: NoRoom) -> Tries {
        Tries { no_room, reclaims: 0, pauses: 0, compacted: false, is_futile: false }
    }

    fn is_last(self) -> bool {
        self.reclaims >= TRIES_BEFORE_FALLBACK || self.is_futile
    }

    /// Returns whether the fault exceeds the limit for a folio of `order`.
    fn may_exceed(self, order: Order) -> bool {
        self.is_last() && (order == Order::ZERO || self.is_futile)
    }

    /// Returns whether the fault may take a folio of `order`. A fault that falls back has reclaimed
    /// for a single page.
    fn may_take(self, order: Order) -> bool {
        order == Order::ZERO || self.no_room == NoRoom::Reclaim || (self.reclaims == 0 && !self.is_futile)
    }

    /// Returns whether the fault reclaims for a folio of `order` before it takes a smaller one.
    fn may_reclaim(self, order: Order) -> bool {
        !self.is_last() && (order == Order::ZERO || self.no_room == NoRoom::Reclaim)
    }

    /// Returns how many pages the fault reclaims at a time if it needs `pages`.
    fn reclaim_pages(self, pages: u64) -> u64 {
        pages.max(match self.no_room {
            NoRoom::Reclaim => DIRECT_RECLAIM_PAGES,
            NoRoom::FallBack => SWAP_CLUSTER_MAX,
        })
    }

    fn may_compact(self, order: Order) -> bool {
        !self.compacted && order > Order::ZERO
    }
}

/// Maximum reclaims of a fault for the order that it wants, before it takes a lower one: the number
/// of failures after which reclaim backs off.
const TRIES_BEFORE_FALLBACK: u32 = super::backoff::PATIENCE;
/// Maximum pauses of a fault while other threads free memory, before it exceeds the limit.
const MAX_PAUSES: u32 = 8;
/// Maximum pauses if processes share pages: a third of a second.
const MAX_PAUSES_SHARING: u32 = 600;
/// Pages that a fault reclaims at a time: room for a few large folios.
const DIRECT_RECLAIM_PAGES: u64 = 64;
/// Pages that a fault reclaims at a time in Linux: room for a large folio after that is luck.
const SWAP_CLUSTER_MAX: u64 = 32;

impl<P: Ports> Engine<P> {
    /// Serves a fault on `page` and wakes the threads that wait for it. The page is resident
    /// afterwards.
    pub fn fault(&self, worker: &mut P::Worker, page: PageNumber) -> Served {
        let (served, waited_for) = self.fault_unwoken(worker, page);
        self.wake(waited_for);
        served
    }

    /// Serves a fault on `page` without the wake. The caller wakes the threads that wait for the
    /// returned pages, which may be none.
    pub fn fault_unwoken(&self, worker: &mut P::Worker, page: PageNumber) -> (Served, Range<PageNumber>) {
        let mut tries = Tries::new(self.config.no_room);
        self.wait_for_others(&mut tries.pauses);
        self.fault_with(worker, page, tries)
    }

    /// Serves a fault on `page` like [`fault_unwoken`](Engine::fault_unwoken), but never reclaims:
    /// it exceeds the limit, and without a free frame the page becomes unmanaged.
    pub(super) fn fault_without_reclaim(&self, worker: &mut P::Worker, page: PageNumber) -> Served {
        let tries = Tries { is_futile: true, ..Tries::new(self.config.no_room) };
        self.fault_with(worker, page, tries).0
    }

    fn fault_with(&self, worker: &mut P::Worker, page: PageNumber, mut tries: Tries) -> (Served, Range<PageNumber>) {
        let nobody = page..page;
        let Some(block) = self.table.get_or_create(page) else {
            return (Served::Done(FaultKind::Spurious), page.folio(Order::ZERO));
        };
        loop {
            match self.try_fault(worker, block, page, tries) {
                Step::Served(served, pages) => return (served, pages),
                Step::Fetching => return (Served::Done(FaultKind::Spurious), nobody),
                Step::Changing => return (Served::Again, nobody),
                Step::LookAgain => {}
                Step::OverLimit(pages) => match self.try_reclaim(worker, tries.reclaim_pages(pages)) {
                    Attempt::Freed(freed_pages) => {
                        tries.reclaims += 1;
                        self.count_direct_reclaim(freed_pages);
                    }
                    Attempt::Nothing if tries.pauses < MAX_PAUSES && !self.is_unevictable() => {
                        tries.pauses += 1;
                        self.pause();
                    }
                    Attempt::Nothing => tries.reclaims += 1,
                    Attempt::Deferred => tries.is_futile = true,
                },
                Step::Fragmented(order) => {
                    if !self.split_deferred() && tries.may_compact(order) {
                        tries.compacted = true;
                        self.compact_direct(order);
                    }
                }
            }
        }
    }

    /// Waits while the tree is over its limit and other processes are likely to free memory. A
    /// process with next to nothing left may exceed the limit, but not first; pages shared by
    /// several processes are free only when the last one freed them.
    fn wait_for_others(&self, pauses: &mut u32) {
        while self.ports.budget().is_lately_over() {
            let most = match (self.urgency(), self.shares_pages()) {
                (Urgency::Reclaim, _) => MAX_PAUSES,
                (Urgency::Normal, true) => MAX_PAUSES_SHARING,
                (Urgency::Normal, false) => 0,
            };
            if *pauses >= most {
                break;
            }
            *pauses += 1;
            self.pause();
        }
    }

    fn count_direct_reclaim(&self, freed_pages: u64) {
        self.counters().vm.allocstall.inc();
        self.counters().vm.pgsteal_direct.add(freed_pages);
    }

    /// Charges `pages` for copy-on-write copies that the program is about to make. Reclaims and
    /// waits for room; exceeds the limit if there is none in the end.
    pub fn charge_copies(&self, worker: &mut P::Worker, pages: u32) {
        let mut pauses = 0;
        while !self.ports.budget().try_charge(pages) {
            // Frames that are free here do not help the program's copies until the system gets them
            // back.
            if self.shrink(RESERVE_FRAMES, pages) >= pages {
                continue;
            }
            let attempt = self.try_reclaim(worker, DIRECT_RECLAIM_PAGES);
            let may_wait =
                pauses < MAX_PAUSES || self.urgency() == Urgency::Normal && self.ports.budget().is_lately_over();
            if attempt == Attempt::Deferred || !may_wait {
                return self.ports.budget().charge(pages);
            }
            if let Attempt::Freed(freed_pages) = attempt {
                self.count_direct_reclaim(freed_pages);
            }
            // The freed pages may be copies themselves.
            pauses += 1;
            if !matches!(attempt, Attempt::Freed(1..)) {
                self.pause();
            }
        }
    }

    fn try_fault(&self, worker: &mut P::Worker, block: &Block, page: PageNumber, tries: Tries) -> Step {
        let Some(steady) = self.ports.address_space().steady() else { return Step::Changing };
        let mut entries = block.lock();
        match entries.get(page) {
            PageState::None | PageState::Hole { .. } => self.first_touch(&steady, &mut entries, page, tries),
            PageState::Resident { order, .. } => {
                if self.drop_absent(&mut entries, page.head(order).folio(order)) == 0
                    || matches!(entries.get(page), PageState::Resident { .. })
                {
                    return Step::Served(Served::Done(FaultKind::Spurious), page.folio(Order::ZERO));
                }
                Step::LookAgain
            }
            PageState::Home { order, writeback, .. } => {
                let head = page.head(order);
                if writeback && !self.copy_from_writeback(&mut entries, head, order) {
                    drop(entries);
                    drop(steady);
                    sync::back_off();
                    return Step::LookAgain;
                }
                // If only parts of the folio are touched, the rest stays staged and is swapped out.
                let expected = self.readahead.expected(page);
                let part =
                    if self.returns_alone() { Some(Order::ZERO) } else { self.locality.part_for_fault(page, expected) };
                let order = part.map_or(order, |part| part.min(order));
                let head = page.head(order);
                self.split_borders(&mut entries, head.folio(order));
                self.counters().vm.pgactivate.add(u64::from(order.pages()));
                entries.set_active(head, order, true);
                step(self.map_in(&steady, &mut entries, head), FaultKind::Home, head.folio(order))
            }
            PageState::Swapped { fetching: true, order, .. } => {
                let head = page.head(order);
                self.readahead.faulted(page, head.folio(order), true);
                Step::Fetching
            }
            PageState::Swapped { .. } => match self.start_swap_in(&mut entries, page, tries) {
                Ok(Start::ExplodedPiece(piece)) => {
                    self.readahead.faulted(page, piece.touched_pages(), false);
                    drop(entries);
                    drop(steady);
                    let pages = piece.pages();
                    step(self.explode(worker, block, *piece), FaultKind::SwapIn, pages)
                }
                Ok(Start::Folio(fetch, run)) => {
                    self.readahead.faulted(page, fetch.pages(), fetch.whole);
                    drop(entries);
                    drop(steady);
                    step(self.swap_in(worker, block, &[fetch], run), FaultKind::SwapIn, fetch.pages())
                }
                Ok(Start::ArenaFull) => {
                    drop(entries);
                    drop(steady);
                    self.map_in_unmanaged(worker, block, page)
                }
                Err(step) => step,
            },
        }
    }

    /// Serves a first touch with a folio of the highest order that fits the mapping and is wholly
    /// untouched, or else of a lower one. In a partially mapped folio, the holes are untouched.
    fn first_touch(&self, steady: &Steady<'_, P>, entries: &mut Entries, page: PageNumber, tries: Tries) -> Step {
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
                    return step(self.map_in_valid(steady, entries, head), FaultKind::FirstTouch, pages);
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

    /// Returns whether a run of `order` may become available soon.
    fn may_make_run(&self, order: Order, tries: Tries) -> bool {
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

    /// Gives a folio under writeback other frames with a copy of its content; the compressing
    /// worker frees the old ones. Returns false if no frames are available.
    fn copy_from_writeback(&self, entries: &mut Entries, head: PageNumber, order: Order) -> bool {
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
    fn map_in(&self, steady: &Steady<'_, P>, entries: &mut Entries, head: PageNumber) -> Result<(), Changing> {
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
    fn drop_lost(&self, entries: &mut Entries, range: Range<PageNumber>) -> bool {
        let mut has_lost = false;
        let Some(marks) = self.ports.marks() else { return false };
        marks.take(entries, range, &mut |entries, lost| {
            has_lost = true;
            self.counters().vm.discarded_unheard.add(lost.end.0 - lost.start.0);
            self.drop_pages(entries, lost);
        });
        if has_lost {
            self.discards_unheard.store(1, Relaxed);
        }
        has_lost
    }

    /// Returns whether only the page that was touched may return with a fault: the program discards
    /// pages without a message. A discard between the look at a page and its return is missed, and
    /// a page that nobody touches may be discarded at any time.
    #[inline]
    fn returns_alone(&self) -> bool {
        self.discards_unheard.load(Relaxed) != 0
    }

    /// Maps in the folio at `head`, which is staged and not under writeback. The program has
    /// discarded none of its pages, or the folio is new.
    #[inline]
    fn map_in_valid(&self, steady: &Steady<'_, P>, entries: &mut Entries, head: PageNumber) -> Result<(), Changing> {
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

    fn make_resident(&self, entries: &mut Entries, head: PageNumber, frame: Frame, order: Order) {
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
    fn map_in_pages(
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

    fn map_in_page(
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

    /// Appends a folio to a queue unless it is in one.
    pub(super) fn enqueue(&self, queue: &Queue, entries: &mut Entries, head: PageNumber, order: Order) {
        if let Some(ticket) = entries.set_queued(head) {
            queue.push(Claim { folio: FolioName { head, order }, ticket });
        }
    }

    /// Marks the folio of `page`, which is swapped out, as being fetched: the whole folio, unless
    /// little of it is likely to be touched, and if frames for it are available; or else the
    /// largest part around `page` for which they are.
    fn start_swap_in(&self, entries: &mut Entries, page: PageNumber, tries: Tries) -> Result<Start, Step> {
        let PageState::Swapped { order: whole, .. } = entries.get(page) else { unreachable!("checked by the caller") };
        let expected = self.readahead.expected(page);
        let part = self.locality.part_for_fault(page, expected);
        let orders = self.orders_of_return(page, whole).up_to(part.unwrap_or(whole));
        if expected != Expected::Stream
            && let Some(piece) = self.start_explode(entries, page, orders.highest(), expected == Expected::Step)
        {
            let FolioName { head, order } = piece.touched();
            self.note_refault(entries, head, order);
            return Ok(Start::ExplodedPiece(Box::new(piece)));
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
        Ok(Start::Folio(mark_fetching(entries, head, *run, part.is_none()), run))
    }

    /// Records a refault of the folio at `head`, which is swapped out. After a short refault
    /// distance the folio becomes active.
    pub(super) fn note_refault(&self, entries: &mut Entries, head: PageNumber, order: Order) {
        self.counters().vm.workingset_refault_anon.add(u64::from(order.pages()));
        if self.workingset.is_refault(entries.evicted(head), self.resident_pages()) {
            self.counters().vm.workingset_activate_anon.add(u64::from(order.pages()));
            entries.set_active(head, order, true);
        }
    }

    /// Returns the orders in which a folio that was swapped out with order `whole` may return to
    /// `page`: none above the sizes allowed now. (Lower orders may result from a split.)
    fn orders_of_return(&self, page: PageNumber, whole: Order) -> OrderSet {
        if self.returns_alone() {
            return OrderSet::ALL.up_to(Order::ZERO);
        }
        let mapping = if whole > Order::ZERO { self.ports.address_space().mapping(page) } else { None };
        let sizes = mapping.map_or(OrderSet::ALL, |mapping| mapping.sizes);
        match self.config.swap_in {
            SwapIn::Whole => sizes.up_to(whole),
            SwapIn::Adaptive | SwapIn::Page => OrderSet::ALL.up_to(sizes.highest().min(whole)),
        }
    }

    /// Swaps in the marked folios: one, or several of one order in a row, to frames in a row, which
    /// are `run`. The caller wakes waiting threads, also for pages that no longer belong here, so
    /// that they fault again.
    fn swap_in(
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

    /// Makes the fetched folios staged, and queues those that are not `wanted`. This comes before
    /// anything else that waits: a thread that moves a folio to another address waits for it while
    /// it holds off mapping events.
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
    fn stage_fetched(&self, entries: &mut Entries, pages: Range<PageNumber>) {
        each_staged(entries, pages, |entries, head, order| self.enqueue(&self.staged, entries, head, order));
    }

    /// Maps in the fetched folios of `wanted`; the rest stays staged. Gives up corrupted ones.
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

    /// Maps in folios of one order that are adjacent, as are their frames, with one move: a move
    /// has a fixed cost. Returns false if some could not move.
    fn map_in_together(
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

    /// Claims what to fetch or make next after the fault on `page`; also returns the order of the
    /// fault's folio. The caller must then call [`Engine::read_ahead`].
    pub fn claim_ahead(&self, page: PageNumber) -> Option<(Ahead, Order)> {
        if !self.readahead.may_claim(page) || self.returns_alone() {
            return None;
        }
        let order = self.table.get(page)?.lock().get(page).order()?;
        Some((self.readahead.claim(page, page.head(order).offset(order.pages()))?, order))
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

    fn read_ahead_all(&self, worker: &mut P::Worker, pages: Range<PageNumber>) -> bool {
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
        let fetch = mark_fetching(&mut entries, head, *run, order == whole);
        drop(entries);
        drop(steady);
        self.swap_in_ahead(worker, block, &[fetch], run);
        true
    }

    /// Swaps in folios ahead of faults, to frames in a row, which are `run`. A thread that faults
    /// on them meanwhile waits; if they cannot be fetched, it faults again.
    fn swap_in_ahead(&self, worker: &mut P::Worker, block: &Block, fetches: &[Fetch], run: UniqueRun) {
        let (Some(first), Some(last)) = (fetches.first(), fetches.last()) else { unreachable!("something was marked") };
        let pages = first.head..last.pages().end;
        let _ = self.swap_in(worker, block, fetches, run);
        self.came_ahead(fetches.len(), pages.clone());
        self.wake(pages);
    }

    /// Counts `folios` folios with these pages as fetched without a fault.
    fn came_ahead(&self, folios: usize, pages: Range<PageNumber>) {
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
        let mut fetches = Fetches::of(mark_fetching(entries, pages.start, run.part(0, order), true));
        for index in (0..run.frames()).step_by(order.pages() as usize).skip(1) {
            fetches.push(mark_fetching(entries, pages.start.offset(index), run.part(index, order), true));
        }
        Some((fetches, run))
    }

    /// Decompresses a folio. Its slots cannot be freed meanwhile, because its pages are marked
    /// *fetching*. Returns the swap-cache entry if it is worth keeping.
    fn fetch(
        &self,
        worker: &mut P::Worker,
        fetch: &Fetch,
        mut run: RunMut<'_>,
    ) -> Result<Option<CacheEntry>, Corrupted> {
        let Fetch { slot, whole, .. } = *fetch;
        let may_keep = whole && self.config.keep_copies;
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
    fn finish_fetch(
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

/// Some pages could not move because the program is changing its mappings. The caller retries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Changing;

pub(super) fn step(served: Result<(), Changing>, kind: FaultKind, pages: Range<PageNumber>) -> Step {
    Step::Served(served.map_or(Served::Again, |()| Served::Done(kind)), pages)
}

/// The start of a swap-in.
enum Start {
    /// A folio is being fetched into the frames of the run.
    Folio(Fetch, UniqueRun),
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
    /// Whether more than a part of the folio is likely to be used: then a swap-cache entry may be
    /// worth its memory.
    pub(super) whole: bool,
}

impl Fetch {
    fn pages(&self) -> Range<PageNumber> {
        self.head.folio(self.run.order)
    }
}

/// Maximum number of folios mapped in at once.
const MAX_TOGETHER: usize = 16;

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

/// Marks the swapped-out folio at `head` as being fetched into `run`. From now on only the caller
/// frees its slots.
#[inline]
pub(super) fn mark_fetching(entries: &mut Entries, head: PageNumber, run: FrameRun, whole: bool) -> Fetch {
    let PageState::Swapped { slot, .. } = entries.get(head) else { unreachable!("the head of a swapped folio") };
    entries.set_folio(head, run.order, PageState::Swapped { slot, order: run.order, fetching: true });
    Fetch { head, slot, run, whole }
}

/// Calls `act` for each folio that begins in `pages`, is staged, and is not under writeback.
fn each_staged(entries: &mut Entries, pages: Range<PageNumber>, mut act: impl FnMut(&mut Entries, PageNumber, Order)) {
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

/// Returns whether `page` still waits for the content of `slot`, whatever happened to the rest of
/// its folio.
#[inline]
fn is_fetched(entries: &Entries, page: PageNumber, slot: Slot) -> bool {
    matches!(entries.get(page), PageState::Swapped { slot: now, fetching: true, .. } if now == slot)
}
