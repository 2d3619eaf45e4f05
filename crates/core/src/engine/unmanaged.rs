//! What becomes of a page when the arena is full and nothing in it can be made free: it is served as the kernel would, without a
//! home. Nothing is known of it then, as of what the program has touched before it was adopted; once there is room, it may
//! be adopted like that.

use super::Engine;
use super::fault::{Changing, Fetch, Served, Step, step};
use crate::machine::{Corrupted, Machine, MoveError};
use crate::page_table::{Block, PageState};
use crate::run_tokens::UniqueRun;
use crate::stats::FaultKind;
use crate::store::PieceId;
use crate::sync;
use crate::units::{FrameRun, Order, PageNumber, Slot};

impl<M: Machine> Engine<M> {
    fn note_unmanaged(&self) {
        self.counters().vm.unmanaged_arena_full.inc();
        self.machine.arena_is_full();
    }

    /// A first touch of `page`. Called under its block's lock.
    pub(super) fn zero_unmanaged(&self, page: PageNumber) -> Step {
        let served = match self.machine.zero_in(page) {
            Ok(()) => {
                self.machine.charge(1);
                self.note_unmanaged();
                Ok(())
            }
            Err(MoveError::Changing) => Err(Changing),
            // Whoever waits finds out.
            Err(_) => Ok(()),
        };
        step(served, FaultKind::FirstTouch, page.folio(Order::ZERO))
    }

    /// Brings `page`, which is out, into the program by way of the spare frame.
    pub(super) fn bring_in_unmanaged(&self, worker: &mut M::Worker, block: &Block, page: PageNumber) -> Step {
        let Some(mut spare) = self.spare.lock().take() else {
            // Somebody else uses it for a moment.
            sync::yield_now();
            return Step::LookAgain;
        };
        // For the frame, then for the page in the program.
        self.machine.charge(1);
        self.machine.populate(spare.as_mut());
        let brought_in = self.copy_in_unmanaged(worker, block, page, &mut spare);
        self.machine.release(spare.as_mut());
        *self.spare.lock() = Some(spare);
        match brought_in {
            Ok(()) => {
                self.note_unmanaged();
                Step::Served(Served::Done(FaultKind::SwapIn), page.folio(Order::ZERO))
            }
            Err(step) => {
                self.machine.uncharge(1);
                step
            }
        }
    }

    fn copy_in_unmanaged(
        &self,
        worker: &mut M::Worker,
        block: &Block,
        page: PageNumber,
        run: &mut UniqueRun,
    ) -> Result<(), Step> {
        // Others may fetch or drop the page meanwhile. As long as its piece is pinned, a slot that names it has the content that
        // is read here, whatever has happened to the slot.
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

    /// `run` has what `of` holds, if it could be read: it goes to `page`, if that is still its place.
    fn settle_unmanaged(
        &self,
        block: &Block,
        page: PageNumber,
        of: (Slot, PieceId),
        run: FrameRun,
        read: Result<(), Corrupted>,
    ) -> Result<(), Step> {
        let (slot, piece) = of;
        let _steady = self.machine.steady().ok_or(Step::Changing)?;
        let mut entries = block.lock();
        if slot_of(entries.get(page)) != Some(slot) || self.slot_map.get(slot) != piece {
            return Err(Step::LookAgain);
        }
        let pages = page.folio(Order::ZERO);
        self.carve(&mut entries, pages.clone());
        if let Err(corrupted) = read {
            self.counters().vm.store_corrupted.inc();
            let given_up =
                self.give_up_corrupted(&mut entries, &Fetch { head: page, slot, run, whole: false }, corrupted);
            return Err(step(given_up, FaultKind::SwapIn, pages));
        }
        let mut is_lost = false;
        self.machine.for_each_lost(pages.clone(), &mut |_| is_lost = true);
        if is_lost {
            entries.set(page, PageState::None);
            self.free_slots(slot, 1);
            return Err(Step::LookAgain);
        }
        let copied = self.machine.copy_in(run.head, page);
        match copied {
            Ok(()) | Err(MoveError::Exists | MoveError::Gone) => {
                entries.set(page, PageState::None);
                self.free_slots(slot, 1);
            }
            Err(MoveError::Changing) => return Err(Step::Changing),
            // The system has no page now. It stays out, and whoever waits asks again.
            Err(_) => {}
        }
        copied.map_err(|_| Step::Served(Served::Done(FaultKind::Spurious), pages))
    }
}

/// The slot of a page that is out, unless it is being fetched.
fn slot_of(state: PageState) -> Option<Slot> {
    match state {
        PageState::Swapped { slot, fetching: false, .. } => Some(slot),
        _ => None,
    }
}
