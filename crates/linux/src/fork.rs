//! Forks: how a forking process and its child keep their swapped-out memory.
//!
//! [`protocol`] states the whole sequence, and what a child resets. The other modules are its
//! parts:
//!
//! | module | part |
//! |---|---|
//! | [`sites`] | finds the system calls of the C library that the agent must see, and patches them |
//! | `entry` | makes a patched system call |
//! | `guards` | installs guards in the program's stead |
//! | [`trap`] | catches the fork where nothing is patched |
//! | `call` | reads the arguments of a fork, and makes the fork between the hooks |
//! | [`quiesce`] | the word by which the forking thread and the monitor wait for each other |
//! | [`descriptor_hand_over`] | passes a descriptor from the parent's companion to the child's |

pub(crate) mod call;
pub(crate) mod child;
pub(crate) mod descriptor_hand_over;
pub(crate) mod entry;
mod guards;
pub(crate) mod protocol;
pub(crate) mod quiesce;
pub mod sites;
pub(crate) mod state;
pub mod trap;
