//! The session: what the processes of one run share.
//!
//! The supervisor creates the control segment, and the agent of every process maps it. All its
//! words are atomics: a process can be killed at any instruction, and the program can overwrite the
//! segment.
//!
//! | module | part |
//! |---|---|
//! | [`segment`] | the segment: its layout, how it is created and found |
//! | `configuration` | the settings of the run |
//! | [`process_table`] | a slot for each process, with its counters |
//! | [`memory_request`] | requests to reclaim or to resume now |
//! | [`messages`] | messages of the agents to the supervisor |
//! | [`tree_usage`] | memory use of the tree, and the limit that follows its need |
//! | [`budget`] | the share of the limit that one process may use |
//! | [`content_sample`] | how much of what the child of a fork has swapped out is its parent's |
//! | `excess` | why a limit is exceeded |
//! | `supervision` | whether the supervisor and the companions are alive |
//! | [`custody`] | the supervisor's copies of userfaultfds |
//! | [`cluster_ownership`] | the holders of the swap file's clusters |
//! | [`shared_pieces`] | what processes publish of a shared store |
//! | [`swap_file`] | how the swap file is created and reopened |
//! | [`wanted_limit`] | the limit that `ctl` wants, and whether it is applied |
//! | [`trace_ring`] | events of a recorded run |
//! | [`door`], [`find_run`] | other ways to open the segment |
//!
//! Lock order: the lock of the totals ([`process_table`]) is a leaf. There is no other lock.
#![forbid(unsafe_code)]

pub mod budget;
pub mod cluster_ownership;
mod configuration;
pub mod content_sample;
pub mod custody;
pub mod door;
mod excess;
pub mod find_run;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod memory_request;
mod message_line;
pub mod messages;
pub mod process_table;
pub mod segment;
pub mod shared_pieces;
mod supervision;
pub mod swap_file;
pub mod trace_ring;
pub mod tree_usage;
pub mod wanted_limit;

#[cfg(all(test, feature = "shuttle"))]
mod schedules;
