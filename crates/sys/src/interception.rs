//! Interception of system calls of the program that the agent must see: forks above all.
//!
//! | module | part |
//! |---|---|
//! | [`patches`] | finds the system calls of the C library that the agent sees, and patches them |
//! | [`entry`] | makes a patched system call |
//! | [`exec_environment`] | carries the agent into programs that the program executes |
//! | `guards` | installs guards for the program |
//! | [`dispatch`] | intercepts forks if the C library cannot be patched (Syscall User Dispatch) |
//! | [`fork_call`] | reads the arguments of a fork and makes the fork between the hooks |
//!
//! The caller implements [`fork_call::ForkHooks`], which decide what happens before and after a
//! fork.

pub mod dispatch;
pub mod entry;
pub mod exec_environment;
pub mod fork_call;
mod guards;
pub mod patches;
