//! Threads of the program tell that they begin, before anything else
//! (`foliomem_sys::thread_control_block`).
//!
//! What a thread is to begin with it gets in a *cell* of the program's heap. Cells are used again:
//! a thread that has never allocated does not begin to, which would cost it an arena of its own.

use super::{PTHREAD_CREATE, THRD_CREATE};
use crate::start::runtime;
use foliomem_runtime::runtime::Runtime;
use foliomem_sys::cell_list::{Cell, CellList};
use foliomem_sys::interception::patches;
use libc::{c_int, c_void};
use std::arch::naked_asm;
use std::ptr::NonNull;

/// Where the program has a thread begin.
pub type Entry = extern "C" fn(*mut c_void) -> *mut c_void;

/// Where a thread begins, and with what.
#[repr(C)]
struct Beginning {
    entry: Entry,
    argument: *mut c_void,
}

// SAFETY: the argument is the program's, on its way from one thread to another.
unsafe impl Send for Beginning {}

/// On its way to the thread.
type Handed = Cell<Beginning>;

/// Cells that nobody uses.
static SPARE: CellList<Beginning> = CellList::new();

/// A cell; `None` where there is no memory.
fn take() -> Option<NonNull<Handed>> {
    // SAFETY: an allocation of the program's.
    SPARE.take().or_else(|| NonNull::new(unsafe { super::memory::malloc(size_of::<Handed>()).cast() }))
}

/// Has `real` make a thread that tells that it begins, then goes to `entry`. What that returns: not
/// 0 where there is no thread. `None` where there is no memory for it.
fn create(real: impl FnOnce(Entry, *mut c_void) -> c_int, entry: Entry, argument: *mut c_void) -> Option<c_int> {
    let handed = take()?;
    // SAFETY: the cell is ours until there is a thread, and if there is none. It is never freed.
    unsafe {
        handed.write(Cell::new(Beginning { entry, argument }));
        let failed = real(begin, handed.as_ptr().cast());
        if failed != 0 {
            SPARE.give_back(handed);
        }
        Some(failed)
    }
}

/// What a thread begins with in the program's stead. It leaves no frame: threads may be ended by
/// unwinding their stacks.
#[unsafe(naked)]
extern "C" fn begin(handed: *mut c_void) -> *mut c_void {
    naked_asm!("sub rsp, 8", "call {begun}", "add rsp, 8", "mov rdi, rdx", "jmp rax", begun = sym begun)
}

/// Tells that the calling thread has begun; what it is to go on with.
extern "C" fn begun(handed: NonNull<Handed>) -> Beginning {
    // SAFETY: `create` has filled it for this thread alone, which gives it back.
    let beginning = unsafe {
        let beginning = handed.read().value;
        SPARE.give_back(handed);
        beginning
    };
    // A thread whose control block was here may have ended with its calls dispatched.
    patches::note_dispatch(None);
    runtime().into_iter().for_each(Runtime::thread_begins);
    beginning
}

type PthreadCreate =
    unsafe extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Entry, *mut c_void) -> c_int;
type ThrdCreate = unsafe extern "C" fn(*mut libc::pthread_t, Entry, *mut c_void) -> c_int;

/// `pthread_create(3)`.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    entry: Entry,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: as for `fork`.
    unsafe {
        let Some(real) = PTHREAD_CREATE.get::<PthreadCreate>() else { return libc::ENOSYS };
        if runtime().is_none() {
            return real(thread, attributes, entry, argument);
        }
        let made = create(|begin, handed| real(thread, attributes, begin, handed), entry, argument);
        made.unwrap_or(libc::EAGAIN)
    }
}

/// `thrd_create(3)`, whose threads return an `int`: that is as good as the half of a register.
///
/// # Safety
/// That of the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_create(thread: *mut libc::pthread_t, entry: Entry, argument: *mut c_void) -> c_int {
    /// `thrd_nomem`
    const NO_MEMORY: c_int = 3;
    // SAFETY: as for `fork`.
    unsafe {
        let Some(real) = THRD_CREATE.get::<ThrdCreate>() else { return NO_MEMORY };
        if runtime().is_none() {
            return real(thread, entry, argument);
        }
        create(|begin, handed| real(thread, begin, handed), entry, argument).unwrap_or(NO_MEMORY)
    }
}
