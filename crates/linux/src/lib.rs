//! The Linux side of foliomem: every system call, and nearly all `unsafe`.
//!
//! [`machine`] is the engine's machine on a real program; [`runtime`] its threads; `adopt` finds the
//! program's memory; [`fork`] and [`clone_trap`] carry it over a fork. Below them are thin modules, one a
//! kernel interface. Code here runs inside foreign programs: no libc allocation, no thread-local storage.

pub mod adopt;
mod advice;
mod arena;
pub mod budget;
mod changes;
pub mod child;
pub mod clock;
pub mod clone_trap;
pub mod codec;
mod companion;
pub mod control;
mod control_block;
mod copies;
mod cpu_load;
mod death;
pub mod door;
pub mod file_mapping;
mod filters;
pub mod find;
pub mod fork;
mod fork_call;
mod fork_cell;
mod fork_entry;
pub mod fork_sites;
pub mod gate;
mod growth;
mod hand_over;
pub mod heap;
mod identity;
mod lenders;
mod line;
mod link_maps;
pub mod loader;
pub mod machine;
pub mod maps;
mod marks;
mod memory_users;
pub mod own;
pub mod pagemap;
mod passing;
mod placement;
pub mod probe;
pub mod ranges;
mod raw_ioctl;
pub mod region;
pub mod runtime;
mod sizing;
mod still;
mod swap_discard;
pub mod swap_file;
pub mod swap_space;
mod swap_writer;
pub mod thread;
pub mod trace_ring;
mod tracer;
pub mod trial;
pub mod uffd;
mod uring;
mod why;
