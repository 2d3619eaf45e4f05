//! Measures a codec alone, on data in pieces of one size.

use foliomem_sys::codec::{Compressor, Decompressor, MAX_PIECE_BYTES};
use foliomem_types::codec::Codec;
use foliomem_types::units::{MAX_ORDER, Order};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

const _: () = assert!(MAX_ORDER.bytes() <= MAX_PIECE_BYTES);

/// The sizes and times of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct RawCodec {
    /// Bytes of whole pieces.
    pub original_bytes: usize,
    /// Bytes that would be stored for those pieces.
    pub stored_bytes: usize,
    /// Time to compress all pieces.
    pub compress: Duration,
    /// Time to decompress all pieces, or to copy those that did not compress.
    pub decompress: Duration,
}

/// Compresses and decompresses `data` in pieces of `piece`, in the time of `clock`.
#[must_use]
pub fn measure(data: &[u8], piece: Order, codec: Codec, clock: impl Fn() -> Duration) -> RawCodec {
    let dictionaries = Arc::default();
    let mut compressor = Compressor::new(codec, &dictionaries);
    let mut decompressor = Decompressor::new(codec, &dictionaries);
    let pieces = || data.chunks_exact(piece.bytes());
    let mut stored = vec![0u8; data.len()];
    let mut target = vec![0u8; piece.bytes()];
    let started = clock();
    let rooms = stored.chunks_exact_mut(piece.bytes());
    let lens: Vec<Option<usize>> =
        pieces().zip(rooms).map(|(content, room)| compressor.compress(content, room)).collect();
    let compress = clock() - started;
    compressor.train_if_due();
    let started = clock();
    for ((content, room), len) in pieces().zip(stored.chunks_exact(piece.bytes())).zip(&lens) {
        match len {
            Some(len) => {
                let _ = decompressor.decompress(&room[..*len], &mut target);
            }
            None => target.copy_from_slice(content),
        }
        black_box(&mut target);
    }
    let decompress = clock() - started;
    RawCodec {
        original_bytes: lens.len() * piece.bytes(),
        stored_bytes: lens.iter().map(|len| len.unwrap_or(piece.bytes())).sum(),
        compress,
        decompress,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_time;

    #[test]
    fn incompressible_pieces_are_stored_uncompressed() {
        let piece = Order::new(2).unwrap();
        let mut chance = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (chance >> 56) as u8
        })
        .take(3 * piece.bytes() + 5)
        .collect();
        let raw = measure(&noise, piece, Codec::Lz4, cpu_time::thread);
        assert_eq!((raw.original_bytes, raw.stored_bytes), (3 * piece.bytes(), 3 * piece.bytes()));
        let raw = measure(&vec![7; 3 * piece.bytes()], piece, Codec::Lz4, cpu_time::thread);
        assert!(raw.stored_bytes < raw.original_bytes / 20 && raw.compress > Duration::ZERO, "{raw:?}");
    }
}
