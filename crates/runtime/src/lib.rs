//! The runtime: the agent inside one process, without the hooks that the agent's library exports.
//!
//! | module | part |
//! |---|---|
//! | [`companion`] | the process beside the program: monitor, handlers, reclaimers, guard |
//! | `address_space` | what is known of the program's mappings, and how it becomes managed |
//! | `fork` | how a forking process and its child keep their swapped-out memory |
//! | `ports` | the engine's machine, on the system interface |
//! | [`runtime`] | the owner of the state, and what the program's hooks call |
//!
//! The crate is a library of its own because measurements run it inside their own process: the
//! hooks of `foliomem-agent` would take the place of that process's C library.
//!
//! Code here runs inside foreign programs: it does not allocate from the program's malloc, and uses
//! no thread-local storage.
//!
//! Lock order: the gate, then the locks by rank (`foliomem_sync::ranks`).

mod address_space;
pub mod companion;
mod fork;
mod ports;
pub mod runtime;
mod tracer;

#[cfg(all(test, feature = "shuttle"))]
mod schedules;
