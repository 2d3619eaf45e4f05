//! Threads and processes of the agent: made by a raw `clone`, unknown to the C library.
//!
//! All of them share the program's memory. A [`Kind::Thread`] belongs to the caller's thread group; a
//! [`Kind::Process`] is a process of its own: it shares the memory and nothing else, so the program neither
//! sees nor counts it. Each has
//! - a stack from a [`Region`] of ours, and a thread control block of our own at its top: functions of the C
//!   library that only use a little initial-exec storage work, as `fs` points to zeroed space; errno is our own, as
//!   the C library's lies behind what the program and its libraries have there (ThreadSanitizer: 0.7 MiB);
//! - all signals blocked from its first instruction on, but SIGSYS, by which filters for system calls answer
//!   ([`crate::filters`]).
//!
//! It must never block on a lock of the C library, or use thread-local storage of a library that was loaded
//! later.

use crate::clock::{now_ns, timespec};
use crate::filters::{self, Call};
use crate::region::Region;
use linux_raw_sys::general as raw;
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::process::Pid;
use std::arch::{asm, naked_asm};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Space below the thread pointer for initial-exec thread-local storage. The C library itself has 0.3 KiB;
/// the static block of a process is rarely above 4 KiB (glibc's reserve for late libraries is 1.7 KiB).
const TLS_BYTES: usize = 64 << 10;
/// Space for the control block above the thread pointer: glibc's `struct pthread` is 2.3 KiB.
const TCB_BYTES: usize = 8 << 10;
/// Offset of the stack protector's canary in the control block, by the x86-64 ABI.
const CANARY_OFFSET: usize = 0x28;

/// Offset in the control block of what is a pointer, to the dynamic thread vector, for threads of the C library.
const MARK_OFFSET: usize = 8;
/// What is there instead for threads of the agent: no pointer, as it is odd.
const MARK: usize = 0x666f_6c69_6f6d_656d | 1;

/// Where a thread of the agent has its errno; `None` for all others.
pub fn own_errno() -> Option<*mut i32> {
    let (thread_pointer, mark): (usize, usize);
    // SAFETY: the x86-64 ABI keeps the address of the control block in its first word; the second one belongs to the
    // C library.
    unsafe {
        asm!("mov {}, fs:[0]", "mov {}, fs:[{}]", out(reg) thread_pointer, out(reg) mark, const MARK_OFFSET,
            options(nostack, readonly));
    }
    // `spawn` has left room below the control block.
    (mark == MARK).then(|| std::ptr::with_exposed_provenance_mut(thread_pointer - size_of::<usize>()))
}

/// A thread of the caller's thread group, with the caller's descriptors, directories and signal handlers.
const THREAD_FLAGS: u32 =
    raw::CLONE_THREAD | raw::CLONE_SIGHAND | raw::CLONE_FILES | raw::CLONE_FS | raw::CLONE_SYSVSEM;
/// What all have in common: the memory, a thread pointer, and a word that tells when they have ended.
const COMMON_FLAGS: u32 = raw::CLONE_VM | raw::CLONE_SETTLS | raw::CLONE_PARENT_SETTID | raw::CLONE_CHILD_CLEARTID;

/// What is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A thread of the caller's group.
    Thread,
    /// A process with copies of the caller's descriptors, directories and signal handlers. Its end sends no signal,
    /// and only a wait with `__WALL` or `__WCLONE` reports it. A tracer of the caller does not trace it.
    Process,
    /// The same, with the caller's descriptors themselves.
    ProcessOfSameFiles,
}

impl Kind {
    fn flags(self) -> u32 {
        // The low byte, the signal that the end of a process sends to its parent, stays 0.
        COMMON_FLAGS
            | match self {
                Kind::Thread => THREAD_FLAGS,
                Kind::Process => raw::CLONE_UNTRACED,
                Kind::ProcessOfSameFiles => raw::CLONE_UNTRACED | raw::CLONE_FILES,
            }
    }
}

/// How to make one.
#[derive(Debug)]
pub struct Spec<'a> {
    /// What to make.
    pub kind: Kind,
    /// Its stack, which no other living thread uses.
    pub stack: &'a Region,
    /// Run on this CPU only.
    pub cpu: Option<usize>,
    /// The kernel writes its id here before [`spawn`] returns, clears the word when it ends, and wakes those who
    /// wait there by a futex (not a private one).
    pub id: &'a AtomicU32,
}

/// What it finds on top of its stack.
#[repr(C)]
struct Start {
    entry: extern "C" fn(*mut u8),
    argument: *mut u8,
    /// CPU to run on, or -1.
    cpu: isize,
}

/// Starts a thread or process in `entry`, which must not return, and returns its id.
///
/// # Safety
/// The stack and the word outlive it, and the stack is its own; `entry` may be called with `argument` on it.
pub unsafe fn spawn(spec: &Spec<'_>, entry: extern "C" fn(*mut u8), argument: *mut u8) -> Result<Pid, Errno> {
    let top = spec.stack.start() + spec.stack.len();
    let thread_pointer = top - TCB_BYTES;
    let start = (thread_pointer - TLS_BYTES - size_of::<Start>()) & !15;
    let cpu = spec.cpu.map_or(-1, |cpu| cpu as isize);
    // SAFETY: all three lie in the stack, which is the new thread's own.
    unsafe {
        let tls = std::ptr::with_exposed_provenance_mut::<u8>(thread_pointer - TLS_BYTES);
        tls.write_bytes(0, TLS_BYTES + TCB_BYTES);
        let control = std::ptr::with_exposed_provenance_mut::<usize>(thread_pointer);
        control.write(thread_pointer);
        control.byte_add(MARK_OFFSET).write(MARK);
        control.add(2).write(thread_pointer);
        let canary: usize;
        asm!("mov {}, fs:[{}]", out(reg) canary, const CANARY_OFFSET, options(nostack, readonly));
        control.byte_add(CANARY_OFFSET).write(canary);
        std::ptr::with_exposed_provenance_mut::<Start>(start).write(Start { entry, argument, cpu });
    }
    let unblocked = block_signals();
    // SAFETY: by the contract; the stack holds a `Start` at its top.
    let result = unsafe { raw_clone(u64::from(spec.kind.flags()), start, thread_pointer, spec.id.as_ptr()) };
    restore_signals(unblocked);
    match Pid::from_raw(result.max(0) as i32) {
        Some(id) => Ok(id),
        None => Err(Errno::from_raw_os_error(-result as i32)),
    }
}

/// Ends the calling thread, and its process if it is the last one there.
pub fn exit_thread() -> ! {
    exit_by(raw::__NR_exit, 0)
}

/// Ends the calling process.
pub fn exit_process(code: u8) -> ! {
    exit_by(raw::__NR_exit_group, code)
}

fn exit_by(number: u32, code: u8) -> ! {
    loop {
        // SAFETY: takes a number, and does not return.
        unsafe { syscall3(number as usize, code.into(), 0, 0) };
    }
}

/// Waits until the process `id`, a child of the caller's that ends by itself, has ended, and takes its status.
/// Returns when its word is cleared even where a filter forbids the wait.
pub fn wait_for_exit(id: Pid, word: &AtomicU32) {
    loop {
        let number = raw::__NR_wait4 as usize;
        // SAFETY: asks for no status.
        let waited = unsafe { syscall4(number, id.as_raw_nonzero().get() as usize, 0, raw::__WALL as usize, 0) };
        if waited != -(Errno::INTR.raw_os_error() as isize) {
            break;
        }
    }
    wait_until_cleared(word, None);
}

/// Waits until the kernel has cleared `word`, which holds the id of a thread or process of [`spawn`], but no longer than
/// until `until_ns` of the monotonic clock.
pub fn wait_until_cleared(word: &AtomicU32, until_ns: Option<u64>) {
    loop {
        // Acquire pairs with the kernel's clearing of the word: the thread has ended.
        let id = word.load(Ordering::Acquire);
        let left_ns = until_ns.map(|until_ns| until_ns.saturating_sub(now_ns()));
        if id == 0 || left_ns == Some(0) {
            return;
        }
        let time = left_ns.map(|left_ns| timespec(Duration::from_nanos(left_ns)));
        // The kernel wakes by the shared kind of futex.
        let _ = rustix::thread::futex::wait(word, rustix::thread::futex::Flags::empty(), id, time.as_ref());
    }
}

/// Whether the kernel says that no other process uses the caller's memory: it answers a process of one
/// thread only.
pub fn is_only_user_of_memory() -> bool {
    // SAFETY: succeeds where there is nothing to unshare, and changes nothing.
    unsafe { syscall3(raw::__NR_unshare as usize, raw::CLONE_VM as usize, 0, 0) == 0 }
}

/// Closes every descriptor but those `kept` of the calling thread's table, which must be its own.
pub fn close_descriptors_but<const N: usize>(mut kept: [Option<RawFd>; N]) {
    let close = |first: u32, last: u32| {
        // SAFETY: closing copies affects nobody else; close_range(2) exists since Linux 5.9.
        unsafe { syscall3(linux_raw_sys::general::__NR_close_range as usize, first as usize, last as usize, 0) };
    };
    kept.sort_unstable();
    let mut first = 0;
    for kept in kept.into_iter().flatten().map(|kept| kept as u32) {
        if first < kept {
            close(first, kept - 1);
        }
        first = kept + 1;
    }
    close(first, u32::MAX);
}

/// `set_robust_list(2)` for the calling thread.
///
/// # Safety
/// That of the call: a list at `head` that stays as long as the thread.
pub unsafe fn set_robust_list(head: usize, bytes: usize) {
    // SAFETY: by the contract.
    unsafe { syscall3(linux_raw_sys::general::__NR_set_robust_list as usize, head, bytes, 0) };
}

#[unsafe(naked)]
unsafe extern "C" fn raw_clone(flags: u64, stack: usize, thread_pointer: usize, id: *mut u32) -> isize {
    // clone(flags=rdi, stack=rsi, parent_tid=rdx, child_tid=r10, tls=r8): the child wakes with rax = 0 on its
    // stack, where `Start` lies, aligned to 16.
    naked_asm!(
        "mov r8, rdx",
        "mov rdx, rcx",
        "mov r10, rcx",
        "mov eax, 56",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2:",
        "xor ebp, ebp",
        "mov rdi, rsp",
        "call {enter}",
        "ud2",
        enter = sym enter,
    )
}

extern "C" fn enter(start: *const Start) {
    // SAFETY: `raw_clone` passes the top of the stack, where `spawn` has put it.
    let Start { entry, argument, cpu } = unsafe { start.read() };
    if cpu >= 0 && filters::allow(Call::SchedSetaffinity) {
        let mut cpus = rustix::thread::CpuSet::new();
        cpus.set(cpu as usize);
        // A CPU that went away leaves the thread where it is.
        let _ = rustix::thread::sched_setaffinity(None, &cpus);
    }
    entry(argument);
}

/// Blocks all signals of the calling thread but SIGSYS; returns which were blocked before.
pub fn block_signals() -> u64 {
    let (most, mut before) = (!(1u64 << (raw::SIGSYS - 1)), 0u64);
    sigprocmask(&raw const most, &raw mut before);
    before
}

/// Sets the blocked signals of the calling thread.
pub fn restore_signals(blocked: u64) {
    sigprocmask(&raw const blocked, std::ptr::null_mut());
}

fn sigprocmask(set: *const u64, before: *mut u64) {
    const SIG_SETMASK: usize = 2;
    // SAFETY: rt_sigprocmask(how, set, oldset, 8) reads and writes the two words, which the callers own.
    unsafe {
        syscall4(
            linux_raw_sys::general::__NR_rt_sigprocmask as usize,
            SIG_SETMASK,
            set.expose_provenance(),
            before.expose_provenance(),
            size_of::<u64>(),
        )
    };
}

/// A system call by itself: the C library's `syscall` sets errno, and threads of the agent have none. What it returns, a negated error number too.
///
/// # Safety
/// That of the call.
pub(crate) unsafe fn syscall3(number: usize, a: usize, b: usize, c: usize) -> isize {
    // SAFETY: by the contract of the callers.
    unsafe { syscall4(number, a, b, c, 0) }
}

pub(crate) unsafe fn syscall4(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    // SAFETY: by the contract of the callers.
    unsafe { syscall5(number, [a, b, c, d, 0]) }
}

/// The same with five arguments.
///
/// # Safety
/// That of the call.
pub(crate) unsafe fn syscall5(number: usize, [a, b, c, d, e]: [usize; 5]) -> isize {
    // SAFETY: by the contract of the callers.
    unsafe { syscall6(number, [a, b, c, d, e, 0]) }
}

/// The same with six arguments.
///
/// # Safety
/// That of the call.
pub(crate) unsafe fn syscall6(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the x86-64 system call convention; what the call does is the callers' contract.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::futex;

    static STATE: AtomicU32 = AtomicU32::new(0);

    fn wait_while(word: &AtomicU32, value: u32) {
        while word.load(Ordering::Acquire) == value {
            foliomem_sync::back_off();
        }
    }

    fn stack() -> &'static Region {
        Box::leak(Box::new(Region::reserve(512 << 10).unwrap()))
    }

    extern "C" fn waits(argument: *mut u8) {
        assert_eq!(argument.addr(), 42);
        close_descriptors_but([]);
        STATE.store(1, Ordering::Release);
        while STATE.load(Ordering::Acquire) == 1 {
            let _ = futex::wait(&STATE, futex::Flags::PRIVATE, 1, None);
        }
        exit_thread();
    }

    #[test]
    fn a_process_shares_memory_and_nothing_else() {
        static ID: AtomicU32 = AtomicU32::new(0);
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let before = threads();
        let spec = Spec { kind: Kind::Process, stack: stack(), cpu: Some(0), id: &ID };
        // SAFETY: the stack is leaked and the word static, so they outlive the process.
        let id = unsafe { spawn(&spec, waits, std::ptr::without_provenance_mut(42)) }.unwrap();
        assert_eq!(ID.load(Ordering::Relaxed), id.as_raw_nonzero().get() as u32);
        wait_while(&STATE, 0);
        // Ours are still open after the process has closed all of its own.
        assert!(file.metadata().is_ok());
        assert_eq!(threads(), before);
        let status = std::fs::read_to_string(format!("/proc/{}/status", id.as_raw_nonzero())).unwrap();
        let blocked = status.lines().find(|line| line.starts_with("SigBlk:")).unwrap();
        assert!(blocked.to_lowercase().contains("fbfeff"), "all its signals but SIGSYS are blocked: {blocked}");
        let mut status = 0;
        // SAFETY: writes to the variable.
        let waited = unsafe { libc::waitpid(id.as_raw_nonzero().get(), &raw mut status, libc::WNOHANG) };
        assert_eq!(waited, -1, "an ordinary wait does not know it");
        STATE.store(2, Ordering::Release);
        let _ = futex::wake(&STATE, futex::Flags::PRIVATE, 1);
        wait_for_exit(id, &ID);
        assert_eq!(ID.load(Ordering::Relaxed), 0);
        // SAFETY: as above.
        let waited = unsafe { libc::waitpid(id.as_raw_nonzero().get(), &raw mut status, libc::__WALL) };
        assert_eq!(waited, -1, "nothing is left of it");
    }
}
