//! The functions that code inside the agent imports, except the memory functions. There is no lock.

use super::errno;
use crate::real::Real;
use libc::{c_char, c_int, c_long, c_void, size_t};
use std::alloc::{GlobalAlloc, Layout};
use std::arch::{global_asm, naked_asm};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Pause between two checks whether a process that aborts has ended.
const ABORT_PAUSE: Duration = Duration::from_millis(1);

/// Defines hidden functions that jump to functions of this file.
macro_rules! hidden {
    ($($name:literal = $function:ident;)*) => {$(
        global_asm!(
            concat!(".globl ", $name), concat!(".hidden ", $name), concat!(".type ", $name, ", @function"),
            concat!($name, ":"), "jmp {function}", function = sym $function,
        );
    )*};
}

/// Defines hidden functions that make the system call of the given number, with up to six
/// arguments.
macro_rules! system_calls {
    ($($name:literal = $number:expr;)*) => {$(
        global_asm!(
            concat!(".globl ", $name), concat!(".hidden ", $name), concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            "mov eax, {number}", "mov r10, rcx", "syscall", "cmp rax, -4096", "ja 2f", "ret",
            "2:", "mov rdi, rax", "jmp {failed}",
            number = const $number, failed = sym failed,
        );
    )*};
}

system_calls! {
    "read" = libc::SYS_read;
    "write" = libc::SYS_write;
    "writev" = libc::SYS_writev;
    "open64" = libc::SYS_open;
    "close" = libc::SYS_close;
    "lseek64" = libc::SYS_lseek;
    "stat64" = libc::SYS_stat;
    "fstat64" = libc::SYS_fstat;
    "statx" = libc::SYS_statx;
    "readlink" = libc::SYS_readlink;
    "munmap" = libc::SYS_munmap;
    "getpid" = libc::SYS_getpid;
    "gettid" = libc::SYS_gettid;
    "getrusage" = libc::SYS_getrusage;
    "__wrap_prctl" = libc::SYS_prctl;
    "__wrap_mmap" = libc::SYS_mmap;
    "__wrap_mmap64" = libc::SYS_mmap;
    "__wrap_madvise" = libc::SYS_madvise;
}

// `long syscall(long number, ...)`, with up to six arguments.
global_asm!(
    ".globl __wrap_syscall", ".hidden __wrap_syscall", ".type __wrap_syscall, @function",
    "__wrap_syscall:",
    "mov rax, rdi", "mov rdi, rsi", "mov rsi, rdx", "mov rdx, rcx", "mov r10, r8", "mov r8, r9", "mov r9, [rsp + 8]",
    "syscall", "cmp rax, -4096", "ja 2f", "ret",
    "2:", "mov rdi, rax", "jmp {failed}",
    failed = sym failed,
);

// `clock_nanosleep(2)`, which returns its error number.
global_asm!(
    ".globl clock_nanosleep", ".hidden clock_nanosleep", ".type clock_nanosleep, @function",
    "clock_nanosleep:",
    "mov eax, {number}", "mov r10, rcx", "syscall", "neg eax", "ret",
    number = const libc::SYS_clock_nanosleep,
);

// `pthread_self`: the first word of a thread control block is the block's own address, in glibc and
// in musl, as the ABI wants it.
global_asm!(
    ".globl pthread_self",
    ".hidden pthread_self",
    ".type pthread_self, @function",
    "pthread_self:",
    "mov rax, fs:[0]",
    "ret",
);

// zstd's tracing functions: weak in the codec, so the codec would otherwise call those of a program
// that traces its own zstd. The result 0 means "not traced".
global_asm!(
    ".irp name, ZSTD_trace_compress_begin, ZSTD_trace_compress_end, ZSTD_trace_decompress_begin, ZSTD_trace_decompress_end",
    ".globl \\name",
    ".hidden \\name",
    ".type \\name, @function",
    "\\name:",
    ".endr",
    "xor eax, eax",
    "ret",
);

hidden! {
    "__errno_location" = errno;
    "pthread_getcpuclockid" = thread_clock;
    "__wrap_dl_iterate_phdr" = iterate_objects;
    "__wrap_malloc" = allocate;
    "__wrap_calloc" = allocate_zeroed;
    "__wrap_realloc" = reallocate;
    "free" = deallocate;
    "abort" = abort;
    "getenv" = no_variable;
    "getcwd" = no_path;
    "realpath" = no_path;
    "pthread_key_create" = no_key;
    "pthread_key_delete" = no_key;
    "pthread_setspecific" = no_key;
    "__cxa_thread_atexit_impl" = forget_destructor;
    "__tls_get_addr" = thread_local_address;
}

static PTHREAD_GETCPUCLOCKID: Real = Real::c_library(c"pthread_getcpuclockid");
static DL_ITERATE_PHDR: Real = Real::c_library(c"dl_iterate_phdr");

type ThreadClock = unsafe extern "C" fn(libc::pthread_t, *mut libc::clockid_t) -> c_int;
type ObjectCallback = unsafe extern "C" fn(*mut libc::dl_phdr_info, size_t, *mut c_void) -> c_int;
type IterateObjects = unsafe extern "C" fn(ObjectCallback, *mut c_void) -> c_int;

/// Defines hidden functions of the unwinder that jump to those of the program's unwinder.
macro_rules! unwinding {
    ($($name:literal = $real:ident, $symbol:literal;)*) => {$(
        static $real: Real = Real::next($symbol);
        global_asm!(
            concat!(".globl ", $name), concat!(".hidden ", $name), concat!(".type ", $name, ", @function"),
            concat!($name, ":"), "lea rax, [rip + {real}]", "jmp {forward}",
            real = sym $real, forward = sym forward_unwinding,
        );
    )*};
}

// std's personality function calls these functions on the program's threads, when the program's
// unwinder passes a frame of a hook. A program that unwinds has loaded its unwinder; otherwise the
// agent needs none.
unwinding! {
    "_Unwind_Backtrace" = UNWIND_BACKTRACE, c"_Unwind_Backtrace";
    "_Unwind_GetDataRelBase" = UNWIND_GET_DATA_REL_BASE, c"_Unwind_GetDataRelBase";
    "_Unwind_GetIP" = UNWIND_GET_IP, c"_Unwind_GetIP";
    "_Unwind_GetIPInfo" = UNWIND_GET_IP_INFO, c"_Unwind_GetIPInfo";
    "_Unwind_GetLanguageSpecificData" = UNWIND_GET_DATA, c"_Unwind_GetLanguageSpecificData";
    "_Unwind_GetRegionStart" = UNWIND_GET_REGION_START, c"_Unwind_GetRegionStart";
    "_Unwind_GetTextRelBase" = UNWIND_GET_TEXT_REL_BASE, c"_Unwind_GetTextRelBase";
    "_Unwind_Resume" = UNWIND_RESUME, c"_Unwind_Resume";
    "_Unwind_SetGR" = UNWIND_SET_GR, c"_Unwind_SetGR";
    "_Unwind_SetIP" = UNWIND_SET_IP, c"_Unwind_SetIP";
}

/// Jumps to the function that the [`Real`] at rax names, with the arguments in the registers.
#[unsafe(naked)]
extern "C" fn forward_unwinding() {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rdi, rax",
        "call {find}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        find = sym find_unwinding,
    )
}

extern "C" fn find_unwinding(real: &Real) -> usize {
    // SAFETY: an address is a `usize`.
    unsafe { real.get::<usize>() }.unwrap_or_else(|| abort())
}

/// Stores the error that a system call has returned in errno, and returns -1.
extern "C" fn failed(result: c_long) -> c_long {
    // SAFETY: `errno` returns the calling thread's errno.
    unsafe { *errno() = -result as c_int };
    -1
}

/// `pthread_getcpuclockid(3)`.
unsafe extern "C" fn thread_clock(thread: libc::pthread_t, clock: *mut libc::clockid_t) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract.
    unsafe { PTHREAD_GETCPUCLOCKID.get::<ThreadClock>().map_or(libc::ENOSYS, |real| real(thread, clock)) }
}

/// `dl_iterate_phdr(3)`.
unsafe extern "C" fn iterate_objects(callback: ObjectCallback, argument: *mut c_void) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract.
    unsafe { DL_ITERATE_PHDR.get::<IterateObjects>().map_or(0, |real| real(callback, argument)) }
}

/// Room before each allocation, in bytes: its size, and padding to the alignment.
const HEADER_BYTES: usize = 16;

/// Returns the layout of an allocation of `bytes` and its header.
fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(HEADER_BYTES)?, HEADER_BYTES).ok()
}

/// `malloc(3)` for code inside the agent.
extern "C" fn allocate(bytes: size_t) -> *mut c_void {
    allocate_zeroed(1, bytes)
}

/// `calloc(3)` for code inside the agent.
extern "C" fn allocate_zeroed(count: size_t, bytes: size_t) -> *mut c_void {
    let Some((bytes, layout)) = count.checked_mul(bytes).and_then(|bytes| Some((bytes, layout(bytes)?))) else {
        return null_mut();
    };
    // SAFETY: the layout is not empty; it has room for the header.
    unsafe {
        let start = crate::HEAP.alloc_zeroed(layout);
        if start.is_null() {
            return null_mut();
        }
        start.cast::<usize>().write(bytes);
        start.add(HEADER_BYTES).cast()
    }
}

/// `realloc(3)` for code inside the agent.
///
/// # Safety
/// `old` is null, or an allocation of the functions above.
unsafe extern "C" fn reallocate(old: *mut c_void, bytes: size_t) -> *mut c_void {
    let new = allocate(bytes);
    if !old.is_null() && !new.is_null() {
        // SAFETY: the caller's contract: `old` is an allocation, and its header has its size.
        unsafe {
            let old_bytes = old.byte_sub(HEADER_BYTES).cast::<usize>().read();
            new.cast::<u8>().copy_from_nonoverlapping(old.cast(), old_bytes.min(bytes));
            deallocate(old);
        }
    }
    new
}

/// `free(3)` for code inside the agent.
///
/// # Safety
/// `old` is null, or an allocation of the functions above that nobody uses any more.
unsafe extern "C" fn deallocate(old: *mut c_void) {
    if old.is_null() {
        return;
    }
    // SAFETY: the caller's contract: `old` is an allocation, and its header has its size.
    unsafe {
        let start = old.byte_sub(HEADER_BYTES);
        if let Some(layout) = layout(start.cast::<usize>().read()) {
            crate::HEAP.dealloc(start.cast(), layout);
        }
    }
}

/// `abort(3)`: ends the process by SIGABRT. The program's handler must not run: the calling thread
/// may be one that the program does not know.
extern "C" fn abort() -> ! {
    use rustix::process::{Signal, getpid};
    let default = [0usize; 4];
    // SAFETY: rt_sigaction reads the four words of `default`, a `struct sigaction` with SIG_DFL and
    // no flags.
    unsafe {
        std::arch::asm!(
            "syscall", inlateout("rax") libc::SYS_rt_sigaction => _, in("rdi") libc::SIGABRT, in("rsi") default.as_ptr(),
            in("rdx") 0, in("r10") 8, lateout("rcx") _, lateout("r11") _, options(nostack),
        );
    }
    let _ = rustix::process::kill_process(getpid(), Signal::ABORT);
    foliomem_sys::thread::restore_signals(0);
    loop {
        foliomem_sys::clock::sleep(ABORT_PAUSE);
    }
}

/// `getenv(3)`: finds no variable. std asks for RUST_BACKTRACE, and a backtrace would read files
/// and allocate memory in the middle of the program.
extern "C" fn no_variable(_name: *const c_char) -> *mut c_char {
    null_mut()
}

/// Functions that return a path, for backtraces: they fail with ENOSYS.
extern "C" fn no_path() -> *mut c_char {
    failed(-c_long::from(libc::ENOSYS));
    null_mut()
}

/// Keys of thread-specific data: none is created, because the agent destroys nothing at a thread's
/// end.
extern "C" fn no_key() -> c_int {
    libc::EAGAIN
}

/// Registers a destructor of a thread-local variable: the destructor never runs.
extern "C" fn forget_destructor() -> c_int {
    0
}

/// The argument that the linker passes to `__tls_get_addr`.
#[repr(C)]
struct ThreadLocal {
    _module: usize,
    offset: usize,
}

/// Room for std's thread-local variables, in bytes: counts of panics, and the calling thread's
/// name.
const THREAD_LOCAL_BYTES: usize = 1024;

/// `__tls_get_addr`: one set of variables for all threads.
///
/// The loader's function needs a thread that the C library knows. Only a panic, which aborts, comes
/// here. The variables start as zeros, except the list of destructors, which `forget_destructor`
/// keeps unused.
extern "C" fn thread_local_address(variable: &ThreadLocal) -> *mut c_void {
    static VARIABLES: [AtomicU64; THREAD_LOCAL_BYTES / 8] = [const { AtomicU64::new(0) }; THREAD_LOCAL_BYTES / 8];
    if variable.offset >= THREAD_LOCAL_BYTES {
        abort();
    }
    VARIABLES[0].as_ptr().wrapping_byte_add(variable.offset).cast()
}
