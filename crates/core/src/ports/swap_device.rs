//! The port to the swap device: the swap file behind the store.

use super::Corrupted;
use crate::run_tokens::RunMut;
use crate::store::{FilePlace, Piece, Seal, WriteBatch};
use crate::sync::Shared;
use foliomem_types::units::ClusterNumber;
use thiserror::Error;

/// Pieces could not be written to the swap file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the swap file cannot be written")]
pub struct NotWritten;

/// Maximum number of unfinished writes to the swap file for each worker: while one is in flight,
/// the worker prepares the next.
pub const MAX_WRITES: usize = 2;

/// The swap file, for threads with a worker `W`. Processes share it cluster by cluster.
pub trait SwapDevice<W>: Shared {
    /// Starts writing the pieces of `batch` to their slots of the swap file and appends one seal
    /// for each, which identifies the piece if the write succeeds. Every seal has its own nonce,
    /// unique in all processes. The worker must have fewer than [`MAX_WRITES`] unfinished writes.
    fn begin_write(&self, worker: &mut W, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>);
    /// Waits for the oldest unfinished write of the worker.
    fn finish_write(&self, worker: &mut W) -> Result<(), NotWritten>;
    /// Records that the swap file is full. The engine continues as if there were none.
    fn note_full(&self);
    /// Restores pages of a piece from the swap file, as [`Pieces::read`](super::Pieces::read) does
    /// from memory. The bytes read must be those written under the piece's seal, to that place.
    fn read(
        &self,
        worker: &mut W,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted>;
    /// Discards a cluster that this process holds and no longer needs. Returns whether the system
    /// took it.
    fn discard(&self, cluster: ClusterNumber) -> bool;
    /// Makes this process a holder of a cluster unless the cluster has one. Returns whether it did.
    /// This method and the next three are called under the store's locks and do not block.
    fn claim(&self, cluster: ClusterNumber) -> bool;
    /// Ends this process's hold on the cluster.
    fn release(&self, cluster: ClusterNumber);
    /// Returns whether this process is the only holder of a cluster that it holds. If so, no other
    /// process can [`SwapDevice::join`] the cluster any more by its present generation.
    fn fence(&self, cluster: ClusterNumber) -> bool;
    /// Makes this process a holder of a cluster that has holders, if its generation is
    /// `generation` still. Returns whether this process is a holder, and the generation is that
    /// one. The generation of a cluster rises with each claim and each fence.
    fn join(&self, cluster: ClusterNumber, generation: u64) -> bool;
}
