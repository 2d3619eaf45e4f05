//! The port to pages that a fork left shared with another process.

use crate::page_table::Entries;
use crate::ports::MoveError;
use crate::sync::Shared;
use foliomem_types::units::{FrameRun, PageNumber};
use std::ops::Range;

/// Pages that other processes may use since a fork. A shared page cannot be moved, and it is free
/// only when all processes freed it.
pub trait SharedPages: Shared {
    /// Returns whether other processes may share pages now.
    fn exist(&self) -> bool;
    /// Lets the program write to `pages`, which are not swapped out: such a page would lose its
    /// mark. Fails with [`MoveError::Changing`] while the program changes its mappings.
    fn unprotect(&self, block: &Entries, pages: Range<PageNumber>) -> Result<(), MoveError>;
    /// Gives the program its own copy of shared pages among `pages`, if they still exist. Called
    /// under no lock, because the program may fault meanwhile.
    fn unshare(&self, pages: Range<PageNumber>);
    /// Replaces staged pages that a fork left shared by unshared copies. It waits for nothing but
    /// the kernel.
    fn unshare_staged(&self, run: FrameRun);
}
