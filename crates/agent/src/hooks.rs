//! The functions of the C library that the agent stands before.
//!
//! - Everything that forks: `fork`, `_Fork`, `forkpty`, `daemon`, and `syscall` and `clone` when they
//!   make a process that does not share its memory. The child must have its memory registered anew before
//!   it touches any (`foliomem_linux::fork`).
//! - `madvise`: what the program says about huge pages is policy for us.
//! - What hands pages to the kernel by reference, `vmsplice` and zero-copy sockets: frames that others
//!   may still read must not be used again in place.
//!
//! The real functions are looked up once, at start: a lookup may allocate, and allocating may fork.

use crate::start::runtime;
use foliomem_core::policy::Advice;
use foliomem_core::units::PAGE_BYTES;
use foliomem_linux::clone_trap::trap_forks;
use foliomem_linux::fork::RuntimeForkHooks;
use libc::{c_char, c_int, c_long, c_uint, c_void, pid_t, size_t, socklen_t, ssize_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

type Fork = unsafe extern "C" fn() -> pid_t;
type Forkpty = unsafe extern "C" fn(*mut c_int, *mut c_char, *const libc::termios, *const libc::winsize) -> pid_t;
type Daemon = unsafe extern "C" fn(c_int, c_int) -> c_int;
type Vmsplice = unsafe extern "C" fn(c_int, *const libc::iovec, size_t, c_uint) -> ssize_t;
type Setsockopt = unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;
type Syscall = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
type CloneEntry = extern "C" fn(*mut c_void) -> c_int;
type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Clone = unsafe extern "C" fn(CloneEntry, *mut c_void, c_int, *mut c_void, usize, usize, usize) -> c_int;

/// The next definition of a function after this library's.
struct Real(AtomicPtr<c_void>, &'static CStr);

impl Real {
    const fn new(name: &'static CStr) -> Real {
        Real(AtomicPtr::new(std::ptr::null_mut()), name)
    }

    fn resolve(&self) {
        // SAFETY: a lookup by name; called while the program has one thread.
        self.0.store(unsafe { libc::dlsym(libc::RTLD_NEXT, self.1.as_ptr()) }, Ordering::Release);
    }

    /// The function.
    ///
    /// # Safety
    /// `F` is the function's type.
    unsafe fn get<F: Copy>(&self) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let mut function = self.0.load(Ordering::Acquire);
        if function.is_null() {
            // Called by a constructor that ran before ours.
            self.resolve();
            function = self.0.load(Ordering::Acquire);
        }
        // SAFETY: a non-null result of dlsym for a function is a function of its type.
        (!function.is_null()).then(|| unsafe { std::mem::transmute_copy(&function) })
    }
}

static FORK: Real = Real::new(c"fork");
static UNDERSCORE_FORK: Real = Real::new(c"_Fork");
static FORKPTY: Real = Real::new(c"forkpty");
static DAEMON: Real = Real::new(c"daemon");
static VMSPLICE: Real = Real::new(c"vmsplice");
static SETSOCKOPT: Real = Real::new(c"setsockopt");
static SYSCALL: Real = Real::new(c"syscall");
static MADVISE: Real = Real::new(c"madvise");
static CLONE: Real = Real::new(c"clone");

/// Looks all of them up.
pub fn resolve() {
    for real in [&FORK, &UNDERSCORE_FORK, &FORKPTY, &DAEMON, &VMSPLICE, &SETSOCKOPT, &SYSCALL, &MADVISE, &CLONE] {
        real.resolve();
    }
}

/// What a program has, without 5-level page tables.
const ADDRESS_SPACE: usize = 1 << 47;

fn missing() -> c_int {
    // SAFETY: errno of the calling thread.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

/// Calls `real` with our hooks around the fork inside it.
fn around_fork<R>(real: impl FnOnce() -> R) -> R {
    match runtime() {
        Some(runtime) => trap_forks(real, &RuntimeForkHooks(runtime)),
        None => real(),
    }
}

/// `fork(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> pid_t {
    // SAFETY: the types match; the contract is the caller's.
    unsafe { FORK.get::<Fork>().map_or_else(missing, |real| around_fork(|| real())) }
}

/// `_Fork(3)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> pid_t {
    // SAFETY: as for `fork`.
    unsafe { UNDERSCORE_FORK.get::<Fork>().map_or_else(missing, |real| around_fork(|| real())) }
}

/// `forkpty(3)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forkpty(
    master: *mut c_int,
    name: *mut c_char,
    termios: *const libc::termios,
    size: *const libc::winsize,
) -> pid_t {
    // SAFETY: as for `fork`.
    unsafe { FORKPTY.get::<Forkpty>().map_or_else(missing, |real| around_fork(|| real(master, name, termios, size))) }
}

/// `daemon(3)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn daemon(keep_directory: c_int, keep_descriptors: c_int) -> c_int {
    // SAFETY: as for `fork`.
    unsafe {
        DAEMON.get::<Daemon>().map_or_else(missing, |real| around_fork(|| real(keep_directory, keep_descriptors)))
    }
}

/// `syscall(2)`: the numbers that can make a process that does not share its memory get the hooks.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    // SAFETY: as for `fork`; passing six arguments to a variadic function that reads as many as the
    // call needs is how the C library itself defines it.
    unsafe {
        let Some(real) = SYSCALL.get::<Syscall>() else { return c_long::from(missing()) };
        match number {
            libc::SYS_fork | libc::SYS_clone | libc::SYS_clone3 => around_fork(|| real(number, a, b, c, d, e, f)),
            libc::SYS_madvise => advised(a, b, c as c_int, real(number, a, b, c, d, e, f)),
            _ => real(number, a, b, c, d, e, f),
        }
    }
}

/// Tells what was said about huge pages, if the kernel has taken it: also where it says that not all is mapped.
fn advised<R: Into<c_long> + Copy>(start: usize, len: usize, advice: c_int, result: R) -> R {
    let advice = match advice {
        libc::MADV_HUGEPAGE => Advice::Huge,
        libc::MADV_NOHUGEPAGE => Advice::NoHuge,
        _ => return result,
    };
    // SAFETY: errno of the calling thread.
    let is_taken = result.into() == 0 || unsafe { *libc::__errno_location() } == libc::ENOMEM;
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
pub unsafe extern "C" fn madvise(start: *mut c_void, len: size_t, advice: c_int) -> c_int {
    // SAFETY: as for `fork`.
    let result = unsafe { MADVISE.get::<Madvise>().map_or_else(missing, |real| real(start, len, advice)) };
    advised(start.addr(), len, advice, result)
}

/// `clone(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    entry: CloneEntry,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: usize,
    tls: usize,
    child_tid: usize,
) -> c_int {
    // SAFETY: as for `syscall`.
    unsafe {
        let Some(real) = CLONE.get::<Clone>() else { return missing() };
        let call = || real(entry, stack, flags, argument, parent_tid, tls, child_tid);
        if flags & libc::CLONE_VM != 0 { call() } else { around_fork(call) }
    }
}

/// `vmsplice(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(pipe: c_int, vectors: *const libc::iovec, count: size_t, flags: c_uint) -> ssize_t {
    if let Some(runtime) = runtime() {
        runtime.pages_escape();
    }
    // SAFETY: as for `fork`.
    unsafe { VMSPLICE.get::<Vmsplice>().map_or_else(|| missing() as ssize_t, |real| real(pipe, vectors, count, flags)) }
}

/// `setsockopt(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    socket: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if level == libc::SOL_SOCKET
        && option == libc::SO_ZEROCOPY
        && let Some(runtime) = runtime()
    {
        runtime.pages_escape();
    }
    // SAFETY: as for `fork`.
    unsafe { SETSOCKOPT.get::<Setsockopt>().map_or_else(missing, |real| real(socket, level, option, value, len)) }
}
