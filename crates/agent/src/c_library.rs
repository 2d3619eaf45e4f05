//! The functions of the C library that code inside the agent calls by name, as the agent's own.
//!
//! A program, or a library of its own, may define any of these names. Then the dynamic loader binds a preloaded library to that
//! definition, which may touch memory that only the calling thread can bring back, or may need a thread that the C
//! library knows. So the agent defines what Rust's std and the C code of its codecs import:
//!
//! - `memory.s`: memcpy, memmove, memset, memcmp, bcmp, strlen.
//! - System calls without the C library: no cancellation, no interposition; errno is kept as usual.
//! - What only std's backtraces and destructors of thread-local variables use: refused.
//! - Allocation, for std's internals and zstd's unused default allocator: the agent's heap.
//!
//! All symbols are hidden. Calls to functions that the agent itself exports arrive at `__wrap_NAME` (`build.rs`). A
//! test (`tests/e2e/test_foreign_symbols.py`) lists what the built library still imports, and why.

use crate::real::Real;
use libc::c_int;
use std::arch::global_asm;
use std::sync::atomic::AtomicI32;

// The executable of the unit tests is a program with threads of its own: it needs the real functions.
#[cfg(not(test))]
mod imports;
#[cfg(test)]
mod tests;

global_asm!(include_str!("c_library/memory.s"));

static ERRNO_LOCATION: Real = Real::c_library(c"__errno_location");

type ErrnoLocation = unsafe extern "C" fn() -> *mut c_int;

/// The C library's `errno` of the calling thread. On the agent's own threads: theirs, as the C
/// library's lies as far from the thread pointer as the program and its libraries have thread-local variables.
pub extern "C" fn errno() -> *mut c_int {
    if let Some(errno) = foliomem_sys::thread::own_errno() {
        return errno;
    }
    static NOWHERE: AtomicI32 = AtomicI32::new(0);
    // SAFETY: the type matches; the function only computes an address.
    unsafe { ERRNO_LOCATION.get::<ErrnoLocation>().map_or(NOWHERE.as_ptr(), |real| real()) }
}
