//! A value that all threads read, and that changes only while its process has one thread.
//!
//! The child of a fork replaces values that belong to its parent. It forgets the old value instead
//! of dropping it, because the parent still uses it. There is no lock.

use std::cell::UnsafeCell;
use std::ops::Deref;

/// A value that changes only while its process has one thread.
#[derive(Debug)]
pub struct ForkCell<T>(UnsafeCell<T>);

// SAFETY: shared access only reads; the only mutation requires that no other thread exists.
unsafe impl<T: Send + Sync> Sync for ForkCell<T> {}

impl<T> ForkCell<T> {
    /// Makes a cell that contains `value`.
    pub const fn new(value: T) -> ForkCell<T> {
        ForkCell(UnsafeCell::new(value))
    }

    /// Replaces the value without dropping the old one, which belongs to the parent.
    ///
    /// # Safety
    /// No other thread that uses the cell exists, and nobody uses an earlier reference into it
    /// again.
    pub unsafe fn replace_forgetting(&self, value: T) {
        // SAFETY: no other reference is in use, by the contract.
        std::mem::forget(std::mem::replace(unsafe { &mut *self.0.get() }, value));
    }
}

impl<T> Deref for ForkCell<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value is only read; `replace_forgetting` requires that no such reference is
        // in use.
        unsafe { &*self.0.get() }
    }
}
