//! Hooks: functions that the agent exports in place of those of the C library.
//!
//! - Functions that fork: `fork`, `_Fork`, `forkpty`, `daemon`, and `syscall` and `clone` if the
//!   new process does not share its parent's memory. The child must register its memory before it
//!   touches any (`foliomem_runtime::fork`). If the agent has patched the C library
//!   (`foliomem_sys::interception::patches`), these hooks only jump there. Otherwise they trap the
//!   fork (`foliomem_sys::interception::dispatch`).
//! - `madvise`: advice about huge pages selects folio sizes. `MADV_FREE` frees at once if memory is
//!   short.
//! - `mlockall`: it succeeds without locking, because locked memory would break the limit and would
//!   populate the address space that the agent has reserved.
//! - Functions that give the program memory, `mmap`, `mprotect` and the functions of malloc: they
//!   send allocation notices, so that new memory is managed before the program fills it. The memory
//!   itself comes from the next definition of the function.
//! - `mremap`: the kernel moves one mapping at a time, and the agent may have split a mapping by
//!   registering parts of it.
//! - `pthread_create` and `thrd_create`: a new thread sends a notice before it does anything else
//!   (`foliomem_sys::thread_control_block`).
//! - `prctl` and `syscall`, if they make the process a subreaper: from then on it must not adopt
//!   companions. Also if they install a system call filter: from then on the hooks make no system
//!   calls of their own, except that starting threads wait on a futex.
//! - `dl_iterate_phdr`: AddressSanitizer refuses to run if another library comes before it
//!   (`crate::objects`).
//!
//! | module | hooks |
//! |---|---|
//! | [`fork`] | functions that fork |
//! | [`memory`] | functions that give the program memory |
//! | [`advice`] | `madvise`, `mlockall` |
//! | [`threads`] | functions that start a thread |
//! | [`system_calls`] | `syscall`, `prctl` |
//!
//! Invariant: hooks whose names std or a codec calls are never inlined. Such a call must reach
//! neither the program's function (`crate::c_library`) nor the hook. The agent looks the real
//! functions up once, at its start (`crate::real`). There is no lock.

mod advice;
mod fork;
mod memory;
mod system_calls;
mod threads;

use crate::c_library::errno;
use crate::objects::{self, ObjectCallback};
use crate::real::Real;
use libc::{c_int, c_void};

type IterateObjects = unsafe extern "C" fn(ObjectCallback, *mut c_void) -> c_int;

/// Declares the real functions, and the table of all of them.
macro_rules! real {
    ($($function:ident = $name:literal),* $(,)?) => {
        $(static $function: Real = Real::next($name);)*
        static ALL: &[&Real] = &[$(&$function),*];
    };
}

real! {
    FORK = c"fork",
    UNDERSCORE_FORK = c"_Fork",
    FORKPTY = c"forkpty",
    DAEMON = c"daemon",
    SYSCALL = c"syscall",
    MADVISE = c"madvise",
    MLOCKALL = c"mlockall",
    CLONE = c"clone",
    PTHREAD_CREATE = c"pthread_create",
    THRD_CREATE = c"thrd_create",
    PRCTL = c"prctl",
    MMAP = c"mmap",
    MPROTECT = c"mprotect",
    MREMAP = c"mremap",
    MALLOC = c"malloc",
    CALLOC = c"calloc",
    REALLOC = c"realloc",
    REALLOCARRAY = c"reallocarray",
    MEMALIGN = c"memalign",
    ALIGNED_ALLOC = c"aligned_alloc",
    POSIX_MEMALIGN = c"posix_memalign",
    VALLOC = c"valloc",
    PVALLOC = c"pvalloc",
    DL_ITERATE_PHDR = c"dl_iterate_phdr",
}

/// Looks all real functions up.
pub fn resolve() {
    ALL.iter().for_each(|real| _ = real.resolve());
}

/// Fails with ENOSYS: the real function does not exist.
fn missing() -> c_int {
    // SAFETY: `errno` returns the calling thread's errno.
    unsafe { *errno() = libc::ENOSYS };
    -1
}

/// `dl_iterate_phdr(3)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn dl_iterate_phdr(callback: ObjectCallback, argument: *mut c_void) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract.
    unsafe {
        DL_ITERATE_PHDR
            .get::<IterateObjects>()
            .map_or(0, |real| objects::iterate(|callback, argument| real(callback, argument), callback, argument))
    }
}
