//! What this machine allows a process: each probe makes the calls that the agent makes.
//!
//! A filter of system calls (seccomp) may kill the caller. Where there is one, a child makes them:
//! then only the child ends, and the steps that it has taken show which call it was.
//!
//! | module | probes |
//! |---|---|
//! | [`steps`] | how a probe runs, and in which process |
//! | [`calls`] | single system calls |
//! | [`userfaultfd`] | how userfaultfd is opened, and whether it moves pages |
//! | [`resources`] | descriptors, processes, address space, `/proc` |
//!
//! There is no policy here: the command decides what a fact means, and how to mend it.

pub mod calls;
pub mod resources;
pub mod steps;
pub mod userfaultfd;

use crate::uring::Uring;
use rustix::fd::AsFd;
use rustix::io::Errno;

/// Returns whether the kernel can dispatch system calls to a handler, which forks may need.
pub fn can_dispatch() -> bool {
    crate::interception::dispatch::is_supported()
}

/// Makes a ring for writes, as they are made to a swap device.
///
/// # Errors
/// Fails if the kernel, or a filter of system calls, refuses.
pub fn make_ring() -> Result<(), Errno> {
    Uring::<1>::new(std::io::stdin().as_fd()).map(|_| ())
}
