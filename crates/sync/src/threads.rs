//! The real locks and atomics, or those of the schedule explorer.

#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic;
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex as RawMutex, RwLock as RawRwLock};

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic;
#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex as RawMutex, RwLock as RawRwLock};
#[cfg(feature = "shuttle")]
pub use shuttle::thread::yield_now as back_off;

/// A thread that the caller waits for needs microseconds, once it runs.
#[cfg(not(feature = "shuttle"))]
const BACK_OFF: std::time::Duration = std::time::Duration::from_micros(5);

/// Sleeps for a moment, so that another thread can do what the caller waits for.
///
/// A yield is not enough. The other thread is often one of the program, in another session, and a
/// yield only gives way to threads of the same session (`autogroup`) and of no lower priority.
/// Worse, a thread of high priority that yields in a loop can keep a CPU for minutes (seen with
/// Linux 6.18), and what it waits for does not happen.
#[cfg(not(feature = "shuttle"))]
pub fn back_off() {
    std::thread::sleep(BACK_OFF);
}

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
