//! Where a patched system call of the C library's goes when it may fork or installs guards
//! ([`crate::interception::patches`]).
//!
//! The entry is reached by jumps from a stub, with the registers of the system call, and `rcx` at
//! the stub's own `syscall` instruction. It leaves with a jump there, where the caller is to make
//! the call itself, or behind it, with the result. In between it claims a frame, blocks signals,
//! takes a lock, and makes the call on the agent's stack.
//!
//! - It uses none of the caller's stack.
//! - It keeps the vector registers, as a system call does; what follows the call in a C function
//!   may rely on that.
//! - SIGSYS stays as it is: a filter of the program that traps one of the calls here finds the
//!   program's handler. A blocked one would end the process.
//! - A signal mask that a filter keeps us from changing is left alone.
//!
//! - A selector of Syscall User Dispatch that the program has set is off meanwhile, where its
//!   prctl(2) was seen.
//!
//! A call that ends the process is made here, after the agent has ended ([`ForkHooks::exiting`]): on
//! a stack of its own, without a lock or a frame, because a child of `vfork(2)` may get there, and
//! be killed at any moment.
//!
//! A frame is claimed before signals are blocked and free after they no longer are. A signal
//! handler in between may fork, with a frame of its own, or leave by `longjmp`: the frame is then
//! used by the next fork of the thread with the same stack pointer, which shows that the one before
//! is over.
//!
//! Lock: `LOCK`, before the gate. It is held over the fork, and the child drops its copy.

use crate::interception::fork_call::{CallKind, ForkCall, ForkHooks};
use crate::interception::guards;
use crate::thread_control_block;
use std::arch::{asm, global_asm};
use std::mem::{MaybeUninit, offset_of};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Threads that fork at the same time; more spin.
const FRAMES: usize = 256;

/// A child that shares the memory has one of these: it is a thread, or its maker waits for it.
const WAITED_FOR: u32 = linux_raw_sys::general::CLONE_THREAD | linux_raw_sys::general::CLONE_VFORK;

/// Saved registers.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Frame {
    mask: u64,
    /// 0 if the mask has been changed.
    mask_result: isize,
    owner: usize,
    /// The number of the system call; then its result.
    rax: usize,
    rbx: usize,
    rdi: usize,
    rsi: usize,
    rdx: usize,
    r10: usize,
    r8: usize,
    r9: usize,
    /// Where to go on.
    resume: usize,
    rsp: usize,
    /// The address of the thread's selector, if the program has its system calls dispatched.
    selector: usize,
    /// What the selector was.
    selected: usize,
}

/// What threads have. The entry scans the array up to the end of the page.
#[repr(C, align(4096))]
struct Table([Entry; FRAMES]);

/// What one thread has.
#[repr(C)]
struct Entry {
    /// The address of the thread's control block, with the lowest bit set; 0 if the entry is free.
    thread: AtomicUsize,
    value: AtomicUsize,
}

impl Table {
    const fn new() -> Table {
        Table([const { Entry { thread: AtomicUsize::new(0), value: AtomicUsize::new(0) } }; FRAMES])
    }

    /// In the child of a fork: no other thread has come along.
    fn keep_only(&self, kept: Option<usize>) {
        let others = self.0.iter().filter(|entry| Some(entry.thread.as_ptr().addr()) != kept);
        others.for_each(|entry| entry.thread.store(0, Ordering::Relaxed));
    }
}

/// Who has the frame of the same index: the stack pointer of the fork.
static OWNERS: Table = Table::new();
/// Threads whose system calls the program has dispatched (Syscall User Dispatch): the address of
/// the selector. The agent's calls over a fork are not.
static DISPATCHES: Table = Table::new();
/// Whether there has been one.
static HAS_DISPATCH: AtomicBool = AtomicBool::new(false);
/// Each is accessed by its owner only.
static mut ALL_FRAMES: [MaybeUninit<Frame>; FRAMES] = [const { MaybeUninit::zeroed() }; FRAMES];

const _: () = assert!(size_of::<Table>() == 4096 && size_of::<Entry>() == 16 && size_of::<Frame>() == 128);

const SYSCALL_BYTES: usize = 2;
const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;

/// A futex: unlocked, locked, or locked and awaited.
static LOCK: AtomicU32 = AtomicU32::new(UNLOCKED);
/// The top of the hooks' stack; 0 as long as nothing is managed.
static STACK_TOP: AtomicUsize = AtomicUsize::new(0);
/// The lowest part of the hooks' stack, on which exits run. The deepest use seen is 3 KiB, of a debug
/// build.
const EXIT_STACK_BYTES: usize = 32 << 10;

/// Its top. Static data would not do: the kernel may have joined it with memory that is managed, and
/// a page that is touched for the first time after the agent's end would be waited for, for ever.
/// Used by the thread that has set [`IS_EXITING`].
static EXIT_STACK_TOP: AtomicUsize = AtomicUsize::new(0);
/// Whether a thread is on the stack for exits. Another one makes the call by itself.
static IS_EXITING: AtomicU32 = AtomicU32::new(0);
/// Whether the program has made a process that shares its memory, and is not waited for as
/// `vfork(2)` waits.
static HAS_SHARED_MEMORY: AtomicBool = AtomicBool::new(false);
/// The signals that are blocked over a fork: all but SIGSYS.
static BLOCKED: u64 = !(1 << (libc::SIGSYS - 1));
static HOOKS: OnceLock<&'static dyn ForkHooks> = OnceLock::new();

global_asm!(
    ".hidden foliomem_fork_entry",
    ".globl foliomem_fork_entry",
    "foliomem_fork_entry:",
    "cmp eax, {exit_group}",
    "jne 40f",
    "cmp qword ptr [rip + {stack_top}], 0",
    "je 9f",
    "cmp byte ptr [rip + {has_dispatch}], 0",
    "jne 9f",
    "lock bts dword ptr [rip + {is_exiting}], 0",
    "jc 9f",
    "mov rsp, [rip + {exit_stack_top}]",
    "call {exit}",
    "ud2",
    "40:",
    // clone with CLONE_VM: a thread, or a child that may have another stack.
    "cmp eax, {clone}",
    "jne 2f",
    "test edi, {clone_vm}",
    "jz 2f",
    "test edi, {clone_thread_or_vfork}",
    "jnz 9f",
    "mov byte ptr [rip + {has_shared_memory}], 1",
    "jmp 9f",
    "2:",
    "cmp qword ptr [rip + {stack_top}], 0",
    "je 9f",
    // The number goes where an address has none of its bits.
    "mov eax, eax",
    "shl rax, 48",
    "or rcx, rax",
    "mov r11, fs:[0]",
    "or r11, 1",
    "lea rax, [rip + {owners}]",
    "20:",
    "cmp [rax], r11",
    "jne 21f",
    "cmp [rax + 8], rsp",
    "je 24f",
    "21:",
    "add rax, 16",
    "test eax, 0xfff",
    "jnz 20b",
    "22:",
    "lea rax, [rip + {owners}]",
    "23:",
    "lock bts qword ptr [rax], 0",
    "jnc 25f",
    "add rax, 16",
    "test eax, 0xfff",
    "jnz 23b",
    "pause",
    "jmp 22b",
    "25:",
    "mov [rax + 8], rsp",
    "mov [rax], r11",
    "24:",
    // r11: the frame of the owner at rax, 128 bytes for its 16.
    "lea r11, [rip + {owners}]",
    "sub rax, r11",
    "lea r11, [rip + {frames}]",
    "lea r11, [r11 + 8 * rax]",
    "mov [r11 + {rbx}], rbx",
    "mov rbx, r11",
    "lea r11, [rip + {owners}]",
    "add rax, r11",
    "mov [rbx + {owner}], rax",
    "mov [rbx + {rdi}], rdi",
    "mov [rbx + {rsi}], rsi",
    "mov [rbx + {rdx}], rdx",
    "mov [rbx + {r10}], r10",
    "mov [rbx + {r8}], r8",
    "mov [rbx + {r9}], r9",
    "mov [rbx + {rsp}], rsp",
    "mov rax, rcx",
    "shr rax, 48",
    "mov [rbx + {rax}], rax",
    "shl rcx, 16",
    "shr rcx, 16",
    "mov [rbx + {resume}], rcx",
    "mov qword ptr [rbx + {selector}], 0",
    "cmp byte ptr [rip + {has_dispatch}], 0",
    "je 32f",
    "mov rcx, fs:[0]",
    "or rcx, 1",
    "lea rax, [rip + {dispatches}]",
    "30:",
    "cmp [rax], rcx",
    "je 31f",
    "add rax, 16",
    "test eax, 0xfff",
    "jnz 30b",
    "jmp 32f",
    "31:",
    "mov rax, [rax + 8]",
    "mov [rbx + {selector}], rax",
    "movzx ecx, byte ptr [rax]",
    "mov [rbx + {selected}], rcx",
    "mov byte ptr [rax], 0",
    "32:",
    // rt_sigprocmask(SIG_BLOCK, BLOCKED, &frame.mask, 8)
    "mov eax, 14",
    "xor edi, edi",
    "lea rsi, [rip + {blocked}]",
    "mov rdx, rbx",
    "mov r10d, 8",
    "syscall",
    "mov [rbx + {mask_result}], rax",
    "xor eax, eax",
    "mov ecx, 1",
    "lock cmpxchg dword ptr [rip + {lock}], ecx",
    "je 4f",
    "3:",
    "mov eax, 2",
    "xchg dword ptr [rip + {lock}], eax",
    "test eax, eax",
    "jz 4f",
    // futex(LOCK, FUTEX_WAIT_PRIVATE, 2, NULL)
    "mov eax, 202",
    "lea rdi, [rip + {lock}]",
    "mov esi, 128",
    "mov edx, 2",
    "xor r10d, r10d",
    "syscall",
    "jmp 3b",
    "4:",
    "mov rsp, [rip + {stack_top}]",
    "sub rsp, 4096",
    "xor eax, eax",
    "mov [rsp + 512], rax",
    "mov [rsp + 520], rax",
    "mov [rsp + 528], rax",
    "mov [rsp + 536], rax",
    "mov [rsp + 544], rax",
    "mov [rsp + 552], rax",
    "mov [rsp + 560], rax",
    "mov [rsp + 568], rax",
    // x87, SSE, AVX, AVX-512: 2.7 KiB.
    "mov eax, 0xe7",
    "xor edx, edx",
    "xsave64 [rsp]",
    "mov rdi, rbx",
    "call {fork}",
    "mov eax, 0xe7",
    "xor edx, edx",
    "xrstor64 [rsp]",
    "mov rsp, [rbx + {rsp}]",
    "xor eax, eax",
    "xchg dword ptr [rip + {lock}], eax",
    "cmp eax, 2",
    "jne 5f",
    // futex(LOCK, FUTEX_WAKE_PRIVATE, 1)
    "mov eax, 202",
    "lea rdi, [rip + {lock}]",
    "mov esi, 129",
    "mov edx, 1",
    "syscall",
    "5:",
    "cmp qword ptr [rbx + {mask_result}], 0",
    "jne 6f",
    // rt_sigprocmask(SIG_SETMASK, &frame.mask, NULL, 8)
    "mov eax, 14",
    "mov edi, 2",
    "mov rsi, rbx",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "6:",
    "mov rcx, [rbx + {selector}]",
    "test rcx, rcx",
    "jz 7f",
    "mov rax, [rbx + {selected}]",
    "mov [rcx], al",
    "7:",
    "mov r11, rbx",
    "mov rbx, [r11 + {rbx}]",
    "mov rax, [r11 + {rax}]",
    "mov rdi, [r11 + {rdi}]",
    "mov rsi, [r11 + {rsi}]",
    "mov rdx, [r11 + {rdx}]",
    "mov r10, [r11 + {r10}]",
    "mov r8, [r11 + {r8}]",
    "mov r9, [r11 + {r9}]",
    "mov rcx, [r11 + {resume}]",
    "mov r11, [r11 + {owner}]",
    "mov qword ptr [r11], 0",
    "9:",
    "jmp rcx",
    clone = const linux_raw_sys::general::__NR_clone,
    clone_vm = const linux_raw_sys::general::CLONE_VM,
    clone_thread_or_vfork = const WAITED_FOR,
    has_shared_memory = sym HAS_SHARED_MEMORY,
    exit_group = const linux_raw_sys::general::__NR_exit_group,
    is_exiting = sym IS_EXITING,
    exit_stack_top = sym EXIT_STACK_TOP,
    exit = sym exit_on_own_stack,
    stack_top = sym STACK_TOP,
    blocked = sym BLOCKED,
    lock = sym LOCK,
    fork = sym call_on_own_stack,
    owners = sym OWNERS,
    frames = sym ALL_FRAMES,
    mask_result = const offset_of!(Frame, mask_result),
    owner = const offset_of!(Frame, owner),
    rax = const offset_of!(Frame, rax),
    rbx = const offset_of!(Frame, rbx),
    rdi = const offset_of!(Frame, rdi),
    rsi = const offset_of!(Frame, rsi),
    rdx = const offset_of!(Frame, rdx),
    r10 = const offset_of!(Frame, r10),
    r8 = const offset_of!(Frame, r8),
    r9 = const offset_of!(Frame, r9),
    resume = const offset_of!(Frame, resume),
    rsp = const offset_of!(Frame, rsp),
    selector = const offset_of!(Frame, selector),
    selected = const offset_of!(Frame, selected),
    has_dispatch = sym HAS_DISPATCH,
    dispatches = sym DISPATCHES,
);

unsafe extern "C" {
    fn foliomem_fork_entry();
}

/// The address that stubs jump to.
pub fn address() -> usize {
    (foliomem_fork_entry as *const ()).expose_provenance()
}

/// Whether this CPU has what the entry needs.
pub fn is_supported() -> bool {
    std::arch::is_x86_feature_detected!("xsave")
}

/// Runs `hooks` around all forks of patched system calls from here on.
pub fn set_hooks(hooks: &'static dyn ForkHooks) {
    if HOOKS.set(hooks).is_ok() {
        let stack = hooks.stack();
        assert!(stack.len() > 2 * EXIT_STACK_BYTES, "exits and forks run on one stack");
        EXIT_STACK_TOP.store(stack.start() + EXIT_STACK_BYTES, Ordering::Relaxed);
        // Release pairs with the read in the entry code: the stack is there.
        STACK_TOP.store(stack.start() + stack.len(), Ordering::Release);
    }
}

/// The program has the calling thread's system calls dispatched, by the selector at an address, or
/// no longer has.
pub fn dispatches(selector: Option<usize>) {
    if selector.is_none() && !HAS_DISPATCH.load(Ordering::Relaxed) {
        return;
    }
    let thread = thread_control_block::own().start | 1;
    let has = |wanted: usize| move |entry: &&Entry| entry.thread.load(Ordering::Relaxed) == wanted;
    let own = DISPATCHES.0.iter().find(has(thread));
    let Some(selector) = selector else {
        // Release pairs with the Acquire of the next claim.
        own.into_iter().for_each(|entry| entry.thread.store(0, Ordering::Release));
        return;
    };
    HAS_DISPATCH.store(true, Ordering::Relaxed);
    // Acquire pairs with the Release of the thread that gave the entry up.
    let claim = |entry: &&Entry| entry.thread.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
    if let Some(entry) = own.or_else(|| DISPATCHES.0.iter().find(claim)) {
        entry.value.store(selector, Ordering::Relaxed);
        // Release pairs with the look of a signal handler of this thread: the entry is filled.
        entry.thread.store(thread, Ordering::Release);
    }
}

/// A system call.
///
/// # Safety
/// That of the call.
pub unsafe fn system_call(number: u32, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: by the contract.
    unsafe {
        asm!(
            "syscall", inlateout("rax") number as usize => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack),
        );
    }
    result
}

/// The program makes a child that shares its memory, by clone3(2) with these flags.
pub fn shares_memory(flags: u64) {
    if flags & u64::from(WAITED_FOR) == 0 {
        HAS_SHARED_MEMORY.store(true, Ordering::Relaxed);
    }
}

/// Whether a process that the program has made may share its memory.
pub fn has_shared_memory() -> bool {
    HAS_SHARED_MEMORY.load(Ordering::Relaxed)
}

/// Ends the process, after the hook. Touches no memory of the program.
extern "C" fn exit_on_own_stack(status: usize) -> ! {
    HOOKS.get().into_iter().for_each(|hooks| hooks.exiting());
    // A child of vfork(2) leaves the stack to its parent.
    IS_EXITING.store(0, Ordering::Relaxed);
    loop {
        // SAFETY: takes a number, and does not return.
        unsafe { system_call(linux_raw_sys::general::__NR_exit_group, [status, 0, 0, 0, 0, 0]) };
    }
}

/// The loader has loaded or unloaded libraries.
pub fn objects_changed() {
    HOOKS.get().into_iter().for_each(|hooks| hooks.objects_changed());
}

/// Makes the call, on the hooks' stack, with the lock held.
extern "C" fn call_on_own_stack(frame: &mut Frame) {
    let Some(&hooks) = HOOKS.get() else { return };
    let number = frame.rax as u32;
    let arguments = [frame.rdi, frame.rsi, frame.rdx, frame.r10, frame.r8, frame.r9];
    let result = match ForkCall::read(number, arguments) {
        CallKind::Other => match guards::install(number, arguments) {
            Some(result) => result,
            None => return,
        },
        CallKind::Invalid(errno) => -(errno.raw_os_error() as isize),
        CallKind::Fork(mut call) => {
            call.make(hooks, thread_control_block::pages(&thread_control_block::own()), system_call);
            if call.result() == 0 {
                // Only this thread has come along.
                LOCK.store(LOCKED, Ordering::Relaxed);
                OWNERS.keep_only(Some(frame.owner));
                DISPATCHES.keep_only(None);
                frame.rsp = call.child_stack().unwrap_or(frame.rsp);
            }
            call.write_results();
            call.result()
        }
    };
    frame.rax = result as usize;
    frame.resume += SYSCALL_BYTES;
}
