//! Threads of the program tell that they begin, before anything else, where that matters (`foliomem_linux::control_block`).
//!
//! What a thread is to begin with it gets in a *cell* of the program's heap. Cells are used again: a thread that has never
//! allocated does not begin to, which would cost it an arena of its own. Who takes one takes the whole list for a moment, so
//! nobody else changes what it reads; what a fork catches there is lost to the child.

use crate::start::runtime;
use foliomem_linux::adopt::is_known_for_stack;
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
    known_for_stack: bool,
    next: *mut Handed,
}

unsafe extern "C" {
    /// What threads are made with where nothing is said (glibc).
    fn pthread_getattr_default_np(attributes: *mut libc::pthread_attr_t) -> c_int;
}

/// Cells that nobody uses.
static SPARE: AtomicPtr<Handed> = AtomicPtr::new(null_mut());

/// A cell; null where there is no memory.
fn take() -> *mut Handed {
    let first = SPARE.swap(null_mut(), Ordering::Acquire);
    if first.is_null() {
        // SAFETY: an allocation of the program's.
        return unsafe { libc::malloc(size_of::<Handed>()).cast() };
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

/// Has `real` make a thread that tells that it begins, then goes to `entry`. What pthread_create(3) returns.
///
/// # Safety
/// `attributes` are valid or null; `real` makes a thread with them.
pub unsafe fn create(
    real: impl FnOnce(Entry, *mut c_void) -> c_int,
    attributes: *const libc::pthread_attr_t,
    entry: Entry,
    argument: *mut c_void,
) -> c_int {
    let handed = take();
    if handed.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: the cell is ours until there is a thread, and if there is none.
    unsafe {
        let known_for_stack = has_known_stack(attributes);
        handed.write(Handed { beginning: Beginning { entry, argument }, known_for_stack, next: null_mut() });
        let failed = real(begin, handed.cast());
        if failed != 0 {
            give_back(handed);
        }
        failed
    }
}

/// Whether a thread with these attributes has a stack of the C library's that is known for one when it is found.
///
/// # Safety
/// They are valid, or null.
unsafe fn has_known_stack(attributes: *const libc::pthread_attr_t) -> bool {
    let (mut stack, mut bytes, mut guard_bytes) = (std::ptr::null_mut(), 0, 0);
    // SAFETY: attributes that nobody has set are read like others; all of it is written to our variables.
    unsafe {
        let mut defaults: libc::pthread_attr_t = std::mem::zeroed();
        if attributes.is_null() && pthread_getattr_default_np(&raw mut defaults) != 0 {
            return false;
        }
        let read = if attributes.is_null() { &raw const defaults } else { attributes };
        let failed = libc::pthread_attr_getstack(read, &raw mut stack, &raw mut bytes) != 0
            || libc::pthread_attr_getguardsize(read, &raw mut guard_bytes) != 0;
        // Where there is none, the C library says that it ends at 0.
        let is_given = stack.addr().wrapping_add(bytes) != 0;
        let is_known = !failed
            && !is_given
            && libc::pthread_attr_getstacksize(read, &raw mut bytes) == 0
            && is_known_for_stack(bytes, guard_bytes);
        if attributes.is_null() {
            libc::pthread_attr_destroy(&raw mut defaults);
        }
        is_known
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
    let (beginning, known_for_stack) = unsafe {
        let Handed { beginning, known_for_stack, .. } = handed.read();
        give_back(handed);
        (beginning, known_for_stack)
    };
    runtime().into_iter().for_each(|runtime| runtime.thread_begins(known_for_stack));
    beginning
}
