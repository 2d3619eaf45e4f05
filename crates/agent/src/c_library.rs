//! The functions of the C library that code inside the agent calls by name, defined in the agent.
//!
//! A program or its libraries may define any of these names. The dynamic loader then binds a
//! preloaded library to that definition. Such a function may touch memory that is swapped out and
//! that only the calling thread can map in, or may need a thread that the C library knows. Hence
//! the agent defines the functions that Rust's std and the C code of its codecs import:
//!
//! - `memory.s`: memcpy, memmove, memset, memcmp, bcmp, strlen.
//! - System calls without the C library: no cancellation, no interposition; they set errno as
//!   usual.
//! - Functions that only std's backtraces and destructors of thread-local variables use: they fail.
//! - Allocation, for std's internals and zstd's unused default allocator: from the agent's heap.
//!
//! All symbols are hidden. Calls to functions that the agent itself exports arrive at `__wrap_NAME`
//! (`build.rs`). A test (`tests/e2e/test_foreign_symbols.py`) lists the imports that remain in the
//! built library, with their reasons. There is no lock.

use crate::real::Real;
use libc::c_int;
use std::arch::global_asm;
use std::sync::atomic::AtomicI32;

// The executable of the unit tests has ordinary threads, which need the real functions.
#[cfg(not(test))]
mod imports;
#[cfg(test)]
mod tests;

global_asm!(include_str!("c_library/memory.s"));

static ERRNO_LOCATION: Real = Real::c_library(c"__errno_location");

type ErrnoLocation = unsafe extern "C" fn() -> *mut c_int;

/// Returns the address of the calling thread's `errno`: the C library's on threads of the program,
/// the agent's on threads of the agent, which have no thread-local variables of the program.
pub extern "C" fn errno() -> *mut c_int {
    if let Some(errno) = foliomem_sys::thread::own_errno() {
        return errno;
    }
    static NOWHERE: AtomicI32 = AtomicI32::new(0);
    // SAFETY: the type is the function's. It only computes an address.
    unsafe { ERRNO_LOCATION.get::<ErrnoLocation>().map_or(NOWHERE.as_ptr(), |real| real()) }
}
