//! Memory that several processes map: structs of atomics.
//!
//! [`SharedWords`] marks the types that such memory may contain. The macro [`crate::shared_words!`]
//! declares a struct of them and checks each field, so that other crates need no `unsafe` code.
//! Another process may write to the memory at any time. So every bit pattern must be valid, and
//! every access atomic. There is no lock.

use crate::memory_advice;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;

/// A type that several processes may access at the same time: it consists of atomics only.
///
/// # Safety
/// Every bit pattern is a valid value of the type. Every access through a shared reference is
/// atomic.
pub unsafe trait SharedWords: 'static {}

#[cfg(not(feature = "shuttle"))]
mod words {
    use super::SharedWords;
    use foliomem_types::counters::Counters;
    use std::sync::atomic::{AtomicU32, AtomicU64};

    // SAFETY: the type is an atomic integer.
    unsafe impl SharedWords for AtomicU32 {}
    // SAFETY: the type is an atomic integer.
    unsafe impl SharedWords for AtomicU64 {}
    // SAFETY: the struct consists of counters, each of which is an atomic integer.
    unsafe impl SharedWords for Counters {}
    // SAFETY: the elements implement `SharedWords`, and an array adds no padding.
    unsafe impl<T: SharedWords, const N: usize> SharedWords for [T; N] {}
}

// SAFETY: the explorer's atomics are not plain words, but with it nothing is mapped or made of
// zeros.
#[cfg(feature = "shuttle")]
unsafe impl<T: 'static> SharedWords for T {}

/// Implements `SharedWords` for a struct of [`crate::shared_words!`] if all its fields implement
/// it.
#[cfg(not(feature = "shuttle"))]
#[doc(hidden)]
#[macro_export]
macro_rules! implement_shared_words {
    ($name:ident: $($type:ty,)*) => {
        // SAFETY: all fields implement `SharedWords`, by the bounds.
        unsafe impl $crate::shared_memory::SharedWords for $name
        where
            $($type: $crate::shared_memory::SharedWords,)*
        {}
    };
}

/// Expands to nothing: with the explorer, every type implements `SharedWords`.
#[cfg(feature = "shuttle")]
#[doc(hidden)]
#[macro_export]
macro_rules! implement_shared_words {
    ($name:ident: $($type:ty,)*) => {};
}

/// Declares structs whose fields are [`SharedWords`]. The structs have the layout of C, and
/// implement `SharedWords`, too.
#[macro_export]
macro_rules! shared_words {
    ($($(#[$attribute:meta])* $visible:vis struct $name:ident { $($(#[$on_field:meta])* $of:vis $field:ident: $type:ty,)* })*) => {$(
        $(#[$attribute])*
        #[repr(C)]
        $visible struct $name { $($(#[$on_field])* $of $field: $type,)* }

        $crate::implement_shared_words!($name: $($type,)*);
    )*};
}

/// The mapping of a shared file. Unmapped on drop.
#[derive(Debug)]
pub struct Mapped<T: SharedWords>(NonNull<T>);

// SAFETY: the mapping belongs to the process, not to a thread, and gives out shared references
// alone.
unsafe impl<T: SharedWords + Sync> Send for Mapped<T> {}
// SAFETY: several threads may read shared words.
unsafe impl<T: SharedWords + Sync> Sync for Mapped<T> {}

impl<T: SharedWords> Mapped<T> {
    /// Maps `file` for reading and writing. The caller seals the file against shrinking; otherwise
    /// an access may raise SIGBUS.
    ///
    /// # Errors
    /// Fails with `INVAL` if the file is smaller than a `T`, or if the kernel refuses the mapping.
    pub fn new(file: impl AsFd) -> Result<Mapped<T>, Errno> {
        if cfg!(feature = "shuttle") {
            return Err(Errno::NOSYS);
        }
        if (rustix::fs::fstat(&file)?.st_size as u64) < size_of::<T>() as u64 {
            return Err(Errno::INVAL);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let (anywhere, len) = (std::ptr::null_mut(), size_of::<T>());
        // SAFETY: the kernel chooses the address of the new mapping, so nothing else is affected.
        let start = unsafe { mmap(anywhere, len, protection, MapFlags::SHARED, file.as_fd(), 0) }?;
        memory_advice::leave_out_of_dumps(&(start.addr()..start.addr() + len));
        NonNull::new(start.cast()).map(Mapped).ok_or(Errno::NOMEM)
    }

    /// Keeps the mapping for the life of the process.
    pub fn leak(self) -> &'static T {
        let start = ManuallyDrop::new(self).0;
        // SAFETY: as in `deref`, and the mapping is never unmapped.
        unsafe { start.as_ref() }
    }
}

impl<T: SharedWords> Deref for Mapped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping is page-aligned, lives as long as `self`, and is backed by the file
        // for at least the size of `T`. By `SharedWords` every bit pattern is valid.
        unsafe { self.0.as_ref() }
    }
}

impl<T: SharedWords> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and references into it do not outlive `self`.
        let unmapped = unsafe { munmap(self.0.as_ptr().cast(), size_of::<T>()) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

/// Returns a `T` of zeros. A page of it takes memory only when it is used.
///
/// # Panics
/// If `T` has no bytes.
#[cfg(not(feature = "shuttle"))]
pub fn zeroed<T: SharedWords>() -> Box<T> {
    let layout = std::alloc::Layout::new::<T>();
    assert!(layout.size() > 0, "a value without bytes");
    // SAFETY: the layout has a size, the memory is allocated with it, and by `SharedWords` zeros
    // are valid.
    unsafe {
        let start = std::alloc::alloc_zeroed(layout).cast::<T>();
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Box::from_raw(start)
    }
}
