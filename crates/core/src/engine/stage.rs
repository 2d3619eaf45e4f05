//! Staging: unmaps the oldest folios into the arena, from where they are written back unless the
//! program touches them.
//!
//! Lock order: mapping events are held off, then a block is locked; the locks of the queues are
//! leaves.

use super::Engine;
use super::reclaim::STAGE_ATTEMPTS;
use crate::page_table::{Block, Entries, PageState};
use crate::ports::{AddressSpace, MoveError, Ports, SharedPages, Stopped, assert_unlocked};
use crate::queue::{Claim, FolioName, Queue};
use crate::sync::atomic::Ordering::Relaxed;
use crate::workingset::{CACHED_SHARE, PROBATION_SHARE};
use foliomem_types::units::{Frame, FrameRun, Order, PageNumber};
use std::ops::Range;

/// The result of staging one folio.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Staged {
    /// This many pages are staged now.
    Pages(u32),
    /// The folio was gone, or was split into smaller ones that were queued again.
    Nothing,
    /// The folio was partially mapped and was split.
    Split,
    /// The folio stays resident.
    Pinned,
}

impl Staged {
    /// Returns the combined result of two folios.
    fn and(self, other: Staged) -> Staged {
        match (self, other) {
            (Staged::Pages(a), Staged::Pages(b)) => Staged::Pages(a + b),
            (Staged::Pages(0) | Staged::Nothing, other) => other,
            (Staged::Pinned, Staged::Pages(pages)) if pages > 0 => Staged::Pages(pages),
            (staged, _) => staged,
        }
    }
}

/// Maximum folios staged with one move, and their maximum pages.
const ROW_FOLIOS: usize = 16;
const ROW_PAGES: u32 = 256;
/// Number of the oldest claims of a queue that are searched for the folios of a row.
const ROW_CLAIMS: usize = 64;
/// Number of failed retries of unevictable pages after which no more are tried.
const MAX_FAILED_RETRIES: usize = 4;
/// Number of pages not worth waiting for: 256 KiB.
const FEW_PAGES: u64 = 64;

/// Folios of one order at consecutive addresses.
struct Row {
    folios: [FolioName; ROW_FOLIOS],
    start: usize,
    len: usize,
}

impl Row {
    fn of(folio: FolioName) -> Row {
        Row { folios: [folio; ROW_FOLIOS], start: 0, len: 1 }
    }

    fn folios(&self) -> &[FolioName] {
        &self.folios[self.start..self.len]
    }

    fn is_full(&self) -> bool {
        self.len == ROW_FOLIOS || self.pages() >= ROW_PAGES
    }

    fn push(&mut self, folio: FolioName) {
        self.folios[self.len] = folio;
        self.len += 1;
    }

    fn pop_first(&mut self) -> FolioName {
        self.start += 1;
        self.folios[self.start - 1]
    }

    fn pages(&self) -> u32 {
        self.folios().iter().map(|folio| folio.order.pages()).sum()
    }
}

impl<P: Ports> Engine<P> {
    /// Stages up to `most_pages` pages of the oldest folios; returns the number of staged pages.
    pub fn stage_oldest(&self, most_pages: u64) -> u64 {
        let mut staged = self.retry_unevictable(most_pages);
        let mut pinned = 0;
        let mut looked_at = self.probation.claims() + self.active.claims() + self.cached.claims();
        while staged < most_pages && pinned < STAGE_ATTEMPTS && looked_at > 0 {
            let Some((queue, block, folio)) = self.oldest_resident() else { break };
            looked_at -= 1;
            match self.stage_row(queue, block, folio) {
                Staged::Pages(pages) => staged += u64::from(pages),
                Staged::Nothing | Staged::Split => {}
                Staged::Pinned => pinned += 1,
            }
        }
        staged
    }

    /// Retries some unevictable folios, because no event reports when they become movable.
    pub(super) fn retry_unevictable(&self, most_pages: u64) -> u64 {
        let (mut staged, mut refused) = (0, 0);
        while staged < most_pages && refused < MAX_FAILED_RETRIES {
            let Some((block, folio)) = self.pop_from(&self.unevictable) else { break };
            self.counters().vm.unevictable_pgs_rescued.add(u64::from(folio.order.pages()));
            match self.stage_in(block, folio) {
                Staged::Pages(pages) => staged += u64::from(pages),
                _ => refused += 1,
            }
        }
        staged
    }

    /// Returns whether nearly all folios here are known to be unevictable, so that other threads
    /// can free nothing either.
    pub(super) fn is_unevictable(&self) -> bool {
        let evictable = [&self.probation, &self.active, &self.cached].map(Queue::pages).iter().sum::<u64>();
        self.staged_pages() == 0 && evictable < FEW_PAGES && self.unevictable.pages() >= FEW_PAGES
    }

    /// Pops the resident folio to stage next; returns its queue, its block and its name.
    fn oldest_resident(&self) -> Option<(&Queue, &Block, FolioName)> {
        let (cached, probation, active) = (self.cached.pages(), self.probation.pages(), self.active.pages());
        let all = cached + probation + active;
        let order = if cached * CACHED_SHARE >= all {
            [&self.cached, &self.probation, &self.active]
        } else if probation * PROBATION_SHARE >= all {
            [&self.probation, &self.active, &self.cached]
        } else {
            [&self.active, &self.probation, &self.cached]
        };
        order.into_iter().find_map(|queue| self.pop_from(queue).map(|(block, folio)| (queue, block, folio)))
    }

    /// Stages `first`, and with it the folios after it in the program that are among the next in
    /// `queue`. They need not be adjacent in the queue: touches of different parts of the program
    /// may alternate there.
    #[inline]
    fn stage_row(&self, queue: &Queue, block: &Block, first: FolioName) -> Staged {
        // This check comes first, because searching the queue takes longer.
        let may_be_next = may_be_next(&block.lock(), behind(first));
        if !may_be_next || !queue.has_among_oldest(behind(first), ROW_CLAIMS) {
            return self.stage_in(block, first);
        }
        let mut next = [None; ROW_CLAIMS];
        queue.copy_oldest(&mut next);
        self.stage_together(block, first, |entries, last| {
            let is_next = |claim: &&Claim| {
                claim.folio == behind(last) && claim.folio.head < entries.end() && entries.holds(**claim)
            };
            Some(next.iter().flatten().find(is_next)?.folio)
        })
    }

    /// Stages `first`, which is of `block`, and the folios after it in `pages` that have its order.
    pub(super) fn stage_all(&self, block: &Block, first: FolioName, pages: &Range<PageNumber>) {
        self.stage_together(block, first, |entries, last| {
            let head = last.head.offset(last.order.pages());
            (head < pages.end.min(entries.end())).then_some(FolioName { head, order: last.order })
        });
    }

    /// Stages `first` and the folios that `next` returns one by one, each given the previous one,
    /// with as few moves as possible: a move has a fixed cost. Folios whose home frames are not
    /// consecutive get new home frames that are: unpopulated frames cost nothing, and frames that
    /// are freed together can be allocated together later. Claims on these folios stay in the queue
    /// and become stale.
    fn stage_together(
        &self,
        block: &Block,
        first: FolioName,
        mut next: impl FnMut(&Entries, FolioName) -> Option<FolioName>,
    ) -> Staged {
        let mut row = Row::of(first);
        let mut staged = 0;
        {
            let Some(steady) = self.ports.address_space().steady() else { return self.stage_later(block, first) };
            let mut entries = block.lock();
            let mut last = Some(first).filter(|&first| frame_of(&entries, first).is_some());
            while let Some(folio) = last
                && !row.is_full()
            {
                last = next(&entries, folio).filter(|&next| frame_of(&entries, next).is_some());
                last.into_iter().for_each(|folio| row.push(folio));
            }
            while row.folios().len() > 1 {
                let Some((frame, folios)) = self.common_frames(&mut entries, row.folios()) else { break };
                let pages = folios * first.order.pages();
                let moved = self.ports.address_space().move_out(&steady, &entries, row.folios()[0].head, frame, pages);
                let mut moved_pages = moved.map_or_else(|stopped| stopped.moved_pages, |()| pages);
                staged += moved_pages;
                while moved_pages > 0 {
                    let folio = row.pop_first();
                    let here = moved_pages.min(folio.order.pages());
                    self.make_staged_up_to(&mut entries, folio, here);
                    moved_pages -= here;
                }
                match moved {
                    Ok(()) => {}
                    // None of the rest could move now.
                    Err(Stopped { error: MoveError::Changing, .. }) => {
                        drop(entries);
                        let next = row.folios().first().map_or(Staged::Nothing, |&next| self.stage_later(block, next));
                        return Staged::Pages(staged).and(next);
                    }
                    Err(_) => break,
                }
            }
        }
        // Folios that did not move are tried one by one.
        let rest = row.folios().iter().map(|&folio| self.stage_in(block, folio));
        let outcome = rest.fold(Staged::Nothing, Staged::and);
        Staged::Pages(staged).and(outcome)
    }

    /// Returns the first of consecutive home frames for some of the `folios`, counted from the
    /// first one, and the number of these folios. Assigns new home frames if needed. All `folios`
    /// are resident, adjacent, and of one order. Returns `None` if no consecutive frames are free.
    fn common_frames(&self, entries: &mut Entries, folios: &[FolioName]) -> Option<(Frame, u32)> {
        let order = folios[0].order;
        let first = frame_of(entries, folios[0])?;
        let in_line = (0..).step_by(order.pages() as usize).zip(folios);
        let in_line = in_line.take_while(|&(index, &folio)| frame_of(entries, folio) == Some(first.offset(index)));
        let in_line = in_line.count() as u32;
        if in_line == folios.len() as u32 {
            return Some((first, in_line));
        }
        let most = Order::from_bytes((order.bytes() as u64) << folios.len().ilog2())?;
        let home = self.homes.alloc_empty(most)?;
        let count = home.frames() / order.pages();
        for (index, &FolioName { head, .. }) in (0..count).zip(folios) {
            let Some(frame) = frame_of(entries, FolioName { head, order }) else {
                unreachable!("{head:?} is resident")
            };
            self.renumber(entries, head, FrameRun::new(frame, order), home.part(index * order.pages(), order));
        }
        Some((home.head, count))
    }

    /// Stages one resident folio of `block`; of a partially mapped one, the remaining pages.
    pub(super) fn stage_in(&self, block: &Block, folio: FolioName) -> Staged {
        match self.try_stage(block, folio) {
            Ok(Staged::Split) => self.stage_parts(block, folio),
            Err(MoveError::Changing) => self.stage_later(block, folio),
            Err(MoveError::Busy) => {
                // The page is shared since a fork, or pinned. Only a shared page can be unshared.
                let pages = folio.head.folio(folio.order);
                if self.unprotect(pages.clone()).is_err() {
                    return self.stage_later(block, folio);
                }
                if let Some(shared) = self.ports.shared_pages() {
                    assert_unlocked();
                    shared.unshare(pages);
                }
                match self.try_stage(block, folio) {
                    Err(MoveError::Changing) => self.stage_later(block, folio),
                    Ok(staged) => staged,
                    Err(error) => self.leave_resident(block, folio, error),
                }
            }
            Ok(staged) => staged,
            Err(error) => self.leave_resident(block, folio, error),
        }
    }

    /// Stages the folios into which `folio` was split.
    fn stage_parts(&self, block: &Block, folio: FolioName) -> Staged {
        let mut staged_pages = 0;
        let mut page = folio.head;
        while page < folio.head.offset(folio.order.pages()) {
            let state = block.lock().get(page);
            let order = state.order().unwrap_or(Order::ZERO);
            if matches!(state, PageState::Resident { .. })
                && let Staged::Pages(pages) = self.stage_in(block, FolioName { head: page.head(order), order })
            {
                staged_pages += pages;
            }
            page = page.head(order).offset(order.pages());
        }
        if staged_pages > 0 { Staged::Pages(staged_pages) } else { Staged::Nothing }
    }

    /// Keeps a folio that cannot be staged now resident, as the youngest. (While the program
    /// changes its mappings, another folio may be there.)
    fn stage_later(&self, block: &Block, folio: FolioName) -> Staged {
        let mut entries = block.lock();
        if is_resident(&entries, folio) {
            entries.set_unqueued(folio.head);
            self.enqueue(self.resident_queue(&entries, folio.head), &mut entries, folio.head, folio.order);
        }
        Staged::Pinned
    }

    fn try_stage(&self, block: &Block, folio: FolioName) -> Result<Staged, MoveError> {
        let steady = self.ports.address_space().steady().ok_or(MoveError::Changing)?;
        let mut entries = block.lock();
        let FolioName { head, order } = folio;
        if is_resident(&entries, folio) && entries.holes(head, order) > 0 {
            self.split_partial(&mut entries, head.folio(order));
            return Ok(Staged::Split);
        }
        let frame = match entries.get(head) {
            PageState::Resident { frame, order: now } if now == order => frame,
            _ => return Ok(Staged::Nothing),
        };
        match self.ports.address_space().move_out(&steady, &entries, head, frame, order.pages()) {
            Ok(()) => {
                self.make_staged(&mut entries, folio);
                Ok(Staged::Pages(order.pages()))
            }
            Err(Stopped { moved_pages: 0, error }) => Err(error),
            Err(Stopped { moved_pages, .. }) => {
                self.make_staged_up_to(&mut entries, folio, moved_pages);
                Ok(Staged::Pages(moved_pages))
            }
        }
    }

    /// Makes the first `moved_pages` pages of a resident folio staged. If the others did not move,
    /// splits the folio into single pages; the others stay resident.
    fn make_staged_up_to(&self, entries: &mut Entries, folio: FolioName, moved_pages: u32) {
        let FolioName { head, order } = folio;
        if moved_pages == order.pages() {
            return self.make_staged(entries, folio);
        }
        self.split_to(entries, head, order, Order::ZERO);
        self.counters().of(order).split.inc();
        for index in 0..moved_pages {
            self.make_staged(entries, FolioName { head: head.offset(index), order: Order::ZERO });
        }
    }

    /// Makes a resident folio staged, after its pages moved.
    #[inline]
    fn make_staged(&self, entries: &mut Entries, folio: FolioName) {
        let FolioName { head, order } = folio;
        let PageState::Resident { frame, .. } = entries.get(head) else { unreachable!("{head:?} was resident") };
        entries.set_folio(head, order, PageState::Home { frame, order, writeback: false });
        self.resident_pages.fetch_sub(u64::from(order.pages()), Relaxed);
        self.staged_pages.fetch_add(u64::from(order.pages()), Relaxed);
        self.counters().of(order).nr_anon.sub(1);
        self.counters().vm.pgdeactivate.add(u64::from(order.pages()));
        entries.set_unqueued(head);
        self.enqueue(&self.staged, entries, head, order);
    }

    /// Handles a folio that could not move: drops its absent pages or splits it, because parts may
    /// be movable. A single page is unevictable.
    fn leave_resident(&self, block: &Block, folio: FolioName, error: MoveError) -> Staged {
        let Some(_steady) = self.ports.address_space().steady() else { return self.stage_later(block, folio) };
        let mut entries = block.lock();
        let FolioName { head, order } = folio;
        if !is_resident(&entries, folio) {
            return Staged::Nothing;
        }
        entries.set_unqueued(head);
        let range = head.folio(order);
        let absent_pages = self.drop_absent(&mut entries, range.clone());
        if self.split_partial(&mut entries, range) || absent_pages > 0 {
            return Staged::Nothing;
        }
        if order > Order::ZERO {
            self.split_to(&mut entries, head, order, Order::ZERO);
            self.counters().of(order).split.inc();
            return Staged::Nothing;
        }
        debug_assert!(error != MoveError::Exists, "the home frame of a resident page is unpopulated");
        self.counters().vm.unevictable_pgs_culled.inc();
        // In any other queue, many such pages would be all that reclaim ever examines.
        self.enqueue(&self.unevictable, &mut entries, head, order);
        Staged::Pinned
    }
}

/// Returns the name of the next folio in the program, with the order of `folio`.
fn behind(FolioName { head, order }: FolioName) -> FolioName {
    FolioName { head: head.offset(order.pages()), order }
}

/// Returns whether `folio` could be staged together with the previous one, which is of this block,
/// if both are in one queue.
#[inline]
fn may_be_next(entries: &Entries, folio: FolioName) -> bool {
    folio.head < entries.end() && entries.is_queued(folio.head) && frame_of(entries, folio).is_some()
}

/// Returns the home frame of `folio` if it is resident as a whole.
#[inline]
fn frame_of(entries: &Entries, FolioName { head, order: wanted }: FolioName) -> Option<Frame> {
    match entries.get(head) {
        PageState::Resident { frame, order } if order == wanted => {
            Some(frame).filter(|_| entries.holes(head, order) == 0)
        }
        _ => None,
    }
}

/// Returns whether `folio`, or what remains of it, is resident.
#[inline]
fn is_resident(entries: &Entries, folio: FolioName) -> bool {
    let FolioName { head, order: wanted } = folio;
    matches!(entries.get(head), PageState::Resident { order, .. } | PageState::Hole { order, .. } if order == wanted)
}
