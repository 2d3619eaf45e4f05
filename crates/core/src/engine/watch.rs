//! Watching: moving pages out of reach though nobody needs their memory, to see when they are touched next.

use super::Engine;
use super::stage::Staged;
use crate::machine::Machine;
use crate::page_table::{Entries, PageState};
use crate::queue::FolioName;
use crate::trace::UNIT;
use crate::units::{BLOCK_PAGES, FrameRun, Order, PageNumber};

impl<M: Machine> Engine<M> {
    /// Stages `page` on its own, so that a fault tells of its next touch; returns whether it could.
    pub fn watch(&self, page: PageNumber) -> bool {
        let Some(block) = self.table.get(page) else { return false };
        {
            let mut entries = block.lock();
            if !matches!(entries.get(page), PageState::Resident { .. }) {
                return false;
            }
            self.split_partial(&mut entries, page.folio(Order::ZERO));
            self.carve(&mut entries, page.folio(Order::ZERO));
        }
        self.stage(FolioName { head: page, order: Order::ZERO }) == Staged::Pages(1)
    }

    /// Moves `page` back into the program if it is at home.
    pub fn unwatch(&self, page: PageNumber) {
        let Some(block) = self.table.get(page) else { return };
        let Some(steady) = self.machine.steady() else { return };
        let mut entries = block.lock();
        if !matches!(entries.get(page), PageState::Home { .. }) {
            return;
        }
        self.bring_in_at_home(&mut entries, page.folio(Order::ZERO));
        drop(entries);
        drop(steady);
        self.machine.wake(page.folio(Order::ZERO));
    }

    /// Compresses what is resident of the [`UNIT`] at `head`, by pieces of each order that lie in one run; whether there were any.
    /// Nothing is kept: the machine knows what they came to. A fault there waits meanwhile.
    pub fn measure(&self, worker: &mut M::Worker, head: PageNumber) -> bool {
        let Some(block) = self.table.get(head) else { return false };
        let unit = head.folio(UNIT);
        let mut page = unit.start;
        while page < unit.end {
            let state = block.lock().get(page);
            let order = state.order().unwrap_or(Order::ZERO);
            if matches!(state, PageState::Resident { .. }) && order <= UNIT {
                self.stage(FolioName { head: page.head(order), order });
            }
            page = page.head(order).offset(order.pages());
        }
        let steady = self.machine.steady();
        let mut entries = block.lock();
        let was_any = self.compress_at_home(&entries, worker, head);
        if steady.is_some() {
            self.bring_in_at_home(&mut entries, unit.clone());
        }
        drop(entries);
        drop(steady);
        self.machine.wake(unit);
        was_any
    }

    fn compress_at_home(&self, entries: &Entries, worker: &mut M::Worker, head: PageNumber) -> bool {
        let mut was_any = false;
        let frame_of = |page: PageNumber| match entries.get(page) {
            PageState::Home { frame, writeback: false, .. } => Some(frame),
            _ => None,
        };
        for order in Order::all().filter(|&order| order <= UNIT) {
            for index in (0..UNIT.pages()).step_by(order.pages() as usize) {
                let part = head.offset(index);
                let Some(first) = frame_of(part) else { continue };
                let in_one_run = (1..order.pages()).all(|more| frame_of(part.offset(more)) == Some(first.offset(more)));
                if !in_one_run || !first.0.is_multiple_of(order.pages()) {
                    continue;
                }
                self.machine.compress(worker, FrameRun::new(first, order));
                was_any = true;
            }
        }
        was_any
    }

    /// The order of the folio around `page`, if it has content.
    pub fn order_of(&self, page: PageNumber) -> Option<Order> {
        self.table.get(page)?.lock().get(page).order()
    }

    /// The first pages of all blocks that have had folios.
    pub fn blocks(&self) -> impl Iterator<Item = PageNumber> {
        self.table.blocks().map(|block| block.lock().first())
    }

    /// Whether `page` is in the program.
    pub fn is_resident(&self, page: PageNumber) -> bool {
        self.table.get(page).is_some_and(|block| matches!(block.lock().get(page), PageState::Resident { .. }))
    }
}

const _: () = assert!(UNIT.pages() as usize <= BLOCK_PAGES);
