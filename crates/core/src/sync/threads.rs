//! The real locks and atomics, or a schedule explorer's.

#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic;
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex as RawMutex, RwLock as RawRwLock};
/// Lets others run, where what they do is waited for.
#[cfg(not(feature = "shuttle"))]
pub use std::thread::yield_now;

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic;
#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex as RawMutex, RwLock as RawRwLock};
#[cfg(feature = "shuttle")]
pub use shuttle::thread::yield_now;

/// What is made once, by whoever needs it first.
pub use std::sync::OnceLock;

/// What all threads may use at once.
pub use std::marker::Sync as Shared;

/// A mutual exclusion lock without poisoning.
#[derive(Debug, Default)]
pub struct Mutex<T>(RawMutex<T>);

/// What the locks hand out while they are held.
#[cfg(not(feature = "shuttle"))]
pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// What the locks hand out while they are held.
#[cfg(feature = "shuttle")]
pub use shuttle::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

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

/// A lock that many hold for reading, or one for writing, without poisoning.
#[derive(Debug, Default)]
pub struct RwLock<T>(RawRwLock<T>);

impl<T> RwLock<T> {
    /// Waits until nobody writes.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        match self.0.read() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Waits until nobody else has the lock.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        match self.0.write() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Whether somebody holds it for writing at this moment.
    pub fn is_written(&self) -> bool {
        self.0.try_read().is_err()
    }
}
