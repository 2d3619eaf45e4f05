//! Locks and atomics for an engine that one thread has for itself: cells, which the compiler keeps to one thread.
//!
//! They do what the real ones do as long as nobody else is there, without the price of a locked bus: half of what the lab
//! spent. Waiting for a lock would be waiting for oneself, and panics.

use std::cell::{RefCell, RefMut};

/// In the place of what is made once: looking at it is one load, and it takes half as much memory.
pub use std::cell::OnceCell as OnceLock;

/// In the place of a mutual exclusion lock.
#[derive(Debug, Default)]
pub struct Mutex<T>(RefCell<T>);

/// What a [`Mutex`] hands out while it is held.
pub type MutexGuard<'a, T> = RefMut<'a, T>;

impl<T> Mutex<T> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(RefCell::new(value))
    }

    /// Takes the lock, which nobody holds.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.borrow_mut()
    }

    /// Takes the lock if nobody holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_borrow_mut().ok()
    }
}

/// There is nobody to be let run.
pub fn yield_now() {}

/// What all threads may use at once: there is one.
pub trait Shared {}

impl<T: ?Sized> Shared for T {}

/// Cells with the methods of atomics, as far as the engine and the lab use them.
pub mod atomic {
    pub use std::sync::atomic::Ordering;

    use std::cell::Cell;

    macro_rules! atomics {
        ($($name:ident of $number:ty),*) => {$(
            /// As the atomic of that name.
            #[derive(Debug, Default)]
            #[repr(transparent)]
            pub struct $name(Cell<$number>);

            impl $name {
                /// One of that value.
                pub const fn new(value: $number) -> Self {
                    Self(Cell::new(value))
                }

                /// Its value.
                #[inline]
                pub fn load(&self, _: Ordering) -> $number {
                    self.0.get()
                }

                /// Gives it a value.
                #[inline]
                pub fn store(&self, value: $number, _: Ordering) {
                    self.0.set(value);
                }

                /// Gives it a value; returns the one before, as all below do.
                #[inline]
                pub fn swap(&self, value: $number, _: Ordering) -> $number {
                    self.0.replace(value)
                }

                /// Adds, around the end.
                #[inline]
                pub fn fetch_add(&self, more: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get().wrapping_add(more))
                }

                /// Subtracts, around the end.
                #[inline]
                pub fn fetch_sub(&self, less: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get().wrapping_sub(less))
                }

                /// Raises it.
                #[inline]
                pub fn fetch_max(&self, least: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get().max(least))
                }

                /// Sets bits.
                #[inline]
                pub fn fetch_or(&self, bits: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get() | bits)
                }

                /// Keeps bits.
                #[inline]
                pub fn fetch_and(&self, bits: $number, _: Ordering) -> $number {
                    self.0.replace(self.0.get() & bits)
                }

                /// Changes it, unless there is nothing to change it to.
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

                /// Changes it if it is `current`.
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

                /// The same: it never fails without a reason.
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
                    _ => unreachable!("one of those"),
                }
                assert_eq!(cell.load(SeqCst), real.load(SeqCst));
            }
        };
    }

    proptest! {
        #[test]
        fn cells_count_as_atomics_do(
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
    fn what_was_made_stays() {
        let made = OnceLock::new();
        assert_eq!((made.get(), made.get_or_init(|| 1), made.get_or_init(|| 2)), (None, &1, &1));
    }

    #[test]
    fn a_lock_is_held_once() {
        let mutex = Mutex::new(1);
        is_shared(&mutex);
        let mut guard: MutexGuard<'_, i32> = mutex.lock();
        *guard += 1;
        assert!(mutex.try_lock().is_none());
        drop(guard);
        yield_now();
        assert_eq!(mutex.try_lock().map(|guard| *guard), Some(2));
    }
}
