//! The companion: the process that manages the program's memory.
//!
//! Its first thread, the monitor, samples the process's size. When the tree comes near its limit,
//! the monitor activates: it creates the arena and the engine, starts handlers and reclaimers,
//! registers the program's memory, and adopts it. [`foliomem_sys::thread`] creates all threads;
//! they have no thread-local storage of the C library.
//!
//! | role | module | its state |
//! |---|---|---|
//! | all | [`context`], `error` | settings, budget, agent memory, tracer, files under `/proc` |
//! | process | [`foliomem_sys::companion_process`] | ids of companion, intermediate, guard |
//! | start | [`mod@start`] | the answer in the companion's process |
//! | monitor | `monitor`, `receive_notices` | `History`, [`notices`], [`shared_pages`] |
//! | what relatives have in common | `monitor` | `content_sampling` |
//! | sleep of an idle process | `monitor` | [`dormancy`] |
//! | faults of a process whose turn it is not | `monitor` | [`held_faults`] |
//! | activation | `activate` | [`activated`] |
//! | mapping events | [`crate::address_space::mapping_events`] | the lock of the mappings |
//! | handler | `handler` | [`workers`], [`placement`] |
//! | reclaimer | [`reclaimer`], [`request_progress`] | its requests |
//! | guard, end | `guard`, `end`, [`memory_users`] | none |
//!
//! The state modules know no roles. [`crate::runtime::Runtime`] owns the state and passes it, or
//! parts of it, to the roles.
//!
//! Lock order: the gate, the lock of the mappings, then the engine's. All other locks are leaves.

pub(crate) mod activate;
pub(crate) mod activated;
mod asleep;
mod content_sampling;
pub(crate) mod context;
pub(crate) mod dormancy;
pub(crate) mod end;
pub(crate) mod error;
pub(crate) mod farewell;
pub(crate) mod guard;
mod handler;
pub(crate) mod held_faults;
pub(crate) mod memory_users;
mod monitor;
pub(crate) mod notices;
pub(crate) mod placement;
mod receive_notices;
pub(crate) mod reclaimer;
pub(crate) mod request_progress;
pub(crate) mod shared_pages;
pub(crate) mod start;
pub(crate) mod workers;

pub use error::RuntimeError;
pub use start::start;
