//! The swap file as one process sees it: its row in the table of cluster owners, reads, writes,
//! discards.
//!
//! The file belongs to all processes of the run ([`foliomem_session::cluster_ownership`]). If it
//! lies in memory, it is the shared store ([`foliomem_session::shared_pieces`]). A fork shares the
//! parent's clusters with the child, before the child exists. There is no lock.

use crate::ports::arena_memory::ArenaMemory;
use crate::ports::attachment::Attachment;
use crate::ports::encrypted_file::SwapFile;
use crate::ports::pieces::{Worker, restore};
use foliomem_core::ports::{self, Corrupted, NotWritten, Offer};
use foliomem_core::run_tokens::RunMut;
use foliomem_core::store::{FilePlace, Piece, Seal, WriteBatch};
use foliomem_session::budget::Budget;
use foliomem_session::cluster_ownership::{Event, RowIndex, SwapSpace};
use foliomem_session::segment::Control;
use foliomem_session::shared_pieces::PublishedPiece;
use foliomem_session::swap_file::Medium;
use foliomem_sys::interception::fork_call::ForkOutcome;
use foliomem_sys::{identity, swap_discard};
use foliomem_types::units::{ClusterNumber, Slot};
use rustix::fd::BorrowedFd;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Instead of a row: the process has no row in the table of cluster owners.
const NO_ROW: u32 = u32::MAX;

/// The state of the swap file in this process.
pub struct Swap {
    file: SwapFile,
    space: &'static SwapSpace,
    attachment: &'static Attachment,
    arena: &'static ArenaMemory,
    budget: &'static Budget,
    /// The process's row in the table of cluster owners.
    row: AtomicU32,
    /// The child's row, during a fork.
    child_row: AtomicU32,
    /// The process that owns `row`. The child of a fork finds its parent here.
    pid: AtomicU32,
}

impl Swap {
    /// Gives this process a row in the table of cluster owners. Returns `None` if the run has no
    /// swap file, or if the table is full.
    pub(super) fn enter(
        attachment: &'static Attachment,
        arena: &'static ArenaMemory,
        budget: &'static Budget,
    ) -> Option<Swap> {
        attachment.descriptors().swap_file.as_ref()?;
        let space = budget.control().swap();
        let pid = identity::of(rustix::process::getpid());
        let row = space.enter(pid)?;
        Some(Swap {
            file: SwapFile::new(&space.key(), space.nonces()),
            space,
            attachment,
            arena,
            budget,
            row: AtomicU32::new(row.get()),
            child_row: AtomicU32::new(NO_ROW),
            pid: AtomicU32::new(pid),
        })
    }

    fn row(&self) -> RowIndex {
        let Some(row) = RowIndex::new(self.row.load(Ordering::Relaxed)) else { unreachable!("a row was claimed") };
        row
    }

    /// Makes the next child a holder of this process's clusters, before a fork. A thread of the
    /// agent calls this.
    pub fn share(&self) {
        let row = self.space.share(self.row(), self.pid.load(Ordering::Relaxed));
        self.child_row.store(row.map_or(NO_ROW, RowIndex::get), Ordering::Relaxed);
    }

    /// Ends the sharing of clusters in the parent after a fork: if the fork has failed, releases
    /// the child's.
    pub fn finish_sharing(&self, outcome: ForkOutcome) {
        let row = RowIndex::new(self.child_row.swap(NO_ROW, Ordering::Relaxed));
        if let Some(row) = row.filter(|_| outcome == ForkOutcome::Failed) {
            self.space.leave(row);
        }
    }

    /// Makes this process, the child of a fork, the owner of its row. Returns `false` if it holds
    /// no clusters.
    pub fn adopt(&self) -> bool {
        let (parent, pid) = (self.pid.load(Ordering::Relaxed), identity::of(rustix::process::getpid()));
        let Some(row) = RowIndex::new(self.child_row.swap(NO_ROW, Ordering::Relaxed)) else { return false };
        self.row.store(row.get(), Ordering::Relaxed);
        self.pid.store(pid, Ordering::Relaxed);
        self.space.adopt(row, parent, pid)
    }

    /// Releases the clusters of this process, which is about to end.
    pub fn leave(&self) {
        self.space.leave(self.row());
    }

    /// Returns whether the file lies in memory.
    pub(super) fn is_shared_store(&self) -> bool {
        self.space.medium() == Medium::Memory
    }

    /// Returns the swap file's descriptor in the table of the agent's threads.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.attachment.swap_file()
    }

    /// Reports `event` once in a run.
    fn report(&self, event: Event, text: std::fmt::Arguments<'_>) {
        if self.space.is_news(event) {
            self.budget.control().notice(text);
        }
    }
}

/// Reports an event that ends the program, once in a run. The message comes before the mark:
/// another thread that finds the mark may end the program at once. The message may come twice,
/// which is better than not at all.
pub(super) fn report_last(control: &Control, event: Event, text: std::fmt::Arguments<'_>) {
    if !control.swap().was_reported(event) {
        control.notice(text);
        control.swap().is_news(event);
    }
}

impl ports::SwapDevice<Worker> for Swap {
    fn begin_write(&self, worker: &mut Worker, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>) {
        let Some(file) = self.descriptor() else { return };
        let mut pieces = batch.pieces();
        let fill = |bytes: &mut [u8]| {
            let (piece, start_bytes) = pieces.next()?;
            let start = start_bytes as usize;
            let len = self.arena.copy_out(piece, &mut bytes[start..]);
            Some(start..start + len)
        };
        worker.writer.begin(&self.file, &file, (batch.first(), batch.slots()), fill, seals);
    }

    fn finish_write(&self, worker: &mut Worker) -> Result<(), NotWritten> {
        let file = self.descriptor().ok_or(NotWritten)?;
        let by_ring_slots = worker.writer.finish(&file).map_err(|error| {
            let name = self.space.medium().file_name();
            self.report(Event::Write, format_args!("cannot write to the {name}: {error}: going on without it"));
            NotWritten
        })?;
        self.budget.counters().backing.bd_writes_uring.add(by_ring_slots.into());
        Ok(())
    }

    fn note_full(&self) {
        self.space.reap();
        self.report(Event::Full, format_args!("the swap file is full: going on without more of it"));
    }

    fn read(
        &self,
        worker: &mut Worker,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        let file = self.descriptor().ok_or(Corrupted)?;
        let stored = self.file.read(&file, &mut worker.reading, place).map_err(|error| {
            let name = self.space.medium().file_name();
            report_last(self.budget.control(), Event::Read, format_args!("cannot read the {name}: {error}"));
            Corrupted
        })?;
        restore(&mut worker.decompressors, &mut worker.scratch, piece, stored, skip_pages, self.arena.bytes_mut(into))
    }

    fn discard(&self, cluster: ClusterNumber) -> bool {
        let Some(file) = self.descriptor() else { return false };
        self.space.discarded(cluster);
        swap_discard::discard(file, self.space.discard(), cluster).is_ok()
    }

    fn claim(&self, cluster: ClusterNumber) -> bool {
        self.space.claim(self.row(), cluster)
    }

    fn release(&self, cluster: ClusterNumber) {
        self.space.release(self.row(), cluster);
    }

    fn fence(&self, cluster: ClusterNumber) -> bool {
        self.space.fence(cluster)
    }

    fn join(&self, cluster: ClusterNumber, generation: u64) -> bool {
        cluster.0 < self.space.clusters() && self.space.join(self.row(), cluster, generation)
    }
}

impl ports::SharedStore<Worker> for Swap {
    fn offer(&self, piece: &Piece<'_>) -> Option<Offer> {
        let published = self.space.shared.find(piece.checksum)?;
        let PublishedPiece { first, offset_bytes, len_bytes, generation, nonce, tag } = published;
        let place = FilePlace { first, offset_bytes, len_bytes, seal: Seal { nonce, tag } };
        // The program may have overwritten any of these words.
        let is_place = first.cluster().0 < self.space.clusters() && FilePlace::may_begin_at(offset_bytes);
        is_place.then_some(Offer { place, generation })
    }

    fn is_equal(&self, worker: &mut Worker, piece: &Piece<'_>, place: &FilePlace) -> bool {
        let Some(file) = self.descriptor() else { return false };
        // What was published may be overwritten: then the seal does not match.
        let Ok(stored) = self.file.read(&file, &mut worker.reading, place) else { return false };
        let mut rest: &[u8] = stored;
        let mut is_equal = true;
        self.arena.for_each_stored(piece, |bytes| {
            let same = rest.strip_prefix(bytes);
            is_equal &= same.is_some();
            rest = same.unwrap_or_default();
        });
        is_equal && rest.is_empty()
    }

    fn publish(&self, piece: &Piece<'_>, place: &FilePlace) {
        let &FilePlace { first, offset_bytes, len_bytes, seal: Seal { nonce, tag } } = place;
        let generation = self.space.generation(first.cluster());
        let published = PublishedPiece { first, offset_bytes, len_bytes, generation, nonce, tag };
        self.space.shared.publish(piece.checksum, &published);
    }

    fn count_user(&self, slots: Range<u32>) {
        slots.for_each(|slot| self.space.shared.count_user(Slot(slot)));
    }

    fn add_user(&self, slot: Slot) -> bool {
        self.space.shared.add_user(slot)
    }

    fn drop_user(&self, slot: Slot) -> bool {
        self.space.shared.drop_user(slot)
    }

    fn discard(&self, slots: Range<u32>) {
        // Slots that keep their memory only take more than they need.
        let _ = self.descriptor().map(|file| swap_discard::discard_slots(file, slots));
    }
}
