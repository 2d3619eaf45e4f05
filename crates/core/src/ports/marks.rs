//! The port to marks: how the engine learns of discards that the program does not announce.

use crate::page_table::Entries;
use crate::sync::Shared;
use foliomem_types::units::PageNumber;
use std::ops::Range;

/// Marks in place of staged and swapped-out pages.
/// [`move_out`](crate::ports::AddressSpace::move_out) leaves a mark in place of each page, and a
/// discard removes the mark.
pub trait Marks: Shared {
    /// Calls `lost` with each run of `pages` whose content the program has discarded without a
    /// message. All `pages` are staged or swapped out.
    fn for_each_lost(&self, block: &Entries, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>));
    /// Calls `lost` like [`for_each_lost`](Marks::for_each_lost) and removes the marks of `pages`,
    /// which are about to be mapped in.
    fn take(
        &self,
        block: &mut Entries,
        pages: Range<PageNumber>,
        lost: &mut dyn FnMut(&mut Entries, Range<PageNumber>),
    );
    /// Marks `pages`, which are staged or swapped out, again.
    fn set(&self, block: &Entries, pages: Range<PageNumber>);
}
