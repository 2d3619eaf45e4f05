//! Hooks of functions that start a thread: the new thread sends a notice before it does anything
//! else (`foliomem_sys::thread_control_block`).
//!
//! The creating thread passes entry and argument in a *cell* of the program's heap. Cells are
//! reused, so a thread that never allocates need not allocate for its cell, which would cost it a
//! malloc arena. The list of spare cells is lock-free.

use super::{PTHREAD_CREATE, THRD_CREATE};
use crate::start::runtime;
use foliomem_runtime::runtime::Runtime;
use foliomem_sys::cell_list::{Cell, CellList};
use foliomem_sys::interception::patches;
use libc::{c_int, c_void};
use std::arch::naked_asm;
use std::ptr::NonNull;

/// A thread's entry function.
pub type Entry = extern "C" fn(*mut c_void) -> *mut c_void;

/// A thread's entry function and its argument.
#[repr(C)]
struct Start {
    entry: Entry,
    argument: *mut c_void,
}

// SAFETY: the argument belongs to the program, which passes it from one thread to another.
unsafe impl Send for Start {}

/// A cell on its way to the new thread.
type StartCell = Cell<Start>;

/// Cells that are not in use.
static SPARE: CellList<Start> = CellList::new();

/// Returns a free cell; `None` if malloc has no memory.
fn take() -> Option<NonNull<StartCell>> {
    // SAFETY: malloc may be called with any size. The hook keeps the program's malloc contract.
    SPARE.take().or_else(|| NonNull::new(unsafe { super::memory::malloc(size_of::<StartCell>()).cast() }))
}

/// Lets `real` create a thread that sends a notice and then runs `entry`. Returns the result of
/// `real`, which is not 0 if there is no thread; `None` if there is no memory for the cell.
fn create(real: impl FnOnce(Entry, *mut c_void) -> c_int, entry: Entry, argument: *mut c_void) -> Option<c_int> {
    let handed = take()?;
    // SAFETY: the cell belongs to this function until the thread exists, or if it fails to. It is
    // never freed.
    unsafe {
        handed.write(Cell::new(Start { entry, argument }));
        let failed = real(begin, handed.as_ptr().cast());
        if failed != 0 {
            SPARE.give_back(handed);
        }
        Some(failed)
    }
}

/// The entry function of every thread: sends a notice, then jumps to the program's entry. It leaves
/// no stack frame, because a thread may be ended by unwinding its stack.
#[unsafe(naked)]
extern "C" fn begin(handed: *mut c_void) -> *mut c_void {
    naked_asm!("sub rsp, 8", "call {started}", "add rsp, 8", "mov rdi, rdx", "jmp rax", started = sym started)
}

/// Notes that the calling thread has started, and returns what it must run.
extern "C" fn started(handed: NonNull<StartCell>) -> Start {
    // SAFETY: `create` filled the cell for this thread alone, and this thread returns it once.
    let start = unsafe {
        let start = handed.read().value;
        SPARE.give_back(handed);
        start
    };
    // The control block of this thread may have belonged to an ended thread whose calls were
    // dispatched.
    patches::note_dispatch(None);
    runtime().into_iter().for_each(Runtime::note_thread_start);
    start
}

type PthreadCreate =
    unsafe extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Entry, *mut c_void) -> c_int;
type ThrdCreate = unsafe extern "C" fn(*mut libc::pthread_t, Entry, *mut c_void) -> c_int;

/// `pthread_create(3)`.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    entry: Entry,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the type is the function's; the caller keeps its contract.
    unsafe {
        let Some(real) = PTHREAD_CREATE.get::<PthreadCreate>() else { return libc::ENOSYS };
        if runtime().is_none() {
            return real(thread, attributes, entry, argument);
        }
        let made = create(|begin, handed| real(thread, attributes, begin, handed), entry, argument);
        made.unwrap_or(libc::EAGAIN)
    }
}

/// `thrd_create(3)`. Its threads return an `int`, which is the lower half of the register of a
/// pointer.
///
/// # Safety
/// The caller keeps the contract of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_create(thread: *mut libc::pthread_t, entry: Entry, argument: *mut c_void) -> c_int {
    /// The error code `thrd_nomem`.
    const NO_MEMORY: c_int = 3;
    // SAFETY: the type is the function's; the caller keeps its contract.
    unsafe {
        let Some(real) = THRD_CREATE.get::<ThrdCreate>() else { return NO_MEMORY };
        if runtime().is_none() {
            return real(thread, entry, argument);
        }
        create(|begin, handed| real(thread, begin, handed), entry, argument).unwrap_or(NO_MEMORY)
    }
}
