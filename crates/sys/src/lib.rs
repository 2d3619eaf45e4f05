//! The system interface of foliomem: kernel interfaces, data of the loader and the C library,
//! codecs.
//!
//! Nearly all `unsafe` code of the workspace is here, behind functions that are safe where they can
//! be. The crate contains mechanisms and no policy: it knows neither the engine nor the control
//! segment. Its code runs inside of foreign programs, so it must not allocate from the program's
//! malloc, use thread-local storage, or call the dynamic loader.
//!
//! | part | modules |
//! |---|---|
//! | memory of the program | [`userfaultfd`], [`pagemap`], [`maps`] |
//! | changes of the program's memory | [`memory_advice`], [`unshare_pages`], [`move_probe`] |
//! | memory of the agent | [`region`], [`heap`], [`agent_memory`], [`fork_cell`], [`cell_list`] |
//! | memory between processes | [`shared_memory`], [`file_mapping`], [`process_exit_notice`] |
//! | processes | [`companion_process`], [`identity`], [`process_limits`] |
//! | the supervised program | [`supervised_program`], [`program_start`] |
//! | threads | [`thread`], [`cpus`], [`signals`], [`clock`], [`word_wait`] |
//! | system calls | [`interception`], [`unseen_calls`], [`seccomp`], [`machine_code`] |
//! | loader and C library | [`loader`], [`thread_control_block`] |
//! | descriptors | [`descriptor_passing`], [`socket`], [`swap_discard`], [`uring`] |
//! | codecs | [`codec`] |
//! | reports | [`system_checks`], [`errno_text`] |
//!
//! Lock order: the locks of [`interception::entry`] and [`interception::dispatch`] come before
//! every lock of the agent. The locks of [`agent_memory`] and [`codec`] are leaves, except that a
//! thread that holds them may allocate: the heap's lock is below all others.

pub mod agent_memory;
pub mod cell_list;
pub mod clock;
pub mod codec;
pub mod companion_process;
pub mod cpus;
pub mod descriptor_passing;
pub mod errno_text;
pub mod exit_status;
pub mod fault_costs;
pub mod file_mapping;
pub mod fork_cell;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod heap;
pub mod identity;
pub mod interception;
mod link_maps;
pub mod loader;
pub mod machine_code;
pub mod maps;
pub mod memory_advice;
pub mod move_probe;
pub mod pagemap;
pub mod process_exit_notice;
pub mod process_limits;
pub mod program_start;
mod raw_ioctl;
pub mod region;
pub mod seccomp;
pub mod shared_memory;
pub mod signals;
pub mod socket;
pub mod supervised_program;
pub mod swap_discard;
pub mod system_checks;
pub mod thread;
pub mod thread_control_block;
pub mod tlb_flush;
pub mod unseen_calls;
pub mod unshare_pages;
pub mod uring;
pub mod userfaultfd;
pub mod word_wait;

#[cfg(all(test, feature = "shuttle"))]
mod schedules;
