//! Compaction: emptying the emptiest zspages into the others of their class.
//!
//! A piece is moved without a lock: it is pinned, copied to a slot taken for it, and its word is switched
//! to the new place if nobody else has it pinned by then. A reader that pins it before the switch reads
//! the old place, which stays as it is; the switch then fails, and the copy is dropped. A release during
//! the copy leaves the piece to the unpin that follows. While a zspage is being emptied it is isolated: it
//! gets no new pieces, and its frames go back only when the emptying is done with it.

use super::classes::{CLASSES, ClassId};
use super::evacuate::copy;
use super::place::{FragmentMut, FragmentRef, PlaceMut};
use super::word::{Location, ZspageId};
use super::{PieceId, RunSource, Store};
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::PAGE_BYTES;

/// Copies the bytes of pieces for compaction. Called with no lock of the store held.
pub trait PieceMover {
    /// Copies the bytes at `from` to `to`, which is as long.
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>);
}

impl Store {
    /// Moves pieces together until about `budget_pages` pages were copied or nothing is left to gain;
    /// returns how many frames that freed.
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

    /// Moves what it can out of an isolated zspage; returns the frames freed.
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
            // One piece that cannot be moved keeps all the frames: moving the others would gain nothing.
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

    /// Moves the piece in `from` to another zspage, where `take_slot` takes one. True if the slot is free now, whoever
    /// freed it.
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
            // Dying, or not published yet: its slot is not free, but may be in a moment.
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
