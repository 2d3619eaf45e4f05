//! Migration for compaction of the arena: the occupants of frames, and how they move.
//!
//! The home frames of a resident folio are only reserved, because its pages are in the program.
//! Migration only gives such a folio other home frames and copies nothing, so the program does not
//! notice and even pinned pages can be migrated. The pages of a staged folio are moved. A folio
//! that a worker is busy with stays: that worker owns its frames. The store moves its pieces by
//! itself.

use super::store_compaction::Mover;
use super::{Engine, StoreRuns};
use crate::compaction::{Occupant, Occupants};
use crate::homes::Urgency;
use crate::page_table::{Block, Entries, PageState};
use crate::ports::{Arena, MoveError, Ports, SharedPages};
use crate::rmap::Holder;
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order, PageNumber};

/// Share of free frames useless for the highest order, in percent, above which background
/// compaction starts, as in Linux with its default `compaction_proactiveness` of 20.
const FRAGMENTED_PERCENT: u32 = 90;

impl<P: Ports> Engine<P> {
    /// Makes a free run of `order` if possible. Returns whether it did.
    pub fn compact(&self, order: Order) -> bool {
        self.compactor.compact(&self.homes, self, &self.counters().vm, order)
    }

    /// Makes a free run at the expense of others, so that under torture everything moves.
    pub fn churn(&self, order: Order) {
        self.compactor.churn(&self.homes, self, &self.counters().vm, order);
    }

    /// Compacts for a fault that waits for it.
    pub(super) fn compact_direct(&self, order: Order) {
        if !self.compactor.defers(order) {
            self.counters().vm.compact_stall.inc();
            self.compact(order);
        }
    }

    /// Makes one run of the highest order if hardly any are left, for threads that nobody waits
    /// for. Returns whether there is one more. (The store chooses the targets of its pieces and may
    /// fill another such run.)
    pub fn compact_proactively(&self) -> bool {
        let is_fragmented = self.homes.fragmentation_percent(MAX_ORDER) > FRAGMENTED_PERCENT;
        if !is_fragmented || self.compactor.defers(MAX_ORDER) {
            return false;
        }
        let before = self.homes.empty_runs(MAX_ORDER);
        self.compact(MAX_ORDER) && self.homes.empty_runs(MAX_ORDER) > before
    }

    /// Calls `act` with the movable folio that holds `frame`, its block locked. Returns `None` if
    /// there is none.
    fn with_movable<T>(
        &self,
        frame: Frame,
        act: impl FnOnce(&mut Entries, PageNumber, PageState, FrameRun) -> T,
    ) -> Option<T> {
        let Holder::Page(low) = self.rmap.get(frame) else { return None };
        for page in Holder::pages(low) {
            let Some(mut entries) = self.table.get(page).map(Block::lock) else { continue };
            let state = entries.get(page);
            let (held, order) = match state {
                PageState::Resident { frame, order }
                | PageState::Hole { frame, order }
                | PageState::Home { frame, order, writeback: false } => (frame, order),
                _ => continue,
            };
            // A folio in no queue belongs to the thread that fetches it.
            let head = page.head(order);
            if held == frame && entries.is_queued(head) {
                let run = FrameRun::new(Frame(frame.0 - (page.0 - head.0) as u32), order);
                let state = entries.get(head);
                return Some(act(&mut entries, head, state, run));
            }
        }
        None
    }

    /// Moves the staged pages of `from` to `to`, which is unpopulated; returns the number of moved
    /// pages, the first ones.
    fn move_staged(&self, from: FrameRun, to: FrameRun) -> u32 {
        let mut moved_pages = 0;
        let mut unshared = false;
        loop {
            let left = from.frames() - moved_pages;
            let Err(stopped) =
                self.ports.arena().regroup(from.head.offset(moved_pages), to.head.offset(moved_pages), left)
            else {
                return from.frames();
            };
            moved_pages += stopped.moved_pages;
            if stopped.error != MoveError::Busy || unshared {
                return moved_pages;
            }
            // A fork left the pages shared.
            unshared = true;
            let Some(shared) = self.ports.shared_pages() else { return moved_pages };
            (moved_pages..from.frames()).for_each(|index| shared.unshare_staged(from.part(index, Order::ZERO)));
        }
    }

    /// Migrates the staged folio at `head` from `from` to `to`. Returns whether all of it moved.
    fn migrate_staged(&self, entries: &mut Entries, head: PageNumber, from: FrameRun, to: FrameRun) -> bool {
        let moved_pages = self.move_staged(from, to);
        let order = from.order;
        if moved_pages == from.frames() {
            self.renumber(entries, head, from, to);
            return true;
        }
        if moved_pages > 0 {
            self.split_to(entries, head, order, Order::ZERO);
            self.counters().of(order).split.inc();
        }
        for index in 0..from.frames() {
            let (from, to) = (from.part(index, Order::ZERO), to.part(index, Order::ZERO));
            if index < moved_pages {
                self.renumber(entries, head.offset(index), from, to);
            } else {
                self.homes.free_empty(to);
            }
        }
        false
    }

    /// Changes the home frames of the folio at `head` from `from` to `to`. No page may be left in
    /// `from`.
    pub(super) fn renumber(&self, entries: &mut Entries, head: PageNumber, from: FrameRun, to: FrameRun) {
        if let Some(entry) = self.swap_cache.take(from.head) {
            self.swap_cache.keep(to.head, entry);
        }
        self.rmap.set_folio(to, head);
        for index in 0..to.frames() {
            let page = head.offset(index);
            entries.set(page, entries.get(page).with_frame(to.head.offset(index)));
        }
        self.homes.free_empty(from);
    }
}

impl<P: Ports> Occupants for Engine<P> {
    fn occupant(&self, frame: Frame) -> Option<Occupant> {
        match self.rmap.get(frame) {
            Holder::Page(_) => self.with_movable(frame, |_, _, _, run| Occupant::Folio(run)),
            Holder::Store(holder) => self.store.run_of(holder, frame).map(Occupant::Store),
        }
    }

    fn migrate(&self, from: FrameRun, to: FrameRun) -> bool {
        let moved = self.with_movable(from.head, |entries, head, state, run| {
            if run != from {
                return None;
            }
            Some(match state {
                PageState::Home { .. } => self.migrate_staged(entries, head, from, to),
                _ => {
                    self.renumber(entries, head, from, to);
                    true
                }
            })
        });
        moved.flatten().unwrap_or_else(|| {
            self.homes.free_empty(to);
            false
        })
    }

    fn split(&self, run: FrameRun, to: Order) -> bool {
        let split = self.with_movable(run.head, |entries, head, _, now| {
            // A partially mapped folio is split at its holes; the caller examines the rest again.
            let is_it = now == run && !self.split_partial(entries, head.folio(run.order));
            if is_it {
                self.split_to(entries, head, run.order, to);
                self.counters().of(run.order).split.inc();
            }
            is_it
        });
        split == Some(true)
    }

    fn evacuate(&self, head: Frame) -> bool {
        let Holder::Store(holder) = self.rmap.get(head) else { return false };
        self.store.evacuate(&StoreRuns(self, Urgency::Normal), &Mover(&self.ports), holder, head)
    }

    fn move_free_page(&self, from: Frame, to: Frame) -> bool {
        let run = |frame| FrameRun::new(frame, Order::ZERO);
        self.move_staged(run(from), run(to)) == 1
    }
}
