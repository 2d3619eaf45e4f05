//! The companion: the process beside the program that manages the program's memory.

pub(crate) mod memory_users;
pub(crate) mod placement;
pub(crate) mod process;
