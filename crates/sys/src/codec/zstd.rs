//! zstd through static contexts, with frames that have no magic number and no content size.
//!
//! A static context lies at the start of a [`Workspace`] and lives as long. It is initialised once
//! and its parameters stay for all frames. If zstd found the memory too small for a piece, it would
//! return an error and the piece would be kept raw; the tests rule that out for every level and
//! size.
//!
//! A dictionary is *attached*: any number of threads search its tables in place, after the tables
//! of the piece. Copying the tables for each piece would cost more than compressing it.

use super::dictionary::SMALL_PIECE_BYTES;
use super::workspace::Workspace;
use super::{CodecError, MAX_PIECE_BYTES};
use foliomem_types::units::Order;
use libc::c_int;
use zstd_sys::{
    ZSTD_BLOCKSIZE_MAX, ZSTD_CCtx_refCDict, ZSTD_CCtx_reset, ZSTD_CCtx_setParameter, ZSTD_DCtx_refDDict,
    ZSTD_DCtx_setParameter, ZSTD_ResetDirective, ZSTD_cParameter, ZSTD_compress2, ZSTD_dParameter, ZSTD_decompressDCtx,
    ZSTD_dictAttachPref_e, ZSTD_dictContentType_e, ZSTD_dictLoadMethod_e, ZSTD_estimateCCtxSize_usingCParams,
    ZSTD_estimateCDictSize_advanced, ZSTD_estimateDCtxSize, ZSTD_estimateDDictSize, ZSTD_format_e, ZSTD_getCParams,
    ZSTD_initStaticCCtx, ZSTD_initStaticCDict, ZSTD_initStaticDCtx, ZSTD_initStaticDDict, ZSTD_isError,
};

/// The parameter `ZSTD_c_maxBlockSize`: maximum number of bytes that share an entropy code.
const MAX_BLOCK_BYTES: ZSTD_cParameter = ZSTD_cParameter::ZSTD_c_experimentalParam18;
/// Minimum length of a part with an entropy code of its own, in bytes. Describing a code takes
/// about 100 bytes.
const MIN_PART_BYTES: usize = 2048;

/// Returns the result of a zstd call, or `None` if it is an error.
fn checked(result: usize) -> Option<usize> {
    // SAFETY: the function only examines the number.
    if unsafe { ZSTD_isError(result) } == 0 { Some(result) } else { None }
}

/// Returns the size of a context that can compress pieces of any size at `level`, in bytes. zstd
/// selects parameters by level and by the content's size, rounded up to a power of two.
fn compressor_bytes(level: c_int) -> usize {
    let sizes = std::iter::once(1 << 8).chain(Order::all().map(|order| order.bytes() as u64));
    sizes
        .filter_map(|size| {
            // SAFETY: both functions only calculate with the numbers.
            checked(unsafe { ZSTD_estimateCCtxSize_usingCParams(ZSTD_getCParams(level, size, 0)) })
        })
        .max()
        .unwrap_or(0)
}

/// Content that pieces may refer to, prepared for compressing and decompressing.
#[derive(Debug)]
pub(super) struct Dictionary {
    compress: Workspace,
    decompress: Workspace,
    /// The content. The two workspaces refer to it.
    _content: Box<[u8]>,
}

// SAFETY: after `new`, the two workspaces are only read: zstd takes them as pointers to const, and
// documents that any number of threads may use them at the same time.
unsafe impl Sync for Dictionary {}

impl Dictionary {
    /// Prepares `content` for pieces of up to [`SMALL_PIECE_BYTES`] at `level`. Returns `None` if
    /// zstd refuses it.
    pub(super) fn new(content: Box<[u8]>, level: u8) -> Option<Dictionary> {
        let by_reference = ZSTD_dictLoadMethod_e::ZSTD_dlm_byRef;
        let raw = ZSTD_dictContentType_e::ZSTD_dct_rawContent;
        // SAFETY: the functions only calculate with the numbers.
        let (parameters, compress_bytes, decompress_bytes) = unsafe {
            let parameters = ZSTD_getCParams(c_int::from(level), SMALL_PIECE_BYTES as u64, content.len());
            let compress_bytes = ZSTD_estimateCDictSize_advanced(content.len(), parameters, by_reference);
            (parameters, compress_bytes, ZSTD_estimateDDictSize(content.len(), by_reference))
        };
        let (mut compress, mut decompress) = (Workspace::new(compress_bytes), Workspace::new(decompress_bytes));
        let start = content.as_ptr().cast();
        // SAFETY: each dictionary lies at the start of a workspace, which is aligned to 64 and of
        // the given length. Both refer to `content`; the `Dictionary` keeps it as long as the
        // workspaces, and moving the box does not move it.
        let made = unsafe {
            let (memory, bytes) = (compress.as_mut_ptr(), compress.bytes());
            let cdict = ZSTD_initStaticCDict(memory, bytes, start, content.len(), by_reference, raw, parameters);
            let (memory, bytes) = (decompress.as_mut_ptr(), decompress.bytes());
            let ddict = ZSTD_initStaticDDict(memory, bytes, start, content.len(), by_reference, raw);
            !cdict.is_null() && !ddict.is_null()
        };
        made.then_some(Dictionary { compress, decompress, _content: content })
    }
}

/// A compression context.
#[derive(Debug)]
pub(super) struct Compressor {
    memory: Workspace,
    level: u8,
    /// Whether the context refers to a dictionary.
    has_dictionary: bool,
    /// Maximum number of bytes that share an entropy code; 0 lets zstd choose.
    block_bytes: usize,
}

impl Compressor {
    /// Makes a context for `level`.
    ///
    /// # Panics
    /// If zstd refuses memory of the size that it asked for, or a documented parameter.
    pub(super) fn new(level: u8) -> Compressor {
        let mut memory = Workspace::new(compressor_bytes(c_int::from(level)));
        // SAFETY: the workspace is owned, aligned to 64 and of the given length.
        let context = unsafe { ZSTD_initStaticCCtx(memory.as_mut_ptr(), memory.bytes()) };
        assert!(!context.is_null(), "zstd refuses its working memory");
        let parameters = [
            (ZSTD_cParameter::ZSTD_c_compressionLevel, c_int::from(level)),
            (ZSTD_cParameter::ZSTD_c_contentSizeFlag, 0),
            (ZSTD_cParameter::ZSTD_c_experimentalParam2, ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int),
            (ZSTD_cParameter::ZSTD_c_experimentalParam4, ZSTD_dictAttachPref_e::ZSTD_dictForceAttach as c_int),
        ];
        for (parameter, value) in parameters {
            // SAFETY: zstd has just initialised the context, and nobody else uses it.
            let result = unsafe { ZSTD_CCtx_setParameter(context, parameter, value) };
            assert!(checked(result).is_some(), "zstd refuses {parameter:?}");
        }
        Compressor { memory, level, has_dictionary: false, block_bytes: 0 }
    }

    /// Returns the size of the context in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Returns the compression level.
    pub(super) fn level(&self) -> u8 {
        self.level
    }

    /// Detaches the dictionary of the last piece. A caller that frees this dictionary must call it.
    pub(super) fn forget_dictionary(&mut self) {
        self.refer_to(None);
    }

    /// Attaches `dictionary`, or detaches the last one.
    fn refer_to(&mut self, dictionary: Option<&Dictionary>) {
        if dictionary.is_none() && !self.has_dictionary {
            return;
        }
        let start = dictionary.map_or(std::ptr::null(), |dictionary| dictionary.compress.as_ptr());
        // SAFETY: a context lies at the start of the memory since `new`, a dictionary at the start
        // of its workspace. The context reads the dictionary only in `compress`, which borrows it.
        // The reset ends a frame that did not fit.
        let result = unsafe {
            let context = self.memory.as_mut_ptr().cast();
            ZSTD_CCtx_reset(context, ZSTD_ResetDirective::ZSTD_reset_session_only);
            ZSTD_CCtx_refCDict(context, start.cast())
        };
        assert!(checked(result).is_some(), "zstd refuses a dictionary between pieces");
        self.has_dictionary = dictionary.is_some();
    }

    /// Sets the maximum number of bytes that share an entropy code.
    fn set_block_bytes(&mut self, block_bytes: usize) {
        if block_bytes == self.block_bytes {
            return;
        }
        // SAFETY: a context lies at the start of the memory since `new`. The reset ends a frame
        // that did not fit.
        let result = unsafe {
            let context = self.memory.as_mut_ptr().cast();
            ZSTD_CCtx_reset(context, ZSTD_ResetDirective::ZSTD_reset_session_only);
            ZSTD_CCtx_setParameter(context, MAX_BLOCK_BYTES, block_bytes as c_int)
        };
        assert!(checked(result).is_some(), "zstd refuses blocks of {block_bytes} bytes");
        self.block_bytes = block_bytes;
    }

    /// Compresses `src` into `dst` and returns the number of bytes written, or `None` if the result
    /// does not fit.
    ///
    /// `src` consists of `parts` parts of equal length. Each part gets an entropy code of its own
    /// if it is long enough to pay for it. With a dictionary, `src` is at most
    /// [`SMALL_PIECE_BYTES`] long.
    pub(super) fn compress(
        &mut self,
        dictionary: Option<&Dictionary>,
        src: &[u8],
        parts: usize,
        dst: &mut [u8],
    ) -> Option<usize> {
        debug_assert!(src.len() <= if dictionary.is_some() { SMALL_PIECE_BYTES } else { MAX_PIECE_BYTES });
        self.refer_to(dictionary);
        let part_bytes = (src.len() / parts).min(ZSTD_BLOCKSIZE_MAX as usize);
        self.set_block_bytes(if parts > 1 && part_bytes >= MIN_PART_BYTES { part_bytes } else { 0 });
        // SAFETY: a context lies at the start of the memory since `new`. zstd reads only `src` and
        // writes only `dst`, within the given lengths. The attached dictionary is borrowed until
        // this call ends.
        let result = unsafe {
            ZSTD_compress2(
                self.memory.as_mut_ptr().cast(),
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
pub(super) struct Decompressor {
    memory: Workspace,
    /// Whether the context refers to a dictionary.
    has_dictionary: bool,
}

impl Decompressor {
    /// Makes a context.
    ///
    /// # Panics
    /// If zstd refuses memory of the size that it asked for, or a documented parameter.
    pub(super) fn new() -> Decompressor {
        // SAFETY: the function only returns a constant.
        let mut memory = Workspace::new(unsafe { ZSTD_estimateDCtxSize() });
        // SAFETY: the workspace is owned, aligned to 64 and of the given length.
        let context = unsafe { ZSTD_initStaticDCtx(memory.as_mut_ptr(), memory.bytes()) };
        assert!(!context.is_null(), "zstd refuses its working memory");
        let magicless = ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int;
        // SAFETY: zstd has just initialised the context, and nobody else uses it.
        let result = unsafe { ZSTD_DCtx_setParameter(context, ZSTD_dParameter::ZSTD_d_experimentalParam1, magicless) };
        assert!(checked(result).is_some(), "zstd refuses frames without magic number");
        Decompressor { memory, has_dictionary: false }
    }

    /// Decompresses all of `src`, which was compressed with `dictionary`. Returns the number of
    /// bytes written to `dst`.
    ///
    /// # Errors
    /// Fails if `src` is damaged, or if its content is longer than `dst`.
    pub(super) fn decompress(
        &mut self,
        dictionary: Option<&Dictionary>,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<usize, CodecError> {
        if dictionary.is_some() || self.has_dictionary {
            let start = dictionary.map_or(std::ptr::null(), |dictionary| dictionary.decompress.as_ptr());
            // SAFETY: a context lies at the start of the memory since `new`, the dictionary at the
            // start of its workspace. The context reads the dictionary only below, under this
            // function's borrow.
            let result = unsafe { ZSTD_DCtx_refDDict(self.memory.as_mut_ptr().cast(), start.cast()) };
            checked(result).ok_or(CodecError)?;
            self.has_dictionary = dictionary.is_some();
        }
        // SAFETY: a context lies at the start of the memory since `new`. zstd reads only `src` and
        // writes only `dst`, within the given lengths, for any input.
        let result = unsafe {
            ZSTD_decompressDCtx(
                self.memory.as_mut_ptr().cast(),
                dst.as_mut_ptr().cast(),
                dst.len(),
                src.as_ptr().cast(),
                src.len(),
            )
        };
        checked(result).ok_or(CodecError)
    }
}
