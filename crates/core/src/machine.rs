//! The one door between the memory manager and the machine it manages.
//!
//! On Linux it is a real program's memory through userfaultfd; in tests and in the lab it is an array.
//! The engine never holds a leaf lock while it calls the machine. It may hold one page table block,
//! where a method says so; such a method must not wait for anything but the kernel.
//!
//! Places: the *program* is addressed by [`PageNumber`]; the *arena* by [`Frame`]. A frame's page is
//! either at home (in the arena), or moved into the program, its home then being *empty*.
//!
//! Memory is read and written only for a token: [`RunRef`] and [`RunMut`] for pages at home,
//! [`Piece`] and [`PlaceMut`] for what the store holds. Safe code cannot have two tokens for the
//! same bytes of which one allows writing, so a machine may turn them into slices.

use crate::run_tokens::{RunMut, RunRef};
use crate::stats::Counters;
use crate::store::{FilePlace, FragmentMut, FragmentRef, Piece, PlaceMut, Seal, WriteBatch};
use crate::sync::Shared;
use crate::units::{ClusterNumber, CpuNumber, Frame, FrameRun, Order, OrderSet, PageNumber};
use std::ops::Range;
use thiserror::Error;

/// Why pages could not be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MoveError {
    /// Somebody else refers to the page: it is pinned, or shared since a fork.
    #[error("the page is pinned or shared")]
    Busy,
    /// The destination already holds a page.
    #[error("the destination is occupied")]
    Exists,
    /// There is no page to move.
    #[error("the source is empty")]
    Absent,
    /// The mapping does not allow it: other protection, locked, or the range crosses its border.
    #[error("the mapping does not allow moves")]
    Refused,
    /// The program is changing its mappings: the change must be heard first.
    #[error("the mapping is being changed")]
    Changing,
    /// The mapping, or the whole program, is gone.
    #[error("the mapping is gone")]
    Gone,
}

/// A move that did not go all the way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("after {moved_pages} pages: {error}")]
pub struct Stopped {
    /// Pages that were moved: the first ones of the range.
    pub moved_pages: u32,
    /// What stopped it.
    pub error: MoveError,
}

/// What compressing a piece came to. The bytes wait in the worker's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compressed {
    /// The whole piece repeats one word and needs no bytes.
    Filled(u64),
    /// Compressed, or `raw` where that saved nothing.
    Bytes {
        /// How many bytes to store.
        len_bytes: u32,
        /// They are the content itself.
        raw: bool,
        /// Checksum of the stored bytes.
        checksum: u64,
    },
}

impl Compressed {
    /// How many bytes to store.
    pub fn len_bytes(&self) -> u32 {
        match *self {
            Compressed::Filled(_) => 0,
            Compressed::Bytes { len_bytes, .. } => len_bytes,
        }
    }
}

/// What recompressing a piece came to. The bytes wait in the worker's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recompressed {
    /// How many bytes to store.
    pub len_bytes: u32,
    /// Checksum of the stored bytes.
    pub checksum: u64,
}

/// A stored piece could not be turned back into the pages it was made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("what was stored of it cannot be read back")]
pub struct Corrupted;

/// Pieces could not be written to the swap file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the swap file cannot be written")]
pub struct NotWritten;

/// Writes to the swap file that a worker has begun and not finished, at most: while one is under way, the next is made.
pub const MOST_WRITES: usize = 2;

/// A mapping of the program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Where it lies, as far as it is known: a folio never leaves it.
    pub pages: Range<PageNumber>,
    /// The folio sizes it may have now: what the policy says for what the program has said about it.
    pub sizes: OrderSet,
}

impl Mapping {
    /// Whether the 2^order pages at `head` may be a folio.
    pub fn allows(&self, head: PageNumber, order: Order) -> bool {
        self.sizes.contains(order) && self.pages.start <= head && head.offset(order.pages()) <= self.pages.end
    }
}

/// What the engine asks of the machine.
pub trait Machine: Shared {
    /// Per-thread state for compression: contexts and scratch memory.
    type Worker;

    /// A clock that never goes back.
    fn now_ns(&self) -> u64;
    /// Where the caller runs. A hint: it may have moved since.
    fn cpu(&self) -> CpuNumber;

    /// Takes `pages` of the budget, unless that would exceed the limit.
    fn try_charge(&self, pages: u32) -> bool;
    /// Takes `pages` of the budget even beyond the limit.
    fn charge(&self, pages: u32);
    /// Gives `pages` back to the budget.
    fn uncharge(&self, pages: u32);
    /// Pages left below the limit; negative beyond it.
    fn room_pages(&self) -> i64;
    /// The counters of the managed program.
    fn counters(&self) -> &Counters;

    /// Gives the empty homes of `run` pages full of zeros: of the highest order one huge page, where one can be had. The
    /// caller has charged them.
    fn populate(&self, run: RunMut<'_>);
    /// Part of a huge page of the program is going, or gone: what is on either side of `border` is to be pages of its own,
    /// so that the system has back what is not used. Called under a block lock.
    fn split_huge(&self, head: PageNumber, border: PageNumber);
    /// Empties the homes of `run`: their pages go back to the system.
    fn release(&self, run: RunMut<'_>);
    /// Fills the pages at home in `run` with zeros; replaces them, if they are of the highest order and not a huge page,
    /// where one can be had.
    fn zero(&self, run: RunMut<'_>);
    /// Keeps changes of mappings from being heard while it lives. A page is moved, in or out, only under it, taken
    /// before what the engine knows of the page is looked up: that must not be behind what the program has done.
    type Steady<'a>
    where
        Self: 'a;
    /// Keeps the next change of mappings from being heard; `None` while one that was heard waits for others that are
    /// under way.
    fn steady(&self) -> Option<Self::Steady<'_>>;
    /// Hash of the content at home in `run`, the same whenever that is the same. Two contents have the same
    /// hash by chance only, once in 2^64.
    fn hash(&self, run: RunRef<'_>) -> u64;
    /// Copies the pages at home in `from` over those at home in `to`, of the same order.
    fn copy(&self, from: RunRef<'_>, to: RunMut<'_>);
    /// Whether somebody outside the program may still read frames that were its own (a pipe, a
    /// zero-copy socket): then no frame may be used again before its page has gone back to the system.
    fn frames_escape(&self) -> bool;
    /// Moves the pages at home from `from` on to the empty homes from `to` on. May be called under a block lock.
    fn regroup(&self, from: Frame, to: Frame, pages: u32) -> Result<(), Stopped>;

    /// Calls `lost` with each run of `pages`, which are at home or swapped out, whose content the program has discarded
    /// without a message. [`move_out`](Machine::move_out) leaves a mark where a page was, and discards remove it. Called
    /// under a block lock.
    fn for_each_lost(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>));
    /// The same, and removes the marks: the pages are about to return to the program.
    fn take_marks(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>));
    /// Marks `pages`, which are at home or swapped out, anew. Called under a block lock.
    fn mark(&self, pages: Range<PageNumber>);
    /// Moves the pages at home in `run` into the program at `to`, whose marks have been taken if they were out; wakes nobody.
    /// Pages that stay at home are marked. Called under a block lock.
    fn move_in(&self, run: FrameRun, to: PageNumber) -> Result<(), Stopped>;
    /// Moves `pages` pages of the program from `from` on to the empty homes from `to` on, and marks where they were. Called
    /// under a block lock.
    fn move_out(&self, from: PageNumber, to: Frame, pages: u32) -> Result<(), Stopped>;
    /// Copies the page at home in `frame` into the program where a move is refused; wakes nobody. Called
    /// under a block lock.
    fn copy_in(&self, frame: Frame, to: PageNumber) -> Result<(), MoveError>;
    /// Puts a page of zeros of the system's own, which nobody manages, into the program; wakes nobody. Called under a block
    /// lock.
    fn zero_in(&self, to: PageNumber) -> Result<(), MoveError>;
    /// The arena is full, and nothing in it can be made free: pages are left to the system from now on. Waits for nothing.
    fn arena_is_full(&self);
    /// Lets the program write to `pages`, which are resident. (Marks of others would be lost.) Called under a block lock.
    fn unprotect(&self, pages: Range<PageNumber>);
    /// Makes pages that a fork left shared the program's own again, if they are still there. Never
    /// called under a lock: the program may have to be served meanwhile.
    /// False where it is not to be done now.
    fn unshare(&self, pages: Range<PageNumber>) -> bool;
    /// Makes pages at home that a fork left shared our own again. Called under a block lock.
    fn unshare_home(&self, run: FrameRun);
    /// Wakes whoever waits for one of `pages`, which may be none. Called under no lock: who wakes up may be given the caller's CPU.
    fn wake(&self, pages: Range<PageNumber>);
    /// Whether the limit has been exceeded for a moment only: others may be giving way.
    fn is_lately_over(&self) -> bool;
    /// Whether other processes may share pages since a fork: what one makes free is free when all have.
    fn shares(&self) -> bool;
    /// Sleeps for as long as others take to free some folios. Called under no lock.
    fn pause(&self);
    /// Makes any access to the page end the program with SIGBUS, and says why; wakes nobody. Called under a block lock.
    fn poison(&self, page: PageNumber, why: Corrupted) -> Result<(), MoveError>;

    /// The mapping around `page`.
    fn mapping(&self, page: PageNumber) -> Option<Mapping>;
    /// Calls `found` with each maximal run of pages in `pages` that the program has content in, in
    /// ascending order.
    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>));

    /// Compresses the pages at home in `run`, which are the program's from `head` on, as one piece into the worker's scratch
    /// memory. Called under no lock.
    fn compress(&self, worker: &mut Self::Worker, head: PageNumber, run: RunRef<'_>) -> Compressed;
    /// Writes what [`compress`](Machine::compress) left in the scratch memory for `run` to `place`.
    fn write_piece(&self, worker: &mut Self::Worker, run: RunRef<'_>, place: PlaceMut<'_>);
    /// Copies stored bytes of a piece from `from` to `to`, which is as long.
    fn copy_piece(&self, from: FragmentRef<'_>, to: FragmentMut<'_>);
    /// Restores pages `skip_pages..` of `piece`, as many as `into` has, to the homes of `into`, after
    /// verifying the checksum.
    fn read_piece(
        &self,
        worker: &mut Self::Worker,
        piece: &Piece<'_>,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted>;

    /// Compresses `piece`, which is in memory, anew with the second codec; `None` if that saves nothing, or the piece is corrupted.
    fn recompress(&self, worker: &mut Self::Worker, piece: &Piece<'_>) -> Option<Recompressed>;
    /// Writes what [`recompress`](Machine::recompress) left in the scratch memory to `place`.
    fn write_recompressed(&self, worker: &mut Self::Worker, place: PlaceMut<'_>);

    /// Begins to write the pieces of `batch` to the slots of the swap file that it names, and says with a seal for each
    /// how they are known again, if the write succeeds. Each seal has a nonce of its own, in this and in all other
    /// processes. The worker has begun fewer than [`MOST_WRITES`] that are not finished.
    fn begin_write(&self, worker: &mut Self::Worker, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>);
    /// Waits for the oldest write that the worker has begun and not finished.
    fn finish_write(&self, worker: &mut Self::Worker) -> Result<(), NotWritten>;
    /// The swap file has no room: it goes on as without one.
    fn swap_file_full(&self);
    /// As [`read_piece`](Machine::read_piece), of a piece that is in the swap file: what is there must be what was written
    /// under its seal, to that place.
    fn read_back(
        &self,
        worker: &mut Self::Worker,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted>;
    /// Nothing in a cluster of the swap file, which this process holds, is needed any more: the system may have its room.
    /// Whether it takes it.
    fn discard_cluster(&self, cluster: ClusterNumber) -> bool;
    /// Makes this process the holder of a cluster of the swap file, unless there is one. Like the next two, it is
    /// called under leaf locks, and waits for nothing.
    fn claim_cluster(&self, cluster: ClusterNumber) -> bool;
    /// This process holds the cluster no more.
    fn release_cluster(&self, cluster: ClusterNumber);
    /// Whether no other process holds a cluster that this one holds.
    fn is_sole_holder(&self, cluster: ClusterNumber) -> bool;
}
