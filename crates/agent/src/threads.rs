//! Threads of the program tell that they begin, before anything else (`foliomem_linux::thread_control_block`).
//!
//! What a thread is to begin with it gets in a *cell* of the program's heap. Cells are used again: a thread that has never
//! allocated does not begin to, which would cost it an arena of its own. Who takes one takes the whole list for a moment, so
//! nobody else changes what it reads; what a fork catches there is lost to the child.

use crate::start::runtime;
use foliomem_linux::fork::sites;
use foliomem_linux::runtime::Runtime;
use libc::{c_int, c_void};
use std::arch::naked_asm;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where the program has a thread begin.
pub type Entry = extern "C" fn(*mut c_void) -> *mut c_void;

/// Where a thread begins, and with what.
#[repr(C)]
struct Beginning {
    entry: Entry,
    argument: *mut c_void,
}

/// The same, on its way to the thread.
struct Handed {
    beginning: Beginning,
    next: *mut Handed,
}

/// Cells that nobody uses.
static SPARE: AtomicPtr<Handed> = AtomicPtr::new(null_mut());

/// A cell; null where there is no memory.
fn take() -> *mut Handed {
    let first = SPARE.swap(null_mut(), Ordering::Acquire);
    if first.is_null() {
        // SAFETY: an allocation of the program's.
        return unsafe { crate::hooks::malloc(size_of::<Handed>()).cast() };
    }
    // SAFETY: what was in the list is ours.
    let mut rest = unsafe { (*first).next };
    if SPARE.compare_exchange(null_mut(), rest, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        while !rest.is_null() {
            // SAFETY: as above.
            unsafe {
                let next = (*rest).next;
                give_back(rest);
                rest = next;
            }
        }
    }
    first
}

/// # Safety
/// The cell is of [`take`], and the caller's.
unsafe fn give_back(cell: *mut Handed) {
    let mut first = SPARE.load(Ordering::Relaxed);
    loop {
        // SAFETY: by the contract.
        unsafe { (*cell).next = first };
        match SPARE.compare_exchange_weak(first, cell, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => first = now,
        }
    }
}

/// Has `real` make a thread that tells that it begins, then goes to `entry`. What that returns: not 0 where there is no thread. `None` where there is no
/// memory for it.
pub fn create(real: impl FnOnce(Entry, *mut c_void) -> c_int, entry: Entry, argument: *mut c_void) -> Option<c_int> {
    let handed = take();
    if handed.is_null() {
        return None;
    }
    // SAFETY: the cell is ours until there is a thread, and if there is none.
    unsafe {
        handed.write(Handed { beginning: Beginning { entry, argument }, next: null_mut() });
        let failed = real(begin, handed.cast());
        if failed != 0 {
            give_back(handed);
        }
        Some(failed)
    }
}

/// What a thread begins with in the program's stead. It leaves no frame: threads may be ended by unwinding their stacks.
#[unsafe(naked)]
extern "C" fn begin(handed: *mut c_void) -> *mut c_void {
    naked_asm!("sub rsp, 8", "call {begun}", "add rsp, 8", "mov rdi, rdx", "jmp rax", begun = sym begun)
}

/// Tells that the calling thread has begun; what it is to go on with.
extern "C" fn begun(handed: *mut Handed) -> Beginning {
    // SAFETY: `create` has filled it for this thread alone, which gives it back.
    let beginning = unsafe {
        let beginning = handed.read().beginning;
        give_back(handed);
        beginning
    };
    // A thread whose control block was here may have ended with its calls dispatched.
    sites::dispatches(None);
    runtime().into_iter().for_each(Runtime::thread_begins);
    beginning
}
