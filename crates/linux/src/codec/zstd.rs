//! zstd, in frames without magic number and content size, through static contexts.
//!
//! A static context lives in memory of ours, at its start, for as long as that memory. It is set up once;
//! its parameters stay for all frames. If zstd ever found the memory too small for a piece it would say
//! so, and the piece would be kept raw; the tests rule that out for every level and size.

use super::workspace::Workspace;
use super::{CodecError, PIECE_MAX_BYTES};
use foliomem_core::units::Order;
use libc::c_int;
use zstd_sys::{
    ZSTD_CCtx_setParameter, ZSTD_DCtx_setParameter, ZSTD_cParameter, ZSTD_compress2, ZSTD_dParameter,
    ZSTD_decompressDCtx, ZSTD_estimateCCtxSize_usingCParams, ZSTD_estimateDCtxSize, ZSTD_format_e, ZSTD_getCParams,
    ZSTD_initStaticCCtx, ZSTD_initStaticDCtx, ZSTD_isError,
};

/// What a call of zstd came to.
fn checked(result: usize) -> Option<usize> {
    // SAFETY: looks at the number only.
    if unsafe { ZSTD_isError(result) } == 0 { Some(result) } else { None }
}

/// Memory for compressing pieces of any size at `level`. zstd picks its parameters by level and by the
/// size of the content rounded up to a power of two: no piece needs more than the hungriest of those.
fn compressor_bytes(level: c_int) -> usize {
    let sizes = std::iter::once(1 << 8).chain(Order::all().map(|order| order.bytes() as u64));
    sizes
        .filter_map(|size| {
            // SAFETY: arithmetic on numbers.
            checked(unsafe { ZSTD_estimateCCtxSize_usingCParams(ZSTD_getCParams(level, size, 0)) })
        })
        .max()
        .unwrap_or(0)
}

/// A compression context.
#[derive(Debug)]
pub(super) struct Compressor(Workspace);

impl Compressor {
    /// # Panics
    /// If the library refuses memory of the size it asked for, or parameters it documents.
    pub(super) fn new(level: u8) -> Compressor {
        let level = c_int::from(level);
        let mut memory = Workspace::new(compressor_bytes(level));
        // SAFETY: the memory is ours, aligned to 64 and as long as said.
        let context = unsafe { ZSTD_initStaticCCtx(memory.as_mut_ptr(), memory.bytes()) };
        assert!(!context.is_null(), "zstd refuses its working memory");
        let parameters = [
            (ZSTD_cParameter::ZSTD_c_compressionLevel, level),
            (ZSTD_cParameter::ZSTD_c_contentSizeFlag, 0),
            (ZSTD_cParameter::ZSTD_c_experimentalParam2, ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int),
        ];
        for (parameter, value) in parameters {
            // SAFETY: the context was just made.
            let result = unsafe { ZSTD_CCtx_setParameter(context, parameter, value) };
            assert!(checked(result).is_some(), "zstd refuses {parameter:?}");
        }
        Compressor(memory)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.bytes()
    }

    /// `None` where the result does not fit into `dst`.
    pub(super) fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        debug_assert!(src.len() <= PIECE_MAX_BYTES);
        // SAFETY: a context lies at the start of the memory since `new`. zstd reads the one slice and
        // writes at most the other.
        let result = unsafe {
            ZSTD_compress2(
                self.0.as_mut_ptr().cast(),
                dst.as_mut_ptr().cast(),
                dst.len(),
                src.as_ptr().cast(),
                src.len(),
            )
        };
        checked(result)
    }
}

/// A decompression context.
#[derive(Debug)]
pub(super) struct Decompressor(Workspace);

impl Decompressor {
    /// # Panics
    /// If the library refuses memory of the size it asked for, or parameters it documents.
    pub(super) fn new() -> Decompressor {
        // SAFETY: returns a constant.
        let mut memory = Workspace::new(unsafe { ZSTD_estimateDCtxSize() });
        // SAFETY: the memory is ours, aligned to 64 and as long as said.
        let context = unsafe { ZSTD_initStaticDCtx(memory.as_mut_ptr(), memory.bytes()) };
        assert!(!context.is_null(), "zstd refuses its working memory");
        let magicless = ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int;
        // SAFETY: the context was just made.
        let result = unsafe { ZSTD_DCtx_setParameter(context, ZSTD_dParameter::ZSTD_d_experimentalParam1, magicless) };
        assert!(checked(result).is_some(), "zstd refuses frames without magic number");
        Decompressor(memory)
    }

    /// Decompresses all of `src`; returns how much of `dst` that filled.
    pub(super) fn decompress(&mut self, src: &[u8], dst: &mut [u8]) -> Result<usize, CodecError> {
        // SAFETY: a context lies at the start of the memory since `new`. zstd reads only the one slice and
        // writes only the other, whatever the input.
        let result = unsafe {
            ZSTD_decompressDCtx(
                self.0.as_mut_ptr().cast(),
                dst.as_mut_ptr().cast(),
                dst.len(),
                src.as_ptr().cast(),
                src.len(),
            )
        };
        checked(result).ok_or(CodecError)
    }
}
