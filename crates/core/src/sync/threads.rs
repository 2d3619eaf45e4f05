//! The real locks and atomics, or those of the schedule explorer.

#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic;
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex as RawMutex, MutexGuard as RawGuard};
/// Yields the CPU to a thread that the caller waits for.
#[cfg(not(feature = "shuttle"))]
pub use std::thread::yield_now;

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic;
#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex as RawMutex, MutexGuard as RawGuard};
#[cfg(feature = "shuttle")]
pub use shuttle::thread::yield_now;

/// A value that its first user initialises.
pub use std::sync::OnceLock;

/// The bound of values shared between threads.
pub use std::marker::Sync as Shared;

/// A mutual exclusion lock without poisoning.
#[derive(Debug, Default)]
pub struct Mutex<T>(RawMutex<T>);

/// The guard of a locked [`Mutex`].
pub type MutexGuard<'a, T> = RawGuard<'a, T>;

impl<T> Mutex<T> {
    /// Makes a lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(RawMutex::new(value))
    }

    /// Takes the lock; waits while it is held.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}
