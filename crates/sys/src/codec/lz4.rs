//! lz4 in its block format, through the calls of the C library that take state owned by the caller.

use super::CodecError;
use super::workspace::Workspace;
use libc::{c_char, c_int, c_void};
// The crate only builds and links the library: it does not declare the calls with the caller's
// state.
use lz4_sys as _;

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
    fn LZ4_decompress_safe_partial(
        src: *const c_char,
        dst: *mut c_char,
        src_bytes: c_int,
        wanted_bytes: c_int,
        dst_bytes: c_int,
    ) -> c_int;
}

/// Pieces of this length and longer, in bytes, are compressed faster and a little worse.
const LARGE_BYTES: usize = 64 << 10;

/// Returns lz4's acceleration for a piece of `src_bytes`.
///
/// For a small piece a saved byte is worth more than the time. A large piece compresses better than
/// small ones anyway and is swapped out in bulk, so it gets 2: about 5% faster for 2.4% of the
/// bytes.
fn acceleration(src_bytes: usize) -> c_int {
    if src_bytes < LARGE_BYTES { 1 } else { 2 }
}

/// A compressor: the memory of lz4's hash table.
#[derive(Debug)]
pub(super) struct Compressor(Workspace);

impl Compressor {
    /// Makes a compressor.
    pub(super) fn new() -> Compressor {
        // SAFETY: the function only returns a constant.
        let bytes = unsafe { LZ4_sizeofState() };
        Compressor(Workspace::new(usize::try_from(bytes).unwrap_or(0)))
    }

    /// Returns the size of the hash table in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Compresses `src` into `dst` and returns the number of bytes written, or `None` if the result
    /// does not fit.
    pub(super) fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let (src_bytes, dst_bytes) = (c_int::try_from(src.len()).ok()?, c_int::try_from(dst.len()).ok()?);
        // SAFETY: the workspace has the size that lz4 asked for, is aligned and borrowed
        // exclusively; lz4 initialises it first. lz4 reads `src_bytes` of `src` and writes at most
        // `dst_bytes` of `dst`, and these are the lengths of the slices.
        let len = unsafe {
            LZ4_compress_fast_extState(
                self.0.as_mut_ptr(),
                src.as_ptr().cast(),
                dst.as_mut_ptr().cast(),
                src_bytes,
                dst_bytes,
                acceleration(src.len()),
            )
        };
        usize::try_from(len).ok().filter(|&len| len > 0)
    }
}

/// Decompresses `src` until `dst` is full. Returns the number of bytes written.
///
/// # Errors
/// Fails if `src` is damaged or longer than `c_int::MAX`.
pub(super) fn decompress_start(src: &[u8], dst: &mut [u8]) -> Result<usize, CodecError> {
    let (src_bytes, dst_bytes) = (length(src.len())?, length(dst.len())?);
    // SAFETY: lz4 checks every read against `src_bytes` and every write against `dst_bytes`, which
    // are the lengths of the slices, for any input.
    let len = unsafe {
        LZ4_decompress_safe_partial(src.as_ptr().cast(), dst.as_mut_ptr().cast(), src_bytes, dst_bytes, dst_bytes)
    };
    usize::try_from(len).map_err(|_| CodecError)
}

/// Decompresses all of `src`. Returns the number of bytes written to `dst`.
///
/// # Errors
/// Fails if `src` is damaged, or if its content is longer than `dst`.
pub(super) fn decompress(src: &[u8], dst: &mut [u8]) -> Result<usize, CodecError> {
    let (src_bytes, dst_bytes) = (length(src.len())?, length(dst.len())?);
    // SAFETY: lz4 checks every read against `src_bytes` and every write against `dst_bytes`, which
    // are the lengths of the slices, for any input.
    let len = unsafe { LZ4_decompress_safe(src.as_ptr().cast(), dst.as_mut_ptr().cast(), src_bytes, dst_bytes) };
    usize::try_from(len).map_err(|_| CodecError)
}

/// Converts a length to the type that lz4 takes.
fn length(bytes: usize) -> Result<c_int, CodecError> {
    c_int::try_from(bytes).map_err(|_| CodecError)
}
