//! Interception of the program's system calls that the agent must see: forks above all.
//!
//! | module | part |
//! |---|---|
//! | [`patches`] | finds the system calls of the C library that the agent must see, and patches them |
//! | [`entry`] | makes a patched system call |
//! | `guards` | installs guards in the program's stead |
//! | [`dispatch`] | catches the fork where nothing is patched (Syscall User Dispatch) |
//! | [`fork_call`] | reads the arguments of a fork, and makes the fork between the hooks |
//!
//! The caller decides what happens around a fork: it implements [`fork_call::ForkHooks`].

pub mod dispatch;
pub mod entry;
pub mod fork_call;
mod guards;
pub mod patches;
