//! Memory that several processes map: structs of atomics.
//!
//! [`SharedWords`] marks the types that such memory may contain. The macro [`crate::shared_words!`]
//! declares a struct of them and checks each field, so that other crates need no `unsafe` code.
//! Another process may write to the memory at any time. So every bit pattern must be valid, and
//! every access atomic. There is no lock.

use rustix::fd::AsFd;
use rustix::io::Errno;

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
    use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

    // SAFETY: the type is an atomic integer.
    unsafe impl SharedWords for AtomicU16 {}
    // SAFETY: the type is an atomic integer.
    unsafe impl SharedWords for AtomicU32 {}
    // SAFETY: the type is an atomic integer.
    unsafe impl SharedWords for AtomicU64 {}
    // SAFETY: the struct consists of counters, each of which is an atomic integer.
    unsafe impl SharedWords for Counters {}
    // SAFETY: the elements are such values, and an array adds no padding.
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

/// Maps `file` for reading and writing, for the life of the process. The caller seals the file
/// against shrinking; otherwise an access may raise SIGBUS.
///
/// # Errors
/// Fails with `INVAL` if the file is smaller than a `T`, or if the kernel refuses the mapping.
pub fn map<T: SharedWords>(file: impl AsFd) -> Result<&'static T, Errno> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    if cfg!(feature = "shuttle") {
        return Err(Errno::NOSYS);
    }
    if (rustix::fs::fstat(&file)?.st_size as u64) < size_of::<T>() as u64 {
        return Err(Errno::INVAL);
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the address of the new mapping, so nothing else is affected.
    let start = unsafe { mmap(std::ptr::null_mut(), size_of::<T>(), protection, MapFlags::SHARED, file.as_fd(), 0) }?;
    // SAFETY: the mapping is never unmapped, is page-aligned, and is backed by the file for at
    // least the size of `T`. By `SharedWords` every bit pattern is valid.
    Ok(unsafe { &*start.cast::<T>() })
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
