//! lz4, block format, through the C library's calls with caller-owned state.

use super::CodecError;
use super::workspace::Workspace;
use libc::{c_char, c_int, c_void};
// The crate only builds and links the library: it lacks the calls that take the caller's state.
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

/// A large piece.
const LARGE_BYTES: usize = 64 << 10;

/// Small pieces do not trade ratio for speed: a byte saved is worth more than the time it takes. A large piece is a sixth smaller
/// than the same in small ones anyway, and what is compressed in large ones goes out in bulk: there 2 is 5% faster for 2.4%
/// of the bytes (3 is no faster for another 1%).
fn acceleration(src_bytes: usize) -> c_int {
    if src_bytes < LARGE_BYTES { 1 } else { 2 }
}

/// lz4's hash table.
#[derive(Debug)]
pub(super) struct Compressor(Workspace);

impl Compressor {
    pub(super) fn new() -> Compressor {
        // SAFETY: returns a constant.
        let bytes = unsafe { LZ4_sizeofState() };
        Compressor(Workspace::new(usize::try_from(bytes).unwrap_or(0)))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.bytes()
    }

    /// `None` where the result does not fit into `dst`.
    pub(super) fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let (src_bytes, dst_bytes) = (c_int::try_from(src.len()).ok()?, c_int::try_from(dst.len()).ok()?);
        // SAFETY: the state has the size lz4 asked for, is aligned and ours; lz4 clears it first. It reads
        // `src_bytes` of the one slice and writes at most `dst_bytes` of the other.
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

/// Decompresses `src` until `dst` is full; returns how much of `dst` that filled.
pub(super) fn decompress_start(src: &[u8], dst: &mut [u8]) -> Result<usize, CodecError> {
    let (src_bytes, dst_bytes) = (length(src.len())?, length(dst.len())?);
    // SAFETY: as in `decompress`.
    let len = unsafe {
        LZ4_decompress_safe_partial(src.as_ptr().cast(), dst.as_mut_ptr().cast(), src_bytes, dst_bytes, dst_bytes)
    };
    usize::try_from(len).map_err(|_| CodecError)
}

/// Decompresses all of `src`; returns how much of `dst` that filled.
pub(super) fn decompress(src: &[u8], dst: &mut [u8]) -> Result<usize, CodecError> {
    let (src_bytes, dst_bytes) = (length(src.len())?, length(dst.len())?);
    // SAFETY: lz4 checks every read against `src_bytes` and every write against `dst_bytes`, which are the
    // slices' lengths, whatever the input.
    let len = unsafe { LZ4_decompress_safe(src.as_ptr().cast(), dst.as_mut_ptr().cast(), src_bytes, dst_bytes) };
    usize::try_from(len).map_err(|_| CodecError)
}

fn length(bytes: usize) -> Result<c_int, CodecError> {
    c_int::try_from(bytes).map_err(|_| CodecError)
}
