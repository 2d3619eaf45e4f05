//! Every lock and atomic of the engine comes from here, so that a schedule explorer can take their
//! place: the feature `shuttle` builds the whole crate over shuttle's.
//!
//! It explores orders of what threads do, not what weaker orderings of memory allow besides. It cannot see a
//! wait for a lock of `std`: an [`OnceLock`] is made by code that touches nothing of this module.
//!
//! [`Mutex`] does not poison: the agent is built with `panic = "abort"`, so that no thread can ever
//! see a half-done change of a thread that panicked.
//!
//! For an engine that one thread has for itself, the lab's, all of them are cells: the feature `one-thread`, of the package
//! `foliomem-core-one-thread` alone, which is built of the same source. A crate that depends on that has no other engine.

#[cfg(any(feature = "one-thread", test))]
mod one_thread;
#[cfg(not(feature = "one-thread"))]
mod threads;

#[cfg(feature = "one-thread")]
use one_thread as kind;
#[cfg(not(feature = "one-thread"))]
use threads as kind;

pub mod ranks;

pub use kind::{OnceLock, Shared, atomic, yield_now};

use ranks::{Leaf, Rank, Waits};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A mutual exclusion lock of a rank: see [`ranks`].
pub struct Mutex<T, R: Rank = Leaf> {
    raw: kind::Mutex<T>,
    rank: PhantomData<fn() -> R>,
}

impl<T, R: Rank> Mutex<T, R> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Self {
        Mutex { raw: kind::Mutex::new(value), rank: PhantomData }
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T, R> {
        let rank = Held::new(Waits::Yes);
        MutexGuard { raw: self.raw.lock(), _rank: rank }
    }

    /// Takes the lock if nobody holds it. That needs no order.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T, R>> {
        let raw = self.raw.try_lock()?;
        Some(MutexGuard { raw, _rank: Held::new(Waits::No) })
    }
}

impl<T: Default, R: Rank> Default for Mutex<T, R> {
    fn default() -> Self {
        Mutex::new(T::default())
    }
}

impl<T: fmt::Debug, R: Rank> fmt::Debug for Mutex<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

/// The calling thread holds a lock of this rank.
struct Held<R: Rank>(PhantomData<fn() -> R>);

impl<R: Rank> Held<R> {
    #[inline]
    fn new(waits: Waits) -> Held<R> {
        ranks::acquire::<R>(waits);
        Held(PhantomData)
    }
}

#[cfg(feature = "lock-ranks")]
impl<R: Rank> Drop for Held<R> {
    fn drop(&mut self) {
        ranks::release::<R>();
    }
}

macro_rules! guards {
    ($($(#[$doc:meta])* $name:ident of $raw:ident $(, $mutable:ident)?;)*) => {$(
        $(#[$doc])*
        pub struct $name<'a, T, R: Rank = Leaf> {
            raw: kind::$raw<'a, T>,
            _rank: Held<R>,
        }

        impl<T, R: Rank> Deref for $name<'_, T, R> {
            type Target = T;

            #[inline]
            fn deref(&self) -> &T {
                &self.raw
            }
        }

        $(impl<T, R: Rank> DerefMut for $name<'_, T, R> {
            #[inline]
            fn deref_mut(&mut self) -> &mut T {
                let $mutable = self;
                &mut $mutable.raw
            }
        })?
    )*};
}

guards! {
    /// What a [`Mutex`] hands out while it is held.
    MutexGuard of MutexGuard, guard;
}

#[cfg(not(feature = "one-thread"))]
pub use shared::{RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(not(feature = "one-thread"))]
mod shared {
    use super::ranks::{Leaf, Rank, Waits};
    use super::{Held, kind};
    use std::marker::PhantomData;
    use std::ops::{Deref, DerefMut};

    /// A lock of a rank that many hold for reading, or one for writing.
    pub struct RwLock<T, R: Rank = Leaf> {
        raw: kind::RwLock<T>,
        rank: PhantomData<fn() -> R>,
    }

    impl<T: Default, R: Rank> Default for RwLock<T, R> {
        fn default() -> Self {
            RwLock { raw: kind::RwLock::default(), rank: PhantomData }
        }
    }

    impl<T, R: Rank> RwLock<T, R> {
        /// Waits until nobody writes. A thread never does while it holds the lock.
        #[inline]
        pub fn read(&self) -> RwLockReadGuard<'_, T, R> {
            let rank = Held::new(Waits::Yes);
            RwLockReadGuard { raw: self.raw.read(), _rank: rank }
        }

        /// Waits until nobody else has the lock.
        #[inline]
        pub fn write(&self) -> RwLockWriteGuard<'_, T, R> {
            let rank = Held::new(Waits::Yes);
            RwLockWriteGuard { raw: self.raw.write(), _rank: rank }
        }

        /// Whether somebody holds it for writing at this moment.
        pub fn is_written(&self) -> bool {
            self.raw.is_written()
        }
    }

    guards! {
        /// What a [`RwLock`] hands out for reading.
        RwLockReadGuard of RwLockReadGuard;
        /// What a [`RwLock`] hands out for writing.
        RwLockWriteGuard of RwLockWriteGuard, guard;
    }
}

/// Atomics that order nothing, counts and hints: of no interest to a schedule explorer, which leaves them alone.
pub mod unordered {
    #[cfg(feature = "one-thread")]
    pub use super::one_thread::atomic::*;
    #[cfg(not(feature = "one-thread"))]
    pub use std::sync::atomic::*;
}
