//! The port to the shared store: a swap file in memory, in which the processes of a fork tree store
//! equal pieces once.
//!
//! A process *publishes* the pieces that it has written: the checksum of the bytes, the place, and
//! the cluster's generation. What is published is only a hint. A process that finds a piece with
//! the checksum of one of its own joins the cluster
//! ([`SwapDevice::join`](super::SwapDevice::join)), so that the place keeps its bytes, and then
//! compares them.
//!
//! Each slot counts the processes that have pieces there. A slot without any takes no memory.

use crate::store::{FilePlace, Piece};
use crate::sync::Shared;
use foliomem_types::units::Slot;
use std::ops::Range;

/// A published piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Its place, which may be any: another process may be overwriting the hint.
    pub place: FilePlace,
    /// The generation of the place's cluster when it was published.
    pub generation: u64,
}

/// The shared store, for threads with a worker `W`.
pub trait SharedStore<W>: Shared {
    /// Returns a published piece with the checksum of `piece`, if there is one.
    fn offer(&self, piece: &Piece<'_>) -> Option<Offer>;
    /// Returns whether `place` has exactly the bytes of a piece in memory, written under its seal.
    fn is_equal(&self, worker: &mut W, piece: &Piece<'_>, place: &FilePlace) -> bool;
    /// Publishes a piece that this process has written to `place`, in a cluster that it holds.
    fn publish(&self, piece: &Piece<'_>, place: &FilePlace);
    /// Counts this process as the only user of `slots`, which it has allocated. This method and the
    /// next three are called under the store's locks.
    fn count_user(&self, slots: Range<u32>);
    /// Counts one more user of a slot, of a cluster that this process holds. Returns `false` if the
    /// slot has none.
    fn add_user(&self, slot: Slot) -> bool;
    /// Counts one user of a slot less. Returns whether it was the last one.
    fn drop_user(&self, slot: Slot) -> bool;
    /// Gives the memory of `slots` without users back.
    fn discard(&self, slots: Range<u32>);
}
