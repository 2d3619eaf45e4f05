//! Compaction of the arena: what holds a frame, and how it is moved to another.
//!
//! A resident folio's home is only reserved: the folio itself is in the program. So another run is noted as its home, nothing
//! is copied, and the program does not notice; whether a page is pinned does not matter. The pages of a staged folio are moved. What a
//! worker is busy with stays: its frames are in that worker's hands. The store moves its pieces by itself.

use super::store_compaction::Mover;
use super::{Engine, StoreRuns};
use crate::compaction::{Occupant, Occupants};
use crate::homes::Urgency;
use crate::machine::{Machine, MoveError};
use crate::page_table::{Block, Entries, PageState};
use crate::rmap::Holder;
use crate::units::{Frame, FrameRun, MAX_ORDER, Order, PageNumber};

/// Compaction in the background begins where more than this part of the free frames is of no use for the highest order, as
/// for Linux with its default `compaction_proactiveness` of 20.
const FRAGMENTED_PERCENT: u32 = 90;

impl<M: Machine> Engine<M> {
    /// Makes a free run of `order`, if it can.
    pub fn compact(&self, order: Order) -> bool {
        self.compactor.compact(&self.homes, self, &self.counters().vm, order)
    }

    /// The same at the expense of other runs: so that under torture everything is moved.
    pub fn churn(&self, order: Order) {
        self.compactor.churn(&self.homes, self, &self.counters().vm, order);
    }

    /// [`compact`](Self::compact) for a fault, which waits for it.
    pub(super) fn compact_direct(&self, order: Order) {
        if !self.compactor.defers(order) {
            self.counters().vm.compact_stall.inc();
            self.compact(order);
        }
    }

    /// Makes one run of the highest order if hardly any are left; returns whether there is one more. (What the store moves it puts
    /// where it likes, maybe into another such run.) For threads that nobody waits for.
    pub fn compact_proactively(&self) -> bool {
        let is_fragmented = self.homes.fragmentation_percent(MAX_ORDER) > FRAGMENTED_PERCENT;
        if !is_fragmented || self.compactor.defers(MAX_ORDER) {
            return false;
        }
        let before = self.homes.empty_runs(MAX_ORDER);
        self.compact(MAX_ORDER) && self.homes.empty_runs(MAX_ORDER) > before
    }

    /// The folio that has `frame`, if it can be moved; with its block locked.
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
            // A folio that is in no queue is in the hands of who fetches it.
            let head = page.head(order);
            if held == frame && entries.is_queued(head) {
                let run = FrameRun::new(Frame(frame.0 - (page.0 - head.0) as u32), order);
                let state = entries.get(head);
                return Some(act(&mut entries, head, state, run));
            }
        }
        None
    }

    /// Moves the pages at home in `from` to `to`, which is empty; returns how many could be moved: the first ones.
    fn move_home(&self, from: FrameRun, to: FrameRun) -> u32 {
        let mut moved_pages = 0;
        let mut unshared = false;
        loop {
            let left = from.frames() - moved_pages;
            let Err(stopped) = self.machine.regroup(from.head.offset(moved_pages), to.head.offset(moved_pages), left)
            else {
                return from.frames();
            };
            moved_pages += stopped.moved_pages;
            if stopped.error != MoveError::Busy || unshared {
                return moved_pages;
            }
            // Shared since a fork.
            unshared = true;
            (moved_pages..from.frames()).for_each(|index| self.machine.unshare_home(from.part(index, Order::ZERO)));
        }
    }

    /// The staged folio at `head` goes from `from` to `to`.
    fn migrate_staged(&self, entries: &mut Entries, head: PageNumber, from: FrameRun, to: FrameRun) -> bool {
        let moved_pages = self.move_home(from, to);
        let order = from.order;
        if moved_pages == from.frames() {
            self.renumber(entries, head, from, to);
            return true;
        }
        if moved_pages > 0 {
            self.carve_to(entries, head, order, Order::ZERO);
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

    /// The folio at `head` has its frames in `to` from now on, no more in `from`, where no page is left.
    pub(super) fn renumber(&self, entries: &mut Entries, head: PageNumber, from: FrameRun, to: FrameRun) {
        if let Some(copy) = self.swap_cache.take(from.head) {
            self.swap_cache.keep(to.head, copy);
        }
        self.rmap.set_folio(to, head);
        for index in 0..to.frames() {
            let page = head.offset(index);
            entries.set(page, entries.get(page).with_frame(to.head.offset(index)));
        }
        self.homes.free_empty(from);
    }
}

impl<M: Machine> Occupants for Engine<M> {
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
            // What is left of a partially mapped one is looked at anew.
            let is_it = now == run && !self.split_partial(entries, head.folio(run.order));
            if is_it {
                self.carve_to(entries, head, run.order, to);
                self.counters().of(run.order).split.inc();
            }
            is_it
        });
        split == Some(true)
    }

    fn evacuate(&self, head: Frame) -> bool {
        let Holder::Store(holder) = self.rmap.get(head) else { return false };
        self.store.evacuate(&StoreRuns(self, Urgency::Normal), &Mover(&self.machine), holder, head)
    }

    fn move_free_page(&self, from: Frame, to: Frame) -> bool {
        let run = |frame| FrameRun::new(frame, Order::ZERO);
        self.move_home(run(from), run(to)) == 1
    }
}
