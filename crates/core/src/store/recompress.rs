//! Recompression: idle pieces move to new places with the shorter bytes of a slower codec.
//!
//! A *clock hand* goes over all pieces, as users of zram mark idle pages. A piece that the hand
//! marked and finds again has been idle for at least one pass, because a touched page leaves the
//! store. Such a piece is pinned, recompressed by the caller and written to a new place. Its word
//! is switched to that place if no other thread pins it then. Its checksum changes, too: all pins
//! are taken between the two stores, so no thread reads the new word with the old checksum. A piece
//! that does not shrink by a size class is marked and not tried again.

use super::classes::class_of;
use super::word::{Location, Mark};
use super::{PieceId, Pinned, Place, PlaceMut, RunSource, Store};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use foliomem_types::units::PAGE_BYTES;

/// The position of the clock hand.
#[derive(Debug, Default)]
pub(super) struct ClockHand {
    /// Ids up to this were visited in this pass.
    passed: AtomicU32,
    started_ns: AtomicU64,
}

/// The error at the end of a pass: no piece is due before the next pass begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PassOver;

/// An allocated place for a recompressed piece. No other thread knows the place before
/// [`Store::replace`] switches the piece to it.
#[must_use = "its frames are taken until it is handed back"]
#[derive(Debug)]
pub struct NewPlace<'a> {
    location: Location,
    place: Place<'a>,
}

impl NewPlace<'_> {
    /// Returns the right to write the place.
    pub fn as_mut(&mut self) -> PlaceMut<'_> {
        PlaceMut::of(self.place)
    }
}

/// Returns the bytes that a piece of `len_bytes` occupies in its zspage or extents.
fn taken_bytes(len_bytes: u32) -> u32 {
    class_of(len_bytes).map_or(len_bytes.next_multiple_of(PAGE_BYTES as u32), |class| class.shape().size_bytes)
}

impl Store {
    /// Visits the next piece. Returns it, pinned, if it has been in memory for `idle_ns` and was
    /// not tried yet.
    ///
    /// # Errors
    /// The pass is over. The next pass begins `idle_ns` after this one began.
    pub fn next_idle(&self, runs: &dyn RunSource, now_ns: u64, idle_ns: u64) -> Result<Option<Pinned<'_>>, PassOver> {
        let used = self.pieces.used();
        let step = |passed: u32| Some(passed + 1).filter(|&next| next <= used);
        let passed = self.clock_hand.passed.fetch_update(Relaxed, Relaxed, step);
        let Some(id) = passed.ok().and_then(|passed| PieceId::new(passed + 1)) else {
            let started_ns = self.clock_hand.started_ns.load(Relaxed);
            let is_due = now_ns.saturating_sub(started_ns) >= idle_ns;
            if is_due && self.clock_hand.started_ns.compare_exchange(started_ns, now_ns, Relaxed, Relaxed).is_ok() {
                self.clock_hand.passed.store(0, Relaxed);
            }
            return Err(PassOver);
        };
        let at = self.pieces.at(id);
        let word = at.load();
        if !word.is_sealed() || !word.location().is_in_memory() {
            return Ok(None);
        }
        match word.mark() {
            Mark::Young => {
                // The id may name another piece by now, which is then tried too early.
                at.mark(Mark::Idle);
                Ok(None)
            }
            Mark::Idle => {
                let Some((word, extra)) = at.try_pin() else { return Ok(None) };
                if word.mark() == Mark::Idle && word.is_sealed() && word.location().is_in_memory() {
                    return Ok(Some(self.pinned(at, word, extra)));
                }
                self.unpin_at(runs, at);
                Ok(None)
            }
            Mark::Settled | Mark::Recompressed => Ok(None),
        }
    }

    /// Unpins a piece and marks it as not to be tried again.
    pub fn settle(&self, runs: &dyn RunSource, pinned: Pinned<'_>) {
        pinned.at.mark(Mark::Settled);
        self.unpin(runs, pinned);
    }

    /// Returns whether `len_bytes` occupy less than the piece occupies now.
    pub fn is_smaller(&self, pinned: &Pinned<'_>, len_bytes: u32) -> bool {
        taken_bytes(len_bytes) < taken_bytes(pinned.piece.place.len_bytes())
    }

    /// Allocates a place for `len_bytes` of a piece.
    pub fn new_place(&self, runs: &dyn RunSource, pinned: &Pinned<'_>, len_bytes: u32) -> Option<NewPlace<'_>> {
        let location = self.find_room(runs, pinned.id(), len_bytes)?;
        Some(NewPlace { location, place: self.place_of(location) })
    }

    /// Switches a piece to `to`, compressed by the second codec. If another thread pins it at this
    /// moment, it stays as it is. Returns the number of bytes saved.
    pub fn replace(&self, runs: &dyn RunSource, pinned: Pinned<'_>, to: NewPlace<'_>, checksum: u64) -> u64 {
        let (at, from) = (pinned.at, &pinned.piece);
        let old = at.load().location();
        // Read before the old place can be freed.
        let (old_bytes, new_bytes) = (from.place.len_bytes(), to.place.len_bytes());
        let Some(word) = at.replace(to.location, checksum) else {
            self.vacate(runs, to.location);
            self.unpin(runs, pinned);
            return 0;
        };
        self.gauges.compressed_bytes.fetch_sub(u64::from(old_bytes - new_bytes), Relaxed);
        if from.raw {
            self.gauges.raw_pages.fetch_sub(u64::from(word.references()), Relaxed);
        }
        self.vacate(runs, old);
        if word.is_dead() {
            // The last reference was dropped meanwhile. This thread held all pins, so it frees the
            // piece.
            self.reclaim_piece(runs, at, word);
        } else {
            self.note_old_age(at.id(), checksum);
        }
        u64::from(taken_bytes(old_bytes) - taken_bytes(new_bytes))
    }
}
