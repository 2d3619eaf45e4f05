//! The functions of the C library that the agent stands before.
//!
//! - Everything that forks: `fork`, `_Fork`, `forkpty`, `daemon`, and `syscall` and `clone` when
//!   they make a process that does not share its memory. The child must have its memory registered
//!   anew before it touches any (`foliomem_linux::fork`). Where the agent has patched the C library
//!   (`foliomem_sys::interception::patches`) these hooks only jump there; elsewhere they trap the fork
//!   (`foliomem_sys::interception::dispatch`).
//! - `madvise`: what the program says about huge pages is policy for us. What is freed lazily is
//!   freed at once where memory is short.
//! - `mlockall`: everything in memory is the opposite of a limit. It would also fill the address
//!   space that the agent has reserved. So it succeeds, and the limit is kept.
//! - What gives the program memory, `mmap`, `mprotect` and the functions of malloc: much of it is
//!   managed before it is touched, where there may be no room for it. They do nothing else: memory
//!   is the C library's, or of whichever allocator comes next.
//! - `mremap`: the kernel moves no more than one mapping at a time, and we register parts of some.
//! - `pthread_create` and `thrd_create`: a thread tells that it begins before anything else
//!   (`foliomem_sys::thread_control_block`).
//! - `prctl` and `syscall` where they set a filter for system calls: then the hooks before make
//!   none of their own, but that threads that begin wait on a futex.
//!
//! - `dl_iterate_phdr`: AddressSanitizer refuses to run where another library comes before it (`crate::objects`).
//!
//! Hooks whose names std or a codec calls are never inlined: such a call must not reach the program's function
//! (`crate::c_library`), nor the hook.
//!
//! The real functions are looked up once, at start (`crate::real`).

use crate::c_library::errno;
use crate::objects::{self, ObjectCallback};
use crate::real::Real;
use crate::start::runtime;
use crate::threads::{self, Entry};
use foliomem_linux::runtime::Runtime;
use foliomem_sys::interception::dispatch::trap_forks;
use foliomem_sys::interception::patches::{self, COVERED};
use foliomem_types::size_policy::Advice;
use foliomem_types::units::PAGE_BYTES;
use libc::{c_char, c_int, c_long, c_void, pid_t, size_t};
use std::arch::naked_asm;

type Syscall = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
type Prctl = unsafe extern "C" fn(c_int, usize, usize, usize, usize) -> c_int;
type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, i64) -> *mut c_void;
type PosixMemalign = unsafe extern "C" fn(*mut *mut c_void, size_t, size_t) -> c_int;
type IterateObjects = unsafe extern "C" fn(ObjectCallback, *mut c_void) -> c_int;
type CloneEntry = extern "C" fn(*mut c_void) -> c_int;
type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Mlockall = unsafe extern "C" fn(c_int) -> c_int;
type Mprotect = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Mremap = unsafe extern "C" fn(*mut c_void, size_t, size_t, c_int, *mut c_void) -> *mut c_void;
type PthreadCreate =
    unsafe extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Entry, *mut c_void) -> c_int;
type ThrdCreate = unsafe extern "C" fn(*mut libc::pthread_t, Entry, *mut c_void) -> c_int;
type Clone = unsafe extern "C" fn(CloneEntry, *mut c_void, c_int, *mut c_void, usize, usize, usize) -> c_int;

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

/// What malloc gives out in smaller pieces comes from a heap, which is managed as it grows; larger ones may be mappings of their own.
const LARGE_BYTES: usize = 128 << 10;

/// Looks all of them up.
pub fn resolve() {
    ALL.iter().for_each(|real| _ = real.resolve());
}

/// `prctl(2)`: Syscall User Dispatch.
const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
const PR_SYS_DISPATCH_ON: c_int = 1;

/// What a program has, without 5-level page tables.
const ADDRESS_SPACE: usize = 1 << 47;

fn missing() -> c_int {
    // SAFETY: errno of the calling thread.
    unsafe { *errno() = libc::ENOSYS };
    -1
}

/// Calls `real` with our hooks around the fork inside it.
fn around_fork<R>(real: impl FnOnce() -> R) -> R {
    match runtime() {
        Some(runtime) => trap_forks(real, runtime),
        None => real(),
    }
}

/// Functions that fork. Where the C library is patched they are its own, and use no more stack.
macro_rules! forking {
    ($($(#[$doc:meta])* $function:ident($($argument:ident: $type:ty),*) -> $result:ty = $real:ident, $trapped:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// That of the C library's function.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $function($($argument: $type),*) -> $result {
            naked_asm!(
                "cmp byte ptr [rip + {covered}], 0",
                "je {trapped}",
                "jmp qword ptr [rip + {real}]",
                covered = sym COVERED,
                trapped = sym $trapped,
                real = sym $real,
            )
        }

        unsafe extern "C" fn $trapped($($argument: $type),*) -> $result {
            type Function = unsafe extern "C" fn($($type),*) -> $result;
            // SAFETY: the types match; the contract is the caller's.
            unsafe { $real.get::<Function>().map_or_else(missing, |real| around_fork(|| real($($argument),*))) }
        }
    )*};
}

forking! {
    /// `fork(2)`.
    fork() -> pid_t = FORK, fork_trapped;
    /// `_Fork(3)`.
    _Fork() -> pid_t = UNDERSCORE_FORK, underscore_fork_trapped;
    /// `forkpty(3)`.
    forkpty(master: *mut c_int, name: *mut c_char, termios: *const libc::termios, size: *const libc::winsize) -> pid_t
        = FORKPTY, forkpty_trapped;
    /// `daemon(3)`.
    daemon(keep_directory: c_int, keep_descriptors: c_int) -> c_int = DAEMON, daemon_trapped;
}

/// `syscall(2)`: calls whose functions have a hook get that.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    naked_asm!(
        "cmp byte ptr [rip + {covered}], 0",
        "je {hooked}",
        "cmp rdi, {fork}",
        "je 2f",
        "cmp rdi, {clone}",
        "je 2f",
        "cmp rdi, {clone3}",
        "jne {hooked}",
        "2:",
        "jmp qword ptr [rip + {real}]",
        covered = sym COVERED,
        hooked = sym syscall_hooked,
        real = sym SYSCALL,
        fork = const libc::SYS_fork,
        clone = const libc::SYS_clone,
        clone3 = const libc::SYS_clone3,
    )
}

/// The same, but for forks of a patched C library.
unsafe extern "C" fn syscall_hooked(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as for `fork`; passing six arguments to a variadic function that reads as many as the
    // call needs is how the C library itself defines it.
    unsafe {
        let Some(real) = SYSCALL.get::<Syscall>() else { return c_long::from(missing()) };
        match number {
            libc::SYS_fork | libc::SYS_clone | libc::SYS_clone3 => around_fork(|| real(number, a, b, c, d, e, f)),
            libc::SYS_prctl if a == PR_SET_SYSCALL_USER_DISPATCH as usize => {
                dispatched(b, e, real(number, a, b, c, d, e, f))
            }
            libc::SYS_seccomp => filtered(real(number, a, b, c, d, e, f)),
            libc::SYS_mlockall if keeps_limit(a as c_int) => 0,
            libc::SYS_madvise => advised(a, b, c as c_int, real(number, a, b, c, d, e, f)),
            libc::SYS_mmap => {
                let flags = filled_later(b, d as c_int);
                let start = real(number, a, b, c, flags as usize, e, f);
                mapped(std::ptr::with_exposed_provenance_mut(start as usize), b, c as c_int, flags);
                start
            }
            libc::SYS_mprotect => {
                let failed = real(number, a, b, c, d, e, f);
                protected(std::ptr::with_exposed_provenance_mut(a), b, c as c_int, failed != 0);
                failed
            }
            libc::SYS_mremap => whole(a, b, || real(number, a, b, c, d, e, f), |&result| result == -1),
            _ => real(number, a, b, c, d, e, f),
        }
    }
}

/// The program has set a filter for system calls, or tried to, or asked what it could.
fn filtered<R>(result: R) -> R {
    runtime().into_iter().for_each(Runtime::is_filtered);
    result
}

/// `prctl(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    // SAFETY: as for `syscall`.
    let result = unsafe { PRCTL.get::<Prctl>().map_or_else(missing, |real| real(option, a, b, c, d)) };
    match option {
        libc::PR_SET_SECCOMP => filtered(result),
        PR_SET_SYSCALL_USER_DISPATCH => dispatched(a, d, result),
        _ => result,
    }
}

/// The program has asked for its system calls to be dispatched, or not to be.
fn dispatched<R: Into<c_long> + Copy>(mode: usize, selector: usize, result: R) -> R {
    if result.into() == 0 {
        let is_on = mode == PR_SYS_DISPATCH_ON as usize && selector != 0;
        patches::dispatches(is_on.then_some(selector));
    }
    result
}

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
fn advised<R: Into<c_long> + Copy>(start: usize, len: usize, advice: c_int, result: R) -> R {
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
fn keeps_limit(flags: c_int) -> bool {
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

/// `clone(2)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn clone(
    entry: CloneEntry,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: usize,
    tls: usize,
    child_tid: usize,
) -> c_int {
    naked_asm!(
        "cmp byte ptr [rip + {covered}], 0",
        "je {trapped}",
        "jmp qword ptr [rip + {real}]",
        covered = sym COVERED,
        trapped = sym clone_trapped,
        real = sym CLONE,
    )
}

unsafe extern "C" fn clone_trapped(
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

/// `pthread_create(3)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    entry: Entry,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: as for `fork`.
    unsafe {
        let Some(real) = PTHREAD_CREATE.get::<PthreadCreate>() else { return libc::ENOSYS };
        if runtime().is_none() {
            return real(thread, attributes, entry, argument);
        }
        let made = threads::create(|begin, handed| real(thread, attributes, begin, handed), entry, argument);
        made.unwrap_or(libc::EAGAIN)
    }
}

/// `thrd_create(3)`, whose threads return an `int`: that is as good as the half of a register.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_create(thread: *mut libc::pthread_t, entry: Entry, argument: *mut c_void) -> c_int {
    /// `thrd_nomem`
    const NO_MEMORY: c_int = 3;
    // SAFETY: as for `fork`.
    unsafe {
        let Some(real) = THRD_CREATE.get::<ThrdCreate>() else { return NO_MEMORY };
        if runtime().is_none() {
            return real(thread, entry, argument);
        }
        threads::create(|begin, handed| real(thread, begin, handed), entry, argument).unwrap_or(NO_MEMORY)
    }
}

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
fn filled_later(bytes: usize, flags: c_int) -> c_int {
    let is_filled = is_private_anonymous(flags) && flags & libc::MAP_POPULATE != 0;
    let is_too_much = is_filled && runtime().is_some_and(|runtime| runtime.is_short_of_room(bytes));
    if is_too_much { flags & !libc::MAP_POPULATE } else { flags }
}

/// The program has mapped something at `start`, if that has not failed.
fn mapped(start: *mut c_void, bytes: usize, protection: c_int, flags: c_int) {
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
fn protected(start: *mut c_void, bytes: usize, protection: c_int, failed: bool) {
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
fn whole<R>(start: usize, bytes: usize, act: impl Fn() -> R, has_failed: impl Fn(&R) -> bool) -> R {
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
