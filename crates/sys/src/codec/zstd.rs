//! zstd, in frames without magic number and content size, through static contexts.
//!
//! A static context lives in memory of ours, at its start, for as long as that memory. It is set up once;
//! its parameters stay for all frames. If zstd ever found the memory too small for a piece it would say
//! so, and the piece would be kept raw; the tests rule that out for every level and size.
//!
//! A dictionary is *attached*: its tables are searched where they are, by any number of threads, after those of the
//! piece. (Copied, for each piece, they would cost more than compressing it.)

use super::dictionary::SMALL_PIECE_BYTES;
use super::workspace::Workspace;
use super::{CodecError, PIECE_MAX_BYTES};
use foliomem_types::units::Order;
use libc::c_int;
use zstd_sys::{
    ZSTD_BLOCKSIZE_MAX, ZSTD_CCtx_refCDict, ZSTD_CCtx_reset, ZSTD_CCtx_setParameter, ZSTD_DCtx_refDDict,
    ZSTD_DCtx_setParameter, ZSTD_ResetDirective, ZSTD_cParameter, ZSTD_compress2, ZSTD_dParameter, ZSTD_decompressDCtx,
    ZSTD_dictAttachPref_e, ZSTD_dictContentType_e, ZSTD_dictLoadMethod_e, ZSTD_estimateCCtxSize_usingCParams,
    ZSTD_estimateCDictSize_advanced, ZSTD_estimateDCtxSize, ZSTD_estimateDDictSize, ZSTD_format_e, ZSTD_getCParams,
    ZSTD_initStaticCCtx, ZSTD_initStaticCDict, ZSTD_initStaticDCtx, ZSTD_initStaticDDict, ZSTD_isError,
};

const MAX_BLOCK_BYTES: ZSTD_cParameter = ZSTD_cParameter::ZSTD_c_experimentalParam18;
/// Shorter parts share an entropy code: to describe one takes about 100 bytes.
const PART_LEAST_BYTES: usize = 2048;

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

/// Content that pieces may refer to, ready for compressing and decompressing.
#[derive(Debug)]
pub(super) struct Dictionary {
    compress: Workspace,
    decompress: Workspace,
    /// The other two refer to it.
    _content: Box<[u8]>,
}

// SAFETY: what lies in the two workspaces is only read once it is made: zstd takes it as pointers to const, and
// documents that any number of threads may use it at once.
unsafe impl Sync for Dictionary {}

impl Dictionary {
    /// For pieces of up to [`SMALL_PIECE_BYTES`] at `level`. `None` if the library refuses.
    pub(super) fn new(content: Box<[u8]>, level: u8) -> Option<Dictionary> {
        let by_reference = ZSTD_dictLoadMethod_e::ZSTD_dlm_byRef;
        let raw = ZSTD_dictContentType_e::ZSTD_dct_rawContent;
        // SAFETY: arithmetic on numbers.
        let (parameters, compress_bytes, decompress_bytes) = unsafe {
            let parameters = ZSTD_getCParams(c_int::from(level), SMALL_PIECE_BYTES as u64, content.len());
            let compress_bytes = ZSTD_estimateCDictSize_advanced(content.len(), parameters, by_reference);
            (parameters, compress_bytes, ZSTD_estimateDDictSize(content.len(), by_reference))
        };
        let (mut compress, mut decompress) = (Workspace::new(compress_bytes), Workspace::new(decompress_bytes));
        let start = content.as_ptr().cast();
        // SAFETY: both lie at the start of memory of ours, aligned to 64 and as long as said, and refer to the content,
        // which lives and stays where it is as long as they.
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
    /// The context refers to a dictionary.
    has_dictionary: bool,
    /// The most that has one entropy code; 0 for the library's own choice.
    block_bytes: usize,
}

impl Compressor {
    /// # Panics
    /// If the library refuses memory of the size it asked for, or parameters it documents.
    pub(super) fn new(level: u8) -> Compressor {
        let mut memory = Workspace::new(compressor_bytes(c_int::from(level)));
        // SAFETY: the memory is ours, aligned to 64 and as long as said.
        let context = unsafe { ZSTD_initStaticCCtx(memory.as_mut_ptr(), memory.bytes()) };
        assert!(!context.is_null(), "zstd refuses its working memory");
        let parameters = [
            (ZSTD_cParameter::ZSTD_c_compressionLevel, c_int::from(level)),
            (ZSTD_cParameter::ZSTD_c_contentSizeFlag, 0),
            (ZSTD_cParameter::ZSTD_c_experimentalParam2, ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int),
            (ZSTD_cParameter::ZSTD_c_experimentalParam4, ZSTD_dictAttachPref_e::ZSTD_dictForceAttach as c_int),
        ];
        for (parameter, value) in parameters {
            // SAFETY: the context was just made.
            let result = unsafe { ZSTD_CCtx_setParameter(context, parameter, value) };
            assert!(checked(result).is_some(), "zstd refuses {parameter:?}");
        }
        Compressor { memory, level, has_dictionary: false, block_bytes: 0 }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(super) fn level(&self) -> u8 {
        self.level
    }

    /// From now on the context refers to no dictionary: who frees one that it was used with must say so.
    pub(super) fn forget_dictionary(&mut self) {
        self.refer_to(None);
    }

    fn refer_to(&mut self, dictionary: Option<&Dictionary>) {
        if dictionary.is_none() && !self.has_dictionary {
            return;
        }
        let start = dictionary.map_or(std::ptr::null(), |dictionary| dictionary.compress.as_ptr());
        // SAFETY: a context lies at the start of the memory since `new`; the dictionary at that of its own. The
        // context looks at it only while it compresses, which `compress` does under the borrow it was given. A piece
        // that did not fit has left it in the middle of a frame.
        let result = unsafe {
            let context = self.memory.as_mut_ptr().cast();
            ZSTD_CCtx_reset(context, ZSTD_ResetDirective::ZSTD_reset_session_only);
            ZSTD_CCtx_refCDict(context, start.cast())
        };
        assert!(checked(result).is_some(), "zstd refuses a dictionary between pieces");
        self.has_dictionary = dictionary.is_some();
    }

    fn code_by(&mut self, block_bytes: usize) {
        if block_bytes == self.block_bytes {
            return;
        }
        // SAFETY: a context lies at the start of the memory since `new`. A piece that did not fit has left it in the middle of
        // a frame.
        let result = unsafe {
            let context = self.memory.as_mut_ptr().cast();
            ZSTD_CCtx_reset(context, ZSTD_ResetDirective::ZSTD_reset_session_only);
            ZSTD_CCtx_setParameter(context, MAX_BLOCK_BYTES, block_bytes as c_int)
        };
        assert!(checked(result).is_some(), "zstd refuses blocks of {block_bytes} bytes");
        self.block_bytes = block_bytes;
    }

    /// `None` where the result does not fit into `dst`. A piece with a dictionary is at most [`SMALL_PIECE_BYTES`] long. Each of
    /// so many `parts` of equal length gets an entropy code of its own, if it is long enough to pay for that.
    pub(super) fn compress(
        &mut self,
        dictionary: Option<&Dictionary>,
        src: &[u8],
        parts: usize,
        dst: &mut [u8],
    ) -> Option<usize> {
        debug_assert!(src.len() <= if dictionary.is_some() { SMALL_PIECE_BYTES } else { PIECE_MAX_BYTES });
        self.refer_to(dictionary);
        let part_bytes = (src.len() / parts).min(ZSTD_BLOCKSIZE_MAX as usize);
        self.code_by(if parts > 1 && part_bytes >= PART_LEAST_BYTES { part_bytes } else { 0 });
        // SAFETY: a context lies at the start of the memory since `new`. zstd reads the one slice and
        // writes at most the other.
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
    /// The context refers to a dictionary.
    has_dictionary: bool,
}

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
        Decompressor { memory, has_dictionary: false }
    }

    /// Decompresses all of `src`, which was compressed with `dictionary`; returns how much of `dst` that filled.
    pub(super) fn decompress(
        &mut self,
        dictionary: Option<&Dictionary>,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<usize, CodecError> {
        if dictionary.is_some() || self.has_dictionary {
            let start = dictionary.map_or(std::ptr::null(), |dictionary| dictionary.decompress.as_ptr());
            // SAFETY: as for compressing: the context looks at the dictionary only below, under the borrow.
            let result = unsafe { ZSTD_DCtx_refDDict(self.memory.as_mut_ptr().cast(), start.cast()) };
            checked(result).ok_or(CodecError)?;
            self.has_dictionary = dictionary.is_some();
        }
        // SAFETY: a context lies at the start of the memory since `new`. zstd reads only the one slice and
        // writes only the other, whatever the input.
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
