//! The session: what the processes of one run share.
//!
//! The supervisor makes the control segment, and the agent of every process maps it. All of it is
//! atomics, because a process can be killed at any instruction and the program can write over it.
//!
//! | module | part |
//! |---|---|
//! | [`segment`] | the segment: its layout, how it is made and found |
//! | `configuration` | the settings of the run |
//! | [`process_table`] | a slot for each process, with its counters |
//! | [`messages`] | what agents say to the supervisor |
//! | `tree_usage` | what the tree takes, and the limit that follows the need |
//! | [`budget`] | what one process may take of the limit |
//! | `supervision` | whether supervisor and companions live |
//! | [`custody`] | the supervisor's copies of userfaultfds |
//! | [`cluster_ownership`], [`swap_file`] | the swap file: who holds its clusters, how it is made |
//! | [`trace_ring`] | events of a recorded run |
//! | [`door`], [`find_run`] | other ways to the segment |
//!
//! Lock order: the lock of the totals ([`process_table`]) is a leaf. There is no other lock.
#![forbid(unsafe_code)]

pub mod budget;
pub mod cluster_ownership;
mod configuration;
pub mod custody;
pub mod door;
pub mod find_run;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod message_line;
pub mod messages;
pub mod process_table;
pub mod segment;
mod supervision;
pub mod swap_file;
pub mod trace_ring;
mod tree_usage;

#[cfg(all(test, feature = "shuttle"))]
mod schedules;
