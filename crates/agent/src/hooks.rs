//! Hooks: functions of the C library that the agent's library exports in their place.
//!
//! - Everything that forks: `fork`, `_Fork`, `forkpty`, `daemon`, and `syscall` and `clone` when
//!   they make a process that does not share its memory. The child must have its memory registered
//!   anew before it touches any (`foliomem_runtime::fork`). Where the agent has patched the C library
//!   (`foliomem_sys::interception::patches`) these hooks only jump there; elsewhere they trap the fork
//!   (`foliomem_sys::interception::dispatch`).
//! - `madvise`: what the program says about huge pages is policy for us. What is freed lazily is
//!   freed at once where memory is short.
//! - `mlockall`: everything in memory is the opposite of a limit. It would also fill the address
//!   space that the agent has reserved. So it succeeds, and the limit is kept.
//! - What gives the program memory, `mmap`, `mprotect` and the functions of malloc: much of it is
//!   managed before it is touched, where there may be no room for it. They do nothing else: memory
//!   is the C library's, or of whichever allocator comes next.
//! - `mremap`: the kernel moves one mapping at a time, and the agent registers parts of some.
//! - `pthread_create` and `thrd_create`: a new thread sends a notice before anything else
//!   (`foliomem_sys::thread_control_block`).
//! - `prctl` and `syscall` where they set a filter for system calls: from then on these hooks make
//!   no system calls of their own, except that starting threads wait on a futex.
//! - `dl_iterate_phdr`: AddressSanitizer refuses to run if another library comes before it
//!   (`crate::objects`).
//!
//! | module | hooks |
//! |---|---|
//! | [`fork`] | everything that forks |
//! | [`memory`] | what gives the program memory |
//! | [`advice`] | `madvise`, `mlockall` |
//! | [`threads`] | what starts a thread |
//! | [`system_calls`] | `syscall`, `prctl` |
//!
//! Hooks whose names std or a codec calls are never inlined: such a call must reach neither the
//! program's function (`crate::c_library`) nor the hook.
//!
//! The real functions are looked up once, at start (`crate::real`).

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

/// The table of what the hooks stand before.
macro_rules! real {
    ($($function:ident = $name:literal),* $(,)?) => {
        $(static $function: Real = Real::next($name);)*
        const ALL: &[&Real] = &[$(&$function),*];
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

/// What a program has, without 5-level page tables.
const ADDRESS_SPACE: usize = 1 << 47;

/// Looks all of them up.
pub fn resolve() {
    ALL.iter().for_each(|real| _ = real.resolve());
}

fn missing() -> c_int {
    // SAFETY: errno of the calling thread.
    unsafe { *errno() = libc::ENOSYS };
    -1
}

/// `dl_iterate_phdr(3)`
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn dl_iterate_phdr(callback: ObjectCallback, argument: *mut c_void) -> c_int {
    // SAFETY: as for `fork`.
    unsafe {
        DL_ITERATE_PHDR
            .get::<IterateObjects>()
            .map_or(0, |real| objects::iterate(|callback, argument| real(callback, argument), callback, argument))
    }
}
