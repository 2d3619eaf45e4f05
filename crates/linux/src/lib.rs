//! The Linux side of foliomem: every system call, and nearly all `unsafe`.
//!
//! [`machine`] is the engine's machine on a real program; [`runtime`] its threads; `adopt` finds the
//! program's memory; [`fork`] carries it over a fork. Below them are thin modules, one a
//! kernel interface. Code here runs inside foreign programs: no libc allocation, no thread-local storage.

pub mod adopt;
mod advice;
mod allocation_notice;
mod arena;
mod arena_size;
mod changes;
pub mod companion;
mod cow_throttle;
pub mod fork;
pub mod gate;
mod lenders;
pub mod machine;
mod marks;
mod program_code;
pub mod ranges;
pub mod runtime;
pub mod swap_file;
mod swap_writer;
mod thread_control_block;
mod tracer;

#[cfg(all(test, feature = "shuttle"))]
mod schedules;
