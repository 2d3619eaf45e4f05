//! Store compaction: moves pieces out of the emptiest zspages into others of their class.
//!
//! A piece moves without a lock: it is pinned and copied to a new slot, and its word is switched to
//! the new place if no other thread pins it then. A reader that pins it before the switch reads the
//! old place, which stays intact; the switch then fails and the copy is dropped. A release during
//! the copy leaves the piece to the following unpin. A zspage is isolated while it is emptied: it
//! gets no new pieces, and its frames are freed only at the end.

use super::classes::{CLASSES, ClassId};
use super::evacuate::copy;
use super::place::{FragmentMut, FragmentRef, PlaceMut};
use super::word::{Location, ZspageId};
use super::{PieceId, RunSource, Store};
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::PAGE_BYTES;

/// The copier of pieces' bytes for compaction. Called with no lock of the store held.
pub trait PieceMover {
    /// Copies the bytes at `from` to `to`, which has the length of `from`.
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>);
}

impl Store {
    /// Moves pieces together until about `budget_pages` pages are copied or nothing is left to
    /// gain. Returns the number of freed frames.
    pub fn compact(&self, runs: &dyn RunSource, mover: &dyn PieceMover, budget_pages: u32) -> u32 {
        let mut budget_bytes = i64::from(budget_pages) * PAGE_BYTES as i64;
        let first = self.next_class.load(Relaxed);
        let mut freed_frames = 0;
        for step in 0..CLASSES as u32 {
            let index = (first + step) % CLASSES as u32;
            self.next_class.store(index, Relaxed);
            let class = ClassId::new(index as usize);
            while budget_bytes > 0 {
                let Some(zspage) = self.zspages.isolate_emptiest(class) else { break };
                let emptied = self.empty_zspage(runs, mover, class, zspage, &mut budget_bytes);
                if emptied == 0 {
                    break;
                }
                freed_frames += emptied;
            }
            if budget_bytes <= 0 {
                break;
            }
        }
        freed_frames
    }

    /// Moves as many pieces as possible out of an isolated zspage; returns the number of freed
    /// frames.
    fn empty_zspage(
        &self,
        runs: &dyn RunSource,
        mover: &dyn PieceMover,
        class: ClassId,
        zspage: ZspageId,
        budget_bytes: &mut i64,
    ) -> u32 {
        let size_bytes = class.shape().size_bytes;
        for slot in 0..self.zspages.slots(zspage) {
            let Some(piece) = self.zspages.piece_of_isolated(class, zspage, slot) else { continue };
            // One immovable piece keeps all the frames, so moving the others gains nothing.
            if !self.move_piece(runs, mover, class, (zspage, slot), piece, || self.zspages.take_slot(class, piece)) {
                break;
            }
            *budget_bytes -= i64::from(size_bytes);
        }
        match self.zspages.put_back(class, zspage) {
            Some(extent) => {
                self.give_back(runs, extent);
                extent.frames
            }
            None => 0,
        }
    }

    /// Moves the piece in `from` to the slot that `take_slot` takes in another zspage. Returns
    /// whether the slot of `from` was freed by this move.
    pub(super) fn move_piece(
        &self,
        runs: &dyn RunSource,
        mover: &dyn PieceMover,
        class: ClassId,
        from: (ZspageId, u32),
        piece: PieceId,
        take_slot: impl FnOnce() -> Option<(ZspageId, u32)>,
    ) -> bool {
        let at = self.pieces.at(piece);
        let Some((word, _)) = at.try_pin() else {
            // The piece is dying or not published yet. Its slot is not free, but may be soon.
            return false;
        };
        let location = word.location();
        let size_bytes = class.shape().size_bytes;
        let is_there = location.is_in_memory()
            && location.zspage() == from.0
            && u32::from(location.last_byte()) / size_bytes == from.1;
        let target = if is_there && word.is_sealed() && word.pins() == 1 { take_slot() } else { None };
        let Some((zspage, slot)) = target else {
            self.unpin_at(runs, at);
            return false;
        };
        let len_less_one = u32::from(location.last_byte()) - from.1 * size_bytes;
        let to = Location::new(zspage, (slot * size_bytes + len_less_one) as u16);
        copy(mover, &self.place_of(location), PlaceMut::of(self.place_of(to)));
        let switched = at.switch(to).is_some();
        self.vacate(runs, if switched { location } else { to });
        if !switched {
            self.unpin_at(runs, at);
        }
        switched
    }
}
