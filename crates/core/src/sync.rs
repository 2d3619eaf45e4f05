//! Every lock and atomic of the engine comes from here, so that a schedule explorer can take their
//! place: the feature `shuttle` builds the whole crate over shuttle's.
//!
//! It explores orders of what threads do, not what weaker orderings of memory allow besides. It cannot see a
//! wait for a lock of `std`: an [`OnceLock`] is made by code that touches nothing of this module.
//!
//! [`Mutex`] does not poison: the agent is built with `panic = "abort"`, so that no thread can ever
//! see a half-done change of a thread that panicked.
//!
//! For an engine that one thread has for itself, the lab's, all of them are cells: the feature `one-thread`, of the package
//! `foliomem-core-one-thread` alone, which is built of the same source. A crate that depends on that has no other engine.

#[cfg(any(feature = "one-thread", test))]
mod one_thread;
#[cfg(not(feature = "one-thread"))]
mod threads;

#[cfg(feature = "one-thread")]
use one_thread as kind;
#[cfg(not(feature = "one-thread"))]
use threads as kind;

pub use kind::{Mutex, MutexGuard, OnceLock, Shared, atomic, yield_now};

/// Atomics that order nothing, counts and hints: of no interest to a schedule explorer, which leaves them alone.
pub mod unordered {
    #[cfg(feature = "one-thread")]
    pub use super::one_thread::atomic::*;
    #[cfg(not(feature = "one-thread"))]
    pub use std::sync::atomic::*;
}
