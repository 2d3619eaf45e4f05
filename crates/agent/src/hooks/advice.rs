//! Hooks of `madvise` and `mlockall`: what the program says about its memory.

use super::{ADDRESS_SPACE, MADVISE, MLOCKALL, missing};
use crate::c_library::errno;
use crate::start::runtime;
use foliomem_runtime::runtime::Runtime;
use foliomem_types::size_policy::Advice;
use foliomem_types::units::PAGE_BYTES;
use libc::{c_int, c_long, c_void, size_t};

type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Mlockall = unsafe extern "C" fn(c_int) -> c_int;

/// Drops what is in a range of which the program has said that it is of no use any more. Keeps errno.
fn discard(start: usize, len: usize) {
    // SAFETY: the types match.
    if let Some(real) = unsafe { MADVISE.get::<Madvise>() }.filter(|_| runtime().is_some()) {
        // SAFETY: nothing is left there to lose; errno of the calling thread.
        unsafe {
            let errno = errno();
            let before = *errno;
            real(std::ptr::with_exposed_provenance_mut(start), len, libc::MADV_DONTNEED);
            *errno = before;
        }
    }
}

/// Tells what was said about huge pages, if the kernel has taken it: also where it says that not all is mapped.
pub(super) fn advised<R: Into<c_long> + Copy>(start: usize, len: usize, advice: c_int, result: R) -> R {
    let advice = match advice {
        libc::MADV_HUGEPAGE => Advice::Huge,
        libc::MADV_NOHUGEPAGE => Advice::NoHuge,
        libc::MADV_FREE if result.into() == 0 => {
            // What is left for later can be written again without a fault, so without waiting for room.
            if runtime().is_some_and(|runtime| runtime.is_short_of_room(0)) {
                discard(start, len);
            }
            return result;
        }
        _ => return result,
    };
    // SAFETY: errno of the calling thread.
    let is_taken = result.into() == 0 || unsafe { *errno() } == libc::ENOMEM;
    if let Some(runtime) = runtime().filter(|_| is_taken && len > 0) {
        let end = start.saturating_add(len).min(ADDRESS_SPACE).next_multiple_of(PAGE_BYTES);
        runtime.advised(start..end, advice);
    }
    result
}

/// `madvise(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn madvise(start: *mut c_void, len: size_t, advice: c_int) -> c_int {
    // SAFETY: as for `fork`.
    let result = unsafe { MADVISE.get::<Madvise>().map_or_else(missing, |real| real(start, len, advice)) };
    advised(start.addr(), len, advice, result)
}

/// Whether the limit is kept, and nothing locked; the kernel is to refuse what is no valid call.
pub(super) fn keeps_limit(flags: c_int) -> bool {
    let (which, all) = (libc::MCL_CURRENT | libc::MCL_FUTURE, libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT);
    let runtime = runtime().filter(|_| flags & which != 0 && flags & !all == 0);
    runtime.into_iter().for_each(Runtime::wants_all_locked);
    runtime.is_some()
}

/// `mlockall(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    if keeps_limit(flags) {
        return 0;
    }
    // SAFETY: as for `fork`.
    unsafe { MLOCKALL.get::<Mlockall>().map_or_else(missing, |real| real(flags)) }
}
