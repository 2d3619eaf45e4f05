//! Forks: how a forking process and its child keep their swapped-out memory.
//!
//! [`protocol`] states the whole sequence, and what a child resets. The other modules are its
//! parts:
//!
//! | module | part |
//! |---|---|
//! | `child` | the child's side: starts a companion, or goes on without the agent |
//! | [`quiesce`] | the word by which the forking thread and the monitor wait for each other |
//! | [`descriptor_hand_over`] | passes a descriptor from the parent's companion to the child's |
//! | `futex_gate` | the gate that stops the agent's threads |
//! | `state` | the state of a process's forks |
//!
//! [`foliomem_sys::interception`] catches and makes the fork. Lock order: the gate comes before
//! every lock.

pub(crate) mod child;
pub(crate) mod descriptor_hand_over;
pub(crate) mod futex_gate;
pub(crate) mod protocol;
pub(crate) mod quiesce;
pub(crate) mod state;
