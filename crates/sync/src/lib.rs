//! Locks with ranks, and atomics, of the engine and of the agent.
//!
//! The feature `shuttle` replaces all of them with shuttle's, so that a schedule explorer controls
//! every crate that uses this one. Shuttle explores interleavings of threads. It does not explore
//! reorderings that weak memory orderings allow, and it cannot see a wait for a `std` lock, so the
//! code that initialises an [`OnceLock`] uses nothing of this crate.
//!
//! [`Mutex`] does not poison: the agent is built with `panic = "abort"`, so no thread sees the
//! half-done change of a thread that panicked.
//!
//! Lock order: each lock has a rank, and a thread takes locks in ascending order ([`ranks`]).
#![forbid(unsafe_code)]

pub mod ranks;
mod threads;

pub use threads::{OnceLock, Shared, atomic, back_off};

use ranks::{Leaf, Rank, Waits};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A mutual exclusion lock with a rank: see [`ranks`].
pub struct Mutex<T, R: Rank = Leaf> {
    raw: threads::Mutex<T>,
    rank: PhantomData<fn() -> R>,
}

impl<T, R: Rank> Mutex<T, R> {
    /// Makes a lock around `value`.
    pub const fn new(value: T) -> Self {
        Mutex { raw: threads::Mutex::new(value), rank: PhantomData }
    }

    /// Takes the lock; waits while it is held.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T, R> {
        let rank = Held::new(Waits::Yes);
        MutexGuard { raw: self.raw.lock(), _rank: rank }
    }

    /// Takes the lock if it is free. The rank does not matter, because the caller does not wait.
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

/// The mark that the calling thread holds a lock of rank `R`.
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
            raw: threads::$raw<'a, T>,
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

/// A lock with a rank that several threads hold for reading, or one for writing.
pub struct RwLock<T, R: Rank = Leaf> {
    raw: threads::RwLock<T>,
    rank: PhantomData<fn() -> R>,
}

impl<T: Default, R: Rank> Default for RwLock<T, R> {
    fn default() -> Self {
        RwLock { raw: threads::RwLock::default(), rank: PhantomData }
    }
}

impl<T, R: Rank> RwLock<T, R> {
    /// Takes the lock for reading; waits while a thread writes. A thread never calls this
    /// while it holds the lock.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T, R> {
        let rank = Held::new(Waits::Yes);
        RwLockReadGuard { raw: self.raw.read(), _rank: rank }
    }

    /// Takes the lock for writing; waits while another thread holds it.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T, R> {
        let rank = Held::new(Waits::Yes);
        RwLockWriteGuard { raw: self.raw.write(), _rank: rank }
    }

    /// Returns whether a thread holds the lock for writing at this moment.
    pub fn is_written(&self) -> bool {
        self.raw.is_written()
    }
}

guards! {
    /// The guard of a locked [`Mutex`].
    MutexGuard of MutexGuard, guard;
    /// The guard of a [`RwLock`] held for reading.
    RwLockReadGuard of RwLockReadGuard;
    /// The guard of a [`RwLock`] held for writing.
    RwLockWriteGuard of RwLockWriteGuard, guard;
}

/// Atomics that order nothing (counts and hints). The schedule explorer does not control them.
pub mod unordered {
    pub use std::sync::atomic::*;
}
