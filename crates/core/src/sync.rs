//! The locks and atomics of the engine, chosen by the build.
//!
//! The agent's engine uses those of `foliomem_sync`. The feature `one-thread` makes all of them
//! cells, for the lab's engine, which only one thread uses. The package `foliomem-core-one-thread`
//! builds this source with that feature. A crate that depends on it has no other engine.
//!
//! Lock order: the ranks of `foliomem_sync::ranks`. Cells have the same types and no check.

#[cfg(any(feature = "one-thread", test))]
mod one_thread;

#[cfg(not(feature = "one-thread"))]
pub use foliomem_sync::{Mutex, MutexGuard, OnceLock, Shared, atomic, back_off, unordered};
#[cfg(feature = "one-thread")]
pub use one_thread::{Mutex, MutexGuard, OnceLock, Shared, atomic, atomic as unordered, back_off};

pub use foliomem_sync::ranks;
