//! Stray pages: pages that the kernel has put where the engine has content, in the child of a fork.
//!
//! Between the fork and the moment when the child's memory is registered, the kernel fills an empty
//! page table entry with zeros for anybody: for a debugger that reads the child's memory at its
//! start, or for khugepaged, which fills the gaps of a huge page. No page of the program is there
//! yet, so such a page has no content of its own. The content is staged or swapped out, and the
//! page must go, or the child would read zeros instead.
//!
//! A page that the child shares with its parent is no stray: it was there before the fork, and it
//! is the program's. The parent's engine had content for it, because another mapping had been there
//! whose end no event had told yet. That content goes.
//!
//! Locks: the caller is the only thread that uses the engine.

use super::Engine;
use crate::page_table::{Block, Entries};
use crate::ports::{AddressSpace, Arena, MoveError, Ports, Steady, Stopped};
use crate::run_tokens::UniqueRun;
use foliomem_types::units::{Order, PageNumber};
use std::ops::Range;

impl<P: Ports> Engine<P> {
    /// Removes all stray pages, and drops the content of pages that the child shares with its
    /// parent. The child of a fork calls this as soon as its memory is registered, so that no more
    /// strays can appear. No other call may be in progress.
    ///
    /// # Errors
    /// The first refusal of the kernel to remove a page, as where the program may not write. All
    /// other strays are removed.
    pub fn remove_strays(&self) -> Result<(), MoveError> {
        let Some(mut spare) = self.spare.lock().take() else { unreachable!("no other call uses the spare frame") };
        let each = |block: &Block| self.remove_strays_of(&mut block.lock(), &mut spare);
        let removed = self.table.blocks().map(each).fold(Ok(()), Result::and);
        *self.spare.lock() = Some(spare);
        removed
    }

    fn remove_strays_of(&self, entries: &mut Entries, spare: &mut UniqueRun) -> Result<(), MoveError> {
        let strays = self.out_but_present(entries, entries.first()..entries.end());
        if strays.is_empty() {
            return Ok(());
        }
        let Some(steady) = self.ports.address_space().steady() else { return Err(MoveError::Changing) };
        let remove = |page| self.remove_stray(&steady, entries, page, spare);
        strays.into_iter().map(remove).fold(Ok(()), Result::and)
    }

    /// Returns those of `pages`, which are of one block, that are staged or swapped out although
    /// the program has them.
    pub(super) fn out_but_present(&self, entries: &Entries, pages: Range<PageNumber>) -> Vec<PageNumber> {
        let is_out = |page: &PageNumber| entries.get(*page).is_out();
        let mut found = Vec::new();
        // The look at the program is a system call.
        if (pages.start.0..pages.end.0).map(PageNumber).any(|page| is_out(&page)) {
            self.ports.address_space().for_each_present(pages, &mut |run| {
                found.extend((run.start.0..run.end.0).map(PageNumber).filter(is_out));
            });
        }
        found
    }

    /// Removes the page of the program at `page` by a move to the spare frame, which leaves the
    /// mapping as it is. If the page is no stray, drops the engine's content instead.
    fn remove_stray(
        &self,
        steady: &Steady<'_, P>,
        entries: &mut Entries,
        page: PageNumber,
        spare: &mut UniqueRun,
    ) -> Result<(), MoveError> {
        debug_assert_eq!(spare.order, Order::ZERO, "the spare frame is one page");
        let space = self.ports.address_space();
        match space.move_out(steady, entries, page, spare.head, 1) {
            Ok(()) => self.ports.arena().release(spare.as_mut()),
            // Only a page that is not the kernel's page of zeros can be busy.
            Err(Stopped { error: MoveError::Busy, .. }) if space.is_shared(page) => {
                self.drop_pages(entries, page.folio(Order::ZERO));
            }
            Err(stopped) => return Err(stopped.error),
        }
        Ok(())
    }
}
