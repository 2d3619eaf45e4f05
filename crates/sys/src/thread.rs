//! Threads and processes of the agent, made by a raw `clone` and unknown to the C library.
//!
//! All of them share the program's memory. A [`Kind::Thread`] belongs to the caller's thread group.
//! A [`Kind::Process`] is a process that shares only the memory, so the program neither sees nor
//! counts it. Each of them has
//! - a stack from a [`Region`] of the agent, with a thread control block of the agent at its top.
//!   The thread pointer `fs` refers to zeroed space, so functions of the C library that use only a
//!   little initial-exec storage work. errno lies in the agent's space, because the C library's own
//!   errno lies beyond the thread-local data of the program and its libraries, which may be large.
//! - all signals blocked from its first instruction on, except SIGSYS, with which filters answer
//!   system calls ([`crate::seccomp`]).
//!
//! Such a thread must never block on a lock of the C library, or use thread-local storage of a
//! library that was loaded later. There is no lock here.

use crate::clock::{now_ns, timespec};
use crate::region::Region;
use crate::seccomp::{self, Call};
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::process::Pid;
use std::arch::{asm, naked_asm};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Space below the thread pointer for initial-exec thread-local storage, in bytes. The C library
/// uses 0.3 KiB; the static block of a process rarely exceeds 4 KiB.
const TLS_BYTES: usize = 64 << 10;
/// Space above the thread pointer for the control block, in bytes. glibc's `struct pthread` has 2.3
/// KiB.
const TCB_BYTES: usize = 8 << 10;
/// Offset of the stack protector's canary in the control block, by the x86-64 ABI.
const CANARY_OFFSET: usize = 0x28;

/// Offset in the control block of the pointer to the dynamic thread vector, in the C library's
/// threads.
const MARK_OFFSET: usize = 8;
/// The value at [`MARK_OFFSET`] in threads of the agent. It is odd, so it is not a pointer.
const MARK: usize = 0x666f_6c69_6f6d_656d | 1;

/// Returns the address of the calling thread's errno if this is a thread of the agent.
pub fn own_errno() -> Option<*mut i32> {
    let (thread_pointer, mark): (usize, usize);
    // SAFETY: by the x86-64 ABI the first word of the control block is its address, and the second
    // one belongs to the C library or to `spawn`. Both are only read.
    unsafe {
        asm!("mov {}, fs:[0]", "mov {}, fs:[{}]", out(reg) thread_pointer, out(reg) mark, const MARK_OFFSET,
            options(nostack, readonly));
    }
    // `spawn` has left room for errno right below the control block.
    (mark == MARK).then(|| std::ptr::with_exposed_provenance_mut(thread_pointer - size_of::<usize>()))
}

/// Flags for a thread of the caller's group, with its descriptors, directories and signal handlers.
const THREAD_FLAGS: u32 =
    raw::CLONE_THREAD | raw::CLONE_SIGHAND | raw::CLONE_FILES | raw::CLONE_FS | raw::CLONE_SYSVSEM;
/// Flags of all kinds: shared memory, a thread pointer, and a word that the kernel clears at the
/// end.
const COMMON_FLAGS: u32 = raw::CLONE_VM | raw::CLONE_SETTLS | raw::CLONE_PARENT_SETTID | raw::CLONE_CHILD_CLEARTID;

/// The kind of a thread or process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A thread of the caller's thread group.
    Thread,
    /// A process with copies of the caller's descriptors, directories and signal handlers. Its end
    /// sends no signal, and only a wait with `__WALL` or `__WCLONE` reports it. A tracer of the
    /// caller does not trace it.
    Process,
    /// A process like [`Kind::Process`]. The caller sleeps until it has ended, as in vfork(2): the
    /// state of such a thread is `D` and not `S`, which tells a program that the thread is idle.
    Intermediate,
    /// A process like [`Kind::Intermediate`], whose end sends SIGCHLD.
    SignallingIntermediate,
    /// A process like [`Kind::Process`], but it shares the caller's descriptors.
    ProcessOfSameFiles,
}

impl Kind {
    /// Returns the flags for clone(2).
    fn flags(self) -> u32 {
        // The low byte is the signal to the parent at the end of a process.
        COMMON_FLAGS
            | match self {
                Kind::Thread => THREAD_FLAGS,
                Kind::Process => raw::CLONE_UNTRACED,
                Kind::Intermediate => raw::CLONE_UNTRACED | raw::CLONE_VFORK,
                Kind::SignallingIntermediate => raw::CLONE_UNTRACED | raw::CLONE_VFORK | raw::SIGCHLD,
                Kind::ProcessOfSameFiles => raw::CLONE_UNTRACED | raw::CLONE_FILES,
            }
    }
}

/// The properties of a new thread or process.
#[derive(Debug)]
pub struct Spec<'a> {
    /// The kind.
    pub kind: Kind,
    /// The stack, which no other living thread uses.
    pub stack: &'a Region,
    /// The only CPU on which the new thread may run; `None` for the caller's CPUs.
    pub cpu: Option<usize>,
    /// The word for the id of the new thread or process. The kernel writes the id before [`spawn`]
    /// returns. When the thread ends, the kernel clears the word and wakes sleepers on it (a futex
    /// of the shared kind).
    pub id: &'a AtomicU32,
}

/// The first data on a new stack.
#[repr(C)]
struct Start {
    entry: extern "C" fn(*mut u8),
    argument: *mut u8,
    /// The CPU on which the thread may run, or -1.
    cpu: isize,
}

/// Starts a thread or process in `entry`, which must not return, and returns its id.
///
/// # Safety
/// The stack and the word outlive the new thread, and no other thread uses the stack. `entry` may
/// be called with `argument` on it.
///
/// # Errors
/// Fails if the kernel refuses to make it.
pub unsafe fn spawn(spec: &Spec<'_>, entry: extern "C" fn(*mut u8), argument: *mut u8) -> Result<Pid, Errno> {
    let top = spec.stack.start() + spec.stack.len();
    let thread_pointer = top - TCB_BYTES;
    let start = (thread_pointer - TLS_BYTES - size_of::<Start>()) & !15;
    let cpu = spec.cpu.map_or(-1, |cpu| cpu as isize);
    // SAFETY: the three areas lie in the stack, which belongs to the new thread, by the contract.
    unsafe {
        clear(std::ptr::with_exposed_provenance_mut(thread_pointer - TLS_BYTES), TLS_BYTES + TCB_BYTES);
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
    // SAFETY: the stack and the word outlive the thread, by the contract, and `start` points to a
    // `Start`.
    let result = unsafe { raw_clone(u64::from(spec.kind.flags()), start, thread_pointer, spec.id.as_ptr()) };
    restore_signals(unblocked);
    id_of(result)
}

/// Fills `bytes` bytes from `start` on with zeros; both are multiples of a page. Writes only to
/// pages with other content: an untouched page that is only read takes no memory.
///
/// # Safety
/// Nothing else reads or writes the range.
unsafe fn clear(start: *mut u8, bytes: usize) {
    for offset in (0..bytes).step_by(PAGE_BYTES) {
        // SAFETY: the page lies in the range, which nothing else uses, by the contract; it is
        // aligned, and every bit pattern is a word.
        unsafe {
            let page = start.add(offset);
            let words = std::slice::from_raw_parts(page.cast::<usize>(), PAGE_BYTES / size_of::<usize>());
            if words.iter().any(|&word| word != 0) {
                page.write_bytes(0, PAGE_BYTES);
            }
        }
    }
}

/// Returns the id in the raw result of clone(2).
fn id_of(result: isize) -> Result<Pid, Errno> {
    Pid::from_raw(result.max(0) as i32).ok_or_else(|| Errno::from_raw_os_error(-result as i32))
}

/// Starts a process of [`Kind::Process`] that ends at once, and returns its id. The process needs
/// no stack. Until it is [reaped](reap), it counts against limits of processes.
///
/// # Errors
/// Fails if the kernel refuses to make it.
pub fn spawn_ending_process() -> Result<Pid, Errno> {
    let flags = raw::CLONE_VM | raw::CLONE_UNTRACED;
    let unblocked = block_signals();
    let result: isize;
    // SAFETY: the new process has the caller's stack pointer. It makes one system call, which ends
    // it, and reads and writes no memory: all signals are blocked.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "mov eax, {exit}",
            "xor edi, edi",
            "syscall",
            "ud2",
            "2:",
            exit = const raw::__NR_exit,
            inlateout("rax") raw::__NR_clone as isize => result,
            inlateout("rdi") flags as usize => _,
            in("rsi") 0, in("rdx") 0, in("r10") 0, in("r8") 0,
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    restore_signals(unblocked);
    id_of(result)
}

/// Ends the calling thread. This ends its process if no other thread is left.
pub fn exit_thread() -> ! {
    exit_by(raw::__NR_exit, 0)
}

/// Ends the calling process.
pub fn exit_process(code: u8) -> ! {
    exit_by(raw::__NR_exit_group, code)
}

/// Ends the calling thread or process by system call `number`.
fn exit_by(number: u32, code: u8) -> ! {
    loop {
        // SAFETY: both system calls take a number and do not return.
        unsafe { syscall3(number as usize, code.into(), 0, 0) };
    }
}

/// Waits until process `id` has ended, and reaps it. It is a child of the caller and ends by
/// itself. If a filter forbids the wait, this returns when the kernel has cleared the process's
/// `word`.
pub fn wait_for_exit(id: Pid, word: &AtomicU32) {
    reap(id);
    wait_until_cleared(word, None);
}

/// Waits until process `id`, a child of the caller, has ended, and reaps it.
pub fn reap(id: Pid) {
    while wait_for(id, 0) == -(Errno::INTR.raw_os_error() as isize) {}
}

/// Reaps process `id`, a child of the caller, if it has ended. Returns whether it is no child any
/// more.
pub fn reap_ended(id: Pid) -> bool {
    wait_for(id, raw::WNOHANG) != 0
}

/// What [`reap_signalless`] has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reaped {
    /// It has reaped a child.
    One,
    /// There are such children. None of them has ended.
    NoneYet,
    /// There is no such child.
    NoChildren,
}

/// Reaps a child of the caller that has ended and sends no SIGCHLD, such as a process of [`spawn`].
pub fn reap_signalless() -> Reaped {
    let (number, options) = (raw::__NR_wait4 as usize, raw::__WCLONE | raw::WNOHANG);
    // SAFETY: the call gets no address for the status, so it writes nothing.
    match unsafe { syscall4(number, usize::MAX, 0, options as usize, 0) } {
        0 => Reaped::NoneYet,
        1.. => Reaped::One,
        _ => Reaped::NoChildren,
    }
}

/// Returns whether the calling process has no children whose end sends SIGCHLD.
pub fn has_no_children() -> bool {
    let (number, options) = (raw::__NR_waitid as usize, (raw::WEXITED | raw::WNOHANG | raw::WNOWAIT) as usize);
    // SAFETY: the call gets no addresses, and leaves all children as they are.
    let result = unsafe { syscall5(number, [libc::P_ALL as usize, 0, 0, options, 0]) };
    result == -(Errno::CHILD.raw_os_error() as isize)
}

/// Waits for process `id` with `options`, and returns the result of wait4(2).
fn wait_for(id: Pid, options: u32) -> isize {
    let (number, id) = (raw::__NR_wait4 as usize, id.as_raw_nonzero().get() as usize);
    // SAFETY: the call gets no address for the status, so it writes nothing.
    unsafe { syscall4(number, id, 0, (raw::__WALL | options) as usize, 0) }
}

/// Waits until the kernel has cleared `word`, which contains the id of a thread or process of
/// [`spawn`]. It waits at most until `until_ns` of the monotonic clock.
pub fn wait_until_cleared(word: &AtomicU32, until_ns: Option<u64>) {
    loop {
        // Acquire pairs with the kernel's clearing of the word when the thread ends.
        let id = word.load(Ordering::Acquire);
        let left_ns = until_ns.map(|until_ns| until_ns.saturating_sub(now_ns()));
        if id == 0 || left_ns == Some(0) {
            return;
        }
        let time = left_ns.map(|left_ns| timespec(Duration::from_nanos(left_ns)));
        // The kernel wakes sleepers on the word with a futex of the shared kind.
        let _ = rustix::thread::futex::wait(word, rustix::thread::futex::Flags::empty(), id, time.as_ref());
    }
}

/// Returns whether the kernel reports that no other process uses the caller's memory. The kernel
/// answers only a process with one thread; otherwise this returns `false`.
pub fn is_only_user_of_memory() -> bool {
    // SAFETY: unshare(2) of memory succeeds only if nothing is shared, so it changes nothing.
    unsafe { syscall3(raw::__NR_unshare as usize, raw::CLONE_VM as usize, 0, 0) == 0 }
}

/// The memory that a thread uses, compared with the caller's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryOf {
    /// The caller's memory.
    Caller,
    /// Other memory, or none any more.
    Other,
    /// The kernel refuses to compare, or there is no such thread.
    Unknown,
}

/// Compares the memory of `thread` with the caller's (kcmp(2)).
pub fn compare_memory(thread: Pid) -> MemoryOf {
    /// `enum kcmp_type` in `linux/kcmp.h`.
    const KCMP_VM: usize = 1;
    let [own, other] = [rustix::thread::gettid(), thread].map(|id| id.as_raw_nonzero().get() as usize);
    // SAFETY: kcmp(2) takes no pointers and changes nothing.
    let order = unsafe { syscall4(raw::__NR_kcmp as usize, own, other, KCMP_VM, 0) };
    match order {
        0 => MemoryOf::Caller,
        1.. => MemoryOf::Other,
        _ => MemoryOf::Unknown,
    }
}

/// Closes all descriptors of the calling process except `kept`. Its table of descriptors must not
/// be shared.
pub fn close_descriptors_but<const N: usize>(mut kept: [Option<RawFd>; N]) {
    let close = |first: u32, last: u32| {
        // SAFETY: close_range(2) (Linux 5.9) closes copies of descriptors, which nobody else uses.
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

/// Registers a robust list for the calling thread (set_robust_list(2)).
///
/// # Safety
/// `head` is the address of a valid list that lives as long as the thread.
pub unsafe fn set_robust_list(head: usize, bytes: usize) {
    // SAFETY: the list is valid and lives as long as the thread, by the contract.
    unsafe { syscall3(linux_raw_sys::general::__NR_set_robust_list as usize, head, bytes, 0) };
}

/// Makes a thread that calls [`enter`] with `stack`, and returns the result of clone(2).
#[unsafe(naked)]
unsafe extern "C" fn raw_clone(flags: u64, stack: usize, thread_pointer: usize, id: *mut u32) -> isize {
    // clone(flags=rdi, stack=rsi, parent_tid=rdx, child_tid=r10, tls=r8). The child continues with
    // rax = 0 on its stack, which begins with the `Start` and is aligned to 16.
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

/// First Rust function of a new thread.
extern "C" fn enter(start: *const Start) {
    // SAFETY: `raw_clone` passes the stack pointer, which `spawn` set to the address of a `Start`.
    let Start { entry, argument, cpu } = unsafe { start.read() };
    if cpu >= 0 && seccomp::allow(Call::SchedSetaffinity) {
        let mut cpus = rustix::thread::CpuSet::new();
        cpus.set(cpu as usize);
        // If the CPU is gone, the thread stays on the caller's CPUs.
        let _ = rustix::thread::sched_setaffinity(None, &cpus);
    }
    entry(argument);
}

/// Blocks all signals of the calling thread except SIGSYS. Returns the previous mask.
pub fn block_signals() -> u64 {
    let (all, mut before) = (!(1u64 << (raw::SIGSYS - 1)), 0u64);
    sigprocmask(&raw const all, &raw mut before);
    before
}

/// Sets the signal mask of the calling thread.
pub fn restore_signals(blocked: u64) {
    sigprocmask(&raw const blocked, std::ptr::null_mut());
}

/// Sets the signal mask of the calling thread, and writes the previous one to `before`.
fn sigprocmask(set: *const u64, before: *mut u64) {
    const SIG_SETMASK: usize = 2;
    // SAFETY: rt_sigprocmask(how, set, oldset, 8) reads one word and writes the other, which the
    // callers in this module own.
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

/// Makes a system call with three arguments and returns its raw result: a value, or a negated error
/// number. The C library's `syscall` would set errno, which threads of the agent do not have.
///
/// # Safety
/// The caller keeps the contract of the system call.
pub(crate) unsafe fn syscall3(number: usize, a: usize, b: usize, c: usize) -> isize {
    // SAFETY: the caller keeps the contract of the call.
    unsafe { syscall4(number, a, b, c, 0) }
}

/// Makes a system call with four arguments, like [`syscall3`].
///
/// # Safety
/// The caller keeps the contract of the system call.
pub(crate) unsafe fn syscall4(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    // SAFETY: the caller keeps the contract of the call.
    unsafe { syscall5(number, [a, b, c, d, 0]) }
}

/// Makes a system call with five arguments, like [`syscall3`].
///
/// # Safety
/// The caller keeps the contract of the system call.
pub(crate) unsafe fn syscall5(number: usize, [a, b, c, d, e]: [usize; 5]) -> isize {
    // SAFETY: the caller keeps the contract of the call.
    unsafe { syscall6(number, [a, b, c, d, e, 0]) }
}

/// Makes a system call with six arguments, like [`syscall3`].
///
/// # Safety
/// The caller keeps the contract of the system call.
pub(crate) unsafe fn syscall6(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: this follows the x86-64 convention for system calls; the caller keeps the contract of
    // the call.
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

    /// Returns how much memory the mapping that begins at `start` takes, in KiB. While the child of
    /// another test's fork lives, it shares the memory.
    fn dirty_kib(start: usize) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_mapping = smaps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
        let until_flags = of_mapping.take_while(|line| !line.starts_with("VmFlags:"));
        let dirty = until_flags
            .filter_map(|line| line.strip_prefix("Private_Dirty:").or_else(|| line.strip_prefix("Shared_Dirty:")));
        dirty.map(|size| size.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()).sum()
    }

    #[test]
    fn zeros_take_no_memory_where_nothing_else_was() {
        let region = stack();
        let first = std::ptr::with_exposed_provenance_mut::<u8>(region.start());
        let all_pages = region.len() / PAGE_BYTES;
        // SAFETY: the region belongs to this test, and the ranges lie in it.
        unsafe {
            clear(first, region.len());
            assert_eq!(dirty_kib(region.start()), 0);
            first.add(5 * PAGE_BYTES - 1).write(1);
            clear(first, region.len());
            assert!((0..all_pages * PAGE_BYTES).all(|byte| first.add(byte).read() == 0));
        }
        assert_eq!(dirty_kib(region.start()), (PAGE_BYTES >> 10) as u64);
    }

    #[test]
    fn a_process_shares_memory_and_nothing_else() {
        static ID: AtomicU32 = AtomicU32::new(0);
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let spec = Spec { kind: Kind::Process, stack: stack(), cpu: Some(0), id: &ID };
        // SAFETY: the stack is leaked and the word static, so they outlive the process.
        let id = unsafe { spawn(&spec, waits, std::ptr::without_provenance_mut(42)) }.unwrap();
        assert_eq!(ID.load(Ordering::Relaxed), id.as_raw_nonzero().get() as u32);
        wait_while(&STATE, 0);
        // The descriptors of this process stay open after the other one has closed all of its own.
        assert!(file.metadata().is_ok());
        let is_thread = std::fs::exists(format!("/proc/self/task/{}", id.as_raw_nonzero())).unwrap();
        assert!(!is_thread, "tests beside this one begin and end threads");
        let status = std::fs::read_to_string(format!("/proc/{}/status", id.as_raw_nonzero())).unwrap();
        let blocked = status.lines().find(|line| line.starts_with("SigBlk:")).unwrap();
        assert!(blocked.to_lowercase().contains("fbfeff"), "all signals but SIGSYS are blocked: {blocked}");
        let mut status = 0;
        // SAFETY: waitpid(2) only writes the status.
        let waited = unsafe { libc::waitpid(id.as_raw_nonzero().get(), &raw mut status, libc::WNOHANG) };
        assert_eq!(waited, -1, "an ordinary wait does not report the process");
        STATE.store(2, Ordering::Release);
        let _ = futex::wake(&STATE, futex::Flags::PRIVATE, 1);
        wait_for_exit(id, &ID);
        assert_eq!(ID.load(Ordering::Relaxed), 0);
        // SAFETY: waitpid(2) only writes the status.
        let waited = unsafe { libc::waitpid(id.as_raw_nonzero().get(), &raw mut status, libc::__WALL) };
        assert_eq!(waited, -1, "the process is reaped");
    }
}
