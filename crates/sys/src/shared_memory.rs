//! Memory that several processes map: structs of atomics.
//!
//! [`SharedWords`] marks the types that such memory may hold. The macro [`shared_words!`] declares a
//! struct of them, and checks each field, so that other crates need no `unsafe` code. Another
//! process may write to the memory at any time: every bit pattern is a value, and every access is
//! atomic. There is no lock.

use rustix::fd::AsFd;
use rustix::io::Errno;

/// Types without padding requirements or invalid values that are accessed by atomics alone.
///
/// # Safety
/// Every bit pattern, and zeros above all, is a value of the type. Every access through a shared
/// reference is atomic.
pub unsafe trait SharedWords: 'static {}

#[cfg(not(feature = "shuttle"))]
mod words {
    use super::SharedWords;
    use foliomem_types::counters::Counters;
    use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

    // SAFETY: an atomic integer.
    unsafe impl SharedWords for AtomicU16 {}
    // SAFETY: an atomic integer.
    unsafe impl SharedWords for AtomicU32 {}
    // SAFETY: an atomic integer.
    unsafe impl SharedWords for AtomicU64 {}
    // SAFETY: a struct of counters, each of which is an atomic integer.
    unsafe impl SharedWords for Counters {}
    // SAFETY: an array of such values.
    unsafe impl<T: SharedWords, const N: usize> SharedWords for [T; N] {}
}

// SAFETY: the explorer's atomics are no plain words, but nothing is mapped or made of zeros then.
#[cfg(feature = "shuttle")]
unsafe impl<T: 'static> SharedWords for T {}

/// Makes a struct of [`shared_words!`] shared, if all its fields are.
#[cfg(not(feature = "shuttle"))]
#[doc(hidden)]
#[macro_export]
macro_rules! implement_shared_words {
    ($name:ident: $($type:ty,)*) => {
        // SAFETY: all fields are such values.
        unsafe impl $crate::shared_memory::SharedWords for $name
        where
            $($type: $crate::shared_memory::SharedWords,)*
        {}
    };
}

/// Nothing: every type is shared.
#[cfg(feature = "shuttle")]
#[doc(hidden)]
#[macro_export]
macro_rules! implement_shared_words {
    ($name:ident: $($type:ty,)*) => {};
}

/// Declares structs whose fields are [`SharedWords`](crate::shared_memory::SharedWords), in the
/// layout of C, as `SharedWords`.
#[macro_export]
macro_rules! shared_words {
    ($($(#[$attribute:meta])* $visible:vis struct $name:ident { $($(#[$on_field:meta])* $of:vis $field:ident: $type:ty,)* })*) => {$(
        $(#[$attribute])*
        #[repr(C)]
        $visible struct $name { $($(#[$on_field])* $of $field: $type,)* }

        $crate::implement_shared_words!($name: $($type,)*);
    )*};
}

/// Maps `file` for reading and writing, for ever. The file must be sealed against shrinking, or the
/// process may get SIGBUS.
///
/// # Errors
/// Fails if the file is smaller than a `T`, or if the system refuses the mapping.
pub fn map<T: SharedWords>(file: impl AsFd) -> Result<&'static T, Errno> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    if cfg!(feature = "shuttle") {
        return Err(Errno::NOSYS);
    }
    if (rustix::fs::fstat(&file)?.st_size as u64) < size_of::<T>() as u64 {
        return Err(Errno::INVAL);
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new shared mapping of a file of at least this size; it is never unmapped.
    let start = unsafe { mmap(std::ptr::null_mut(), size_of::<T>(), protection, MapFlags::SHARED, file.as_fd(), 0) }?;
    // SAFETY: mapped for ever and page aligned; by `SharedWords` every bit pattern is a value.
    Ok(unsafe { &*start.cast::<T>() })
}

/// Returns a `T` of zeros, of which only pages that are used take memory.
#[cfg(not(feature = "shuttle"))]
pub fn zeroed<T: SharedWords>() -> Box<T> {
    let layout = std::alloc::Layout::new::<T>();
    assert!(layout.size() > 0, "a value without bytes");
    // SAFETY: the layout has a size; by `SharedWords` zeros are a value.
    unsafe {
        let start = std::alloc::alloc_zeroed(layout).cast::<T>();
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Box::from_raw(start)
    }
}
