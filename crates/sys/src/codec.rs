//! Compression: lz4 and zstd behind one type, with all working memory allocated up front.
//!
//! Compressors run in threads of a foreign program, which must not call malloc or touch thread-local
//! storage. So both libraries are used only through calls that take caller-owned state: lz4's
//! `LZ4_compress_fast_extState`, zstd's static contexts, which "will never resize nor malloc()". What they
//! call outside themselves is memcpy, memmove and memset.
//!
//! A piece's compressed bytes carry neither magic number, length nor checksum: the store keeps all three.
//!
//! They begin with a byte that says whether they are planes (`planes`), and with a codec that has dictionaries ([`Dictionaries`]) there is another
//! that says by which of those they were compressed.
//!
//! The C library it is for lz4: on 32 MiB of executables, text, numbers and JSON in granules of 64 KiB, one
//! thread of an EPYC virtual machine compressed 350 MB/s and decompressed 1302 MB/s with it, and 335 and
//! 1065 MB/s with lz4_flex 0.13; clearing the hash table for each piece cost nothing that could be
//! measured (331 against 309 MB/s at 4 KiB). zstd:3 did 248 and 787 MB/s at a ratio of 4.45 instead of 2.71.

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

/// The largest piece that is compressed as one.
pub const PIECE_MAX_BYTES: usize = MAX_ORDER.bytes();

/// Compressed bytes that are not a compressed piece of the expected length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the compressed data is damaged")]
pub struct CodecError;

/// A compressed piece is at most this much of its content (in 16ths); otherwise it is kept raw: the little
/// saved would not pay for decompressing it.
const WORTHWHILE_16THS: usize = 15;

/// What a piece begins with: its content is compressed as it is, or as planes.
const PLAIN: u8 = 0;
const PLANES: u8 = 1;

/// What of a piece has planes of its own.
fn span_bytes(is_lz4: bool, piece_bytes: usize) -> usize {
    if is_lz4 { PAGE_BYTES } else { piece_bytes }
}

/// State for compressing. Allocates only when made, and when it makes a dictionary.
#[derive(Debug)]
pub struct Compressor {
    state: CompressorState,
    choice: planes::Choice,
    /// Room for the planes of a piece.
    planes: Box<[u8]>,
}

#[derive(Debug)]
enum CompressorState {
    Lz4(lz4::Compressor),
    Zstd(zstd::Compressor),
    ZstdDictionary(zstd::Compressor, Arc<Dictionaries>),
}

impl CompressorState {
    /// Compresses `src`, which is so many planes or one part.
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

    /// `src` is content that a dictionary may be made of.
    fn offer(&self, src: &[u8]) {
        if let CompressorState::ZstdDictionary(_, dictionaries) = self
            && src.len() <= SMALL_PIECE_BYTES
        {
            dictionaries.offer(src);
        }
    }
}

impl Compressor {
    /// State for pieces of up to [`PIECE_MAX_BYTES`]. The dictionaries, for a codec that has them, are to be those of
    /// all who decompress what it compresses.
    pub fn new(codec: Codec, dictionaries: &Arc<Dictionaries>) -> Compressor {
        let zstd = |level: u8| zstd::Compressor::new(level.clamp(1, ZSTD_MAX_LEVEL));
        let state = match codec {
            Codec::Lz4 => CompressorState::Lz4(lz4::Compressor::new()),
            Codec::Zstd { level, dictionary: false } => CompressorState::Zstd(zstd(level)),
            Codec::Zstd { level, dictionary: true } => {
                CompressorState::ZstdDictionary(zstd(level), Arc::clone(dictionaries))
            }
        };
        let planes = vec![0; PIECE_MAX_BYTES].into_boxed_slice();
        Compressor { state, choice: planes::Choice::default(), planes }
    }

    /// Compresses `src` to the start of `dst` and returns how many bytes that took; `None` if it would take
    /// more than 15/16 of `src`, or than `dst` has.
    ///
    /// # Panics
    /// If `src` is longer than [`PIECE_MAX_BYTES`].
    pub fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        assert!(src.len() <= PIECE_MAX_BYTES, "a piece of {} bytes", src.len());
        let most = (src.len() * WORTHWHILE_16THS / 16).min(dst.len());
        if most == 0 {
            return None;
        }
        let (kind, body) = dst[..most].split_first_mut()?;
        let way = self.choice.way(src);
        let mut planes_bytes = None;
        if way != Way::Plain {
            let planes = &mut self.planes[..src.len()];
            planes::split(src, planes, span_bytes(matches!(self.state, CompressorState::Lz4(_)), src.len()));
            planes_bytes = self.state.compress(planes, planes::PLANES, body);
        }
        let is_planes = way == Way::Planes && planes_bytes.is_some();
        let mut bytes = if is_planes { planes_bytes } else { self.state.compress(src, 1, body) };
        *kind = if is_planes { PLANES } else { PLAIN };
        if way != Way::Plain && !is_planes {
            // Planes that do not fit are news, too.
            let taken = |bytes: Option<usize>| bytes.unwrap_or(src.len());
            if self.choice.learn(src, taken(bytes), taken(planes_bytes)) {
                bytes = self.state.compress(&self.planes[..src.len()], planes::PLANES, body);
                *kind = PLANES;
            }
        }
        if bytes.is_some() {
            self.state.offer(src);
        }
        bytes.map(|len| 1 + len)
    }

    /// Makes a dictionary of what has been compressed, if enough has been. For threads that nobody waits for.
    pub fn train_if_due(&mut self) {
        if let CompressorState::ZstdDictionary(state, dictionaries) = &mut self.state {
            dictionaries.train_if_due(state);
        }
    }

    /// Working memory it was made with; pages of it are used as large pieces need them.
    pub fn memory_bytes(&self) -> usize {
        let state_bytes = match &self.state {
            CompressorState::Lz4(state) => state.memory_bytes(),
            CompressorState::Zstd(state) | CompressorState::ZstdDictionary(state, _) => state.memory_bytes(),
        };
        state_bytes + self.planes.len()
    }
}

/// State for decompressing. Allocates only when made.
#[derive(Debug)]
pub struct Decompressor {
    state: DecompressorState,
    /// Room for the planes of a piece.
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
    /// State for what `codec` has compressed, at any level, with these dictionaries.
    pub fn new(codec: Codec, dictionaries: &Arc<Dictionaries>) -> Decompressor {
        let state = match codec {
            Codec::Lz4 => DecompressorState::Lz4,
            Codec::Zstd { dictionary: false, .. } => DecompressorState::Zstd(zstd::Decompressor::new()),
            Codec::Zstd { dictionary: true, .. } => {
                DecompressorState::ZstdDictionary(zstd::Decompressor::new(), Arc::clone(dictionaries))
            }
        };
        Decompressor { state, planes: vec![0; PIECE_MAX_BYTES].into_boxed_slice() }
    }

    /// Decompresses `src` to exactly the length of `dst`. Bytes that no compressor made give an error or
    /// some content, never more; on an error `dst` holds anything.
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

    /// Decompresses `src`, whose content is as long as `dst`, as far as the first `start_bytes` of it need; what `dst`
    /// holds behind them is anything. lz4 stops there, zstd cannot. Errors as [`decompress`](Self::decompress) gives them.
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

/// What a piece for `dst` begins with, and the rest of it.
fn kind<'a>(src: &'a [u8], dst: &[u8]) -> Result<(u8, &'a [u8]), CodecError> {
    match src.split_first() {
        Some((&PLAIN, rest)) => Ok((PLAIN, rest)),
        Some((&PLANES, rest)) if !dst.is_empty() && dst.len().is_multiple_of(PAGE_BYTES) => Ok((PLANES, rest)),
        _ => Err(CodecError),
    }
}

/// The word that `src` repeats, if it is nothing else; never for a length that is not a multiple of 8.
/// Most content is told apart by its first, second and last word.
pub fn fill_word(src: &[u8]) -> Option<u64> {
    let (words, rest) = src.as_chunks::<8>();
    let (first, last) = (*words.first()?, *words.last()?);
    if !rest.is_empty() || first != last || words.get(1).is_some_and(|second| *second != first) {
        return None;
    }
    let word = u64::from_ne_bytes(first);
    // Sixteen words at a time without a branch: that becomes vector instructions.
    let (lines, rest) = words.as_chunks::<16>();
    let differs =
        |words: &[[u8; 8]]| words.iter().fold(0, |bits, &other| bits | (u64::from_ne_bytes(other) ^ word)) != 0;
    if lines.iter().any(|line| differs(line)) || differs(rest) { None } else { Some(word) }
}

/// Checksum of stored bytes: xxh3, which costs about a tenth of decompressing them.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
