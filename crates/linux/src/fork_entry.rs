//! Where a patched system call of the C library's goes when it may fork ([`crate::fork_sites`]).
//!
//! The entry is reached by jumps from a stub, with the registers of the system call, and `rcx` at the stub's own
//! `syscall` instruction. It leaves with a jump there, where the caller is to make the call itself, or behind it, with
//! the result. In between it blocks signals, takes a lock, and runs the fork on the agent's stack.
//!
//! - Of the caller's stack it uses [`Frame`], below the red zone: less than the C library's `fork` uses before it.
//! - It keeps the vector registers, as a system call does; what follows the call in a C function may rely on that.
//! - SIGSYS stays as it is: a filter of the program that traps one of the calls here finds the program's
//!   handler. A blocked one would end the process.
//! - A signal mask that a filter keeps us from changing is left alone.
//!
//! Lock: `LOCK`, before the gate. It is held over the fork, and the child drops its copy.

use crate::control_block;
use crate::fork_call::{CallKind, ForkCall, ForkHooks};
use std::arch::{asm, global_asm};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Saved registers, as the entry pushes them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Frame {
    mask: u64,
    /// 0 if the mask has been changed.
    mask_result: isize,
    rbx: usize,
    /// The number of the system call; then its result.
    rax: usize,
    rdi: usize,
    rsi: usize,
    rdx: usize,
    r10: usize,
    r8: usize,
    r9: usize,
    /// Where to go on.
    resume: usize,
    rsp: usize,
}

const SYSCALL_BYTES: usize = 2;
const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;

/// A futex: unlocked, locked, or locked and awaited.
static LOCK: AtomicU32 = AtomicU32::new(UNLOCKED);
/// The top of the hooks' stack; 0 as long as nothing is managed.
static STACK_TOP: AtomicUsize = AtomicUsize::new(0);
/// The signals that are blocked over a fork: all but SIGSYS.
static BLOCKED: u64 = !(1 << (libc::SIGSYS - 1));
static HOOKS: OnceLock<&'static dyn ForkHooks> = OnceLock::new();

global_asm!(
    ".hidden foliomem_fork_entry",
    ".globl foliomem_fork_entry",
    "foliomem_fork_entry:",
    // clone with CLONE_VM: a thread, or a child that may have another stack.
    "cmp eax, {clone}",
    "jne 2f",
    "test edi, {clone_vm}",
    "jnz 9f",
    "2:",
    "cmp qword ptr [rip + {stack_top}], 0",
    "je 9f",
    "mov r11, rsp",
    "lea rsp, [rsp - 128]",
    "push r11",
    "push rcx",
    "push r9",
    "push r8",
    "push r10",
    "push rdx",
    "push rsi",
    "push rdi",
    "push rax",
    "push rbx",
    "sub rsp, 16",
    "mov rbx, rsp",
    // rt_sigprocmask(SIG_BLOCK, BLOCKED, &frame.mask, 8)
    "mov eax, 14",
    "xor edi, edi",
    "lea rsi, [rip + {blocked}]",
    "mov rdx, rbx",
    "mov r10d, 8",
    "syscall",
    "mov [rbx + 8], rax",
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
    "mov rsp, rbx",
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
    "cmp qword ptr [rbx + 8], 0",
    "jne 6f",
    // rt_sigprocmask(SIG_SETMASK, &frame.mask, NULL, 8)
    "mov eax, 14",
    "mov edi, 2",
    "mov rsi, rbx",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "6:",
    "add rsp, 16",
    "pop rbx",
    "pop rax",
    "pop rdi",
    "pop rsi",
    "pop rdx",
    "pop r10",
    "pop r8",
    "pop r9",
    "pop rcx",
    "pop rsp",
    "9:",
    "jmp rcx",
    clone = const linux_raw_sys::general::__NR_clone,
    clone_vm = const linux_raw_sys::general::CLONE_VM,
    stack_top = sym STACK_TOP,
    blocked = sym BLOCKED,
    lock = sym LOCK,
    fork = sym fork_on_own_stack,
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
        STACK_TOP.store(stack.start() + stack.len(), Ordering::Release);
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

/// Forks, on the hooks' stack, with the lock held.
extern "C" fn fork_on_own_stack(frame: *mut Frame) {
    // SAFETY: the entry passes its frame, which nobody else uses. A copy, because the frame lies in the program's memory.
    let mut saved = unsafe { frame.read() };
    let Some(&hooks) = HOOKS.get() else { return };
    let arguments = [saved.rdi, saved.rsi, saved.rdx, saved.r10, saved.r8, saved.r9];
    let result = match ForkCall::read(saved.rax as u32, arguments) {
        CallKind::Other => return,
        CallKind::Invalid(errno) => -(errno.raw_os_error() as isize),
        CallKind::Fork(mut call) => {
            call.make(hooks, control_block::pages(&control_block::own()), system_call);
            if call.result() == 0 {
                // Only this thread has come along.
                LOCK.store(LOCKED, Ordering::Relaxed);
                saved.rsp = call.child_stack().unwrap_or(saved.rsp);
            }
            call.write_results();
            call.result()
        }
    };
    saved.rax = result as usize;
    saved.resume += SYSCALL_BYTES;
    // SAFETY: as above; faults of the program are served again.
    unsafe { frame.write(saved) };
}
