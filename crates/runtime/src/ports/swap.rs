//! The swap file as one process sees it: its row in the table of cluster owners, reads, writes,
//! discards.
//!
//! The file belongs to all processes of the run ([`foliomem_session::cluster_ownership`]). A fork
//! shares the parent's clusters with the child, before the child exists. There is no lock.

use crate::ports::encrypted_file::SwapFile;
use crate::ports::machine::LinuxMachine;
use crate::ports::pieces::{Worker, restore};
use foliomem_core::machine::{Corrupted, Machine, NotWritten};
use foliomem_core::run_tokens::RunMut;
use foliomem_core::store::{FilePlace, Piece, Seal, WriteBatch};
use foliomem_session::cluster_ownership::{Event, RowIndex, SwapSpace};
use foliomem_sys::interception::fork_call::ForkOutcome;
use foliomem_sys::{identity, swap_discard};
use foliomem_types::units::ClusterNumber;
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// Instead of a row: the process has no row in the table of cluster owners.
pub(super) const NO_ROW: u32 = u32::MAX;

/// The state of the swap file in this process.
pub(super) struct Swap {
    pub(super) file: SwapFile,
    pub(super) space: &'static SwapSpace,
    /// The process's row in the table of cluster owners.
    pub(super) row: AtomicU32,
    /// The child's row, during a fork.
    pub(super) child_row: AtomicU32,
    /// The process that owns `row`. The child of a fork finds its parent here.
    pub(super) pid: AtomicU32,
}

impl Swap {
    pub(super) fn row(&self) -> RowIndex {
        let Some(row) = RowIndex::new(self.row.load(Ordering::Relaxed)) else { unreachable!("a row was claimed") };
        row
    }
}

impl LinuxMachine {
    /// Returns whether the run has a swap file that this process uses.
    pub fn has_swap_file(&self) -> bool {
        self.swap.is_some()
    }

    /// Makes the next child a holder of this process's clusters, before a fork. A thread of the
    /// agent calls this.
    pub fn share_swap_file(&self) {
        let Some(swap) = &self.swap else { return };
        let row = swap.space.share(swap.row(), swap.pid.load(Ordering::Relaxed));
        swap.child_row.store(row.map_or(NO_ROW, RowIndex::get), Ordering::Relaxed);
    }

    /// Releases the clusters of this process, which is about to end.
    pub fn leave_swap_file(&self) {
        self.swap.iter().for_each(|swap| swap.space.leave(swap.row()));
    }

    /// Returns the swap file's descriptor in the table of the agent's threads.
    pub fn swap_file_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.swap_file().map(|(_, file)| file)
    }

    /// Ends the sharing of clusters in the parent after a fork: if the fork has failed, releases
    /// the child's.
    pub fn finish_sharing_swap_file(&self, outcome: ForkOutcome) {
        let Some(swap) = &self.swap else { return };
        let row = RowIndex::new(swap.child_row.swap(NO_ROW, Ordering::Relaxed));
        if let Some(row) = row.filter(|_| outcome == ForkOutcome::Failed) {
            swap.space.leave(row);
        }
    }

    /// Makes this process, the child of a fork, the owner of its row. Returns `false` if it holds
    /// no clusters.
    pub fn adopt_swap_file(&self) -> bool {
        let Some(swap) = &self.swap else { return true };
        let (parent, pid) = (swap.pid.load(Ordering::Relaxed), identity::of(rustix::process::getpid()));
        let Some(row) = RowIndex::new(swap.child_row.swap(NO_ROW, Ordering::Relaxed)) else { return false };
        swap.row.store(row.get(), Ordering::Relaxed);
        swap.pid.store(pid, Ordering::Relaxed);
        swap.space.adopt(row, parent, pid)
    }

    /// Reports `event` once in a run.
    pub(super) fn report(&self, swap: &Swap, event: Event, text: std::fmt::Arguments<'_>) {
        if swap.space.is_news(event) {
            self.budget.control().notice(text);
        }
    }

    /// Reports an event that ends the program, once in a run. The message comes before the mark:
    /// another thread that finds the mark may end the program at once. The message may come twice,
    /// which is better than not at all.
    pub(super) fn report_last(&self, event: Event, text: std::fmt::Arguments<'_>) {
        let control = self.budget.control();
        if !control.swap().was_reported(event) {
            control.notice(text);
            control.swap().is_news(event);
        }
    }

    pub(super) fn swap_file(&self) -> Option<(&Swap, BorrowedFd<'_>)> {
        let file = if self.is_detached() {
            let number = self.detached_swap_file.load(Ordering::Relaxed);
            // SAFETY: the caller of `detach` keeps the descriptor open until all pieces are read.
            (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
        } else {
            self.descriptors().swap_file.as_ref().map(AsFd::as_fd)
        };
        self.swap.as_ref().zip(file)
    }

    /// Encrypts a batch of pieces, and begins to write it.
    pub(super) fn begin_write_batch(&self, worker: &mut Worker, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>) {
        let Some((swap, file)) = self.swap_file() else { return };
        let mut pieces = batch.pieces();
        let fill = |bytes: &mut [u8]| {
            let (piece, start_bytes) = pieces.next()?;
            let start = start_bytes as usize;
            let len = self.arena.copy_out(piece, &mut bytes[start..]);
            Some(start..start + len)
        };
        worker.writer.begin(&swap.file, &file, (batch.first(), batch.slots()), fill, seals);
    }

    /// Waits for the oldest write that was begun.
    pub(super) fn finish_write_batch(&self, worker: &mut Worker) -> Result<(), NotWritten> {
        let (swap, file) = self.swap_file().ok_or(NotWritten)?;
        let by_ring_slots = worker.writer.finish(&file).map_err(|error| {
            self.report(
                swap,
                Event::Write,
                format_args!("cannot write to the swap file: {error}: going on without it"),
            );
            NotWritten
        })?;
        self.counters().backing.bd_writes_uring.add(by_ring_slots.into());
        Ok(())
    }

    /// Reports once in a run that the swap file is full.
    pub(super) fn tell_swap_file_full(&self) {
        let Some(swap) = &self.swap else { return };
        swap.space.reap();
        self.report(swap, Event::Full, format_args!("the swap file is full: going on without more of it"));
    }

    /// Reads a piece from the swap file, and restores it from page `skip_pages` on. Fails if it is
    /// lost or corrupted.
    pub(super) fn read_from_file(
        &self,
        worker: &mut Worker,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        let (swap, file) = self.swap_file().ok_or(Corrupted)?;
        let stored = swap.file.read(&file, &mut worker.reading, place).map_err(|error| {
            self.report_last(Event::Read, format_args!("cannot read the swap file: {error}"));
            Corrupted
        })?;
        restore(&mut worker.decompressors, &mut worker.scratch, piece, stored, skip_pages, self.arena.bytes_mut(into))
    }

    /// Discards a free cluster. Returns whether that succeeded.
    pub(super) fn discard_free_cluster(&self, cluster: ClusterNumber) -> bool {
        let Some((swap, file)) = self.swap_file() else { return false };
        swap.space.discarded(cluster);
        swap_discard::discard(file, swap.space.discard(), cluster).is_ok()
    }
}
