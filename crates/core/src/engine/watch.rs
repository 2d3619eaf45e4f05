//! Watching: moving pages out of reach though nobody needs their memory, to see when they are touched next.

use super::Engine;
use super::stage::Staged;
use crate::machine::{Compressed, Machine};
use crate::page_table::PageState;
use crate::queue::FolioName;
use crate::trace::UNIT;
use crate::units::{BLOCK_PAGES, FrameRun, Order, PageNumber};

impl<M: Machine> Engine<M> {
    /// Stages what is resident of the [`UNIT`] at `head`, page by page, so that a fault tells of each page's next touch;
    /// returns how many pages.
    pub fn watch(&self, head: PageNumber) -> u32 {
        let Some(block) = self.table.get(head) else { return 0 };
        let unit = head.folio(UNIT);
        {
            let mut entries = block.lock();
            let is_resident = |state| matches!(state, PageState::Resident { .. });
            if !(unit.start.0..unit.end.0).any(|page| is_resident(entries.get(PageNumber(page)))) {
                return 0;
            }
            self.split_partial(&mut entries, unit.clone());
            self.carve(&mut entries, unit.clone());
            for page in (unit.start.0..unit.end.0).map(PageNumber) {
                if let PageState::Resident { order, .. } = entries.get(page)
                    && order > Order::ZERO
                {
                    self.carve_to(&mut entries, page, order, Order::ZERO);
                }
            }
        }
        let pages = (unit.start.0..unit.end.0).map(|page| FolioName { head: PageNumber(page), order: Order::ZERO });
        pages.filter(|&page| self.stage(page) == Staged::Pages(1)).count() as u32
    }

    /// Compresses what is at home of the [`UNIT`] at `head`, by pieces of each order that lie in one run, and tells what
    /// each comes to. Nothing is kept. A fault there waits meanwhile.
    pub fn measure(&self, worker: &mut M::Worker, head: PageNumber, told: &mut dyn FnMut(Order, u32)) {
        let Some(block) = self.table.get(head) else { return };
        let entries = block.lock();
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
                told(
                    order,
                    match self.machine.compress(worker, FrameRun::new(first, order)) {
                        Compressed::Filled(_) => 0,
                        Compressed::Bytes { len_bytes, .. } => len_bytes,
                    },
                );
            }
        }
    }

    /// The order of the folio around `page`, if it has content.
    pub fn order_of(&self, page: PageNumber) -> Option<Order> {
        self.table.get(page)?.lock().get(page).order()
    }
}

const _: () = assert!(UNIT.pages() as usize <= BLOCK_PAGES);
