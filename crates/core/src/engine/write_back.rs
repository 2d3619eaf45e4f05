//! The swap file: the oldest pieces of the store go there when the store takes too much of the limit.

use super::Engine;
use crate::homes::Urgency;
use crate::machine::{Corrupted, Machine};
use crate::store::{FilePlace, MAX_FILE_PIECE_ORDER, NoBatch, Piece};
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::{FrameRun, MAX_ORDER, Order};

/// Looks at the store that leave the file alone after it was full or has failed: a file without room is asked for some now
/// and then, and does not slow down what goes on without it.
const PAUSE: u32 = 64;

impl<M: Machine> Engine<M> {
    /// The largest piece to make.
    pub(super) fn largest_piece(&self) -> Order {
        if self.config.backing.is_some() { MAX_FILE_PIECE_ORDER } else { MAX_ORDER }
    }

    /// Whether something should go from the store to the file: because the store takes more than its share, or because
    /// it has taken everything but what the program must keep.
    pub(super) fn store_presses(&self) -> bool {
        let Some(backing) = &self.config.backing else { return false };
        if self.store.held_frames() <= backing.store_pages && self.urgency() == Urgency::Normal {
            return false;
        }
        let pause = self.file_pause.load(Relaxed);
        if pause > 0 {
            // A lost update makes the pause a little longer or shorter.
            self.file_pause.store(pause - 1, Relaxed);
        }
        pause == 0
    }

    /// Writes the oldest pieces to the file; returns how many bytes of frames that freed. `None` if nothing could be written.
    pub(super) fn write_out(&self, worker: &mut M::Worker) -> Option<u64> {
        let begin = || self.store.begin_write_back(&self.runs(), self.machine.cpu());
        let batch = match begin() {
            // Copies of what is in the program are the least useful part of what is in the file.
            Err(NoBatch::Full) if self.shed_copies() > 0 => begin(),
            begun => begun,
        };
        let backing = &self.counters().backing;
        let batch = match batch {
            Ok(batch) => batch,
            Err(NoBatch::Empty) => return None,
            Err(NoBatch::Full) => {
                backing.full.inc();
                self.machine.swap_file_full();
                self.file_pause.store(PAUSE, Relaxed);
                return None;
            }
        };
        let slots = u64::from(batch.slots());
        let mut seals = Vec::with_capacity(batch.pieces().len());
        if self.machine.write_back(worker, &batch, &mut seals).is_err() {
            backing.failed_writes.inc();
            self.file_pause.store(PAUSE, Relaxed);
            self.store.abandon_write_back(&self.runs(), batch);
            return None;
        }
        backing.bd_writes.add(slots);
        Some(self.store.finish_write_back(&self.runs(), batch, &seals))
    }

    /// Restores a part of a piece that is in the file.
    pub(super) fn read_back(
        &self,
        worker: &mut M::Worker,
        piece: &Piece,
        place: &FilePlace,
        skip_pages: u32,
        into: FrameRun,
    ) -> Result<(), Corrupted> {
        let backing = &self.counters().backing;
        backing.bd_reads.add(u64::from(place.slots()));
        let read = self.machine.read_back(worker, piece, place, skip_pages, into);
        if read.is_err() {
            backing.failed_reads.inc();
        }
        read
    }

    /// Slots of the file that are in use.
    pub fn file_slots(&self) -> u32 {
        self.store.file_slots()
    }

    /// The process is about to fork. Only while no other call is under way.
    pub fn lend_file(&self) {
        self.store.lend_file();
    }

    /// This process is the child of a fork. Only while no other call is under way.
    pub fn borrow_file(&self) {
        self.store.borrow_file();
    }
}
