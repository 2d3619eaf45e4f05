//! The real locks and atomics, or those of the schedule explorer.

#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic;
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex as RawMutex, RwLock as RawRwLock};
/// Yields the CPU to a thread that the caller waits for.
#[cfg(not(feature = "shuttle"))]
pub use std::thread::yield_now;

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic;
#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex as RawMutex, RwLock as RawRwLock};
#[cfg(feature = "shuttle")]
pub use shuttle::thread::yield_now;

/// A value that its first user initialises.
pub use std::sync::OnceLock;

/// The bound of values shared between threads.
pub use std::marker::Sync as Shared;

/// A mutual exclusion lock without poisoning.
#[derive(Debug, Default)]
pub struct Mutex<T>(RawMutex<T>);

/// The guards of held locks.
#[cfg(not(feature = "shuttle"))]
pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// The guards of held locks.
#[cfg(feature = "shuttle")]
pub use shuttle::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

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

/// A lock that several threads hold for reading, or one for writing, without poisoning.
#[derive(Debug, Default)]
pub struct RwLock<T>(RawRwLock<T>);

impl<T> RwLock<T> {
    /// Takes the lock for reading; waits while a thread writes.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        match self.0.read() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Takes the lock for writing; waits while another thread holds it.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        match self.0.write() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Returns whether a thread holds the lock for writing at this moment.
    pub fn is_written(&self) -> bool {
        self.0.try_read().is_err()
    }
}
