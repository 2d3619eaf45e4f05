//! Zeroed memory that a C library keeps its state in: owned by us, at one address for its whole life.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Aligned for anything: the strictest user, zstd, asks for 8 and works best on cache lines.
const ALIGN: usize = 64;

/// See the module.
#[derive(Debug)]
pub(super) struct Workspace {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned by the workspace, and what the libraries keep in it is plain data that no
// thread is tied to.
unsafe impl Send for Workspace {}

impl Workspace {
    /// `bytes` zero bytes, at least one.
    ///
    /// # Panics
    /// If that is more than the address space has.
    pub(super) fn new(bytes: usize) -> Workspace {
        let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGN) else {
            panic!("{bytes} bytes of working memory")
        };
        // SAFETY: the layout is not of size 0.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => Workspace { start, layout },
            None => handle_alloc_error(layout),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// Its start, for a library to look at its state.
    pub(super) fn as_ptr(&self) -> *const c_void {
        self.start.as_ptr().cast()
    }

    /// Its start, for a library to keep its state at.
    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.start.as_ptr().cast()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout; nobody else has it.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
