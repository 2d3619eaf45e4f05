//! A value that all threads read, and that changes only while its process has one thread.
//!
//! The child of a fork replaces what belonged to its parent. The old value is forgotten, not
//! dropped, because the parent still uses it. There is no lock.

use std::cell::UnsafeCell;
use std::ops::Deref;

/// A value that changes only while its process has one thread.
#[derive(Debug)]
pub struct ForkCell<T>(UnsafeCell<T>);

// SAFETY: shared access only reads; the one mutation requires that no other thread exists.
unsafe impl<T: Send + Sync> Sync for ForkCell<T> {}

impl<T> ForkCell<T> {
    /// A cell that holds `value`.
    pub const fn new(value: T) -> ForkCell<T> {
        ForkCell(UnsafeCell::new(value))
    }

    /// Replaces the value without dropping the old one, which belongs to the parent.
    ///
    /// # Safety
    /// No other thread exists that uses the cell, and no reference into it is used again.
    pub unsafe fn replace_forgetting(&self, value: T) {
        // SAFETY: exclusive by the contract.
        std::mem::forget(std::mem::replace(unsafe { &mut *self.0.get() }, value));
    }
}

impl<T> Deref for ForkCell<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: only read, see `replace_forgetting`.
        unsafe { &*self.0.get() }
    }
}
