//! Staging: moving the oldest folios of the program home, from where they are written back unless they are touched.
//!
//! Lock order: the machine is held steady, then a block is locked; the queues' locks are leaves.

use super::Engine;
use super::reclaim::STAGE_ATTEMPTS;
use crate::machine::{Machine, MoveError, Stopped};
use crate::page_table::{Block, Entries, PageState};
use crate::queue::{Claim, FolioName, Queue};
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::{Frame, MAX_ORDER, Order, PageNumber};
use crate::workingset::PROBATION_SHARE;

/// What staging one folio came to.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Staged {
    /// This many pages are at home now.
    Pages(u32),
    /// The folio was gone, or has been split into smaller ones that were queued again.
    Nothing,
    /// It was partially mapped, and has been split.
    Split,
    /// It stays where it is.
    Pinned,
}

impl Staged {
    /// What two came to together.
    fn and(self, other: Staged) -> Staged {
        match (self, other) {
            (Staged::Pages(a), Staged::Pages(b)) => Staged::Pages(a + b),
            (Staged::Pages(0) | Staged::Nothing, other) => other,
            (Staged::Pinned, Staged::Pages(pages)) if pages > 0 => Staged::Pages(pages),
            (staged, _) => staged,
        }
    }
}

/// Folios that are staged together, at most, and their pages.
const ROW_FOLIOS: usize = 16;
const ROW_PAGES: u32 = 256;

/// Folios one behind the other.
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

    fn end(&self) -> PageNumber {
        self.folios[self.start].head.offset(self.pages())
    }
}

impl<M: Machine> Engine<M> {
    /// Stages up to `most_pages` pages of the oldest folios; returns how many.
    pub fn stage_oldest(&self, most_pages: u64) -> u64 {
        let mut staged = 0;
        let mut pinned = 0;
        let mut looked_at = self.probation.claims() + self.active.claims();
        while staged < most_pages && pinned < STAGE_ATTEMPTS && looked_at > 0 {
            let Some((queue, folio)) = self.oldest_resident() else { break };
            looked_at -= 1;
            match self.stage_row(queue, folio) {
                Staged::Pages(pages) => staged += u64::from(pages),
                Staged::Nothing | Staged::Split => {}
                Staged::Pinned => pinned += 1,
            }
        }
        staged
    }

    /// Takes the resident folio that is to go next out of its queue; which queue it was in.
    fn oldest_resident(&self) -> Option<(&Queue, FolioName)> {
        let (probation, active) = (self.probation.pages(), self.active.pages());
        let [first, second] = if probation * PROBATION_SHARE >= probation + active {
            [&self.probation, &self.active]
        } else {
            [&self.active, &self.probation]
        };
        let pop = |queue| Some((queue, self.pop_from(queue)?));
        pop(first).or_else(|| pop(second))
    }

    /// Moves `first` home, and with it those behind it in `queue` that lie behind it in the program and at home: a move
    /// has its price whatever its size.
    fn stage_row(&self, queue: &Queue, first: FolioName) -> Staged {
        if queue.oldest().is_none_or(|next| next.folio.head != first.head.offset(first.order.pages())) {
            return self.stage(first);
        }
        let Some(block) = self.table.get(first.head) else { return Staged::Nothing };
        let mut row = Row::of(first);
        let mut staged = 0;
        {
            let Some(_steady) = self.machine.steady() else { return self.stage_later(block, first) };
            let mut entries = block.lock();
            let frame_of = |folio: FolioName| match entries.get(folio.head) {
                PageState::Resident { frame, order } if order == folio.order => {
                    Some(frame).filter(|_| entries.holes(folio.head, order) == 0)
                }
                _ => None,
            };
            let frame = frame_of(first);
            let follows = |frame: Frame, row: &Row, next: Claim| {
                next.folio.head == row.end()
                    && next.folio.head.head(MAX_ORDER) == entries.first()
                    && entries.holds(next)
                    && frame_of(next.folio) == Some(frame.offset(row.pages()))
            };
            while let Some(frame) = frame.filter(|_| !row.is_full())
                && let Some(next) = queue.pop_if(|next| follows(frame, &row, next))
            {
                row.push(next.folio);
            }
            if let Some(frame) = frame.filter(|_| row.len > 1) {
                let moved = self.machine.move_out(first.head, frame, row.pages());
                let mut moved_pages = moved.map_or_else(|stopped| stopped.moved_pages, |()| row.pages());
                staged = moved_pages;
                while moved_pages > 0 {
                    let folio = row.pop_first();
                    let here = moved_pages.min(folio.order.pages());
                    self.make_staged_up_to(&mut entries, folio, here);
                    moved_pages -= here;
                }
            }
        }
        // Those that did not come with it are tried on their own.
        let rest = row.folios().iter().map(|&folio| self.stage(folio));
        let outcome = rest.fold(Staged::Nothing, Staged::and);
        Staged::Pages(staged).and(outcome)
    }

    /// Moves one resident folio home; of a partially mapped one, what is left.
    pub(super) fn stage(&self, folio: FolioName) -> Staged {
        let Some(block) = self.table.get(folio.head) else { return Staged::Nothing };
        match self.try_stage(block, folio) {
            Ok(Staged::Split) => self.stage_parts(block, folio),
            Err(MoveError::Changing) => self.stage_later(block, folio),
            Err(MoveError::Busy) => {
                // Shared since a fork, or pinned: only the first can be mended.
                if !self.machine.unshare(folio.head.folio(folio.order)) {
                    return self.stage_later(block, folio);
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

    /// Moves the folios home that `folio` was split into.
    fn stage_parts(&self, block: &Block, folio: FolioName) -> Staged {
        let mut staged_pages = 0;
        let mut page = folio.head;
        while page < folio.head.offset(folio.order.pages()) {
            let state = block.lock().get(page);
            let order = state.order().unwrap_or(Order::ZERO);
            if matches!(state, PageState::Resident { .. })
                && let Staged::Pages(pages) = self.stage(FolioName { head: page.head(order), order })
            {
                staged_pages += pages;
            }
            page = page.head(order).offset(order.pages());
        }
        if staged_pages > 0 { Staged::Pages(staged_pages) } else { Staged::Nothing }
    }

    /// It cannot be moved now. (Where the program is changing its mappings, what lies there may be something else by now.) It
    /// stays, as the youngest.
    fn stage_later(&self, block: &Block, folio: FolioName) -> Staged {
        let mut entries = block.lock();
        if is_resident(&entries, folio) {
            entries.set_unqueued(folio.head);
            self.enqueue(self.resident_queue(&entries, folio.head), &mut entries, folio.head, folio.order);
        }
        Staged::Pinned
    }

    fn try_stage(&self, block: &Block, folio: FolioName) -> Result<Staged, MoveError> {
        let _steady = self.machine.steady().ok_or(MoveError::Changing)?;
        let mut entries = block.lock();
        let FolioName { head, order } = folio;
        if is_resident(&entries, folio) && self.split_partial(&mut entries, head.folio(order)) {
            return Ok(Staged::Split);
        }
        let frame = match entries.get(head) {
            PageState::Resident { frame, order: now } if now == order => frame,
            _ => return Ok(Staged::Nothing),
        };
        match self.machine.move_out(head, frame, order.pages()) {
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

    /// The first `moved_pages` pages of a resident folio have come home. What is left of it stays, and is tried again on its
    /// own.
    fn make_staged_up_to(&self, entries: &mut Entries, folio: FolioName, moved_pages: u32) {
        let FolioName { head, order } = folio;
        if moved_pages == order.pages() {
            return self.make_staged(entries, folio);
        }
        self.carve_to(entries, head, order, Order::ZERO);
        self.counters().of(order).split.inc();
        for index in 0..moved_pages {
            self.make_staged(entries, FolioName { head: head.offset(index), order: Order::ZERO });
        }
    }

    /// The pages of a resident folio have come home.
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

    /// A folio that could not be moved: parts of it may be gone, or movable on their own.
    fn leave_resident(&self, block: &Block, folio: FolioName, error: MoveError) -> Staged {
        let Some(_steady) = self.machine.steady() else { return self.stage_later(block, folio) };
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
            self.carve_to(&mut entries, head, order, Order::ZERO);
            self.counters().of(order).split.inc();
            return Staged::Nothing;
        }
        debug_assert!(error != MoveError::Exists, "the home of a resident page is empty");
        self.counters().vm.unevictable_pgs_stranded.inc();
        // Among the active ones it is met seldom. On probation, many of its kind would be all that is ever looked at.
        entries.set_active(head, order, true);
        self.enqueue(&self.active, &mut entries, head, order);
        Staged::Pinned
    }
}

/// Whether `folio` is in the program, or what is left of it.
fn is_resident(entries: &Entries, folio: FolioName) -> bool {
    let FolioName { head, order: wanted } = folio;
    matches!(entries.get(head), PageState::Resident { order, .. } | PageState::Hole { order, .. } if order == wanted)
}
