//! The runtime: the agent inside one process, without the hooks that the agent's library exports.
//!
//! | module | part |
//! |---|---|
//! | [`companion`] | the process that serves the program: monitor, handlers, reclaimers, guard |
//! | `address_space` | the program's mappings, and how they become managed |
//! | `fork` | how a forking process and its child keep their swapped-out memory |
//! | `ports` | the engine's ports, on the system interface |
//! | [`runtime`] | the agent's state, and the functions that the program's hooks call |
//!
//! The crate is a library of its own because benchmarks run it inside their own process: the hooks
//! of `foliomem-agent` would replace that process's C library functions.
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
