//! Forks: how a forking process and its child keep their swapped-out memory.
//!
//! [`protocol`] states the whole sequence, and what a child resets. The other modules are its
//! parts:
//!
//! | module | part |
//! |---|---|
//! | [`quiesce`] | the word by which the forking thread and the monitor wait for each other |
//! | [`descriptor_hand_over`] | passes a descriptor from the parent's companion to the child's |
//! | `futex_gate` | the gate that stops the agent's threads |
//!
//! How a fork is caught and made is [`foliomem_sys::interception`].

pub(crate) mod child;
pub(crate) mod descriptor_hand_over;
pub(crate) mod futex_gate;
pub(crate) mod protocol;
pub(crate) mod quiesce;
pub(crate) mod state;
