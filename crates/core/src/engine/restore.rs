//! Bringing everything back into a program that is not served any more.
//!
//! A process that goes on without the agent (the child of a fork whose companion cannot start) must find all its
//! memory. Nothing is reclaimed meanwhile, and the budget does not count.

use crate::engine::{Engine, Served};
use crate::machine::Machine;
use crate::page_table::PageState;
use crate::units::PageNumber;

impl<M: Machine> Engine<M> {
    /// Maps in every staged and swapped-out page. The caller is the only thread that uses the engine, and its machine grants every
    /// frame that it is asked for.
    pub fn bring_all_in(&self, worker: &mut M::Worker) {
        for block in self.table.blocks() {
            let (mut page, end) = {
                let entries = block.lock();
                (entries.first(), entries.end())
            };
            while page < end {
                if !self.is_away(page) {
                    page = page.offset(1);
                } else if let (Served::Again, _) = self.fault_unwoken(worker, page) {
                    unreachable!("nobody changes the mappings");
                }
            }
        }
    }

    fn is_away(&self, page: PageNumber) -> bool {
        let state = self.table.get(page).map(|block| block.lock().get(page));
        matches!(state, Some(PageState::Home { .. } | PageState::Swapped { .. }))
    }
}
