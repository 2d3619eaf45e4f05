//! Claims of the reclaim queues: which hold, and how stale ones are dropped.
//!
//! Reclaim drops stale claims when it pops them. While no thread needs memory, none is popped, and
//! a program that frees and touches memory all the time, or one under observation, would fill
//! memory with stale claims.
//!
//! Lock order: a block is locked, then a queue, never the other way round, and never two blocks.

use super::Engine;
use crate::page_table::Block;
use crate::ports::Ports;
use crate::queue::{Claim, FolioName, Queue};
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::MAX_ORDER;

/// Number of claims beyond five for each four pages before stale ones are searched for, so that
/// each search finds at least one stale claim in five.
const STALE_CLAIMS: u64 = 4096;
/// Number of claims examined in a row: a tenth of a millisecond.
const LOOKED_AT: usize = 8192;

impl<P: Ports> Engine<P> {
    /// Pops the oldest valid claim of `queue`; returns its folio and the folio's block.
    pub(super) fn pop_from(&self, queue: &Queue) -> Option<(&Block, FolioName)> {
        self.first_held(|| queue.pop())
    }

    /// Pops the oldest valid claim of `queue` that was queued before `epoch`; returns its folio and
    /// the folio's block.
    pub(super) fn pop_before(&self, queue: &Queue, epoch: u64) -> Option<(&Block, FolioName)> {
        self.first_held(|| queue.pop_before(epoch))
    }

    /// Pops the youngest valid claim of `queue`; returns its folio and the folio's block.
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

    /// Returns whether `claim` is valid: its folio is queued with its ticket.
    pub(super) fn holds(&self, claim: Claim) -> bool {
        self.table.get(claim.folio.head).is_some_and(|block| block.lock().holds(claim))
    }

    /// Returns the number of claims in all queues, including stale ones.
    pub fn queued_claims(&self) -> u64 {
        self.reclaim_queues().map(|queue| queue.claims() as u64).iter().sum()
    }

    pub(super) fn reclaim_queues(&self) -> [&Queue; 5] {
        [&self.probation, &self.active, &self.cached, &self.unevictable, &self.staged]
    }

    /// Drops stale claims if there are many, some at a time.
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

    /// Examines one chunk of `queue`; returns its number of claims. Claims on one block are often
    /// adjacent, so its lock is kept.
    fn look_through(&self, queue: &Queue) -> usize {
        let mut locked = None;
        queue.look_through(|claim| {
            let first = claim.folio.head.head(MAX_ORDER);
            if locked.as_ref().is_none_or(|(of, _)| *of != first) {
                // The old block is unlocked first: never two blocks.
                locked = None;
                locked = self.table.get(first).map(|block| (first, Block::lock(block)));
            }
            locked.as_ref().is_some_and(|(_, entries)| entries.holds(claim))
        })
    }
}
