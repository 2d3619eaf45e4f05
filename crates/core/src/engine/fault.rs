//! Faults: first touch, second chance and swap-in.

use super::reclaim::Attempt;
use super::swap_in::Start;
use super::{Engine, NoRoom};
use crate::homes::{RESERVE_FRAMES, Urgency};
use crate::locality::Part;
use crate::page_table::{Block, PageState};
use crate::ports::{AddressSpace, Budget, Ports};
use crate::readahead::LikelyUse;
use crate::sync;
use foliomem_types::counters::FaultKind;
use foliomem_types::units::{Order, PageNumber};
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
pub(super) struct Tries {
    no_room: NoRoom,
    reclaims: u32,
    /// Number of reclaims that freed enough memory, but lost it to other processes.
    lost: u32,
    pauses: u32,
    compacted: bool,
    /// Whether reclaim is known to free nothing.
    is_futile: bool,
}

impl Tries {
    pub(super) fn new(no_room: NoRoom) -> Tries {
        Tries { no_room, reclaims: 0, lost: 0, pauses: 0, compacted: false, is_futile: false }
    }

    pub(super) fn is_last(self) -> bool {
        self.reclaims >= TRIES_BEFORE_FALLBACK || self.is_futile
    }

    /// Returns whether the fault exceeds the limit for a folio of `order`.
    pub(super) fn may_exceed(self, order: Order) -> bool {
        self.is_last() && (order == Order::ZERO || self.is_futile)
    }

    /// Returns whether the fault may take a folio of `order`. A fault that falls back has reclaimed
    /// for a single page.
    pub(super) fn may_take(self, order: Order) -> bool {
        order == Order::ZERO || self.no_room == NoRoom::Reclaim || (self.reclaims == 0 && !self.is_futile)
    }

    /// Returns whether the fault reclaims for a folio of `order` before it takes a smaller one.
    pub(super) fn may_reclaim(self, order: Order) -> bool {
        !self.is_last() && (order == Order::ZERO || self.no_room == NoRoom::Reclaim)
    }

    /// Returns how many pages the fault reclaims at a time if it needs `pages`.
    pub(super) fn reclaim_pages(self, pages: u64) -> u64 {
        pages.max(match self.no_room {
            NoRoom::Reclaim => DIRECT_RECLAIM_PAGES,
            NoRoom::FallBack => SWAP_CLUSTER_MAX,
        })
    }

    pub(super) fn may_compact(self, order: Order) -> bool {
        !self.compacted && order > Order::ZERO
    }
}

/// Maximum reclaims of a fault for the order that it wants, before it takes a lower one: the number
/// of failures after which reclaim backs off.
const TRIES_BEFORE_FALLBACK: u32 = super::backoff::PATIENCE;
/// Maximum pauses of a fault while other threads free memory, before it exceeds the limit.
const MAX_PAUSES: u32 = 8;
/// Maximum pauses if processes share pages, while some of them free memory: a third of a second.
const MAX_PAUSES_SHARING: u32 = 600;
/// Maximum reclaims of a fault that freed enough memory, but lost it to other processes. Further
/// ones count as failures.
const MAX_LOST_RECLAIMS: u32 = 256;
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
        self.wait_for_others(page, &mut tries.pauses);
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
                        // If reclaim freed enough, another process has taken the memory.
                        if freed_pages >= pages && tries.lost < MAX_LOST_RECLAIMS {
                            tries.lost += 1;
                        } else {
                            tries.reclaims += 1;
                        }
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

    /// Waits while a fault on `page` takes memory, the tree is over its limit, and other processes
    /// are likely to free memory. A process that is down to the protected minimum may exceed the
    /// limit, but only after some pauses. A page that several processes share is free only when the
    /// last of them has freed it.
    fn wait_for_others(&self, page: PageNumber, pauses: &mut u32) {
        while self.ports.budget().is_shrinking() && self.takes_memory(page) {
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

    /// Returns whether a fault on `page` needs frames that are not charged yet. A staged page
    /// already has a charged frame.
    fn takes_memory(&self, page: PageNumber) -> bool {
        let Some(block) = self.table.get(page) else { return true };
        match block.lock().get(page) {
            PageState::None | PageState::Hole { .. } | PageState::Swapped { fetching: false, .. } => true,
            PageState::Swapped { .. } | PageState::Resident { .. } | PageState::Home { .. } => false,
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
            if pauses < MAX_PAUSES_SHARING && self.shrink(RESERVE_FRAMES, pages) >= pages {
                pauses += 1;
                continue;
            }
            let attempt = self.try_reclaim(worker, DIRECT_RECLAIM_PAGES);
            let may_free_more = self.urgency() == Urgency::Normal && self.ports.budget().is_shrinking();
            let most = if may_free_more { MAX_PAUSES_SHARING } else { MAX_PAUSES };
            if attempt == Attempt::Deferred || pauses >= most {
                return self.ports.budget().charge(pages);
            }
            if let Attempt::Freed(freed_pages) = attempt {
                self.count_direct_reclaim(freed_pages);
            }
            // Counts every attempt: the pages that reclaim freed may be copies that staging made.
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
                let part = if self.returns_alone() { Part::PAGE } else { self.locality.part_for_fault(page, expected) };
                let order = part.order().map_or(order, |part| part.min(order));
                let head = page.head(order);
                self.split_borders(&mut entries, head.folio(order));
                self.counters().vm.pgactivate.add(u64::from(order.pages()));
                entries.set_active(head, order);
                step(self.map_in(&steady, &mut entries, head), FaultKind::Staged, head.folio(order))
            }
            PageState::Swapped { fetching: true, order, .. } => {
                let head = page.head(order);
                self.readahead.faulted(page, head.folio(order), LikelyUse::WholeFolio);
                Step::Fetching
            }
            PageState::Swapped { .. } => match self.start_swap_in(&mut entries, page, tries) {
                Ok(Start::ExplodedPiece(piece)) => {
                    self.readahead.faulted(page, piece.touched_pages(), LikelyUse::Part);
                    drop(entries);
                    drop(steady);
                    let pages = piece.pages();
                    step(self.explode(worker, block, *piece), FaultKind::SwapIn, pages)
                }
                Ok(Start::Folio(fetch, run)) => {
                    self.readahead.faulted(page, fetch.pages(), fetch.likely_use);
                    drop(entries);
                    drop(steady);
                    step(self.swap_in(worker, block, &[fetch], run), FaultKind::SwapIn, fetch.pages())
                }
                Ok(Start::Pair(fetches, run)) => {
                    let pages = fetches[0].head..fetches[1].pages().end;
                    self.readahead.faulted(page, pages.clone(), LikelyUse::Part);
                    drop(entries);
                    drop(steady);
                    let served = self.swap_in(worker, block, &fetches, run);
                    self.came_ahead(1, fetches[1].pages());
                    step(served, FaultKind::SwapIn, pages)
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
}

/// Some pages could not move because the program is changing its mappings. The caller retries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Changing;

pub(super) fn step(served: Result<(), Changing>, kind: FaultKind, pages: Range<PageNumber>) -> Step {
    Step::Served(served.map_or(Served::Again, |()| Served::Done(kind)), pages)
}
