//! Probes of single system calls: whether a filter (seccomp) lets them through to the kernel.
//!
//! Each call is made with arguments that change nothing. The kernel refuses most of them for these
//! arguments, with an error that no filter uses.

use crate::system_checks::steps::{self, By, Step};
use crate::thread::syscall6;
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl::{PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF};
use rustix::io::Errno;

/// A call that the agent makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// `memfd_create(2)`: the memory that the processes of a run share.
    MemfdCreate,
    /// `prctl(2)` with `PR_SET_SYSCALL_USER_DISPATCH`: forks, where the C library cannot be
    /// patched.
    SyscallUserDispatch,
    /// `pidfd_open(2)`: learning of a process's end.
    PidfdOpen,
    /// `pidfd_getfd(2)`: handing descriptors over at a fork.
    PidfdGetfd,
    /// `futex_waitv(2)`: sleeping on two words.
    FutexWaitv,
    /// `clone3(2)`: the C library starts threads with it, and uses `clone(2)` only if `clone3` does
    /// not exist.
    Clone3,
    /// `kcmp(2)`: learning that a process has executed another program.
    Kcmp,
    /// `io_uring_setup(2)`: writing to a swap device.
    IoUringSetup,
}

/// All of them.
pub const ALL: [Call; 8] = [
    Call::MemfdCreate,
    Call::SyscallUserDispatch,
    Call::PidfdOpen,
    Call::PidfdGetfd,
    Call::FutexWaitv,
    Call::Clone3,
    Call::Kcmp,
    Call::IoUringSetup,
];

/// The result of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The kernel gets it.
    Passes,
    /// The kernel has no such call, or a filter says so.
    Absent,
    /// It is refused with this error.
    Refused(Errno),
    /// The caller is killed.
    Deadly,
}

impl Call {
    /// Returns the name of the call.
    pub fn name(self) -> &'static str {
        match self {
            Call::MemfdCreate => "memfd_create",
            Call::SyscallUserDispatch => "prctl(PR_SET_SYSCALL_USER_DISPATCH)",
            Call::PidfdOpen => "pidfd_open",
            Call::PidfdGetfd => "pidfd_getfd",
            Call::FutexWaitv => "futex_waitv",
            Call::Clone3 => "clone3",
            Call::Kcmp => "kcmp",
            Call::IoUringSetup => "io_uring_setup",
        }
    }

    /// Makes the call; returns the kernel's answer.
    fn make(self) -> isize {
        const NO_DESCRIPTOR: usize = usize::MAX;
        let dispatch = [PR_SET_SYSCALL_USER_DISPATCH as usize, PR_SYS_DISPATCH_OFF as usize, 0, 0, 0, 0];
        let (number, arguments) = match self {
            Call::MemfdCreate => (raw::__NR_memfd_create, [0; 6]),
            Call::SyscallUserDispatch => (raw::__NR_prctl, dispatch),
            Call::PidfdOpen => (raw::__NR_pidfd_open, [0; 6]),
            Call::PidfdGetfd => (raw::__NR_pidfd_getfd, [NO_DESCRIPTOR, 0, 0, 0, 0, 0]),
            Call::FutexWaitv => (raw::__NR_futex_waitv, [0; 6]),
            Call::Clone3 => (raw::__NR_clone3, [0; 6]),
            Call::Kcmp => (raw::__NR_kcmp, [0; 6]),
            Call::IoUringSetup => (raw::__NR_io_uring_setup, [0; 6]),
        };
        // SAFETY: the calls are refused for their arguments, or, the second, disable what is
        // disabled already.
        unsafe { syscall6(number as usize, arguments) }
    }

    /// Returns the error by which the kernel refuses the arguments; `None` for a call that it
    /// makes.
    fn kernels_error(self) -> Option<Errno> {
        match self {
            Call::MemfdCreate | Call::IoUringSetup => Some(Errno::FAULT),
            Call::PidfdOpen | Call::FutexWaitv | Call::Clone3 => Some(Errno::INVAL),
            Call::PidfdGetfd => Some(Errno::BADF),
            Call::Kcmp => Some(Errno::SRCH),
            Call::SyscallUserDispatch => None,
        }
    }
}

/// Tries a call.
///
/// # Errors
/// Fails if there can be no child to try it in.
pub fn probe(call: Call, by: By) -> Result<Fate, Errno> {
    let [step] = steps::run(by, |steps| {
        steps.take(0, || {
            let answer = call.make();
            let refused = call.kernels_error().map(|errno| -(errno.raw_os_error() as isize));
            let passes = answer >= 0 || refused == Some(answer);
            if passes { Ok(()) } else { Err(Errno::from_raw_os_error(-answer as i32)) }
        });
    })?;
    Ok(match step {
        Step::Done(_) => Fate::Passes,
        Step::Failed(Errno::NOSYS) => Fate::Absent,
        Step::Failed(errno) => Fate::Refused(errno),
        Step::Killed | Step::NotTaken => Fate::Deadly,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_filter_every_call_reaches_the_kernel() {
        if steps::is_filtered() {
            return;
        }
        for (call, by) in ALL.into_iter().flat_map(|call| [(call, By::Caller), (call, By::Child)]) {
            let fate = probe(call, by).unwrap();
            // The administrator may have disabled io_uring, and the kernel may lack kcmp.
            let is_sure = !matches!(call, Call::IoUringSetup | Call::Kcmp);
            assert!(fate == Fate::Passes || !is_sure, "{} {fate:?}", call.name());
        }
    }
}
