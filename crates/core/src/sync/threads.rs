//! The real locks and atomics, or a schedule explorer's.

#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic;
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex as RawMutex, MutexGuard as RawGuard};
/// Lets others run, where what they do is waited for.
#[cfg(not(feature = "shuttle"))]
pub use std::thread::yield_now;

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic;
#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex as RawMutex, MutexGuard as RawGuard};
#[cfg(feature = "shuttle")]
pub use shuttle::thread::yield_now;

/// What is made once, by whoever needs it first.
pub use std::sync::OnceLock;

/// What all threads may use at once.
pub use std::marker::Sync as Shared;

/// A mutual exclusion lock without poisoning.
#[derive(Debug, Default)]
pub struct Mutex<T>(RawMutex<T>);

/// What a [`Mutex`] hands out while it is held.
pub type MutexGuard<'a, T> = RawGuard<'a, T>;

impl<T> Mutex<T> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(RawMutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Takes the lock if nobody holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}
