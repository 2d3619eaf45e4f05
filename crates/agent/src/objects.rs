//! The order in which a program is told of its loaded objects.
//!
//! The runtime of AddressSanitizer ends a program if the first library that `dl_iterate_phdr` reports is not the runtime itself:
//! its functions must come before the C library's. The agent comes first, but each of its hooks goes on to the next
//! definition, which is the runtime's. So where a runtime is loaded as a library, the agent is reported last. The list
//! stays complete: LeakSanitizer looks for pointers in all of it, and unwinding needs it.

use foliomem_sys::loader::{holds_own_code, is_any_named};
use libc::{c_int, c_void, dl_phdr_info, size_t};

/// What `dl_iterate_phdr` calls.
pub type ObjectCallback = unsafe extern "C" fn(*mut dl_phdr_info, size_t, *mut c_void) -> c_int;

/// What the names of the runtimes that insist on their place begin with: gcc's and clang's.
const RUNTIMES: [&[u8]; 2] = [b"libasan.so", b"libclang_rt.asan"];

/// The caller's callback, and the agent's own object once it has been passed over.
struct Reordered {
    callback: ObjectCallback,
    argument: *mut c_void,
    own: Option<(dl_phdr_info, size_t)>,
}

/// Has `real` report the objects to `callback`.
///
/// # Safety
/// `real` is the C library's `dl_iterate_phdr`, or another that behaves like it; `callback` may be called with `argument`.
pub unsafe fn iterate(
    real: impl Fn(ObjectCallback, *mut c_void) -> c_int,
    callback: ObjectCallback,
    argument: *mut c_void,
) -> c_int {
    if !is_any_named(&RUNTIMES) {
        return real(callback, argument);
    }
    let mut reordered = Reordered { callback, argument, own: None };
    let result = real(pass_own_over, (&raw mut reordered).cast());
    match reordered.own {
        // SAFETY: by the contract; the loader keeps what the copied object refers to.
        Some((mut own, bytes)) if result == 0 => unsafe { callback(&raw mut own, bytes, argument) },
        _ => result,
    }
}

/// Passes one object on, but keeps the agent's for later.
///
/// # Safety
/// `reordered` is what `iterate` passes.
unsafe extern "C" fn pass_own_over(object: *mut dl_phdr_info, bytes: size_t, reordered: *mut c_void) -> c_int {
    // SAFETY: by the contract; the loader passes a whole object of at least the size that callers know.
    unsafe {
        let reordered = &mut *reordered.cast::<Reordered>();
        if holds_own_code((*object).dlpi_addr as usize) {
            reordered.own = Some((object.read(), bytes));
            return 0;
        }
        (reordered.callback)(object, bytes, reordered.argument)
    }
}
