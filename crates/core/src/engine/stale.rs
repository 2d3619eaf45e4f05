//! What is stale in the queues: elements of folios that are gone, or queued elsewhere.
//!
//! Reclaim drops them when they come up. While nobody needs memory nothing comes up, and a program that frees and touches anew
//! all the time, or one that is watched, would fill memory with them.

use super::Engine;
use crate::machine::Machine;
use crate::page_table::PageState;
use crate::queue::{FolioName, Queue};
use crate::sync::atomic::Ordering::Relaxed;

/// Elements that a queue may have beyond two for each page before stale ones are looked for: so they are half of it at least.
const STALE_ELEMENTS: u64 = 4096;

impl<M: Machine> Engine<M> {
    /// Elements of the queues, stale ones included.
    pub fn queued_elements(&self) -> u64 {
        [&self.probation, &self.active, &self.staged].map(|queue| queue.elements() as u64).iter().sum()
    }

    /// Drops what is stale in the queues where that is most of them. While nobody needs memory: a queue that is being looked
    /// through seems empty to reclaim.
    pub fn drop_stale(&self) {
        let pages = self.resident_pages.load(Relaxed) + self.staged_pages.load(Relaxed);
        for queue in [&self.probation, &self.active, &self.staged] {
            if queue.elements() as u64 > 2 * pages + STALE_ELEMENTS {
                self.drop_stale_of(queue);
            }
        }
    }

    fn drop_stale_of(&self, queue: &Queue) {
        let popped: Vec<FolioName> = (0..queue.elements()).map_while(|_| queue.pop()).collect();
        let mut kept = Vec::new();
        let is_there = |state, order| match state {
            PageState::Resident { order: now, .. } | PageState::Home { order: now, writeback: false, .. } => {
                now == order
            }
            _ => false,
        };
        for folio in popped {
            let Some(block) = self.table.get(folio.head) else { continue };
            let mut entries = block.lock();
            // Of several elements the first counts: the others find it not queued.
            if is_there(entries.get(folio.head), folio.order) && entries.set_queued(folio.head, false) {
                kept.push(folio);
            }
        }
        for FolioName { head, order } in kept {
            let Some(block) = self.table.get(head) else { continue };
            let mut entries = block.lock();
            match entries.get(head) {
                state if !is_there(state, order) => {}
                PageState::Home { .. } => self.enqueue(&self.staged, &mut entries, head, order),
                _ => self.enqueue(self.resident_queue(&entries, head), &mut entries, head, order),
            }
        }
    }
}
