//! The swap file: the oldest pieces of the store go there when the store takes too much of the limit.
//!
//! A batch is written while its reclaimer compresses, or makes the next one. Its pieces stay pinned in memory until the
//! write is known to have succeeded. A call of reclaim ends only when all that it has begun is finished, so none is under
//! way in a fork.

use super::Engine;
use crate::homes::Urgency;
use crate::machine::{Corrupted, Machine};
use crate::run_tokens::RunMut;
use crate::store::{MAX_FILE_PIECE_ORDER, NoBatch, Piece, Seal, WriteBatch};
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::{CLUSTER_SLOTS, MAX_ORDER, Order};

/// Looks at the store that leave the file alone after it was full or has failed: a file without room is asked for some now
/// and then, and does not slow down what goes on without it.
const PAUSE: u32 = 64;

/// What one call of reclaim has under way to the file.
#[derive(Default)]
pub(super) struct Writing<'a>(Option<(WriteBatch<'a>, Vec<Seal>)>);

impl Writing<'_> {
    /// Pages of the store that will be free if it succeeds.
    pub(super) fn pages(&self) -> u32 {
        self.0.as_ref().map_or(0, |(batch, _)| batch.slots())
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.is_none()
    }
}

impl<M: Machine> Engine<M> {
    /// The largest piece to make.
    pub(super) fn largest_piece(&self) -> Order {
        if self.config.backing.is_some() { MAX_FILE_PIECE_ORDER } else { MAX_ORDER }
    }

    /// Whether there is a swap file, and it was neither full nor failed lately.
    pub(super) fn can_write_out(&self) -> bool {
        self.config.backing.is_some() && self.file_pause.load(Relaxed) == 0
    }

    /// Whether something should go from the store to the file: because the store takes more than its share, or because
    /// it has taken everything but what the program must keep. What is under way counts as gone.
    pub(super) fn store_presses(&self, writing: &Writing<'_>) -> bool {
        if self.config.backing.is_none() {
            return false;
        }
        let held = self.store.held_frames().saturating_sub(writing.pages());
        if held <= self.store_pages.load(Relaxed) && self.urgency() == Urgency::Normal {
            return false;
        }
        let pause = self.file_pause.load(Relaxed);
        if pause > 0 {
            // A lost update makes the pause a little longer or shorter.
            self.file_pause.store(pause - 1, Relaxed);
        }
        pause == 0
    }

    /// Begins to write the oldest pieces to the file, and finishes what was under way before; returns how many bytes of
    /// frames that freed. `None` if there was nothing to begin.
    pub(super) fn write_out<'a>(&'a self, worker: &mut M::Worker, writing: &mut Writing<'a>) -> Option<u64> {
        let begin = || self.store.begin_write_back(&self.runs(), self.machine.cpu());
        let batch = match begin() {
            // Copies of what is in the program are the least useful part of what is in the file.
            Err(NoBatch::Full) if self.shed_copies() > 0 => begin(),
            begun => begun,
        };
        let batch = match batch {
            Ok(batch) => batch,
            Err(NoBatch::Empty) => return None,
            Err(NoBatch::Full) => {
                self.counters().backing.full.inc();
                self.machine.swap_file_full();
                self.file_pause.store(PAUSE, Relaxed);
                return None;
            }
        };
        let mut seals = Vec::with_capacity(batch.pieces().len());
        self.machine.begin_write(worker, &batch, &mut seals);
        let freed_bytes = self.finish_write_out(worker, writing);
        writing.0 = Some((batch, seals));
        Some(freed_bytes)
    }

    /// Finishes what is under way, if anything is; returns how many bytes of frames that freed.
    pub(super) fn finish_write_out(&self, worker: &mut M::Worker, writing: &mut Writing<'_>) -> u64 {
        let Some((batch, seals)) = writing.0.take() else { return 0 };
        let backing = &self.counters().backing;
        if self.machine.finish_write(worker).is_err() {
            backing.failed_writes.inc();
            self.file_pause.store(PAUSE, Relaxed);
            self.store.abandon_write_back(&self.runs(), batch);
            return 0;
        }
        backing.bd_writes.add(batch.slots().into());
        self.store.finish_write_back(&self.runs(), batch, &seals)
    }

    /// Restores a part of a piece, wherever it is.
    pub(super) fn read_piece(
        &self,
        worker: &mut M::Worker,
        piece: &Piece<'_>,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        let Some(place) = piece.place.in_file() else {
            return self.machine.read_piece(worker, piece, skip_pages, into);
        };
        let backing = &self.counters().backing;
        backing.bd_reads.add(u64::from(place.slots()));
        let read = self.machine.read_back(worker, piece, &place, skip_pages, into);
        if read.is_err() {
            backing.failed_reads.inc();
        }
        read
    }

    /// Whether there are clusters of the file to be discarded.
    pub fn awaits_discard(&self) -> bool {
        self.store.awaiting_discard() > 0
    }

    /// Discards one of them, for who has nothing better to do: it may take a while. Returns whether there was one.
    pub fn discard_one(&self) -> bool {
        self.store.discard_one(&self.runs(), |cluster| {
            if self.machine.discard_cluster(cluster) {
                self.counters().backing.bd_discards.add(CLUSTER_SLOTS.into());
            }
        })
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
