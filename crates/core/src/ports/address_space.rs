//! The port to the program's address space: its mappings, and how pages move in and out.

use super::Corrupted;
use crate::page_table::Entries;
use crate::sync::Shared;
use foliomem_types::units::{Frame, FrameRun, Order, OrderSet, PageNumber};
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

/// The program's mappings and pages.
pub trait AddressSpace: Shared {
    /// A guard that holds off mapping events. The engine takes it before it looks up a page that it
    /// moves in or out: its knowledge must not be older than the program's mappings.
    type Steady<'a>
    where
        Self: 'a;

    /// Holds off the next mapping event. Returns `None` while a received event waits for others in
    /// progress.
    fn steady(&self) -> Option<Self::Steady<'_>>;

    /// Returns the mapping that contains `page`.
    fn mapping(&self, page: PageNumber) -> Option<Mapping>;
    /// Returns the folio sizes that are allowed for a return to `page`. They may be those of a
    /// moment ago: each fault of a swapped-out folio asks for them.
    fn sizes_of_return(&self, page: PageNumber) -> OrderSet;
    /// Calls `found` with each maximal run of pages in `pages` that have content in the program, in
    /// ascending order.
    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>));
    /// Returns whether the program has `page`, and another process maps it, too. The kernel's page
    /// of zeros counts as shared.
    fn is_shared(&self, page: PageNumber) -> bool;

    /// Maps the staged pages of `run` into the program at `to`; wakes nobody. The caller has taken
    /// the marks of pages that were staged or swapped out; pages that stay staged are marked
    /// again.
    fn move_in(&self, steady: &Self::Steady<'_>, block: &Entries, run: FrameRun, to: PageNumber)
    -> Result<(), Stopped>;
    /// Unmaps `pages` pages of the program from `from` on into the unpopulated frames from `to` on,
    /// and leaves a mark in place of each page.
    fn move_out(
        &self,
        steady: &Self::Steady<'_>,
        block: &Entries,
        from: PageNumber,
        to: Frame,
        pages: u32,
    ) -> Result<(), Stopped>;
    /// Copies the staged page of `frame` into the program where a move is refused; wakes nobody.
    fn copy_in(
        &self,
        steady: &Self::Steady<'_>,
        block: &Entries,
        frame: Frame,
        to: PageNumber,
    ) -> Result<(), MoveError>;
    /// Maps a new page of zeros, which is not managed, into the program; wakes nobody.
    fn zero_in(&self, steady: &Self::Steady<'_>, block: &Entries, to: PageNumber) -> Result<(), MoveError>;
    /// Makes any access to `page` end the program with SIGBUS and reports `why`; wakes nobody.
    fn poison(
        &self,
        steady: &Self::Steady<'_>,
        block: &Entries,
        page: PageNumber,
        why: Corrupted,
    ) -> Result<(), MoveError>;
    /// Splits a huge page of the program at `border`, because part of it was unmapped or will be.
    /// The system gets back the unused part.
    fn split_huge(&self, block: &Entries, head: PageNumber, border: PageNumber);

    /// Wakes the threads that wait for one of `pages`; the range may be empty. Called under no
    /// lock, because a woken thread may preempt the caller.
    fn wake(&self, pages: Range<PageNumber>);
}
