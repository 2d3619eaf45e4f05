//! Mapping in all memory of a program that continues without the agent.
//!
//! The child of a fork whose companion cannot start continues without the agent, so all its memory
//! must be mapped in. Reclaim does not run meanwhile, because it would evict pages that are already
//! mapped in, and the budget does not count.

use crate::engine::{Engine, Served};
use crate::ports::Ports;
use foliomem_types::units::PageNumber;

impl<P: Ports> Engine<P> {
    /// Maps in every staged and swapped-out page. No other thread may use the engine, and the
    /// budget must grant every frame.
    pub fn bring_all_in(&self, worker: &mut P::Worker) {
        for block in self.table.blocks() {
            let (mut page, end) = {
                let entries = block.lock();
                (entries.first(), entries.end())
            };
            while page < end {
                if !self.is_away(page) {
                    page = page.offset(1);
                } else if self.fault_without_reclaim(worker, page) == Served::Again {
                    unreachable!("no thread changes the mappings");
                }
            }
        }
    }

    fn is_away(&self, page: PageNumber) -> bool {
        self.table.get(page).is_some_and(|block| block.lock().get(page).is_out())
    }
}
