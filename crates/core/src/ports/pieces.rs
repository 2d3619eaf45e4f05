//! The port to the codec: how staged pages become stored pieces, and pieces pages.

use crate::run_tokens::{RunMut, RunRef};
use crate::store::{FragmentMut, FragmentRef, Piece, PlaceMut};
use crate::sync::Shared;
use foliomem_types::units::PageNumber;
use thiserror::Error;

/// The result of compressing a piece. The compressed bytes are in the worker's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compressed {
    /// The whole piece repeats this word and needs no bytes.
    Filled(u64),
    /// The piece as bytes: compressed, or `raw` if compression saved nothing.
    Bytes {
        /// Number of bytes to store.
        len_bytes: u32,
        /// The bytes are the content itself, uncompressed.
        raw: bool,
        /// Checksum of the stored bytes.
        checksum: u64,
    },
}

impl Compressed {
    /// Returns the number of bytes to store.
    pub fn len_bytes(&self) -> u32 {
        match *self {
            Compressed::Filled(_) => 0,
            Compressed::Bytes { len_bytes, .. } => len_bytes,
        }
    }
}

/// A stored piece could not be read back: its bytes do not match its checksum or seal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the stored copy cannot be read back")]
pub struct Corrupted;

/// The codec of pieces, for threads with a worker `W`. Called under no lock, except for
/// [`copy`](Pieces::copy).
pub trait Pieces<W>: Shared {
    /// Compresses the staged pages of `run` as one piece into the worker's scratch memory. The
    /// program knows them as the pages from `head` on.
    fn compress(&self, worker: &mut W, head: PageNumber, run: RunRef<'_>) -> Compressed;
    /// Writes the bytes that [`compress`](Pieces::compress) left in the scratch memory for `run` to
    /// `place`.
    fn write(&self, worker: &mut W, run: RunRef<'_>, place: PlaceMut<'_>);
    /// Copies stored bytes of a piece from `from` to `to`, which has the length of `from`.
    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>);
    /// Restores the pages of `piece` from `skip_pages` on into the frames of `into`, as many as
    /// `into` has. Verifies the checksum first.
    fn read(&self, worker: &mut W, piece: &Piece<'_>, skip_pages: u32, into: RunMut<'_>) -> Result<(), Corrupted>;
}
