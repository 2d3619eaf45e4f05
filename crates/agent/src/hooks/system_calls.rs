//! Hooks of `syscall` and `prctl`: a system call that has a hook is treated as that hook does.
//! There is no lock.

use super::advice::{advised, keeps_limit};
use super::fork::around_fork;
use super::memory::{mapped, on_whole_mapping, protected, without_populate};
use super::{PRCTL, SYSCALL, missing};
use crate::start::runtime;
use foliomem_runtime::runtime::Runtime;
use foliomem_sys::interception::patches::{self, COVERED};
use libc::{c_int, c_long};
use std::arch::naked_asm;

type Syscall = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
type Prctl = unsafe extern "C" fn(c_int, usize, usize, usize, usize) -> c_int;

/// The option of `prctl(2)` for Syscall User Dispatch.
const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
const PR_SYS_DISPATCH_ON: c_int = 1;

/// `syscall(2)`: a call that has a hook is treated as that hook does.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
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

/// Handles each call of the C library's `syscall`, except forks if the C library is patched: those
/// do not come here.
unsafe extern "C" fn syscall_hooked(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: the type is the function's; the caller keeps its contract. The variadic function
    // reads as many of the six arguments as the call needs; the C library's own definition reads
    // six, too.
    unsafe {
        let Some(real) = SYSCALL.get::<Syscall>() else { return c_long::from(missing()) };
        match number {
            libc::SYS_fork | libc::SYS_clone | libc::SYS_clone3 => around_fork(|| real(number, a, b, c, d, e, f)),
            libc::SYS_prctl if a == PR_SET_SYSCALL_USER_DISPATCH as usize => {
                dispatched(b, e, real(number, a, b, c, d, e, f))
            }
            libc::SYS_prctl if a == libc::PR_SET_CHILD_SUBREAPER as usize => {
                adopting(b, real(number, a, b, c, d, e, f))
            }
            libc::SYS_seccomp if a as u32 <= libc::SECCOMP_SET_MODE_FILTER => {
                filtered(|| real(number, a, b, c, d, e, f))
            }
            libc::SYS_mlockall if keeps_limit(a as c_int) => 0,
            libc::SYS_madvise => advised(a, b, c as c_int, real(number, a, b, c, d, e, f)),
            libc::SYS_mmap => {
                let flags = without_populate(b, d as c_int);
                let start = real(number, a, b, c, flags as usize, e, f);
                mapped(std::ptr::with_exposed_provenance_mut(start as usize), b, c as c_int, flags);
                start
            }
            libc::SYS_mprotect => {
                let failed = real(number, a, b, c, d, e, f);
                protected(std::ptr::with_exposed_provenance_mut(a), b, c as c_int, failed != 0);
                failed
            }
            libc::SYS_mremap => on_whole_mapping(a, b, || real(number, a, b, c, d, e, f), |&result| result == -1),
            _ => real(number, a, b, c, d, e, f),
        }
    }
}

/// Makes a call that may install a system call filter. Returns its result, which is below 0 if the
/// call has failed: some programs only try whether the kernel knows filters.
fn filtered<R: Copy + Into<i64>>(install: impl FnOnce() -> R) -> R {
    runtime().into_iter().for_each(Runtime::expect_system_call_filter);
    let result = install();
    if result.into() >= 0 {
        runtime().into_iter().for_each(Runtime::note_system_call_filter);
    }
    result
}

/// `prctl(2)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract.
    let set = || unsafe { PRCTL.get::<Prctl>().map_or_else(missing, |real| real(option, a, b, c, d)) };
    match option {
        libc::PR_SET_SECCOMP => filtered(set),
        PR_SET_SYSCALL_USER_DISPATCH => dispatched(a, d, set()),
        libc::PR_SET_CHILD_SUBREAPER => adopting(a, set()),
        _ => set(),
    }
}

/// Notes that the process adopts orphans if `adopts` is not 0 and the call has succeeded. Returns
/// `result`.
fn adopting<R: Into<c_long> + Copy>(adopts: usize, result: R) -> R {
    if result.into() == 0 && adopts != 0 {
        runtime().into_iter().for_each(Runtime::note_subreaper);
    }
    result
}

/// Notes that the program has turned Syscall User Dispatch on or off, if that has succeeded.
/// Returns `result`.
fn dispatched<R: Into<c_long> + Copy>(mode: usize, selector: usize, result: R) -> R {
    if result.into() == 0 {
        let is_on = mode == PR_SYS_DISPATCH_ON as usize && selector != 0;
        patches::note_dispatch(is_on.then_some(selector));
    }
    result
}
