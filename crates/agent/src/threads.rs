//! Threads of the program tell that they begin, before anything else
//! (`foliomem_sys::thread_control_block`).
//!
//! What a thread is to begin with it gets in a *cell* of the program's heap. Cells are used again:
//! a thread that has never allocated does not begin to, which would cost it an arena of its own.

use crate::start::runtime;
use foliomem_linux::runtime::Runtime;
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
    SPARE.take().or_else(|| NonNull::new(unsafe { crate::hooks::malloc(size_of::<Handed>()).cast() }))
}

/// Has `real` make a thread that tells that it begins, then goes to `entry`. What that returns: not
/// 0 where there is no thread. `None` where there is no memory for it.
pub fn create(real: impl FnOnce(Entry, *mut c_void) -> c_int, entry: Entry, argument: *mut c_void) -> Option<c_int> {
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
    patches::dispatches(None);
    runtime().into_iter().for_each(Runtime::thread_begins);
    beginning
}
