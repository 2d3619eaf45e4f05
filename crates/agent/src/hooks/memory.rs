//! Hooks of what gives the program memory: `mmap`, `mprotect`, `mremap`, and the functions of malloc.
//!
//! They report new memory, which may be managed before it is touched, and change nothing else.

use super::{
    ADDRESS_SPACE, ALIGNED_ALLOC, CALLOC, MALLOC, MEMALIGN, MMAP, MPROTECT, MREMAP, POSIX_MEMALIGN, PVALLOC, REALLOC,
    REALLOCARRAY, VALLOC, missing,
};
use crate::c_library::errno;
use crate::start::runtime;
use foliomem_runtime::runtime::Runtime;
use foliomem_types::units::PAGE_BYTES;
use libc::{c_int, c_void, size_t};

type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, i64) -> *mut c_void;
type PosixMemalign = unsafe extern "C" fn(*mut *mut c_void, size_t, size_t) -> c_int;
type Mprotect = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Mremap = unsafe extern "C" fn(*mut c_void, size_t, size_t, c_int, *mut c_void) -> *mut c_void;

/// What malloc gives out in smaller pieces comes from a heap, which is managed as it grows; larger ones may be mappings of their own.
const LARGE_BYTES: usize = 128 << 10;

/// Tells that malloc has given out `bytes` at `start`, if it has.
#[inline]
fn got(start: *mut c_void, bytes: usize) -> *mut c_void {
    if let Some(runtime) = runtime()
        && (bytes >= LARGE_BYTES || runtime.is_watched(start.addr().wrapping_add(bytes)))
    {
        grows(runtime, start, bytes);
    }
    start
}

#[cold]
fn grows(runtime: &Runtime, start: *mut c_void, bytes: usize) {
    if !start.is_null() {
        let end = start.addr().saturating_add(bytes).min(ADDRESS_SPACE).next_multiple_of(PAGE_BYTES);
        runtime.grows(start.addr() & !(PAGE_BYTES - 1)..end);
    }
}

/// Nothing, where there is no such function.
fn none() -> *mut c_void {
    missing();
    std::ptr::null_mut()
}

/// `mmap(2)`, with 64-bit offsets as all of them here.
///
/// # Safety
/// That of the C library's function.
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
    let flags = filled_later(bytes, flags);
    // SAFETY: as for `fork`.
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

/// The flags with which so many `bytes` are mapped: what is filled before anybody can manage it does not wait for room. To fill it is no promise of
/// the kernel's.
pub(super) fn filled_later(bytes: usize, flags: c_int) -> c_int {
    let is_filled = is_private_anonymous(flags) && flags & libc::MAP_POPULATE != 0;
    let is_too_much = is_filled && runtime().is_some_and(|runtime| runtime.is_short_of_room(bytes));
    if is_too_much { flags & !libc::MAP_POPULATE } else { flags }
}

/// The program has mapped something at `start`, if that has not failed.
pub(super) fn mapped(start: *mut c_void, bytes: usize, protection: c_int, flags: c_int) {
    if start == libc::MAP_FAILED || !is_private_anonymous(flags) {
        return;
    }
    let Some(runtime) = runtime() else { return };
    // What is reserved, more than there can be, is not about to be filled; what may be executed is not managed.
    let is_reserve =
        flags & libc::MAP_GROWSDOWN != 0 || flags & libc::MAP_NORESERVE != 0 && runtime.exceeds_limit(bytes);
    if !is_reserve && protection & (libc::PROT_WRITE | libc::PROT_EXEC) == libc::PROT_WRITE {
        grows(runtime, start, bytes);
    }
}

/// The program has had `protection` made that of a range, unless that has `failed`.
pub(super) fn protected(start: *mut c_void, bytes: usize, protection: c_int, failed: bool) {
    // What was reserved may be filled from now on.
    if protection == libc::PROT_READ | libc::PROT_WRITE
        && !failed
        && let Some(runtime) = runtime()
    {
        grows(runtime, start, bytes);
    }
}

/// `mprotect(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, bytes: size_t, protection: c_int) -> c_int {
    // SAFETY: as for `fork`.
    let failed = unsafe { MPROTECT.get::<Mprotect>().map_or_else(missing, |real| real(start, bytes, protection)) };
    protected(start, bytes, protection, failed != 0);
    failed
}

/// Does `act` to the mapping of so many `bytes` at `start`. The kernel refuses what lies across two mappings, and we make two of some
/// that are one to the program: then those are made one again.
pub(super) fn whole<R>(start: usize, bytes: usize, act: impl Fn() -> R, has_failed: impl Fn(&R) -> bool) -> R {
    // SAFETY: errno of the calling thread.
    let errno = unsafe { &mut *errno() };
    let before = *errno;
    let result = act();
    let range = start..start.saturating_add(bytes);
    if !has_failed(&result) || *errno != libc::EFAULT || !runtime().is_some_and(|runtime| runtime.is_made_whole(range))
    {
        return result;
    }
    *errno = before;
    act()
}

/// `mremap(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_bytes: size_t,
    bytes: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    // SAFETY: as for `syscall`.
    let Some(real) = (unsafe { MREMAP.get::<Mremap>() }) else {
        missing();
        return libc::MAP_FAILED;
    };
    // SAFETY: the types match; the contract is the caller's.
    let act = || unsafe { real(old, old_bytes, bytes, flags, new) };
    whole(old.addr(), old_bytes, act, |&result| result == libc::MAP_FAILED)
}

/// `mmap(2)`, by its other name.
///
/// # Safety
/// That of the C library's function.
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
    // SAFETY: the contract is the caller's.
    unsafe { mmap(address, bytes, protection, flags, file, offset) }
}

/// Functions of malloc's that return what they have allocated: so many `$bytes`.
macro_rules! allocating {
    ($($(#[$doc:meta])* $function:ident($($argument:ident: $type:ty),*) = $real:ident, $bytes:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// That of the C library's function.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub unsafe extern "C" fn $function($($argument: $type),*) -> *mut c_void {
            type Function = unsafe extern "C" fn($($type),*) -> *mut c_void;
            // SAFETY: as for `fork`.
            unsafe { $real.get::<Function>().map_or_else(none, |real| got(real($($argument),*), $bytes)) }
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
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(start: *mut *mut c_void, alignment: size_t, bytes: size_t) -> c_int {
    // SAFETY: as for `fork`; where the real function succeeds, it has written to `start`.
    unsafe {
        let Some(real) = POSIX_MEMALIGN.get::<PosixMemalign>() else { return libc::ENOSYS };
        let failed = real(start, alignment, bytes);
        if failed == 0 {
            got(*start, bytes);
        }
        failed
    }
}
