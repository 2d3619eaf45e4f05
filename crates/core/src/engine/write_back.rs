//! Writeback to the swap file: the oldest pieces of the store go there when the store takes too
//! much of the limit.
//!
//! A batch is written while its reclaimer compresses or prepares the next one. Its pieces stay
//! pinned in memory until the write is known to have succeeded. A call of reclaim ends only when
//! all its writes are finished, so none is in flight during a fork.

use super::Engine;
use crate::homes::Urgency;
use crate::ports::{Clock, Corrupted, Pieces, Ports, SharedStore, SwapDevice};
use crate::run_tokens::RunMut;
use crate::store::{MAX_FILE_PIECE_ORDER, NoBatch, Piece, Seal, WriteBatch};
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{CLUSTER_SLOTS, MAX_ORDER, Order};

/// Number of checks that skip the file after it was full or failed: a full file is tried again now
/// and then, without slowing down the rest.
const PAUSE: u32 = 64;

/// The unfinished write to the file of one reclaim call.
pub(super) struct Writing<'a, P: Ports>(Option<(&'a P::SwapDevice, WriteBatch<'a>, Vec<Seal>)>);

impl<'a, P: Ports> Writing<'a, P> {
    /// No write.
    pub(super) fn none() -> Self {
        Writing(None)
    }

    /// Starts writing `batch`.
    pub(super) fn begin(device: &'a P::SwapDevice, worker: &mut P::Worker, batch: WriteBatch<'a>) -> Self {
        let mut seals = Vec::with_capacity(batch.pieces().len());
        device.begin_write(worker, &batch, &mut seals);
        Writing(Some((device, batch, seals)))
    }

    /// Returns the pages of the store that the write frees if it succeeds.
    pub(super) fn pages(&self) -> u32 {
        self.0.as_ref().map_or(0, |(_, batch, _)| batch.slots())
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.is_none()
    }
}

impl<P: Ports> Engine<P> {
    /// Returns the maximum order of a piece.
    pub(super) fn largest_piece(&self) -> Order {
        if self.config.backing.is_some() { MAX_FILE_PIECE_ORDER } else { MAX_ORDER }
    }

    /// Returns whether pieces in the swap file take none of the limit: it is no shared store.
    fn has_file_outside(&self) -> bool {
        self.config.backing.is_some() && self.ports.shared_store().is_none()
    }

    /// Returns whether there is a swap file that was neither full nor failed recently.
    pub(super) fn can_write_out(&self) -> bool {
        self.has_file_outside() && self.file_pause.load(Relaxed) == 0
    }

    /// Returns whether pieces should go from the store to the file: the store takes more than its
    /// share, or everything beyond the protected minimum. Pages of an unfinished write count as
    /// gone.
    pub(super) fn store_presses(&self, writing: &Writing<'_, P>) -> bool {
        if !self.has_file_outside() {
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

    /// Starts writing the oldest pieces to the file, and finishes the previous write; returns the
    /// bytes that this freed. Returns `None` if there was nothing to start.
    pub(super) fn write_out<'a>(&'a self, worker: &mut P::Worker, writing: &mut Writing<'a, P>) -> Option<u64> {
        let device = self.ports.swap_device()?;
        let begin = || self.store.begin_write_back(&self.runs(), self.ports.clock().cpu());
        let batch = match begin() {
            // Swap-cache entries are the least useful content of the file.
            Err(NoBatch::Full) if self.drop_swap_cache() > 0 => begin(),
            begun => begun,
        };
        let batch = match batch {
            Ok(batch) => batch,
            Err(NoBatch::Empty) => return None,
            Err(NoBatch::Full) => {
                self.counters().backing.full.inc();
                device.note_full();
                self.file_pause.store(PAUSE, Relaxed);
                return None;
            }
        };
        let begun = Writing::begin(device, worker, batch);
        let freed_bytes = self.finish_write_out(worker, writing);
        *writing = begun;
        Some(freed_bytes)
    }

    /// Finishes the unfinished write, if there is one, and publishes its pieces in a shared store;
    /// returns the bytes that this freed.
    pub(super) fn finish_write_out(&self, worker: &mut P::Worker, writing: &mut Writing<'_, P>) -> u64 {
        let Some((device, batch, seals)) = writing.0.take() else { return 0 };
        let backing = &self.counters().backing;
        if device.finish_write(worker).is_err() {
            backing.failed_writes.inc();
            self.file_pause.store(PAUSE, Relaxed);
            self.store.abandon_write_back(&self.runs(), batch);
            return 0;
        }
        backing.bd_writes.add(batch.slots().into());
        if let Some(shared) = self.ports.shared_store() {
            for ((piece, start_bytes), &seal) in batch.pieces().zip(&seals) {
                shared.publish(piece, &batch.place(piece, start_bytes, seal));
            }
        }
        self.store.finish_write_back(&self.runs(), batch, &seals)
    }

    /// Restores a part of a piece from memory or from the file.
    pub(super) fn read_piece(
        &self,
        worker: &mut P::Worker,
        piece: &Piece<'_>,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        let Some(place) = piece.place.in_file() else {
            return self.ports.pieces().read(worker, piece, skip_pages, into);
        };
        let backing = &self.counters().backing;
        backing.bd_reads.add(u64::from(place.slots()));
        let device = self.ports.swap_device().ok_or(Corrupted);
        let read = device.and_then(|device| device.read(worker, piece, &place, skip_pages, into));
        if read.is_err() {
            backing.failed_reads.inc();
        }
        read
    }

    /// Returns whether clusters of the file wait for discard.
    pub fn awaits_discard(&self) -> bool {
        self.store.awaiting_discard() > 0
    }

    /// Discards one cluster of the swap file, which may take a while: for threads with nothing
    /// better to do. Returns whether a cluster waited for discard.
    pub fn discard_one(&self) -> bool {
        let Some(device) = self.ports.swap_device() else { return false };
        self.store.discard_one(&self.runs(), |cluster| {
            if device.discard(cluster) {
                self.counters().backing.bd_discards.add(CLUSTER_SLOTS.into());
            }
        })
    }

    /// Returns the number of slots of the file in use.
    pub fn file_slots(&self) -> u32 {
        self.store.file_slots()
    }

    /// Prepares for a fork of the process. No other call may be in progress.
    pub fn lend_file(&self) {
        self.store.lend_file();
        if self.ports.shared_store().is_some() {
            self.store.count_child(&self.runs());
        }
    }

    /// Ends the use of the swap file by this process, or by a child that was not forked. No other
    /// call may be in progress.
    pub fn leave_file(&self) {
        if self.ports.shared_store().is_some() {
            self.store.drop_users(&self.runs());
        }
    }

    /// Prepares the child of a fork. No other call may be in progress.
    pub fn borrow_file(&self) {
        self.store.borrow_file();
    }
}
