//! Compression: lz4 and zstd behind one type, with all working memory allocated up front.
//!
//! Compressors run in threads of a foreign program, which must not call malloc or touch thread-local
//! storage: so the C libraries are used through the calls that take caller-owned state.

use lz4_sys as _;
use libc::{c_char, c_int, c_void};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// How pieces are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Codec {
    /// Fast.
    Lz4,
    /// Denser.
    Zstd {
        /// 1 to 19.
        level: u8,
    },
}

/// The level of `zstd` without one.
const ZSTD_DEFAULT_LEVEL: u8 = 3;
const ZSTD_MAX_LEVEL: u8 = 19;

/// There is no codec of that name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("unknown codec {0:?}: use lz4, zstd or zstd:LEVEL with a level from 1 to 19")]
pub struct UnknownCodec(String);

impl FromStr for Codec {
    type Err = UnknownCodec;

    fn from_str(name: &str) -> Result<Codec, UnknownCodec> {
        let unknown = || UnknownCodec(name.to_owned());
        match name.split_once(':') {
            None if name == "lz4" => Ok(Codec::Lz4),
            None if name == "zstd" => Ok(Codec::Zstd { level: ZSTD_DEFAULT_LEVEL }),
            Some(("zstd", level)) => match level.parse() {
                Ok(level @ 1..=ZSTD_MAX_LEVEL) => Ok(Codec::Zstd { level }),
                _ => Err(unknown()),
            },
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Lz4 => f.write_str("lz4"),
            Codec::Zstd { level } => write!(f, "zstd:{level}"),
        }
    }
}

/// Compressed bytes that are not a compressed piece of the expected length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the compressed data is damaged")]
pub struct CodecError;

/// The largest piece.
const PIECE_MAX_BYTES: usize = 2 << 20;

unsafe extern "C" {
    fn LZ4_sizeofState() -> c_int;
    fn LZ4_compress_fast_extState(
        state: *mut c_void,
        src: *const c_char,
        dst: *mut c_char,
        src_bytes: c_int,
        dst_bytes: c_int,
        acceleration: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe(src: *const c_char, dst: *mut c_char, src_bytes: c_int, dst_bytes: c_int) -> c_int;
}

/// State for compressing.
pub struct Compressor(CompressorState);

enum CompressorState {
    Lz4(Box<[u64]>),
    Zstd(zstd_safe::CCtx<'static>),
}

impl Compressor {
    /// State for `codec`.
    pub fn new(codec: Codec) -> Compressor {
        Compressor(match codec {
            Codec::Lz4 => {
                // SAFETY: asks for a constant.
                let bytes = unsafe { LZ4_sizeofState() } as usize;
                CompressorState::Lz4(vec![0; bytes.div_ceil(8)].into_boxed_slice())
            }
            Codec::Zstd { level } => {
                let mut context = zstd_safe::CCtx::create();
                // A level in range cannot be refused.
                let _ = context.set_parameter(zstd_safe::CParameter::CompressionLevel(level.into()));
                CompressorState::Zstd(context)
            }
        })
    }

    /// Compresses `src` to the start of `dst`; `None` where that saves less than 1/16.
    pub fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let most = (src.len() - src.len() / 16).min(dst.len());
        match &mut self.0 {
            CompressorState::Lz4(state) => {
                // SAFETY: the state has the size lz4 asks for and is aligned to 8; lengths are the slices'.
                let len = unsafe {
                    LZ4_compress_fast_extState(
                        state.as_mut_ptr().cast(),
                        src.as_ptr().cast(),
                        dst.as_mut_ptr().cast(),
                        src.len() as c_int,
                        most as c_int,
                        1,
                    )
                };
                (len > 0).then_some(len as usize)
            }
            CompressorState::Zstd(context) => context.compress2(&mut dst[..most], src).ok(),
        }
    }
}

/// State for decompressing.
pub struct Decompressor(DecompressorState);

enum DecompressorState {
    Lz4,
    Zstd(zstd_safe::DCtx<'static>),
}

impl Decompressor {
    /// State for `codec`.
    pub fn new(codec: Codec) -> Decompressor {
        Decompressor(match codec {
            Codec::Lz4 => DecompressorState::Lz4,
            Codec::Zstd { .. } => DecompressorState::Zstd(zstd_safe::DCtx::create()),
        })
    }

    /// Decompresses `src` to exactly the length of `dst`.
    pub fn decompress(&mut self, src: &[u8], dst: &mut [u8]) -> Result<(), CodecError> {
        debug_assert!(dst.len() <= PIECE_MAX_BYTES);
        let len = match &mut self.0 {
            DecompressorState::Lz4 => {
                // SAFETY: lengths are the slices'; lz4 checks every input against them.
                let len = unsafe {
                    LZ4_decompress_safe(
                        src.as_ptr().cast(),
                        dst.as_mut_ptr().cast(),
                        src.len() as c_int,
                        dst.len() as c_int,
                    )
                };
                usize::try_from(len).map_err(|_| CodecError)?
            }
            DecompressorState::Zstd(context) => context.decompress(dst, src).map_err(|_| CodecError)?,
        };
        if len == dst.len() { Ok(()) } else { Err(CodecError) }
    }
}

/// The word that `src` repeats, if it is nothing else.
pub fn fill_word(src: &[u8]) -> Option<u64> {
    let (words, rest) = src.as_chunks::<8>();
    let first = *words.first().filter(|_| rest.is_empty())?;
    words.iter().all(|word| *word == first).then(|| u64::from_ne_bytes(first))
}

/// Checksum of stored bytes.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
