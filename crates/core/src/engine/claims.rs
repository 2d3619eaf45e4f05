//! Claims of the reclaim queues: which hold, and dropping those that do not.
//!
//! Reclaim drops them when they come up. While nobody needs memory nothing comes up, and a program that frees and touches anew
//! all the time, or one that is watched, would fill memory with them.
//!
//! Lock order: a block is locked, then a queue, never the other way round, and never two blocks.

use super::Engine;
use crate::machine::Machine;
use crate::page_table::Block;
use crate::queue::{Claim, FolioName, Queue};
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::MAX_ORDER;

/// Claims that the queues may have beyond five for each four pages before stale ones are looked for: so each look finds one
/// among five at least.
const STALE_CLAIMS: u64 = 4096;
/// Claims that are looked at in turn: a tenth of a millisecond.
const LOOKED_AT: usize = 8192;

impl<M: Machine> Engine<M> {
    /// Takes the oldest folio that is in `queue`; with the block it is of.
    pub(super) fn pop_from(&self, queue: &Queue) -> Option<(&Block, FolioName)> {
        self.first_held(|| queue.pop())
    }

    /// Likewise the youngest.
    pub(super) fn pop_youngest_from(&self, queue: &Queue) -> Option<(&Block, FolioName)> {
        self.first_held(|| queue.pop_youngest())
    }

    fn first_held(&self, mut pop: impl FnMut() -> Option<Claim>) -> Option<(&Block, FolioName)> {
        loop {
            let claim = pop()?;
            if let Some(block) = self.table.get(claim.folio.head)
                && block.lock().holds(claim)
            {
                return Some((block, claim.folio));
            }
        }
    }

    /// Whether `claim` is not stale: what it names is queued as it says.
    pub(super) fn holds(&self, claim: Claim) -> bool {
        self.table.get(claim.folio.head).is_some_and(|block| block.lock().holds(claim))
    }

    /// Claims in the queues, stale ones included.
    pub fn queued_claims(&self) -> u64 {
        self.reclaim_queues().map(|queue| queue.claims() as u64).iter().sum()
    }

    pub(super) fn reclaim_queues(&self) -> [&Queue; 5] {
        [&self.probation, &self.active, &self.copied, &self.unevictable, &self.staged]
    }

    /// Drops stale claims where they are many, some at a time.
    pub(super) fn drop_stale_claims(&self) {
        let pages = self.resident_pages.load(Relaxed) + self.staged_pages.load(Relaxed);
        if self.queued_claims() <= pages + pages / 4 + STALE_CLAIMS {
            return;
        }
        for queue in self.reclaim_queues() {
            let mut looked_at = 0;
            while looked_at < LOOKED_AT.min(queue.claims()) {
                looked_at += self.look_through(queue);
            }
        }
    }

    /// Looks through a part of `queue`; returns how many claims that had. Those of one block are often together.
    fn look_through(&self, queue: &Queue) -> usize {
        let mut locked = None;
        queue.look_through(|claim| {
            let first = claim.folio.head.head(MAX_ORDER);
            if locked.as_ref().is_none_or(|(of, _)| *of != first) {
                // Never two blocks.
                locked = None;
                locked = self.table.get(first).map(|block| (first, Block::lock(block)));
            }
            locked.as_ref().is_some_and(|(_, entries)| entries.holds(claim))
        })
    }
}
