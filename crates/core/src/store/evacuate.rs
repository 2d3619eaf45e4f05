//! Evacuation: the store leaves certain frames that compaction of the arena needs for a larger run.
//!
//! Pieces move as in compaction of the store ([`super::compact`]): pinned, copied, and switched to
//! their new place if no other thread pins them then. A zspage is emptied into others, or into a
//! new one of its size. An extent moves with its whole chain, because a piece's word names only the
//! start of the chain.

use super::compact::PieceMover;
use super::place::{Fragment, FragmentMut, FragmentRef, Place, PlaceMut};
use super::word::ZspageId;
use super::{RunSource, Store};
use foliomem_types::units::{Frame, FrameRun};

/// The name of a zspage or an extent, for the reverse map. It may be stale.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HolderId(u32);

impl HolderId {
    /// Returns the holder with this number.
    pub const fn new(number: u32) -> HolderId {
        HolderId(number)
    }

    /// Returns the holder's number.
    pub const fn get(self) -> u32 {
        self.0
    }

    pub(super) const fn of(zspage: ZspageId) -> HolderId {
        HolderId(zspage.index())
    }

    fn zspage(self) -> ZspageId {
        ZspageId::new(self.0)
    }
}

impl Store {
    /// Returns the run of `holder` that contains `frame`, if it has one. Evacuation later checks
    /// whether `holder` still has that run.
    pub fn run_of(&self, holder: HolderId, frame: Frame) -> Option<FrameRun> {
        self.zspages.extent(holder.zspage()).run_of(frame)
    }

    /// Leaves the frames of `holder` if it has a run from `head` on. Returns false if a piece in
    /// them cannot move now, or there are no frames to move it to.
    pub fn evacuate(&self, runs: &dyn RunSource, mover: &dyn PieceMover, holder: HolderId, head: Frame) -> bool {
        let zspage = holder.zspage();
        if self.run_of(holder, head).is_none() {
            // The store already left this run when it moved another extent of the chain.
            return true;
        }
        let Some(class) = self.zspages.class(zspage) else { return self.evacuate_chain(runs, mover, zspage) };
        if !self.zspages.isolate(class, zspage, head) {
            return false;
        }
        let frames = self.zspages.extent(zspage).frames;
        for slot in 0..self.zspages.slots(zspage) {
            let Some(piece) = self.zspages.piece_of_isolated(class, zspage, slot) else { continue };
            let take_slot = || {
                self.zspages
                    .take_slot(class, piece)
                    .or_else(|| self.open_zspage(runs, class, self.obtain(runs, frames)?, piece))
            };
            if !self.move_piece(runs, mover, class, (zspage, slot), piece, take_slot) {
                break;
            }
        }
        let emptied = self.zspages.put_back(class, zspage);
        emptied.into_iter().for_each(|extent| self.give_back(runs, extent));
        emptied.is_some()
    }

    /// Moves the piece that owns `extent`.
    fn evacuate_chain(&self, runs: &dyn RunSource, mover: &dyn PieceMover, extent: ZspageId) -> bool {
        let Some(piece) = self.zspages.piece_of_extent(extent) else { return false };
        let at = self.pieces.at(piece);
        let Some((word, _)) = at.try_pin() else { return false };
        let from = word.location();
        let has_chain = from.is_in_memory() && self.zspages.class(from.zspage()).is_none();
        let mut links = std::iter::successors(has_chain.then(|| from.zspage()), |&link| self.zspages.next_extent(link));
        let is_movable = links.any(|link| link == extent) && word.is_sealed() && word.pins() == 1;
        let to = if is_movable { self.build_chain(runs, piece, self.place_of(from).len_bytes()) } else { None };
        let Some(to) = to else {
            self.unpin_at(runs, at);
            return false;
        };
        copy(mover, &self.place_of(from), PlaceMut::of(self.place_of(to)));
        let switched = at.switch(to).is_some();
        self.vacate(runs, if switched { from } else { to });
        if !switched {
            self.unpin_at(runs, at);
        }
        switched
    }
}

/// Copies the bytes at `from` to `to`, whose fragments may have other boundaries. The caller has
/// pinned the piece at `from`.
pub(super) fn copy(mover: &dyn PieceMover, from: &Place<'_>, mut to: PlaceMut<'_>) {
    let targets = to.fragments();
    let mut targets = targets.iter().copied();
    let mut target = targets.next();
    for &fragment in &*from.fragments() {
        let mut rest = fragment;
        while rest.len_bytes > 0 {
            let Some(room) = target else { unreachable!("{to:?} is as long as {from:?}") };
            let len_bytes = rest.len_bytes.min(room.len_bytes);
            let source = FragmentRef::of(Fragment { len_bytes, ..rest }, from);
            mover.copy(source, FragmentMut::of(Fragment { len_bytes, ..room }, &mut to));
            let after = |of: Fragment| Fragment::new(of.head, of.offset_bytes + len_bytes, of.len_bytes - len_bytes);
            rest = after(rest);
            target = if room.len_bytes == len_bytes { targets.next() } else { Some(after(room)) };
        }
    }
}
