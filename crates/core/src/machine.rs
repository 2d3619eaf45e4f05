//! The machine: the only interface between the memory manager and the memory it manages.
//!
//! On Linux the machine is a real program's memory through userfaultfd; in tests and in the lab it
//! is an array. The engine never holds a leaf lock while it calls the machine. It may hold one page
//! table block lock where a method says so; such a method must wait for nothing but the kernel.
//!
//! A [`PageNumber`] addresses a page of the *program*, a [`Frame`] a page of the *arena*. The page
//! of a frame either lies in the arena at its home frame, or it is mapped into the program; its
//! home frame is then *unpopulated*.
//!
//! A method reads or writes memory only for a token: [`RunRef`] and [`RunMut`] stand for staged
//! pages, [`Piece`] and [`PlaceMut`] for stored bytes. Safe code cannot hold two tokens for the
//! same bytes if one of them allows writing, so a machine may turn tokens into slices.

use crate::run_tokens::{RunMut, RunRef};
use crate::store::{FilePlace, FragmentMut, FragmentRef, Piece, PlaceMut, Seal, WriteBatch};
use crate::sync::Shared;
use foliomem_types::counters::Counters;
use foliomem_types::units::{ClusterNumber, CpuNumber, Frame, FrameRun, Order, OrderSet, PageNumber};
use std::ops::Range;
use thiserror::Error;

/// The reason why pages could not be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MoveError {
    /// The page has another user: it is pinned, or a fork left it shared.
    #[error("the page is pinned or shared")]
    Busy,
    /// The destination already has a page.
    #[error("the destination is occupied")]
    Exists,
    /// The source has no page.
    #[error("the source is empty")]
    Absent,
    /// The mapping does not allow the move: its protection differs, it is locked, or the range
    /// crosses its border.
    #[error("the mapping does not allow moves")]
    Refused,
    /// The program is changing its mappings. The agent must receive that event before it retries.
    #[error("the mapping is being changed")]
    Changing,
    /// The mapping or the whole program is gone.
    #[error("the mapping is gone")]
    Gone,
}

/// A move that stopped before its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("after {moved_pages} pages: {error}")]
pub struct Stopped {
    /// Number of moved pages: the first pages of the range.
    pub moved_pages: u32,
    /// The error that stopped the move.
    pub error: MoveError,
}

/// The result of compressing a piece. The compressed bytes are in the worker's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compressed {
    /// The whole piece repeats this word and needs no bytes.
    Filled(u64),
    /// The piece as bytes: compressed, or `raw` if compression saved nothing.
    Bytes {
        /// Number of bytes to store.
        len_bytes: u32,
        /// The bytes are the content itself, uncompressed.
        raw: bool,
        /// Checksum of the stored bytes.
        checksum: u64,
    },
}

impl Compressed {
    /// Returns the number of bytes to store.
    pub fn len_bytes(&self) -> u32 {
        match *self {
            Compressed::Filled(_) => 0,
            Compressed::Bytes { len_bytes, .. } => len_bytes,
        }
    }
}

/// The result of recompressing a piece. The compressed bytes are in the worker's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recompressed {
    /// Number of bytes to store.
    pub len_bytes: u32,
    /// Checksum of the stored bytes.
    pub checksum: u64,
}

/// A stored piece could not be read back: its bytes do not match its checksum or seal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the stored copy cannot be read back")]
pub struct Corrupted;

/// Pieces could not be written to the swap file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the swap file cannot be written")]
pub struct NotWritten;

/// Maximum number of unfinished writes to the swap file for each worker: while one is in flight,
/// the worker prepares the next.
pub const MOST_WRITES: usize = 2;

/// A mapping of the program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The pages of the mapping, as far as known. A folio never crosses their ends.
    pub pages: Range<PageNumber>,
    /// The folio sizes that the size policy and the program's advice allow now.
    pub sizes: OrderSet,
}

impl Mapping {
    /// Returns whether the 2^order pages at `head` may be one folio.
    pub fn allows(&self, head: PageNumber, order: Order) -> bool {
        self.sizes.contains(order) && self.pages.start <= head && head.offset(order.pages()) <= self.pages.end
    }
}

/// The operations that the engine needs from the machine.
pub trait Machine: Shared {
    /// Per-thread state of a compressing thread: codec contexts and scratch memory.
    type Worker;

    /// Returns the time in nanoseconds. It never goes back.
    fn now_ns(&self) -> u64;
    /// Returns the CPU of the caller. This is a hint: the caller may have moved since.
    fn cpu(&self) -> CpuNumber;

    /// Charges `pages` to the budget unless that exceeds the limit. Returns whether it did.
    fn try_charge(&self, pages: u32) -> bool;
    /// Charges `pages` to the budget even beyond the limit.
    fn charge(&self, pages: u32);
    /// Returns `pages` to the budget.
    fn uncharge(&self, pages: u32);
    /// Returns the pages left below the limit; negative above the limit.
    fn room_pages(&self) -> i64;
    /// Returns the counters of the managed program.
    fn counters(&self) -> &Counters;

    /// Populates the home frames of `run` with pages of zeros; a run of the highest order becomes
    /// one huge page if the system has one. The frames must be unpopulated and charged.
    fn populate(&self, run: RunMut<'_>);
    /// Splits a huge page of the program at `border`, because part of it was unmapped or will be.
    /// The system gets back the unused part. Called under a block lock.
    fn split_huge(&self, head: PageNumber, border: PageNumber);
    /// Releases the pages of `run` to the system; their home frames become unpopulated.
    fn release(&self, run: RunMut<'_>);
    /// Fills the staged pages of `run` with zeros. Pages of the highest order that are no huge page
    /// are replaced by one if the system has one.
    fn zero(&self, run: RunMut<'_>);
    /// A guard that holds off mapping events. The engine moves a page in or out only under this
    /// guard, and takes it before it looks up the page: its knowledge must not be older than the
    /// program's mappings.
    type Steady<'a>
    where
        Self: 'a;
    /// Holds off the next mapping event. Returns `None` while a received event waits for others in
    /// progress.
    fn steady(&self) -> Option<Self::Steady<'_>>;
    /// Returns a hash of the staged content of `run`. Equal contents have equal hashes; two
    /// different contents collide with probability 2^-64.
    fn hash(&self, run: RunRef<'_>) -> u64;
    /// Copies the pages of `from` over those of `to`, in the arena. Both have the same order.
    fn copy(&self, from: RunRef<'_>, to: RunMut<'_>);
    /// Returns whether anything outside the program may still read frames that it owned (a pipe, a
    /// zero-copy socket). If so, a frame must go back to the system before it is used again.
    fn frames_escape(&self) -> bool;
    /// Moves the pages of `from` to the unpopulated frames from `to` on, in the arena. May be
    /// called under a block lock.
    fn regroup(&self, from: Frame, to: Frame, pages: u32) -> Result<(), Stopped>;

    /// Calls `lost` with each run of `pages` whose content the program has discarded without a
    /// message. All `pages` are staged or swapped out. [`move_out`](Machine::move_out) leaves a
    /// mark in place of each page, and a discard removes the mark. Called under a block lock.
    fn for_each_lost(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>));
    /// Calls `lost` like [`for_each_lost`](Machine::for_each_lost) and removes the marks of
    /// `pages`, which are about to be mapped in. Called under a block lock.
    fn take_marks(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>));
    /// Marks `pages`, which are staged or swapped out, again. Called under a block lock.
    fn mark(&self, pages: Range<PageNumber>);
    /// Maps the staged pages of `run` into the program at `to`; wakes nobody. The caller has taken
    /// the marks of pages that were staged or swapped out; pages that stay staged are marked
    /// again. Called under a block lock.
    fn move_in(&self, run: FrameRun, to: PageNumber) -> Result<(), Stopped>;
    /// Unmaps `pages` pages of the program from `from` on into the unpopulated frames from `to` on,
    /// and leaves a mark in place of each page. Called under a block lock.
    fn move_out(&self, from: PageNumber, to: Frame, pages: u32) -> Result<(), Stopped>;
    /// Copies the staged page of `frame` into the program where a move is refused; wakes nobody.
    /// Called under a block lock.
    fn copy_in(&self, frame: Frame, to: PageNumber) -> Result<(), MoveError>;
    /// Maps a new page of zeros, which is not managed, into the program; wakes nobody. Called under
    /// a block lock.
    fn zero_in(&self, to: PageNumber) -> Result<(), MoveError>;
    /// Reports that the arena is full and that nothing in it can be freed: new pages stay
    /// unmanaged. Does not block.
    fn arena_is_full(&self);
    /// Lets the program write to `pages`, which are resident; a page that is not would lose its
    /// mark. Called under a block lock.
    fn unprotect(&self, pages: Range<PageNumber>);
    /// Gives the program its own copy of pages that a fork left shared, if they still exist.
    /// Returns false if that must not be done now. Never called under a lock, because the program
    /// may fault meanwhile.
    fn unshare(&self, pages: Range<PageNumber>) -> bool;
    /// Replaces staged pages that a fork left shared by unshared copies. Called under a block lock.
    fn unshare_home(&self, run: FrameRun);
    /// Wakes the threads that wait for one of `pages`; the range may be empty. Called under no
    /// lock, because a woken thread may preempt the caller.
    fn wake(&self, pages: Range<PageNumber>);
    /// Returns whether the limit has been exceeded only recently: other processes may still free
    /// memory.
    fn is_lately_over(&self) -> bool;
    /// Returns whether other processes may share pages since a fork. A shared page is free only
    /// when all of them freed it.
    fn shares(&self) -> bool;
    /// Sleeps for about the time in which other threads free a few folios. Called under no lock.
    fn pause(&self);
    /// Makes any access to `page` end the program with SIGBUS and reports `why`; wakes nobody.
    /// Called under a block lock.
    fn poison(&self, page: PageNumber, why: Corrupted) -> Result<(), MoveError>;

    /// Returns the mapping that contains `page`.
    fn mapping(&self, page: PageNumber) -> Option<Mapping>;
    /// Calls `found` with each maximal run of pages in `pages` that have content in the program, in
    /// ascending order.
    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>));

    /// Compresses the staged pages of `run` as one piece into the worker's scratch memory. The
    /// program knows them as the pages from `head` on. Called under no lock.
    fn compress(&self, worker: &mut Self::Worker, head: PageNumber, run: RunRef<'_>) -> Compressed;
    /// Writes the bytes that [`compress`](Machine::compress) left in the scratch memory for `run`
    /// to `place`.
    fn write_piece(&self, worker: &mut Self::Worker, run: RunRef<'_>, place: PlaceMut<'_>);
    /// Copies stored bytes of a piece from `from` to `to`, which has the length of `from`.
    fn copy_piece(&self, from: FragmentRef<'_>, to: FragmentMut<'_>);
    /// Restores the pages of `piece` from `skip_pages` on into the frames of `into`, as many as
    /// `into` has. Verifies the checksum first.
    fn read_piece(
        &self,
        worker: &mut Self::Worker,
        piece: &Piece<'_>,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted>;

    /// Recompresses `piece`, which is in memory, with the second codec. Returns `None` if that
    /// saves nothing or the piece is corrupted.
    fn recompress(&self, worker: &mut Self::Worker, piece: &Piece<'_>) -> Option<Recompressed>;
    /// Writes the bytes that [`recompress`](Machine::recompress) left in the scratch memory to
    /// `place`.
    fn write_recompressed(&self, worker: &mut Self::Worker, place: PlaceMut<'_>);

    /// Starts writing the pieces of `batch` to their slots of the swap file and appends one seal
    /// for each, which identifies the piece if the write succeeds. Every seal has its own nonce,
    /// unique in all processes. The worker must have fewer than [`MOST_WRITES`] unfinished writes.
    fn begin_write(&self, worker: &mut Self::Worker, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>);
    /// Waits for the oldest unfinished write of the worker.
    fn finish_write(&self, worker: &mut Self::Worker) -> Result<(), NotWritten>;
    /// Reports that the swap file is full. The engine continues as if there were none.
    fn swap_file_full(&self);
    /// Restores pages of a piece from the swap file, as [`read_piece`](Machine::read_piece) does
    /// from memory. The bytes read must be those written under the piece's seal, to that place.
    fn read_back(
        &self,
        worker: &mut Self::Worker,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted>;
    /// Discards a cluster of the swap file that this process holds and no longer needs. Returns
    /// whether the system took it.
    fn discard_cluster(&self, cluster: ClusterNumber) -> bool;
    /// Makes this process a holder of a cluster of the swap file unless the cluster has one.
    /// Returns whether it did. This method and the next two are called under leaf locks and do not
    /// block.
    fn claim_cluster(&self, cluster: ClusterNumber) -> bool;
    /// Ends this process's hold on the cluster.
    fn release_cluster(&self, cluster: ClusterNumber);
    /// Returns whether this process is the only holder of a cluster that it holds.
    fn is_sole_holder(&self, cluster: ClusterNumber) -> bool;
}
