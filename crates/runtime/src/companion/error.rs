//! Errors of the agent. There is no lock.

use foliomem_core::ports::MoveError;
use foliomem_sys::errno_text::{Cause, ErrnoText};
use foliomem_sys::userfaultfd::UffdError;
use rustix::io::Errno;
use rustix::process::Pid;
use thiserror::Error;

/// Why the agent cannot work. The program must not go on: it may have memory that only the agent
/// can map in.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The userfaultfd cannot be opened or used.
    #[error(transparent)]
    Userfaultfd(#[from] UffdError),
    /// A file under /proc cannot be opened.
    #[error("cannot open /proc/{0}: {cause}", cause = Cause(*.1))]
    Proc(&'static str, Errno),
    /// Address space for the agent cannot be reserved; its size is in MiB.
    #[error("cannot reserve {0} MiB of address space: {cause}", cause = Cause(*.1))]
    Reserve(usize, Errno),
    /// A thread cannot be created.
    #[error("cannot start a thread: {}", Cause(*.0))]
    Thread(Errno),
    /// The companion process cannot be created.
    #[error("cannot start the companion process: {}", Cause(*.0))]
    Companion(Errno),
    /// The companion was killed at its start.
    #[error("the companion process was killed at its start; does a filter for system calls (seccomp) do that?")]
    CompanionKilled,
    /// The companion was killed after its start.
    #[error(
        "the companion process of process {} was killed: stopped, because a child would be without its limit",
        .0.as_raw_nonzero()
    )]
    CompanionLost(Pid),
    /// The companion has printed the reason.
    #[error("the companion process could not start")]
    CompanionFailed,
    /// The kernel has put pages of zeros where the child of a fork has swapped-out content, and
    /// refuses to remove them.
    #[error("the child of a fork has zeros in the place of swapped-out memory: {0}; did a debugger read that memory?")]
    Strays(#[from] MoveError),
    /// The child of a fork cannot reach its memory in the swap file.
    #[error("the child of a fork cannot reach the swap file, which has some of its memory: {}", ErrnoText(*.0))]
    SwapFile(Errno),
}

impl RuntimeError {
    /// Returns whether the system has no room for one more thread or process at the moment.
    pub(crate) fn lacks_threads(&self) -> bool {
        matches!(self, RuntimeError::Thread(Errno::AGAIN) | RuntimeError::Companion(Errno::AGAIN))
    }
}
