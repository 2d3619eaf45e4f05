//! Identities of processes: pids that are valid across pid namespaces.
//!
//! A process of the run may be in another pid namespace than the supervisor (`unshare --pid`, a
//! browser's sandbox). It is *nested*: for the supervisor its pid names another process, or none,
//! and for it the supervisor's pids name other processes. Only the kernel can translate pids, and
//! only for a process that sees the supervisor's `/proc`. So an identity in shared memory contains
//! a flag for nested processes. Exit notices ([`crate::process_exit_notice`]) report their end, and
//! nobody sends them a signal by pid.
//!
//! A nested process stays nested, and so are its children.

use crate::interception::fork_call;
use rustix::io::Errno;
use rustix::process::Pid;
use std::sync::atomic::{AtomicBool, Ordering};

/// The flag of a nested process in an identity. Linux has no pids beyond 2^22.
const NESTED: u32 = 1 << 31;

/// Whether the calling process is nested.
static IS_NESTED: AtomicBool = AtomicBool::new(false);

/// Notes that the calling process is in another pid namespace than the supervisor.
pub fn set_nested() {
    IS_NESTED.store(true, Ordering::Relaxed);
}

/// Returns whether the calling process is in another pid namespace than the supervisor.
pub fn is_nested() -> bool {
    IS_NESTED.load(Ordering::Relaxed)
}

/// Returns the identity of a process of the caller's pid namespace.
pub fn of(pid: Pid) -> u32 {
    let flag = if is_nested() { NESTED } else { 0 };
    pid.as_raw_nonzero().get() as u32 | flag
}

/// Returns whether `identity` is of a nested process.
pub fn is_of_nested(identity: u32) -> bool {
    identity & NESTED != 0
}

/// Returns whether a process with this identity may exist.
///
/// Zombies count, and so do processes that the caller cannot see.
pub fn is_alive(identity: u32) -> bool {
    if is_nested() || is_of_nested(identity) {
        return true;
    }
    let Some(pid) = Pid::from_raw(identity as i32) else { return false };
    rustix::process::test_kill_process(pid) != Err(Errno::SRCH)
}

/// In the child of a fork, notes whether the child is in a new pid namespace. `own` is its pid.
///
/// It is if it is the first process of its namespace, or if its parent is outside: then getppid(2)
/// returns 0. A filter may forbid that call: a process that has installed one is taken to have made
/// its namespaces before.
pub fn note_fork(own: Pid) {
    let number = linux_raw_sys::general::__NR_getppid;
    // SAFETY: getppid(2) takes no arguments and cannot fail.
    let is_parent_outside =
        || !fork_call::has_filter() && unsafe { crate::interception::entry::system_call(number, [0; 6]) } == 0;
    if !is_nested() && (own.is_init() || is_parent_outside()) {
        set_nested();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_tells_whether_its_pid_is_valid_here() {
        let own = rustix::process::getpid();
        assert!(!is_nested() && !is_of_nested(of(own)) && is_alive(of(own)));
        note_fork(own);
        assert!(!is_nested(), "the parent is in the same namespace");
        let nested = of(own) | NESTED;
        assert!(is_of_nested(nested) && is_alive(nested));
        assert!(!is_alive(u32::MAX >> 1), "no such pid");
    }
}
