//! The port to a slower codec, which makes idle pieces smaller.

use crate::store::{Piece, PlaceMut};
use crate::sync::Shared;

/// The result of recompressing a piece. The compressed bytes are in the worker's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recompressed {
    /// Number of bytes to store.
    pub len_bytes: u32,
    /// Checksum of the stored bytes.
    pub checksum: u64,
}

/// A slower codec, for threads with a worker `W`. [`Pieces::read`](super::Pieces::read) also reads
/// its pieces.
pub trait Recompressor<W>: Shared {
    /// Recompresses `piece`, which is in memory. Returns `None` if that saves nothing or the piece
    /// is corrupted.
    fn recompress(&self, worker: &mut W, piece: &Piece<'_>) -> Option<Recompressed>;
    /// Writes the bytes that [`recompress`](Recompressor::recompress) left in the scratch memory to
    /// `place`.
    fn write(&self, worker: &mut W, place: PlaceMut<'_>);
}
