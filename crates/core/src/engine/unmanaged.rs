//! Unmanaged pages: if the arena is full and nothing in it can be freed, a page is served as the
//! kernel would, without a home frame. The engine then knows nothing of that page, just as it knows
//! nothing of pages touched before adoption. The page may be adopted later when there is room.

use super::Engine;
use super::fault::{Changing, Served, Step, step};
use super::swap_in::Fetch;
use crate::page_table::{Block, Entries, PageState};
use crate::ports::{AddressSpace, Arena, Budget, Corrupted, Marks, MoveError, Ports, Steady};
use crate::readahead::LikelyUse;
use crate::run_tokens::UniqueRun;
use crate::store::PieceId;
use crate::sync;
use foliomem_types::counters::FaultKind;
use foliomem_types::units::{FrameRun, Order, PageNumber, Slot};

impl<P: Ports> Engine<P> {
    fn note_unmanaged(&self) {
        self.counters().vm.unmanaged_arena_full.inc();
        self.ports.arena().note_full();
    }

    /// Serves a first touch of `page` with an unmanaged page.
    pub(super) fn zero_unmanaged(&self, steady: &Steady<'_, P>, entries: &Entries, page: PageNumber) -> Step {
        let served = match self.ports.address_space().zero_in(steady, entries, page) {
            Ok(()) => {
                self.ports.budget().charge(1);
                self.note_unmanaged();
                Ok(())
            }
            Err(MoveError::Changing) => Err(Changing),
            // The waiting threads fault again and find out.
            Err(_) => Ok(()),
        };
        step(served, FaultKind::FirstTouch, page.folio(Order::ZERO))
    }

    /// Maps in `page`, which is swapped out, as an unmanaged page through the spare frame.
    pub(super) fn map_in_unmanaged(&self, worker: &mut P::Worker, block: &Block, page: PageNumber) -> Step {
        let Some(mut spare) = self.spare.lock().take() else {
            // Another thread uses the spare frame for a moment.
            sync::back_off();
            return Step::LookAgain;
        };
        // Charges the spare frame. After the frame's release, the charge stands for the page that
        // was copied into the program.
        self.ports.budget().charge(1);
        self.ports.arena().populate(spare.as_mut());
        let mapped_in = self.copy_in_unmanaged(worker, block, page, &mut spare);
        self.ports.arena().release(spare.as_mut());
        *self.spare.lock() = Some(spare);
        match mapped_in {
            Ok(()) => {
                self.note_unmanaged();
                Step::Served(Served::Done(FaultKind::SwapIn), page.folio(Order::ZERO))
            }
            Err(step) => {
                self.ports.budget().uncharge(1);
                step
            }
        }
    }

    fn copy_in_unmanaged(
        &self,
        worker: &mut P::Worker,
        block: &Block,
        page: PageNumber,
        run: &mut UniqueRun,
    ) -> Result<(), Step> {
        // Other threads may fetch or drop the page meanwhile. While its piece is pinned, any slot
        // that names the piece has the content read here, whatever happened to the slot.
        let (slot, pinned) = {
            let entries = block.lock();
            let slot = slot_of(entries.get(page)).ok_or(Step::LookAgain)?;
            (slot, self.store.pin(self.slot_map.get(slot)))
        };
        let skip_pages = slot.0 % pinned.piece().granule.pages();
        let read = self.read_piece(worker, pinned.piece(), skip_pages, run.as_mut());
        let settled = self.settle_unmanaged(block, page, (slot, pinned.id()), **run, read);
        self.store.unpin(&self.runs(), pinned);
        settled
    }

    /// Copies the content of `of` from `run` to `page`, if it could be read and the page still has
    /// that slot and piece.
    fn settle_unmanaged(
        &self,
        block: &Block,
        page: PageNumber,
        of: (Slot, PieceId),
        run: FrameRun,
        read: Result<(), Corrupted>,
    ) -> Result<(), Step> {
        let (slot, piece) = of;
        let steady = self.ports.address_space().steady().ok_or(Step::Changing)?;
        let mut entries = block.lock();
        if slot_of(entries.get(page)) != Some(slot) || self.slot_map.get(slot) != piece {
            return Err(Step::LookAgain);
        }
        let pages = page.folio(Order::ZERO);
        self.split_borders(&mut entries, pages.clone());
        if let Err(corrupted) = read {
            self.counters().vm.store_corrupted.inc();
            let given_up = self.give_up_corrupted(
                &steady,
                &mut entries,
                &Fetch { head: page, slot, run, likely_use: LikelyUse::Part },
                corrupted,
            );
            return Err(step(given_up, FaultKind::SwapIn, pages));
        }
        let mut is_lost = false;
        if let Some(marks) = self.ports.marks() {
            marks.for_each_lost(&entries, pages.clone(), &mut |_| is_lost = true);
        }
        if is_lost {
            entries.set(page, PageState::None);
            self.free_slots(slot, 1);
            return Err(Step::LookAgain);
        }
        let copied = self.ports.address_space().copy_in(&steady, &entries, run.head, page);
        match copied {
            Ok(()) | Err(MoveError::Exists | MoveError::Gone) => {
                entries.set(page, PageState::None);
                self.free_slots(slot, 1);
            }
            Err(MoveError::Changing) => return Err(Step::Changing),
            // The system has no page now. The page stays swapped out and the waiting threads fault
            // again.
            Err(_) => {}
        }
        copied.map_err(|_| Step::Served(Served::Done(FaultKind::Spurious), pages))
    }
}

/// Returns the slot of a swapped-out page that is not being fetched.
fn slot_of(state: PageState) -> Option<Slot> {
    match state {
        PageState::Swapped { slot, fetching: false, .. } => Some(slot),
        _ => None,
    }
}
