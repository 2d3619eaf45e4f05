//! Recompression: pieces that have not been touched for a while take the place that a slower codec makes of them.
//!
//! A *hand* goes over all pieces, as zram's users mark what is idle: what it finds marked was there when it came by last, at
//! least that long ago, because what is touched leaves the store. Such a piece is pinned, compressed anew by
//! the caller, who writes it to a new place, and its word is switched to that if nobody else has it pinned by then. Its checksum
//! changes, too: for the instant between the two all pins are taken, so that nobody reads one without the other. What does not
//! get smaller by a size class is marked, and not tried again.

use super::classes::class_of;
use super::word::{Location, Mark};
use super::{PieceId, Pinned, Place, PlaceMut, RunSource, Store};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::units::PAGE_BYTES;

/// Where the hand is.
#[derive(Debug, Default)]
pub(super) struct Hand {
    /// Ids up to this have been looked at.
    passed: AtomicU32,
    started_ns: AtomicU64,
}

/// The hand has gone over all pieces: there is nothing more to do before pieces are older.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PassOver;

/// A place for what a piece is recompressed to: nobody else knows of it before it takes the place
/// of the old one.
#[must_use = "its frames are taken until it is handed back"]
#[derive(Debug)]
pub struct NewPlace<'a> {
    location: Location,
    place: Place<'a>,
}

impl NewPlace<'_> {
    /// The right to write it.
    pub fn as_mut(&mut self) -> PlaceMut<'_> {
        PlaceMut::of(self.place)
    }
}

/// Bytes that a piece of `len_bytes` takes in its zspage or extents.
fn taken_bytes(len_bytes: u32) -> u32 {
    class_of(len_bytes).map_or(len_bytes.next_multiple_of(PAGE_BYTES as u32), |class| class.shape().size_bytes)
}

impl Store {
    /// The next piece, pinned, if it has been in memory for `idle_ns` and was not tried.
    ///
    /// # Errors
    /// At the end of a pass; the next begins `idle_ns` after this one has.
    pub fn next_idle(&self, runs: &dyn RunSource, now_ns: u64, idle_ns: u64) -> Result<Option<Pinned<'_>>, PassOver> {
        let used = self.pieces.used();
        let step = |passed: u32| Some(passed + 1).filter(|&next| next <= used);
        let passed = self.hand.passed.fetch_update(Relaxed, Relaxed, step);
        let Some(id) = passed.ok().and_then(|passed| PieceId::new(passed + 1)) else {
            let started_ns = self.hand.started_ns.load(Relaxed);
            let is_due = now_ns.saturating_sub(started_ns) >= idle_ns;
            if is_due && self.hand.started_ns.compare_exchange(started_ns, now_ns, Relaxed, Relaxed).is_ok() {
                self.hand.passed.store(0, Relaxed);
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
                // It may be another piece by now, which is then tried too early.
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

    /// Lets go of a piece that is not to be tried again.
    pub fn settle(&self, runs: &dyn RunSource, pinned: Pinned<'_>) {
        pinned.at.mark(Mark::Settled);
        self.unpin(runs, pinned);
    }

    /// Whether `len_bytes` take less than what a piece takes now.
    pub fn is_smaller(&self, pinned: &Pinned<'_>, len_bytes: u32) -> bool {
        taken_bytes(len_bytes) < taken_bytes(pinned.piece.place.len_bytes())
    }

    /// Room for `len_bytes` of a piece.
    pub fn new_place(&self, runs: &dyn RunSource, pinned: &Pinned<'_>, len_bytes: u32) -> Option<NewPlace<'_>> {
        let location = self.find_room(runs, pinned.id(), len_bytes)?;
        Some(NewPlace { location, place: self.place_of(location) })
    }

    /// A piece is at `to` from now on, compressed by the second codec, unless somebody else reads it at this moment: then
    /// it stays as it is. Returns how many bytes that saves.
    pub fn replace(&self, runs: &dyn RunSource, pinned: Pinned<'_>, to: NewPlace<'_>, checksum: u64) -> u64 {
        let (at, from) = (pinned.at, &pinned.piece);
        let old = at.load().location();
        // Looked up while it cannot be freed.
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
            // Its last reference went at that instant, and was left to us.
            self.reclaim_piece(runs, at, word);
        } else {
            self.note_old_age(at.id(), checksum);
        }
        u64::from(taken_bytes(old_bytes) - taken_bytes(new_bytes))
    }
}
