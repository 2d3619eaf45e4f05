//! Functions of other objects that the agent looks up itself: hooked functions, and the C
//! library's.
//!
//! The lookups happen once, at the start. A function that is called earlier, by constructors or by
//! the loader, is looked up at that call. A lookup allocates nothing and calls nothing
//! (`foliomem_sys::loader`). There is no lock.

use foliomem_sys::loader::{c_library_function, next_function};
use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whose definition is meant.
enum Definer {
    /// The next object after the agent that has one: what the program would call without the agent.
    Next,
    /// The C library.
    CLibrary,
}

/// A function of another object. Its address comes first: code jumps there (`crate::hooks`).
#[repr(C)]
pub struct Real {
    address: AtomicUsize,
    name: &'static CStr,
    definer: Definer,
}

impl Real {
    /// The next definition after the agent's.
    pub const fn next(name: &'static CStr) -> Real {
        Real { address: AtomicUsize::new(0), name, definer: Definer::Next }
    }

    /// The definition of the C library.
    pub const fn c_library(name: &'static CStr) -> Real {
        Real { address: AtomicUsize::new(0), name, definer: Definer::CLibrary }
    }

    /// Looks the function up.
    pub fn resolve(&self) -> usize {
        let found = match self.definer {
            Definer::Next => next_function(self.name),
            Definer::CLibrary => c_library_function(self.name),
        };
        // Release pairs with the Acquire in `get`.
        self.address.store(found.unwrap_or(0), Ordering::Release);
        found.unwrap_or(0)
    }

    /// The function.
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
        // SAFETY: a definition of a function is a function of its type.
        (address != 0).then(|| unsafe { std::mem::transmute_copy(&address) })
    }
}
