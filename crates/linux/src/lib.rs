//! The Linux side of foliomem: every system call, and nearly all `unsafe`.
//!
//! [`machine`] is the engine's machine on a real program; [`runtime`] its threads; `adopt` finds the
//! program's memory; [`fork`] carries it over a fork. Below them are thin modules, one a
//! kernel interface. Code here runs inside foreign programs: no libc allocation, no thread-local storage.

pub mod adopt;
mod advice;
pub mod agent_memory;
mod allocation_notice;
mod arena;
mod arena_size;
pub mod budget;
pub mod cell_list;
mod changes;
pub mod child;
pub mod clock;
pub mod codec;
pub mod companion;
pub mod control;
mod cow_throttle;
mod cpu_load;
pub mod custody;
pub mod door;
pub mod file_mapping;
mod filters;
pub mod find;
pub mod fork;
mod fork_cell;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod gate;
pub mod heap;
mod identity;
mod lenders;
mod line;
mod link_maps;
pub mod loader;
pub mod machine;
mod machine_code;
pub mod maps;
mod marks;
pub mod pagemap;
mod passing;
pub mod probe;
mod process_exit_notice;
mod process_limits;
pub mod ranges;
mod raw_ioctl;
pub mod region;
pub mod runtime;
mod swap_discard;
pub mod swap_file;
pub mod swap_space;
mod swap_writer;
pub mod thread;
mod thread_control_block;
pub mod trace_ring;
mod tracer;
pub mod trial;
pub mod uffd;
mod unseen_calls;
pub(crate) mod unshare;
mod uring;
mod why;
mod word_wait;

#[cfg(all(test, feature = "shuttle"))]
mod schedules;
