//! The Linux side of foliomem: every system call, and nearly all `unsafe`.
//!
//! [`machine`] is the engine's machine on a real program; [`runtime`] its threads; [`adopt`] finds the
//! program's memory; [`fork`] and [`clone_trap`] carry it over a fork. Below them are thin modules, one a
//! kernel interface. Code here runs inside foreign programs: no libc allocation, no thread-local storage.

pub mod pagemap;
pub mod maps;
pub mod raw_ioctl;
pub mod region;
pub mod thread;
pub mod uffd;
pub mod gate;
pub mod ranges;
pub mod own;
