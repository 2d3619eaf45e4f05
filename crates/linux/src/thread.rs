//! The agent's threads: made by a raw `clone`, unknown to the C library.
//!
//! Such a thread shares the program's memory and ends with it, but has
//! - a stack from a [`Region`] of ours, and a thread control block of our own at its top: functions of the C
//!   library that only use initial-exec storage (errno) work, as `fs` points to zeroed space;
//! - if asked for, a descriptor table of its own: what the agent opens the program neither sees nor closes;
//! - all signals blocked, from its first instruction on: signals are the program's.
//!
//! It must never end, block on a lock of the C library, or use thread-local storage of a library that was
//! loaded later.

use crate::region::Region;
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::arch::{asm, naked_asm};

/// Space below the thread pointer for initial-exec thread-local storage. The C library itself has 0.3 KiB;
/// the static block of a process is rarely above 4 KiB (glibc's reserve for late libraries is 1.7 KiB).
const TLS_BYTES: usize = 64 << 10;
/// Space for the control block above the thread pointer: glibc's `struct pthread` is 2.3 KiB.
const TCB_BYTES: usize = 8 << 10;
/// Offset of the stack protector's canary in the control block, by the x86-64 ABI.
const CANARY_OFFSET: usize = 0x28;

const CLONE_VM: u64 = 0x100;
const CLONE_FS: u64 = 0x200;
const CLONE_FILES: u64 = 0x400;
const CLONE_SIGHAND: u64 = 0x800;
const CLONE_THREAD: u64 = 0x1_0000;
const CLONE_SYSVSEM: u64 = 0x4_0000;
const CLONE_SETTLS: u64 = 0x8_0000;

/// How to make a thread.
#[derive(Debug)]
pub struct ThreadSpec<'a> {
    /// Its stack, which no other living thread uses.
    pub stack: &'a Region,
    /// Share the descriptor table of the caller, instead of starting with a copy of it.
    pub share_files: bool,
    /// Run on this CPU only.
    pub cpu: Option<usize>,
}

/// What the new thread finds on top of its stack.
#[repr(C)]
struct Start {
    entry: extern "C" fn(*mut u8),
    argument: *mut u8,
    /// CPU to run on, or -1.
    cpu: isize,
}

/// Starts a thread in `entry`, which must not return.
///
/// # Safety
/// The stack outlives the thread and is its own; `entry` may be called with `argument` on it.
pub unsafe fn spawn(spec: &ThreadSpec<'_>, entry: extern "C" fn(*mut u8), argument: *mut u8) -> Result<(), Errno> {
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
        control.add(2).write(thread_pointer);
        let canary: usize;
        asm!("mov {}, fs:[{}]", out(reg) canary, const CANARY_OFFSET, options(nostack, readonly));
        control.byte_add(CANARY_OFFSET).write(canary);
        std::ptr::with_exposed_provenance_mut::<Start>(start).write(Start { entry, argument, cpu });
    }
    let files = if spec.share_files { CLONE_FILES } else { 0 };
    let flags = CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS | files;
    let unblocked = block_signals();
    // SAFETY: by the contract; the stack holds a `Start` at its top.
    let result = unsafe { raw_clone(flags, start, thread_pointer) };
    restore_signals(unblocked);
    if result < 0 { Err(Errno::from_raw_os_error(-result as i32)) } else { Ok(()) }
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
unsafe extern "C" fn raw_clone(flags: u64, stack: usize, thread_pointer: usize) -> isize {
    // clone(flags=rdi, stack=rsi, parent_tid=rdx, child_tid=r10, tls=r8): the child wakes with rax = 0 on its
    // stack, where `Start` lies, aligned to 16.
    naked_asm!(
        "mov r8, rdx",
        "xor edx, edx",
        "xor r10d, r10d",
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
    if cpu >= 0 {
        let mut cpus = rustix::thread::CpuSet::new();
        cpus.set(cpu as usize);
        // A CPU that went away leaves the thread where it is.
        let _ = rustix::thread::sched_setaffinity(None, &cpus);
    }
    entry(argument);
}

/// Blocks all signals of the calling thread; returns which were blocked before.
pub fn block_signals() -> u64 {
    let (all, mut before) = (u64::MAX, 0u64);
    sigprocmask(&raw const all, &raw mut before);
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

unsafe fn syscall4(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    // SAFETY: by the contract of the callers.
    unsafe { syscall5(number, [a, b, c, d, 0]) }
}

/// The same with five arguments.
///
/// # Safety
/// That of the call.
pub(crate) unsafe fn syscall5(number: usize, [a, b, c, d, e]: [usize; 5]) -> isize {
    let result;
    // SAFETY: the x86-64 system call convention; what the call does is the callers' contract.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
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
    use std::sync::atomic::{AtomicU32, Ordering};

    static STATE: AtomicU32 = AtomicU32::new(0);
    static THREAD: AtomicU32 = AtomicU32::new(0);

    fn wait_for(value: u32) {
        while STATE.load(Ordering::Acquire) != value {
            std::thread::yield_now();
        }
    }

    extern "C" fn body(argument: *mut u8) {
        assert_eq!(argument.addr(), 42);
        close_descriptors_but([]);
        THREAD.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Relaxed);
        STATE.store(1, Ordering::Release);
        loop {
            let _ = futex::wait(&STATE, futex::Flags::PRIVATE, 1, None);
        }
    }

    #[test]
    fn a_thread_runs_and_its_descriptors_are_its_own() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let stack = Box::leak(Box::new(Region::reserve(512 << 10).unwrap()));
        let spec = ThreadSpec { stack, share_files: false, cpu: Some(0) };
        // SAFETY: the stack is leaked, so it outlives the thread.
        unsafe { spawn(&spec, body, std::ptr::without_provenance_mut(42)) }.unwrap();
        wait_for(1);
        // Ours are still open after the thread has closed all of its own.
        assert!(file.metadata().is_ok());
        let status = format!("/proc/self/task/{}/status", THREAD.load(Ordering::Relaxed));
        let status = std::fs::read_to_string(status).unwrap();
        let blocked = status.lines().find(|line| line.starts_with("SigBlk:")).unwrap();
        assert!(blocked.to_lowercase().contains("fffffff"), "all its signals are blocked: {blocked}");
    }
}
