//! Process ids across pid namespaces.
//!
//! A process of the run may be in another pid namespace than the supervisor (`unshare --pid`, a
//! browser's sandbox). It is *nested*: its pid means another process, or none, to the supervisor, and
//! the supervisor's pids mean others to it. Only the kernel can translate, and only for a process that
//! sees the supervisor's `/proc`. So an identity in shared memory says whether it is of a nested
//! process. The end of such a process is known by marks ([`crate::process_exit_notice`]), and nobody signals it by
//! its pid.
//!
//! A process that is nested stays so, and so do its children.

use rustix::io::Errno;
use rustix::process::Pid;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set in the identity of a nested process. Linux has no pids beyond 2^22.
const NESTED: u32 = 1 << 31;

/// Whether the calling process is nested.
static IS_NESTED: AtomicBool = AtomicBool::new(false);

/// The calling process is in another pid namespace than the supervisor.
pub fn set_nested() {
    IS_NESTED.store(true, Ordering::Relaxed);
}

/// Whether the calling process is in another pid namespace than the supervisor.
pub fn is_nested() -> bool {
    IS_NESTED.load(Ordering::Relaxed)
}

/// The identity of a process of the caller's pid namespace.
pub fn of(pid: Pid) -> u32 {
    let flag = if is_nested() { NESTED } else { 0 };
    pid.as_raw_nonzero().get() as u32 | flag
}

/// Whether it is the identity of a nested process.
pub fn is_of_nested(identity: u32) -> bool {
    identity & NESTED != 0
}

/// Whether there may be a process of this identity.
///
/// A zombie counts, and so does a process that the caller cannot see.
pub fn is_alive(identity: u32) -> bool {
    if is_nested() || is_of_nested(identity) {
        return true;
    }
    let Some(pid) = Pid::from_raw(identity as i32) else { return false };
    rustix::process::test_kill_process(pid) != Err(Errno::SRCH)
}

/// In the child of a fork: finds out whether it begins a pid namespace or is made into another one.
///
/// The parent is then outside, which getppid(2) reports as 0.
pub fn forked(own: Pid) {
    let number = linux_raw_sys::general::__NR_getppid;
    // SAFETY: takes no arguments.
    if own.is_init() || unsafe { crate::interception::entry::system_call(number, [0; 6]) } == 0 {
        set_nested();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_says_whether_its_pid_means_anything_here() {
        let own = rustix::process::getpid();
        assert!(!is_nested() && !is_of_nested(of(own)) && is_alive(of(own)));
        forked(own);
        assert!(!is_nested(), "a process that has a parent here");
        let nested = of(own) | NESTED;
        assert!(is_of_nested(nested) && is_alive(nested));
        assert!(!is_alive(u32::MAX >> 1), "no such pid");
    }
}
