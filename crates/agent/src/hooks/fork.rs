//! Hooks of functions that fork. If the C library is patched, they only jump there. There is no
//! lock.

use super::{CLONE, DAEMON, FORK, FORKPTY, UNDERSCORE_FORK, missing};
use crate::start::runtime;
use foliomem_sys::interception::dispatch::trap_forks;
use foliomem_sys::interception::patches::COVERED;
use libc::{c_char, c_int, c_void, pid_t};
use std::arch::naked_asm;

type CloneEntry = extern "C" fn(*mut c_void) -> c_int;
type Clone = unsafe extern "C" fn(CloneEntry, *mut c_void, c_int, *mut c_void, usize, usize, usize) -> c_int;

/// Calls `real` so that a fork inside it runs the fork protocol.
pub(super) fn around_fork<R>(real: impl FnOnce() -> R) -> R {
    match runtime() {
        Some(runtime) => trap_forks(real, runtime),
        None => real(),
    }
}

/// Functions that fork. If the C library is patched, a hook is one jump and uses no stack.
macro_rules! forking {
    ($($(#[$doc:meta])* $function:ident($($argument:ident: $type:ty),*) -> $result:ty = $real:ident, $trapped:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The caller keeps the contract of the C library's function.
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
            // SAFETY: the type is the function's; the caller keeps its contract.
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

/// `clone(2)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
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
    // SAFETY: the type is the function's; the caller keeps its contract.
    unsafe {
        let Some(real) = CLONE.get::<Clone>() else { return missing() };
        let call = || real(entry, stack, flags, argument, parent_tid, tls, child_tid);
        if flags & libc::CLONE_VM != 0 { call() } else { around_fork(call) }
    }
}
