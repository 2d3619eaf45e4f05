//! Stray pages: pages that the kernel has put where the engine has content, in the child of a fork.
//!
//! Between the fork and the moment when the child's memory is registered, the kernel fills an empty
//! page table entry with zeros for anybody: for a debugger that reads the child's memory at its
//! start, or for khugepaged, which fills the gaps of a huge page. No page of the program is there
//! yet, so such a page has no content of its own. The content is staged or swapped out, and the
//! page must go, or the child would read zeros instead.
//!
//! Locks: the caller is the only thread that uses the engine.

use super::Engine;
use crate::page_table::Entries;
use crate::ports::{AddressSpace, Arena, MoveError, Ports, Steady};
use crate::run_tokens::UniqueRun;
use foliomem_types::units::{Order, PageNumber};
use std::ops::Range;

impl<P: Ports> Engine<P> {
    /// Removes all stray pages. The child of a fork calls this as soon as its memory is registered,
    /// so that no more of them can appear. No other call may be in progress.
    ///
    /// # Errors
    /// The kernel refuses to remove a page, as it does where the program may not write.
    pub fn remove_strays(&self) -> Result<(), MoveError> {
        let Some(mut spare) = self.spare.lock().take() else { unreachable!("no other call uses the spare frame") };
        let removed = self.table.blocks().try_for_each(|block| self.remove_strays_of(&mut block.lock(), &mut spare));
        *self.spare.lock() = Some(spare);
        removed
    }

    fn remove_strays_of(&self, entries: &mut Entries, spare: &mut UniqueRun) -> Result<(), MoveError> {
        let pages = entries.first()..entries.end();
        if !(pages.start.0..pages.end.0).any(|page| entries.get(PageNumber(page)).is_out()) {
            return Ok(());
        }
        let mut present: Vec<Range<PageNumber>> = Vec::new();
        self.ports.address_space().for_each_present(pages, &mut |run| present.push(run));
        let Some(steady) = self.ports.address_space().steady() else { return Err(MoveError::Changing) };
        let present = present.into_iter().flat_map(|run| run.start.0..run.end.0).map(PageNumber);
        for page in present {
            if entries.get(page).is_out() {
                self.remove_stray(&steady, entries, page, spare)?;
            }
        }
        Ok(())
    }

    /// Removes the page of the program at `page` by a move to the spare frame, which leaves the
    /// mapping as it is. Leaves a page that the child shares with its parent.
    fn remove_stray(
        &self,
        steady: &Steady<'_, P>,
        entries: &Entries,
        page: PageNumber,
        spare: &mut UniqueRun,
    ) -> Result<(), MoveError> {
        debug_assert_eq!(spare.order, Order::ZERO, "the spare frame is one page");
        let moved = self.ports.address_space().move_out(steady, entries, page, spare.head, 1);
        match moved.map_err(|stopped| stopped.error) {
            Ok(_) => self.ports.arena().release(spare.as_mut()),
            // The child shares the page with its parent: it was there before the fork, so the
            // kernel has not put it here since.
            Err(MoveError::Busy) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
