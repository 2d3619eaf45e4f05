//! Locks and atomics of the engine. The feature `shuttle` replaces all of them with shuttle's, so
//! that a schedule explorer controls the whole crate.
//!
//! Shuttle explores interleavings of threads. It does not explore reorderings that weak memory
//! orderings allow, and it cannot see a wait for a `std` lock, so the code that initialises an
//! [`OnceLock`] uses nothing of this module.
//!
//! [`Mutex`] does not poison: the agent is built with `panic = "abort"`, so no thread sees the
//! half-done change of a thread that panicked.
//!
//! The feature `one-thread` makes all of them cells, for the lab's engine, which only one thread
//! uses. The package `foliomem-core-one-thread` builds this source with that feature. A crate that
//! depends on it has no other engine.

#[cfg(any(feature = "one-thread", test))]
mod one_thread;
#[cfg(not(feature = "one-thread"))]
mod threads;

#[cfg(feature = "one-thread")]
use one_thread as kind;
#[cfg(not(feature = "one-thread"))]
use threads as kind;

pub use kind::{Mutex, MutexGuard, OnceLock, Shared, atomic, yield_now};

/// Atomics that order nothing (counts and hints). The schedule explorer does not control them.
pub mod unordered {
    #[cfg(feature = "one-thread")]
    pub use super::one_thread::atomic::*;
    #[cfg(not(feature = "one-thread"))]
    pub use std::sync::atomic::*;
}
