//! Hooks of `madvise` and `mlockall`: the program's advice about its memory. There is no lock.

use super::{MADVISE, MLOCKALL, missing};
use crate::c_library::errno;
use crate::start::runtime;
use foliomem_runtime::runtime::{Madvice, Runtime};
use foliomem_sys::maps::ADDRESSES_END;
use foliomem_sys::memory_advice::Forks;
use foliomem_types::size_policy::Advice;
use foliomem_types::units::PAGE_BYTES;
use libc::{c_int, c_long, c_void, size_t};

type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Mlockall = unsafe extern "C" fn(c_int) -> c_int;

/// Discards the content of a range that the program has freed lazily. Keeps errno.
fn discard(start: usize, len: usize) {
    // SAFETY: the type is the function's.
    if let Some(real) = unsafe { MADVISE.get::<Madvise>() }.filter(|_| runtime().is_some()) {
        // SAFETY: the program has given the content up; `errno` returns the calling thread's errno.
        unsafe {
            let errno = errno();
            let before = *errno;
            real(std::ptr::with_exposed_provenance_mut(start), len, libc::MADV_DONTNEED);
            *errno = before;
        }
    }
}

/// Passes advice about huge pages and forks to the runtime if the kernel has applied it. A call
/// that fails with ENOMEM, because a part of the range is not mapped, applies it to the rest.
pub(super) fn advised<R: Into<c_long> + Copy>(start: usize, len: usize, advice: c_int, result: R) -> R {
    let advice = match advice {
        libc::MADV_HUGEPAGE => Madvice::HugePages(Advice::Huge),
        libc::MADV_NOHUGEPAGE => Madvice::HugePages(Advice::NoHuge),
        libc::MADV_DOFORK => Madvice::Forks(Forks::Copy),
        libc::MADV_DONTFORK => Madvice::Forks(Forks::LeaveOut),
        libc::MADV_FREE if result.into() == 0 => {
            // The program can write pages of a lazy discard without a fault, hence without waiting
            // for room.
            if runtime().is_some_and(|runtime| runtime.is_short_of_room(0)) {
                discard(start, len);
            }
            return result;
        }
        _ => return result,
    };
    // SAFETY: `errno` returns the calling thread's errno.
    let is_taken = result.into() == 0 || unsafe { *errno() } == libc::ENOMEM;
    if let Some(runtime) = runtime().filter(|_| is_taken && len > 0) {
        let end = start.saturating_add(len).min(ADDRESSES_END).next_multiple_of(PAGE_BYTES);
        runtime.note_advice(start..end, advice);
    }
    result
}

/// `madvise(2)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn madvise(start: *mut c_void, len: size_t, advice: c_int) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract.
    let result = unsafe { MADVISE.get::<Madvise>().map_or_else(missing, |real| real(start, len, advice)) };
    advised(start.addr(), len, advice, result)
}

/// Returns whether `mlockall` is to succeed without locking, so that the limit holds. The kernel
/// must refuse calls with invalid flags.
pub(super) fn keeps_limit(flags: c_int) -> bool {
    let (which, all) = (libc::MCL_CURRENT | libc::MCL_FUTURE, libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT);
    let runtime = runtime().filter(|_| flags & which != 0 && flags & !all == 0);
    runtime.into_iter().for_each(Runtime::note_mlockall);
    runtime.is_some()
}

/// `mlockall(2)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    if keeps_limit(flags) {
        return 0;
    }
    // SAFETY: the type is the function's; the caller keeps its contract.
    unsafe { MLOCKALL.get::<Mlockall>().map_or_else(missing, |real| real(flags)) }
}
