//! Locks and atomics for an engine that one thread uses: cells, which the compiler confines to one
//! thread.
//!
//! With one thread, they behave like the real locks and atomics, but do without locked bus cycles,
//! which took half of the lab's time. A wait for a lock would wait for the same thread, so it
//! panics.

use foliomem_sync::ranks::{Leaf, Rank};
use std::cell::{RefCell, RefMut};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A value that is initialised once. A cell needs one load to read and half the memory of the real
/// one.
pub use std::cell::OnceCell as OnceLock;

/// A mutual exclusion lock as a cell. Its rank is not checked.
#[derive(Debug)]
pub struct Mutex<T, R: Rank = Leaf> {
    cell: RefCell<T>,
    rank: PhantomData<fn() -> R>,
}

/// The guard of a locked [`Mutex`].
pub struct MutexGuard<'a, T, R: Rank = Leaf> {
    value: RefMut<'a, T>,
    rank: PhantomData<fn() -> R>,
}

impl<T: Default, R: Rank> Default for Mutex<T, R> {
    fn default() -> Self {
        Mutex::new(T::default())
    }
}

impl<T, R: Rank> Mutex<T, R> {
    /// Makes a lock around `value`.
    pub const fn new(value: T) -> Self {
        Mutex { cell: RefCell::new(value), rank: PhantomData }
    }

    /// Takes the lock. Panics if it is held.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T, R> {
        MutexGuard { value: self.cell.borrow_mut(), rank: PhantomData }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T, R>> {
        Some(MutexGuard { value: self.cell.try_borrow_mut().ok()?, rank: PhantomData })
    }
}

impl<T, R: Rank> Deref for MutexGuard<'_, T, R> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T, R: Rank> DerefMut for MutexGuard<'_, T, R> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// Does nothing: there is no other thread to run.
pub fn back_off() {}

/// The bound of values shared between threads. Every type satisfies it, because there is one
/// thread.
pub trait Shared {}

impl<T: ?Sized> Shared for T {}

/// Cells with the methods of atomics that the engine and the lab use.
pub mod atomic {
    pub use std::sync::atomic::Ordering;

    use std::cell::Cell;

    macro_rules! atomics {
        ($($name:ident of $number:ty),*) => {$(
            /// A cell with the methods of the atomic of that name.
            #[derive(Debug, Default)]
            #[repr(transparent)]
            pub struct $name(Cell<$number>);

            impl $name {
                /// Makes a cell with `value`.
                pub const fn new(value: $number) -> Self {
                    Self(Cell::new(value))
                }

                /// Returns the value.
                #[inline]
                pub fn load(&self, _: Ordering) -> $number {
                    self.0.get()
                }

                /// Sets the value.
                #[inline]
                pub fn store(&self, value: $number, _: Ordering) {
                    self.0.set(value);
                }

                /// Sets the value and returns the previous one.
                #[inline]
                pub fn swap(&self, value: $number, _: Ordering) -> $number {
                    self.0.replace(value)
                }

                /// Adds `more`, wrapping, and returns the previous value.
                #[inline]
                pub fn fetch_add(&self, more: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get().wrapping_add(more))
                }

                /// Subtracts `less`, wrapping, and returns the previous value.
                #[inline]
                pub fn fetch_sub(&self, less: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get().wrapping_sub(less))
                }

                /// Raises the value to `least` and returns the previous value.
                #[inline]
                pub fn fetch_max(&self, least: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get().max(least))
                }

                /// Sets `bits` and returns the previous value.
                #[inline]
                pub fn fetch_or(&self, bits: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get() | bits)
                }

                /// Clears all bits except `bits` and returns the previous value.
                #[inline]
                pub fn fetch_and(&self, bits: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get() & bits)
                }

                /// Replaces the value unless `change` returns `None`. Returns the previous value as
                /// `Ok` or `Err`.
                #[inline]
                pub fn fetch_update(
                    &self,
                    _: Ordering,
                    _: Ordering,
                    mut change: impl FnMut($number) -> Option<$number>,
                ) -> Result<$number, $number> {
                    let now = self.0.get();
                    change(now).map(|new| self.0.replace(new)).ok_or(now)
                }

                /// Replaces the value if it is `current`. Returns the previous value as `Ok` or
                /// `Err`.
                #[inline]
                pub fn compare_exchange(
                    &self,
                    current: $number,
                    new: $number,
                    _: Ordering,
                    _: Ordering,
                ) -> Result<$number, $number> {
                    let now = self.0.get();
                    if now == current { Ok(self.0.replace(new)) } else { Err(now) }
                }

                /// Calls `compare_exchange`: a cell never fails spuriously.
                #[inline]
                pub fn compare_exchange_weak(
                    &self,
                    current: $number,
                    new: $number,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$number, $number> {
                    self.compare_exchange(current, new, success, failure)
                }
            }
        )*};
    }

    atomics!(AtomicU16 of u16, AtomicU32 of u32, AtomicU64 of u64, AtomicUsize of usize, AtomicI64 of i64);
}

#[cfg(test)]
mod tests {
    use super::atomic::{AtomicI64, AtomicU16, AtomicU32, AtomicU64, AtomicUsize};
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{self as real, Ordering::SeqCst};

    fn is_shared(_: &dyn Shared) {}

    macro_rules! same_as_real {
        ($cell:ident, $number:ty, $start:expr, $steps:expr) => {
            let (cell, real) = ($cell::new($start as $number), real::$cell::new($start as $number));
            for (what, a, b) in $steps {
                let (a, b) = (a as $number, b as $number);
                let up_to = |now: $number| (now < b).then(|| now.wrapping_add(a));
                macro_rules! same {
                    ($method:ident($argument:expr)) => {
                        assert_eq!(cell.$method($argument, SeqCst), real.$method($argument, SeqCst))
                    };
                }
                match what {
                    0 => same!(swap(a)),
                    1 => same!(fetch_add(a)),
                    2 => same!(fetch_sub(a)),
                    3 => same!(fetch_max(a)),
                    4 => same!(fetch_or(a)),
                    5 => same!(fetch_and(a)),
                    6 => same!(store(a)),
                    7 => assert_eq!(cell.fetch_update(SeqCst, SeqCst, up_to), real.fetch_update(SeqCst, SeqCst, up_to)),
                    8 => {
                        let now = if b % 2 == 0 { cell.load(SeqCst) } else { b };
                        let exchanged = cell.compare_exchange_weak(now, a, SeqCst, SeqCst);
                        assert_eq!(exchanged, real.compare_exchange(now, a, SeqCst, SeqCst));
                    }
                    _ => unreachable!("steps are 0..9"),
                }
                assert_eq!(cell.load(SeqCst), real.load(SeqCst));
            }
        };
    }

    proptest! {
        #[test]
        fn cells_behave_like_atomics(
            start in any::<u64>(), steps in prop::collection::vec((0..9, any::<u64>(), any::<u64>()), 1..60)
        ) {
            same_as_real!(AtomicU16, u16, start, steps.iter().copied());
            same_as_real!(AtomicU32, u32, start, steps.iter().copied());
            same_as_real!(AtomicU64, u64, start, steps.iter().copied());
            same_as_real!(AtomicUsize, usize, start, steps.iter().copied());
            same_as_real!(AtomicI64, i64, start, steps.iter().copied());
        }
    }

    #[test]
    fn an_initialised_value_stays() {
        let made = OnceLock::new();
        assert_eq!((made.get(), made.get_or_init(|| 1), made.get_or_init(|| 2)), (None, &1, &1));
    }

    #[test]
    fn a_lock_is_held_once() {
        let mutex = Mutex::<i32>::new(1);
        is_shared(&mutex);
        let mut guard: MutexGuard<'_, i32> = mutex.lock();
        *guard += 1;
        assert!(mutex.try_lock().is_none());
        drop(guard);
        back_off();
        assert_eq!(mutex.try_lock().map(|guard| *guard), Some(2));
    }
}
