//! The search for cold memory: finds what the program has not touched for a while, however much
//! room there is.
//!
//! User space sees no accessed bit. So the oldest resident folios are staged, some in each round: a
//! folio in use returns with its next touch, at the cost of a fault that only maps it in. What is
//! still staged some rounds later is written back. The caller decides how often there is a round,
//! and stages as much in it as the program may lose by the touches
//! ([`stage_oldest`](Engine::stage_oldest)).
//!
//! Locks: as for reclaim ([`super::reclaim`]).

use super::Engine;
use super::reclaim::WrittenBack;
use crate::pacing::BATCH_PAGES;
use crate::ports::Ports;
use foliomem_types::units::PAGE_BYTES;

/// Free pages that are not released to the system after cold memory was written back. They serve
/// the next faults.
const KEPT_PAGES: u32 = 256;

/// The result of a step of writing back what is cold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColdWriteBack {
    /// There may be more.
    Some,
    /// There is no more that could be written back.
    Done,
}

impl<P: Ports> Engine<P> {
    /// Begins a round.
    pub fn begin_cold_round(&self) {
        self.staged.begin_epoch();
    }

    /// Writes back a batch of folios that were staged at least `rounds` rounds ago, and releases
    /// their frames to the system.
    pub fn write_back_cold(&self, worker: &mut P::Worker, rounds: u64) -> ColdWriteBack {
        let before = (self.staged.epoch() + 1).saturating_sub(rounds);
        let (mut freed_bytes, mut written_pages) = (0, 0);
        let result = loop {
            if written_pages >= BATCH_PAGES {
                break ColdWriteBack::Some;
            }
            let Some((block, folio)) = self.pop_before(&self.staged, before) else { break ColdWriteBack::Done };
            match self.write_back(worker, block, folio) {
                WrittenBack::Freed { pages, bytes } => {
                    freed_bytes += bytes;
                    written_pages += pages;
                }
                WrittenBack::Nothing => {}
                WrittenBack::NoRoom => break ColdWriteBack::Done,
            }
        };
        if freed_bytes > 0 {
            self.shrink(KEPT_PAGES, (freed_bytes / PAGE_BYTES as i64) as u32);
        }
        self.publish_store();
        result
    }
}
