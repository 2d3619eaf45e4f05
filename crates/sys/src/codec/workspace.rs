//! Zeroed memory for the state of a C library. The agent owns it, and it never moves.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Alignment in bytes. zstd, the strictest user, asks for 8 and works best on cache lines.
const ALIGN: usize = 64;

/// A block of memory that holds the state of a C library.
#[derive(Debug)]
pub(super) struct Workspace {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the workspace owns the memory. The libraries keep plain data in it, which is not tied to
// a thread.
unsafe impl Send for Workspace {}

impl Workspace {
    /// Allocates `bytes` zero bytes, at least one.
    ///
    /// # Panics
    /// If `bytes` exceeds the address space.
    pub(super) fn new(bytes: usize) -> Workspace {
        let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGN) else {
            panic!("{bytes} bytes of working memory")
        };
        // SAFETY: the size of the layout is not 0, by `max(1)` above.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => Workspace { start, layout },
            None => handle_alloc_error(layout),
        }
    }

    /// Returns the size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// Returns the start of the memory, for calls that only read the library's state.
    pub(super) fn as_ptr(&self) -> *const c_void {
        self.start.as_ptr().cast()
    }

    /// Returns the start of the memory, for calls that change the library's state.
    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.start.as_ptr().cast()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout, and the workspace is its only owner.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
