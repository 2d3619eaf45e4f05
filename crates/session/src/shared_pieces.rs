//! Shared pieces: what the processes of a run publish of a shared store, so that equal pieces lie
//! there once.
//!
//! The table has a place for each published piece, found by the checksum of the piece's bytes. A
//! published piece is a hint: any process may overwrite it at any time, also while another one
//! reads it. So a reader joins the cluster by its generation, which tells whether the place is
//! still in use for what was published, and then compares the bytes
//! ([`crate::cluster_ownership`]).
//!
//! One process at a time looks up and publishes its pieces: it has the *turn*. Otherwise relatives
//! that become idle together would all write. A turn of a killed process ends.
//!
//! Each slot counts its *users*: the processes that have pieces there. The last user gives the
//! slot's memory back. A process that was killed with its companion stays a user, and the memory
//! goes with the cluster. A slot that all users have left may still be published; it has no users,
//! so nobody joins it.
//!
//! There is no lock.

use foliomem_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use foliomem_sys::identity::is_alive;
use foliomem_sys::shared_words;
use foliomem_types::units::{PAGE_BYTES, Slot};

/// Number of published pieces: 1 GiB of content in pieces of 64 KiB takes 0.9 MiB.
const HINTS: usize = if cfg!(feature = "shuttle") { 4 } else { 1 << 14 };
/// Width of a count of users: there are at most [`crate::process_table::MAX_PROCESSES`].
const USER_BITS: u32 = 16;
const USERS_PER_WORD: u32 = u64::BITS / USER_BITS;
const ONE_USER: u64 = 1;
const USERS: u64 = (1 << USER_BITS) - 1;
const USER_WORDS: usize =
    if cfg!(feature = "shuttle") { 1 } else { (MAX_BYTES / PAGE_BYTES as u64) as usize / USERS_PER_WORD as usize };
/// Maximum size of a shared store, in bytes.
pub const MAX_BYTES: u64 = 8 << 30;

shared_words! {
    /// A published piece.
    struct Hint {
        checksum: AtomicU64,
        /// The first slot above, the offset in it below.
        first: AtomicU64,
        len_bytes: AtomicU64,
        generation: AtomicU64,
        nonce: AtomicU64,
        tag: [AtomicU64; 2],
    }

    /// The table of published pieces, and the users of slots.
    pub struct SharedPieces {
        /// The process that has the turn, as `identity` encodes its pid; 0 if none has.
        turn: AtomicU32,
        hints: [Hint; HINTS],
        /// The number of users of each slot: [`USER_BITS`] bits for each.
        users: [AtomicU64; USER_WORDS],
    }
}

/// A piece as it was published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PublishedPiece {
    /// The slot in which it begins.
    pub first: Slot,
    /// The offset in that slot, in bytes.
    pub offset_bytes: u32,
    /// Its length in bytes.
    pub len_bytes: u32,
    /// The generation of its cluster.
    pub generation: u64,
    /// The nonce with which it was written.
    pub nonce: u64,
    /// The authentication tag of that write.
    pub tag: [u64; 2],
}

/// The right to share. Dropping it ends the turn.
#[derive(Debug)]
pub struct Turn<'a>(&'a AtomicU32);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Release pairs with the Acquire in `take_turn`: what was published is seen.
        self.0.store(0, Ordering::Release);
    }
}

impl SharedPieces {
    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn for_schedules() -> SharedPieces {
        let word = || AtomicU64::new(0);
        let hint = |_| Hint {
            checksum: word(),
            first: word(),
            len_bytes: word(),
            generation: word(),
            nonce: word(),
            tag: [word(), word()],
        };
        SharedPieces {
            turn: AtomicU32::new(0),
            hints: std::array::from_fn(hint),
            users: std::array::from_fn(|_| word()),
        }
    }

    /// Gives the turn to process `pid`. Returns `None` if another thread or process has it.
    pub fn take_turn(&self, pid: u32) -> Option<Turn<'_>> {
        let holder = self.turn.load(Ordering::Relaxed);
        let is_free = holder == 0 || !is_alive(holder);
        // Acquire pairs with the Release at the end of the last turn.
        let take = || self.turn.compare_exchange(holder, pid, Ordering::Acquire, Ordering::Relaxed);
        (is_free && take().is_ok()).then_some(Turn(&self.turn))
    }

    /// Changes the number of users of a slot with `change`, unless that is `None`. Returns the
    /// number before.
    fn change_users(&self, slot: Slot, change: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let word = self.users.get((slot.0 / USERS_PER_WORD) as usize)?;
        let shift = slot.0 % USERS_PER_WORD * USER_BITS;
        let change = |word: u64| Some(word & !(USERS << shift) | change(word >> shift & USERS)? << shift);
        // AcqRel pairs with itself: the last user discards the slot after all others have read it.
        let before = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, change);
        before.ok().map(|word| word >> shift & USERS)
    }

    /// Counts the caller as the only user of a slot. It holds the slot's cluster, and nobody else
    /// has the slot.
    pub fn count_user(&self, slot: Slot) {
        self.change_users(slot, |_| Some(ONE_USER));
    }

    /// Counts one more user of a slot. Returns `false` if it has none.
    pub fn add_user(&self, slot: Slot) -> bool {
        self.change_users(slot, |users| Some(users + 1).filter(|_| (ONE_USER..USERS).contains(&users))).is_some()
    }

    /// Counts one user of a slot less. Returns whether it was the last one.
    pub fn drop_user(&self, slot: Slot) -> bool {
        self.change_users(slot, |users| users.checked_sub(1)) == Some(ONE_USER)
    }

    /// Returns the two places for a piece with this checksum.
    fn places(&self, checksum: u64) -> [&Hint; 2] {
        let first = checksum as usize % HINTS;
        [&self.hints[first], &self.hints[first ^ 1]]
    }

    /// Publishes a piece.
    pub fn publish(&self, checksum: u64, piece: &PublishedPiece) {
        let places = self.places(checksum);
        let has = |of: u64| places.iter().find(|hint| hint.checksum.load(Ordering::Relaxed) == of);
        let Hint { checksum: its, first, len_bytes, generation, nonce, tag } =
            has(checksum).or_else(|| has(0)).unwrap_or(&places[(checksum >> 63) as usize]);
        its.store(checksum, Ordering::Relaxed);
        first.store(u64::from(piece.first.0) << 32 | u64::from(piece.offset_bytes), Ordering::Relaxed);
        len_bytes.store(piece.len_bytes.into(), Ordering::Relaxed);
        generation.store(piece.generation, Ordering::Relaxed);
        nonce.store(piece.nonce, Ordering::Relaxed);
        tag.iter().zip(piece.tag).for_each(|(word, half)| word.store(half, Ordering::Relaxed));
    }

    /// Returns the piece that was published last with this checksum, if it is still known.
    pub fn find(&self, checksum: u64) -> Option<PublishedPiece> {
        let is_meant = |hint: &&Hint| hint.checksum.load(Ordering::Relaxed) == checksum;
        let hint = self.places(checksum).into_iter().find(is_meant)?;
        let first = hint.first.load(Ordering::Relaxed);
        Some(PublishedPiece {
            first: Slot((first >> 32) as u32),
            offset_bytes: first as u32,
            len_bytes: hint.len_bytes.load(Ordering::Relaxed) as u32,
            generation: hint.generation.load(Ordering::Relaxed),
            nonce: hint.nonce.load(Ordering::Relaxed),
            tag: [0, 1].map(|half| hint.tag[half].load(Ordering::Relaxed)),
        })
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use foliomem_sys::shared_memory::zeroed;

    fn piece(number: u32) -> PublishedPiece {
        let nonce = u64::from(number) + 9;
        let [offset_bytes, len_bytes] = [32 * number, 100 + number];
        PublishedPiece {
            first: Slot(7 * number),
            offset_bytes,
            len_bytes,
            generation: nonce * 3,
            nonce,
            tag: [nonce; 2],
        }
    }

    #[test]
    fn a_piece_is_found_by_its_checksum_until_others_take_its_place() {
        let pieces = zeroed::<SharedPieces>();
        let step = HINTS as u64;
        let checksums = [5, 5 + step, 5 + 2 * step];
        for (number, checksum) in (1..).zip(checksums) {
            assert_eq!(pieces.find(checksum), None);
            pieces.publish(checksum, &piece(number));
            assert_eq!(pieces.find(checksum), Some(piece(number)));
        }
        let known = checksums.iter().filter(|&&checksum| pieces.find(checksum).is_some()).count();
        assert_eq!(known, 2, "each piece has two places");
        pieces.publish(checksums[2], &piece(4));
        assert_eq!(pieces.find(checksums[2]), Some(piece(4)), "the last one counts");
    }

    #[test]
    fn nobody_joins_a_slot_after_its_last_user() {
        let pieces = zeroed::<SharedPieces>();
        let [slot, neighbour] = [Slot(7), Slot(6)];
        assert!(!pieces.add_user(slot), "it was never used");
        pieces.count_user(slot);
        pieces.count_user(neighbour);
        assert!(pieces.add_user(slot) && pieces.add_user(slot));
        assert_eq!([(); 3].map(|()| pieces.drop_user(slot)), [false, false, true]);
        assert!(!pieces.add_user(slot) && !pieces.drop_user(slot));
        assert!(pieces.drop_user(neighbour), "its count is another one");
        let beyond = Slot((MAX_BYTES / PAGE_BYTES as u64) as u32);
        pieces.count_user(beyond);
        assert!(!pieces.add_user(beyond) && !pieces.drop_user(beyond));
    }

    #[test]
    fn one_living_process_has_the_turn() {
        let pieces = zeroed::<SharedPieces>();
        let me = std::process::id();
        let turn = pieces.take_turn(me);
        assert!(turn.is_some() && pieces.take_turn(me).is_none());
        drop(turn);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let left = pieces.take_turn(child.id()).unwrap();
        child.wait().unwrap();
        std::mem::forget(left);
        assert!(pieces.take_turn(me).is_some(), "its process has ended");
    }
}
