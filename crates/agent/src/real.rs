//! Functions of other objects that the agent looks up itself: hooked functions, and functions of
//! the C library.
//!
//! The agent looks them up once, at its start. A function that constructors or the loader call
//! earlier is looked up at that call. A lookup allocates nothing and calls nothing
//! (`foliomem_sys::loader`). There is no lock.

use foliomem_sys::loader::{c_library_function, next_function};
use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The object whose definition a lookup returns.
enum Definer {
    /// The next object after the agent that defines the name: the program would call it without the
    /// agent.
    Next,
    /// The C library.
    CLibrary,
}

/// A function of another object. Its address comes first, because hooks jump to it
/// (`crate::hooks`).
#[repr(C)]
pub struct Real {
    address: AtomicUsize,
    name: &'static CStr,
    definer: Definer,
}

impl Real {
    /// Declares the next definition of `name` after the agent's.
    pub const fn next(name: &'static CStr) -> Real {
        Real { address: AtomicUsize::new(0), name, definer: Definer::Next }
    }

    /// Declares the C library's definition of `name`.
    pub const fn c_library(name: &'static CStr) -> Real {
        Real { address: AtomicUsize::new(0), name, definer: Definer::CLibrary }
    }

    /// Looks the function up, and returns its address; 0 if nobody defines it.
    pub fn resolve(&self) -> usize {
        let found = match self.definer {
            Definer::Next => next_function(self.name),
            Definer::CLibrary => c_library_function(self.name),
        };
        // Release pairs with the Acquire in `get`.
        self.address.store(found.unwrap_or(0), Ordering::Release);
        found.unwrap_or(0)
    }

    /// Returns the function; `None` if nobody defines it.
    ///
    /// # Safety
    /// `F` is the function's type.
    pub unsafe fn get<F: Copy>(&self) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<usize>()) };
        // Acquire pairs with the Release in `resolve`.
        let mut address = self.address.load(Ordering::Acquire);
        if address == 0 {
            address = self.resolve();
        }
        // SAFETY: the address is that of a function, and the caller says that `F` is its type.
        (address != 0).then(|| unsafe { std::mem::transmute_copy(&address) })
    }
}
