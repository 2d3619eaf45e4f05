//! Hooks of functions that give the program memory: `mmap`, `mprotect`, `mremap`, and those of
//! malloc.
//!
//! They send allocation notices, so that the monitor can register the memory before the program
//! fills it, and change nothing else. There is no lock.

use super::{
    ALIGNED_ALLOC, CALLOC, MALLOC, MEMALIGN, MMAP, MPROTECT, MREMAP, POSIX_MEMALIGN, PVALLOC, REALLOC, REALLOCARRAY,
    VALLOC, missing,
};
use crate::c_library::errno;
use crate::start::runtime;
use foliomem_runtime::runtime::Runtime;
use foliomem_sys::maps::ADDRESSES_END;
use foliomem_types::units::PAGE_BYTES;
use libc::{c_int, c_void, size_t};

type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, i64) -> *mut c_void;
type PosixMemalign = unsafe extern "C" fn(*mut *mut c_void, size_t, size_t) -> c_int;
type Mprotect = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Mremap = unsafe extern "C" fn(*mut c_void, size_t, size_t, c_int, *mut c_void) -> *mut c_void;

/// Size from which malloc may return a mapping of its own, in bytes. Smaller pieces come from a
/// heap, which is managed as it grows.
const LARGE_BYTES: usize = 128 << 10;

/// Sends a notice that malloc has returned `bytes` at `start`, unless `start` is null. Returns
/// `start`.
#[inline]
fn allocated(start: *mut c_void, bytes: usize) -> *mut c_void {
    if let Some(runtime) = runtime()
        && (bytes >= LARGE_BYTES || runtime.is_watched(start.addr().wrapping_add(bytes)))
    {
        notify(runtime, start, bytes);
    }
    start
}

#[cold]
fn notify(runtime: &Runtime, start: *mut c_void, bytes: usize) {
    if !start.is_null() {
        let end = start.addr().saturating_add(bytes).min(ADDRESSES_END).next_multiple_of(PAGE_BYTES);
        runtime.notify_allocation(start.addr() & !(PAGE_BYTES - 1)..end);
    }
}

/// Returns null with ENOSYS: the real function does not exist.
fn missing_allocator() -> *mut c_void {
    missing();
    std::ptr::null_mut()
}

/// `mmap(2)`, with a 64-bit offset.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    let flags = without_populate(bytes, flags);
    // SAFETY: the type is the function's; the caller keeps its contract.
    let start = unsafe {
        let Some(real) = MMAP.get::<Mmap>() else {
            missing();
            return libc::MAP_FAILED;
        };
        real(address, bytes, protection, flags, file, offset)
    };
    mapped(start, bytes, protection, flags);
    start
}

fn is_private_anonymous(flags: c_int) -> bool {
    flags & libc::MAP_PRIVATE != 0 && flags & libc::MAP_ANONYMOUS != 0
}

/// Returns the flags with which to map `bytes`: without `MAP_POPULATE` if there is no room for
/// `bytes`. The kernel would populate the memory before the agent manages it, so the program could
/// not be made to wait for room. The program cannot rely on `MAP_POPULATE`: the kernel does not
/// promise to populate memory.
pub(super) fn without_populate(bytes: usize, flags: c_int) -> c_int {
    let is_populated = is_private_anonymous(flags) && flags & libc::MAP_POPULATE != 0;
    let has_no_room = is_populated && runtime().is_some_and(|runtime| runtime.is_short_of_room(bytes));
    if has_no_room { flags & !libc::MAP_POPULATE } else { flags }
}

/// Sends a notice that the program has mapped memory at `start`, unless that has failed.
pub(super) fn mapped(start: *mut c_void, bytes: usize, protection: c_int, flags: c_int) {
    if start == libc::MAP_FAILED || !is_private_anonymous(flags) {
        return;
    }
    let Some(runtime) = runtime() else { return };
    // Reserved memory, more than the limit, is not filled soon; executable memory is not managed.
    let is_reserve =
        flags & libc::MAP_GROWSDOWN != 0 || flags & libc::MAP_NORESERVE != 0 && runtime.exceeds_limit(bytes);
    if !is_reserve && protection & (libc::PROT_WRITE | libc::PROT_EXEC) == libc::PROT_WRITE {
        notify(runtime, start, bytes);
    }
}

/// Sends a notice that the program has changed a range's protection to `protection`, unless that
/// has `failed`.
pub(super) fn protected(start: *mut c_void, bytes: usize, protection: c_int, failed: bool) {
    // The program may fill reserved memory from now on.
    if protection == libc::PROT_READ | libc::PROT_WRITE
        && !failed
        && let Some(runtime) = runtime()
    {
        notify(runtime, start, bytes);
    }
}

/// `mprotect(2)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, bytes: size_t, protection: c_int) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract.
    let failed = unsafe { MPROTECT.get::<Mprotect>().map_or_else(missing, |real| real(start, bytes, protection)) };
    protected(start, bytes, protection, failed != 0);
    failed
}

/// Runs `act` on the mapping of `bytes` at `start`. The kernel refuses a range with two mappings,
/// and the agent splits mappings that are one to the program. If `act` fails for this reason, the
/// agent merges these mappings, and `act` runs again.
pub(super) fn on_whole_mapping<R>(
    start: usize,
    bytes: usize,
    act: impl Fn() -> R,
    has_failed: impl Fn(&R) -> bool,
) -> R {
    // SAFETY: `errno` returns the calling thread's errno.
    let errno = unsafe { &mut *errno() };
    let before = *errno;
    let result = act();
    let range = start..start.saturating_add(bytes);
    if !has_failed(&result) || *errno != libc::EFAULT || !runtime().is_some_and(|runtime| runtime.merge_mappings(range))
    {
        return result;
    }
    *errno = before;
    act()
}

/// `mremap(2)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_bytes: size_t,
    bytes: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    // SAFETY: the type is the function's; the caller keeps its contract.
    let Some(real) = (unsafe { MREMAP.get::<Mremap>() }) else {
        missing();
        return libc::MAP_FAILED;
    };
    // SAFETY: the type is the function's; the caller keeps its contract.
    let act = || unsafe { real(old, old_bytes, bytes, flags, new) };
    on_whole_mapping(old.addr(), old_bytes, act, |&result| result == libc::MAP_FAILED)
}

/// `mmap64(2)`: another name of `mmap` with a 64-bit offset.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller keeps the contract of `mmap`.
    unsafe { mmap(address, bytes, protection, flags, file, offset) }
}

/// Functions of malloc that return an allocation of `$bytes`.
macro_rules! allocating {
    ($($(#[$doc:meta])* $function:ident($($argument:ident: $type:ty),*) = $real:ident, $bytes:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The caller keeps the contract of the C library's function.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub unsafe extern "C" fn $function($($argument: $type),*) -> *mut c_void {
            type Function = unsafe extern "C" fn($($type),*) -> *mut c_void;
            // SAFETY: the type is the function's; the caller keeps its contract.
            unsafe { $real.get::<Function>().map_or_else(missing_allocator, |real| allocated(real($($argument),*), $bytes)) }
        }
    )*};
}

allocating! {
    /// `malloc(3)`.
    malloc(bytes: size_t) = MALLOC, bytes;
    /// `calloc(3)`.
    calloc(count: size_t, bytes: size_t) = CALLOC, count.saturating_mul(bytes);
    /// `realloc(3)`.
    realloc(old: *mut c_void, bytes: size_t) = REALLOC, bytes;
    /// `reallocarray(3)`.
    reallocarray(old: *mut c_void, count: size_t, bytes: size_t) = REALLOCARRAY, count.saturating_mul(bytes);
    /// `memalign(3)`.
    memalign(alignment: size_t, bytes: size_t) = MEMALIGN, bytes;
    /// `aligned_alloc(3)`.
    aligned_alloc(alignment: size_t, bytes: size_t) = ALIGNED_ALLOC, bytes;
    /// `valloc(3)`.
    valloc(bytes: size_t) = VALLOC, bytes;
    /// `pvalloc(3)`.
    pvalloc(bytes: size_t) = PVALLOC, bytes;
}

/// `posix_memalign(3)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(start: *mut *mut c_void, alignment: size_t, bytes: size_t) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract. If the real function
    // succeeds, it has written to `start`.
    unsafe {
        let Some(real) = POSIX_MEMALIGN.get::<PosixMemalign>() else { return libc::ENOSYS };
        let failed = real(start, alignment, bytes);
        if failed == 0 {
            allocated(*start, bytes);
        }
        failed
    }
}
