//! The entry: makes a patched system call of the C library that may fork, installs guards, or
//! executes another program ([`crate::interception::patches`]).
//!
//! A stub jumps to the entry with the registers of the system call, and with the address of the
//! stub's own `syscall` instruction in `rcx`. The entry claims a frame, blocks signals, takes a
//! lock, and makes the call on the agent's stack. Then it jumps to after the stub's instruction,
//! with the result. If the caller must make the call itself, the entry jumps to the instruction
//! instead.
//!
//! - The entry does not use the caller's stack for a fork.
//! - It preserves the vector registers, as a system call does: the C function around the call may
//!   rely on that.
//! - It does not block SIGSYS. A filter of the program that traps one of the entry's own calls thus
//!   reaches the program's handler; a blocked SIGSYS would end the process.
//! - If a filter refuses to change the signal mask, the mask stays as it is.
//! - A selector of Syscall User Dispatch that the program has set is off meanwhile, if the agent
//!   has seen the program's prctl(2).
//!
//! A call that ends the process is made here, after the agent has ended ([`ForkHooks::exiting`]).
//! It runs on a stack of its own, without a lock or a frame: a child of `vfork(2)` may make it, and
//! may be killed at any moment.
//!
//! A call that executes another program is made here if its environment must be changed
//! ([`exec_environment`]), without a lock or a frame, either, but on the caller's stack. The C
//! function around it keeps nothing in vector registers.
//!
//! A frame is claimed before signals are blocked, and released after they are unblocked. A signal
//! handler in between may fork, with another frame, or leave by `longjmp`. In the second case the
//! next fork of the thread with the same stack pointer takes over the frame: the same stack pointer
//! shows that the earlier fork is over.
//!
//! Lock order: `LOCK` comes before the gate. It is held over the fork, and the child drops its
//! copy.

use crate::interception::fork_call::{CallKind, ForkCall, ForkHooks, NEEDS_WORDS};
use crate::interception::{exec_environment, guards};
use crate::thread_control_block;
use std::arch::{asm, global_asm};
use std::mem::{MaybeUninit, offset_of};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Maximum number of threads that fork at the same time; more threads spin.
const FRAMES: usize = 256;

/// Flags of a child that may share its parent's memory: a thread, or a process that its parent
/// waits for (`vfork`).
const WAITED_FOR: u32 = linux_raw_sys::general::CLONE_THREAD | linux_raw_sys::general::CLONE_VFORK;

/// The saved state of a thread in the entry.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Frame {
    /// The signal mask of the thread.
    mask: u64,
    /// The result of blocking signals; 0 if the mask has been changed.
    mask_result: isize,
    /// Address of the frame's entry in `OWNERS`.
    owner: usize,
    /// The number of the system call, later its result.
    rax: usize,
    rbx: usize,
    rdi: usize,
    rsi: usize,
    rdx: usize,
    r10: usize,
    r8: usize,
    r9: usize,
    /// The address at which the thread continues.
    resume: usize,
    rsp: usize,
    /// Address of the thread's selector of Syscall User Dispatch; 0 if it has none.
    selector: usize,
    /// The value of the selector before the call.
    selected: usize,
}

/// Words of threads. The entry's code scans the array up to the end of the page.
#[repr(C, align(4096))]
struct Table([Entry; FRAMES]);

/// The word of one thread.
#[repr(C)]
struct Entry {
    /// Address of the thread's control block, with the lowest bit set; 0 if the entry is free.
    thread: AtomicUsize,
    value: AtomicUsize,
}

impl Table {
    /// Makes a table of free entries.
    const fn new() -> Table {
        Table([const { Entry { thread: AtomicUsize::new(0), value: AtomicUsize::new(0) } }; FRAMES])
    }

    /// Frees all entries but that at address `kept`, in the child of a fork, which has one thread.
    fn keep_only(&self, kept: Option<usize>) {
        let others = self.0.iter().filter(|entry| Some(entry.thread.as_ptr().addr()) != kept);
        others.for_each(|entry| entry.thread.store(0, Ordering::Relaxed));
    }
}

/// Owner of the frame of the same index. The value is the stack pointer of the fork.
static OWNERS: Table = Table::new();
/// Threads for which the program uses Syscall User Dispatch. The value is the selector's address.
/// The agent's calls around a fork must not be dispatched.
static DISPATCHES: Table = Table::new();
/// Whether `DISPATCHES` has ever had an entry.
static HAS_DISPATCH: AtomicBool = AtomicBool::new(false);
/// The frames. Only the owner of a frame accesses it.
static mut ALL_FRAMES: [MaybeUninit<Frame>; FRAMES] = [const { MaybeUninit::zeroed() }; FRAMES];

const _: () = assert!(size_of::<Table>() == 4096 && size_of::<Entry>() == 16 && size_of::<Frame>() == 128);

/// Length of a `syscall` instruction, in bytes.
const SYSCALL_BYTES: usize = 2;
/// Value of `LOCK` when no thread holds it.
const UNLOCKED: u32 = 0;
/// Value of `LOCK` when a thread holds it and no thread waits.
const LOCKED: u32 = 1;

/// The lock, a futex: unlocked, locked, or 2 if it is locked and threads wait.
static LOCK: AtomicU32 = AtomicU32::new(UNLOCKED);
/// Top of the hooks' stack; 0 until the agent is active.
static STACK_TOP: AtomicUsize = AtomicUsize::new(0);
/// Size of the stack for exits, in bytes: the lowest part of the hooks' stack. Debug builds use 3
/// KiB.
const EXIT_STACK_BYTES: usize = 32 << 10;

/// Top of the stack for exits. The thread that has set [`IS_EXITING`] uses it.
///
/// The stack cannot be static data: the kernel may have merged that with managed memory, and a
/// first touch after the agent's end would wait forever.
static EXIT_STACK_TOP: AtomicUsize = AtomicUsize::new(0);
/// Whether a thread uses the stack for exits. Meanwhile other threads exit without the hook.
static IS_EXITING: AtomicU32 = AtomicU32::new(0);
/// Whether the program has made a process that shares its memory and for which it does not wait as
/// `vfork(2)` does.
static HAS_SHARED_MEMORY: AtomicBool = AtomicBool::new(false);
/// The signals that are blocked around a fork: all but SIGSYS.
static BLOCKED: u64 = !(1 << (libc::SIGSYS - 1));
/// The hooks, which are set once.
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
    "cmp eax, {execve}",
    "je 50f",
    "cmp eax, {execveat}",
    "jne 42f",
    "50:",
    "cmp qword ptr [rip + {stack_top}], 0",
    "je 9f",
    "cmp byte ptr [rip + {has_dispatch}], 0",
    "jne 9f",
    // The function around the call may use the red zone.
    "lea rsp, [rsp - 128]",
    "push rbx",
    "mov rbx, rsp",
    "push rax",
    "push rcx",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r10",
    "push r8",
    "push r9",
    "cmp eax, {execve}",
    "cmovne rdx, r10",
    "mov rdi, rdx",
    "and rsp, -16",
    "call {needed_bytes}",
    "test rax, rax",
    "jz 53f",
    "sub rsp, rax",
    "mov rsi, rsp",
    "mov rdi, [rbx - 40]",
    "cmp dword ptr [rbx - 8], {execve}",
    "cmovne rdi, [rbx - 48]",
    "call {changed}",
    "mov rdx, rax",
    "mov r10, rax",
    "cmp dword ptr [rbx - 8], {execve}",
    "cmovne rdx, [rbx - 40]",
    "cmove r10, [rbx - 48]",
    "mov rsi, [rbx - 32]",
    "mov rdi, [rbx - 24]",
    "mov r8, [rbx - 56]",
    "mov r9, [rbx - 64]",
    "mov rax, [rbx - 8]",
    "syscall",
    // The program cannot be executed.
    "mov [rbx - 8], rax",
    "add qword ptr [rbx - 16], {syscall_bytes}",
    "53:",
    "mov r9, [rbx - 64]",
    "mov r8, [rbx - 56]",
    "mov r10, [rbx - 48]",
    "mov rdx, [rbx - 40]",
    "mov rsi, [rbx - 32]",
    "mov rdi, [rbx - 24]",
    "mov rcx, [rbx - 16]",
    "mov rax, [rbx - 8]",
    "mov rsp, rbx",
    "pop rbx",
    "lea rsp, [rsp + 128]",
    "jmp rcx",
    "42:",
    // clone with CLONE_VM makes a thread, or a child that may run on another stack.
    "cmp eax, {clone}",
    "jne 2f",
    "test edi, {clone_vm}",
    "jz 2f",
    "test edi, {clone_thread_or_vfork}",
    "jnz 41f",
    "mov byte ptr [rip + {has_shared_memory}], 1",
    "41:",
    "test edi, {needs_words}",
    "jz 9f",
    "2:",
    "cmp qword ptr [rip + {stack_top}], 0",
    "je 9f",
    // The number goes into the upper 16 bits of rcx, which are 0 in an address.
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
    // r11 becomes the frame: 128 bytes for each 16 bytes before the entry at rax.
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
    // Save x87, SSE, AVX and AVX-512 state: 2.7 KiB.
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
    needs_words = const NEEDS_WORDS,
    has_shared_memory = sym HAS_SHARED_MEMORY,
    execve = const linux_raw_sys::general::__NR_execve,
    execveat = const linux_raw_sys::general::__NR_execveat,
    needed_bytes = sym exec_environment::needed_bytes,
    changed = sym exec_environment::changed,
    syscall_bytes = const SYSCALL_BYTES,
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

/// Returns the address to which stubs jump.
pub fn address() -> usize {
    (foliomem_fork_entry as *const ()).expose_provenance()
}

/// Returns whether the CPU has the instructions that the entry uses.
pub fn is_supported() -> bool {
    std::arch::is_x86_feature_detected!("xsave")
}

/// Sets the hooks that run around all forks of patched system calls from here on.
///
/// # Panics
/// If the stack of the hooks is too small for exits and forks.
pub fn set_hooks(hooks: &'static dyn ForkHooks) {
    if HOOKS.set(hooks).is_ok() {
        let stack = hooks.stack();
        assert!(stack.len() > 2 * EXIT_STACK_BYTES, "exits and forks run on one stack");
        EXIT_STACK_TOP.store(stack.start() + EXIT_STACK_BYTES, Ordering::Relaxed);
        // Release pairs with the read in the entry's code: the stack exists and `HOOKS` is set.
        STACK_TOP.store(stack.start() + stack.len(), Ordering::Release);
    }
}

/// Notes that the program dispatches the calling thread's system calls (Syscall User Dispatch) by
/// the selector at this address, or no longer dispatches them if `selector` is `None`.
pub fn note_dispatch(selector: Option<usize>) {
    if selector.is_none() && !HAS_DISPATCH.load(Ordering::Relaxed) {
        return;
    }
    let thread = thread_control_block::own().start | 1;
    let has = |wanted: usize| move |entry: &&Entry| entry.thread.load(Ordering::Relaxed) == wanted;
    let own = DISPATCHES.0.iter().find(has(thread));
    let Some(selector) = selector else {
        // Release pairs with the Acquire of the next thread that claims the entry.
        own.into_iter().for_each(|entry| entry.thread.store(0, Ordering::Release));
        return;
    };
    HAS_DISPATCH.store(true, Ordering::Relaxed);
    // Acquire pairs with the Release of the thread that freed the entry.
    let claim = |entry: &&Entry| entry.thread.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
    if let Some(entry) = own.or_else(|| DISPATCHES.0.iter().find(claim)) {
        entry.value.store(selector, Ordering::Relaxed);
        // Release orders the value before the owner, for a signal handler of this thread that
        // forks.
        entry.thread.store(thread, Ordering::Release);
    }
}

/// Makes a system call and returns its raw result.
///
/// # Safety
/// The caller keeps the contract of the system call.
pub unsafe fn system_call(number: u32, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the caller keeps the contract of the call. The kernel changes only the declared
    // registers.
    unsafe {
        asm!(
            "syscall", inlateout("rax") number as usize => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack),
        );
    }
    result
}

/// Notes that the program makes a child that shares its memory, by clone3(2) with `flags`.
pub fn note_shared_memory(flags: u64) {
    if flags & u64::from(WAITED_FOR) == 0 {
        HAS_SHARED_MEMORY.store(true, Ordering::Relaxed);
    }
}

/// Returns whether a process that the program has made may share its memory.
pub fn has_shared_memory() -> bool {
    HAS_SHARED_MEMORY.load(Ordering::Relaxed)
}

/// Runs the hook and ends the process. It touches no memory of the program.
extern "C" fn exit_on_own_stack(status: usize) -> ! {
    HOOKS.get().into_iter().for_each(|hooks| hooks.exiting());
    // A child of vfork(2) shares the flag with its parent, which may need the stack.
    IS_EXITING.store(0, Ordering::Relaxed);
    loop {
        // SAFETY: exit_group(2) takes a number, and does not return.
        unsafe { system_call(linux_raw_sys::general::__NR_exit_group, [status, 0, 0, 0, 0, 0]) };
    }
}

/// Runs the hook for libraries that the loader has loaded or unloaded.
pub fn objects_changed() {
    HOOKS.get().into_iter().for_each(|hooks| hooks.objects_changed());
}

/// Makes the call on the hooks' stack, with the lock held.
extern "C" fn call_on_own_stack(frame: &mut Frame) {
    let Some(&hooks) = HOOKS.get() else { return };
    let number = frame.rax as u32;
    let arguments = [frame.rdi, frame.rsi, frame.rdx, frame.r10, frame.r8, frame.r9];
    let result = match ForkCall::read(number, arguments) {
        CallKind::Other => match guards::install(number, arguments) {
            Some(result) => result,
            None => return,
        },
        CallKind::Shared(needed) => {
            needed.announce(hooks);
            return;
        }
        CallKind::Invalid(errno) => -(errno.raw_os_error() as isize),
        CallKind::Fork(mut call) => {
            call.make(hooks, thread_control_block::pages(&thread_control_block::own()), system_call);
            if call.result() == 0 {
                // The calling thread is the only one of the child.
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
