//! Compression: lz4 and zstd behind one type, with all working memory allocated up front.
//!
//! Compressors run in threads of a foreign program, which must not call the program's malloc or use
//! thread-local storage. So the agent calls both libraries only through functions that take state
//! owned by the caller: `LZ4_compress_fast_extState` of lz4, and zstd's static contexts, which
//! "will never resize nor malloc()". Outside of the libraries, these functions call only memcpy,
//! memmove and memset.
//!
//! # Format of a piece
//! The compressed bytes contain no magic number, length or checksum: the store keeps all three. The
//! first byte says whether the content was split into planes (see `planes`). For a codec with
//! [`Dictionaries`], the second byte is the generation of the dictionary.
//!
//! lz4 is the C library because it decompresses faster than `lz4_flex`.
//!
//! Lock order: the only lock is the leaf in [`Dictionaries`].

use std::sync::Arc;
use thiserror::Error;

mod dictionary;
mod lz4;
mod planes;
#[cfg(test)]
mod tests;
mod workspace;
mod zstd;

pub use dictionary::Dictionaries;
use dictionary::SMALL_PIECE_BYTES;
use foliomem_types::codec::{Codec, ZSTD_MAX_LEVEL};
use foliomem_types::units::{MAX_ORDER, PAGE_BYTES};
use planes::Way;

/// Maximum length of a piece, in bytes: a folio of the highest order.
pub const MAX_PIECE_BYTES: usize = MAX_ORDER.bytes();

/// The error for bytes that do not decompress to the expected length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the compressed data is damaged")]
pub struct CodecError;

/// Maximum size of a compressed piece, in 16ths of its content. A larger result is dropped and the
/// piece is kept raw: so little saved memory does not pay for decompressing.
const WORTHWHILE_16THS: usize = 15;

/// First byte of a piece whose content is compressed unchanged.
const PLAIN: u8 = 0;
/// First byte of a piece whose content is split into planes before compression.
const PLANES: u8 = 1;

/// Returns the number of bytes that are split into planes together.
fn span_bytes(is_lz4: bool, piece_bytes: usize) -> usize {
    if is_lz4 { PAGE_BYTES } else { piece_bytes }
}

/// State for compressing. It allocates memory only in [`Compressor::new`] and when it trains a
/// dictionary.
#[derive(Debug)]
pub struct Compressor {
    state: CompressorState,
    choice: planes::Choice,
    /// Buffer for the planes of a piece.
    planes: Box<[u8]>,
    /// Buffer for compressed planes, while the plain content is tried, too.
    tried: Box<[u8]>,
}

#[derive(Debug)]
enum CompressorState {
    Lz4(lz4::Compressor),
    Zstd(zstd::Compressor),
    ZstdDictionary(zstd::Compressor, Arc<Dictionaries>),
}

impl CompressorState {
    /// Compresses `src`, which consists of `parts` planes (1 for plain content), into `dst`.
    /// Returns the number of bytes written, or `None` if the result does not fit.
    fn compress(&mut self, src: &[u8], parts: usize, dst: &mut [u8]) -> Option<usize> {
        match self {
            CompressorState::Lz4(state) => state.compress(src, dst),
            CompressorState::Zstd(state) => state.compress(None, src, parts, dst),
            CompressorState::ZstdDictionary(state, dictionaries) => {
                let (generation, body) = dst.split_first_mut()?;
                let small = src.len() <= SMALL_PIECE_BYTES;
                let newest = if small { dictionaries.newest() } else { None };
                *generation = newest.map_or(0, |(generation, _)| generation);
                state.compress(newest.map(|(_, dictionary)| dictionary), src, parts, body).map(|len| 1 + len)
            }
        }
    }

    /// Offers the content `src` as a sample for a dictionary.
    fn offer(&self, src: &[u8]) {
        if let CompressorState::ZstdDictionary(_, dictionaries) = self
            && src.len() <= SMALL_PIECE_BYTES
        {
            dictionaries.offer(src);
        }
    }
}

impl Compressor {
    /// Makes state for pieces of up to [`MAX_PIECE_BYTES`]. A codec with dictionaries must share
    /// `dictionaries` with all decompressors of its pieces.
    pub fn new(codec: Codec, dictionaries: &Arc<Dictionaries>) -> Compressor {
        let zstd = |level: u8| zstd::Compressor::new(level.clamp(1, ZSTD_MAX_LEVEL));
        let state = match codec {
            Codec::Lz4 => CompressorState::Lz4(lz4::Compressor::new()),
            Codec::Zstd { level, dictionary: false } => CompressorState::Zstd(zstd(level)),
            Codec::Zstd { level, dictionary: true } => {
                CompressorState::ZstdDictionary(zstd(level), Arc::clone(dictionaries))
            }
        };
        let [planes, tried] = [(); 2].map(|()| vec![0; MAX_PIECE_BYTES].into_boxed_slice());
        Compressor { state, choice: planes::Choice::default(), planes, tried }
    }

    /// Makes state as [`Compressor::new`] does, which takes more time to choose how to compress:
    /// equal content becomes equal bytes, whatever was compressed before. (Not so with
    /// dictionaries, which differ.)
    pub fn thorough(codec: Codec, dictionaries: &Arc<Dictionaries>) -> Compressor {
        Compressor { choice: planes::Choice::ByTrying, ..Compressor::new(codec, dictionaries) }
    }

    /// Compresses `src` to the start of `dst` and returns the number of bytes written. Returns
    /// `None` if the result would exceed 15/16 of `src` or the length of `dst`.
    ///
    /// # Panics
    /// If `src` is longer than [`MAX_PIECE_BYTES`].
    pub fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        assert!(src.len() <= MAX_PIECE_BYTES, "a piece of {} bytes", src.len());
        let max_bytes = (src.len() * WORTHWHILE_16THS / 16).min(dst.len());
        if max_bytes == 0 {
            return None;
        }
        let (kind, body) = dst[..max_bytes].split_first_mut()?;
        let way = self.choice.way(src);
        let mut planes_bytes = None;
        if way != Way::Plain {
            let planes = &mut self.planes[..src.len()];
            planes::split(src, planes, span_bytes(matches!(self.state, CompressorState::Lz4(_)), src.len()));
            let to = if way == Way::Try { &mut self.tried[..body.len()] } else { &mut *body };
            planes_bytes = self.state.compress(planes, planes::PLANES, to);
        }
        let mut is_planes = way == Way::Planes && planes_bytes.is_some();
        let mut bytes = if is_planes { planes_bytes } else { self.state.compress(src, 1, body) };
        if way != Way::Plain && !is_planes {
            // Planes that do not fit are a result, too: their pattern does not pay.
            let taken = |bytes: Option<usize>| bytes.unwrap_or(src.len());
            let pays = self.choice.learn(src, taken(bytes), taken(planes_bytes));
            if let Some(len) = planes_bytes.filter(|_| pays) {
                body[..len].copy_from_slice(&self.tried[..len]);
                (bytes, is_planes) = (planes_bytes, true);
            }
        }
        *kind = if is_planes { PLANES } else { PLAIN };
        if bytes.is_some() {
            self.state.offer(src);
        }
        bytes.map(|len| 1 + len)
    }

    /// Trains a dictionary if enough samples have been collected. Takes tens of milliseconds, so
    /// only background threads call it.
    pub fn train_if_due(&mut self) {
        if let CompressorState::ZstdDictionary(state, dictionaries) = &mut self.state {
            dictionaries.train_if_due(state);
        }
    }

    /// Returns the size of the working memory in bytes. Large pieces touch more of its pages.
    pub fn memory_bytes(&self) -> usize {
        let state_bytes = match &self.state {
            CompressorState::Lz4(state) => state.memory_bytes(),
            CompressorState::Zstd(state) | CompressorState::ZstdDictionary(state, _) => state.memory_bytes(),
        };
        state_bytes + self.planes.len() + self.tried.len()
    }
}

/// State for decompressing. It allocates memory only in [`Decompressor::new`].
#[derive(Debug)]
pub struct Decompressor {
    state: DecompressorState,
    /// Buffer for the planes of a piece.
    planes: Box<[u8]>,
}

#[derive(Debug)]
enum DecompressorState {
    Lz4,
    Zstd(zstd::Decompressor),
    ZstdDictionary(zstd::Decompressor, Arc<Dictionaries>),
}

impl DecompressorState {
    fn decompress(&mut self, src: &[u8], dst: &mut [u8]) -> Result<(), CodecError> {
        let len = match self {
            DecompressorState::Lz4 => lz4::decompress(src, dst)?,
            DecompressorState::Zstd(state) => state.decompress(None, src, dst)?,
            DecompressorState::ZstdDictionary(state, dictionaries) => match src.split_first().ok_or(CodecError)? {
                (0, body) => state.decompress(None, body, dst)?,
                (&generation, body) => {
                    let dictionary = dictionaries.get(generation).ok_or(CodecError)?;
                    state.decompress(Some(dictionary), body, dst)?
                }
            },
        };
        if len == dst.len() { Ok(()) } else { Err(CodecError) }
    }
}

impl Decompressor {
    /// Makes state for pieces that `codec` compressed, at any level, with `dictionaries`.
    pub fn new(codec: Codec, dictionaries: &Arc<Dictionaries>) -> Decompressor {
        let state = match codec {
            Codec::Lz4 => DecompressorState::Lz4,
            Codec::Zstd { dictionary: false, .. } => DecompressorState::Zstd(zstd::Decompressor::new()),
            Codec::Zstd { dictionary: true, .. } => {
                DecompressorState::ZstdDictionary(zstd::Decompressor::new(), Arc::clone(dictionaries))
            }
        };
        Decompressor { state, planes: vec![0; MAX_PIECE_BYTES].into_boxed_slice() }
    }

    /// Decompresses `src` to exactly the length of `dst`.
    ///
    /// Any `src` is safe: bytes that no compressor produced yield an error or arbitrary content.
    ///
    /// # Errors
    /// Fails if `src` is not a piece of this length. Then the content of `dst` is unspecified.
    pub fn decompress(&mut self, src: &[u8], dst: &mut [u8]) -> Result<(), CodecError> {
        let (kind, src) = kind(src, dst)?;
        if kind == PLAIN {
            return self.state.decompress(src, dst);
        }
        let span_bytes = span_bytes(matches!(self.state, DecompressorState::Lz4), dst.len());
        let planes = self.planes.get_mut(..dst.len()).ok_or(CodecError)?;
        self.state.decompress(src, planes)?;
        planes::join(planes, dst, span_bytes);
        Ok(())
    }

    /// Decompresses at least the first `start_bytes` of a piece whose content is as long as `dst`.
    /// The rest of `dst` has unspecified content. lz4 stops there; zstd decompresses all.
    ///
    /// # Errors
    /// Fails in the cases of [`decompress`](Self::decompress).
    pub fn decompress_start(&mut self, src: &[u8], dst: &mut [u8], start_bytes: usize) -> Result<(), CodecError> {
        if start_bytes >= dst.len() || !matches!(self.state, DecompressorState::Lz4) {
            return self.decompress(src, dst);
        }
        let (kind, src) = kind(src, dst)?;
        let fill = |start: &mut [u8]| match lz4::decompress_start(src, start)? {
            len if len == start.len() => Ok(()),
            _ => Err(CodecError),
        };
        if kind == PLAIN {
            return fill(&mut dst[..start_bytes]);
        }
        let whole_bytes = start_bytes.next_multiple_of(PAGE_BYTES);
        let planes = self.planes.get_mut(..whole_bytes).ok_or(CodecError)?;
        fill(planes)?;
        planes::join(planes, &mut dst[..whole_bytes], PAGE_BYTES);
        Ok(())
    }
}

/// Returns the first byte of a piece whose content is as long as `dst`, and the rest of the piece.
fn kind<'a>(src: &'a [u8], dst: &[u8]) -> Result<(u8, &'a [u8]), CodecError> {
    match src.split_first() {
        Some((&PLAIN, rest)) => Ok((PLAIN, rest)),
        Some((&PLANES, rest)) if !dst.is_empty() && dst.len().is_multiple_of(PAGE_BYTES) => Ok((PLANES, rest)),
        _ => Err(CodecError),
    }
}

/// Returns the word that fills `src`, or `None` if `src` has other content or a length that is not
/// a multiple of 8. Comparing the first, second and last word rejects most content early.
pub fn fill_word(src: &[u8]) -> Option<u64> {
    let (words, rest) = src.as_chunks::<8>();
    let (first, last) = (*words.first()?, *words.last()?);
    if !rest.is_empty() || first != last || words.get(1).is_some_and(|second| *second != first) {
        return None;
    }
    let word = u64::from_ne_bytes(first);
    // Without a branch per word, the compiler compares 16 words at a time with vector instructions.
    let (lines, rest) = words.as_chunks::<16>();
    let differs =
        |words: &[[u8; 8]]| words.iter().fold(0, |bits, &other| bits | (u64::from_ne_bytes(other) ^ word)) != 0;
    if lines.iter().any(|line| differs(line)) || differs(rest) { None } else { Some(word) }
}

/// Returns the xxh3 checksum of stored bytes. It costs about a tenth of decompressing them.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
