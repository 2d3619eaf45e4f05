//! Errors of the agent.

use foliomem_sys::errno_text::{Cause, ErrnoText};
use foliomem_sys::userfaultfd::UffdError;
use rustix::io::Errno;
use rustix::process::Pid;
use thiserror::Error;

/// Why the agent cannot do its work. The program must not go on: it may have memory that only the
/// agent can give back to it.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// No userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UffdError),
    /// A file under /proc/self.
    #[error("cannot open /proc/{0}: {cause}", cause = Cause(*.1))]
    Proc(&'static str, Errno),
    /// Address space or memory for the agent itself.
    #[error("cannot reserve {0} MiB of address space: {cause}", cause = Cause(*.1))]
    Reserve(usize, Errno),
    /// A thread.
    #[error("cannot start a thread: {}", Cause(*.0))]
    Thread(Errno),
    /// The companion process.
    #[error("cannot start the companion process: {}", Cause(*.0))]
    Companion(Errno),
    /// The companion was killed at its start.
    #[error("the companion process was killed at its start; does a filter for system calls (seccomp) do that?")]
    CompanionKilled,
    /// The companion was killed later.
    #[error(
        "the companion process of process {} was killed: stopped, because a child would be without its limit",
        .0.as_raw_nonzero()
    )]
    CompanionLost(Pid),
    /// The companion has printed the reason.
    #[error("the companion process could not start")]
    CompanionFailed,
    /// The child of a fork cannot reach its memory in the swap file.
    #[error("the child of a fork cannot reach the swap file, which has some of its memory: {}", ErrnoText(*.0))]
    SwapFile(Errno),
}
