//! The order in which `dl_iterate_phdr` reports a program's loaded objects.
//!
//! The runtime of AddressSanitizer ends a program if the first reported library is not the runtime:
//! its functions must come before the C library's. The agent is loaded first, but each of its hooks
//! calls the next definition, which is the runtime's. So if such a runtime is loaded as a library,
//! the agent is reported last. The list stays complete: LeakSanitizer searches all objects for
//! pointers, and unwinding needs them. There is no lock.

use foliomem_sys::loader::{holds_own_code, is_any_named};
use libc::{c_int, c_void, dl_phdr_info, size_t};

/// The callback of `dl_iterate_phdr`.
pub type ObjectCallback = unsafe extern "C" fn(*mut dl_phdr_info, size_t, *mut c_void) -> c_int;

/// Beginnings of the names of the runtimes that must come first: gcc's and clang's.
const RUNTIMES: [&[u8]; 2] = [b"libasan.so", b"libclang_rt.asan"];

/// The caller's callback, and the agent's own object once it has been skipped.
struct Reordered {
    callback: ObjectCallback,
    argument: *mut c_void,
    own: Option<(dl_phdr_info, size_t)>,
}

/// Lets `real` report the objects to `callback`, the agent's own object last. Returns what the last
/// call of `callback` returned.
///
/// # Safety
/// `real` behaves like the C library's `dl_iterate_phdr`; `callback` may be called with `argument`.
pub unsafe fn iterate(
    real: impl Fn(ObjectCallback, *mut c_void) -> c_int,
    callback: ObjectCallback,
    argument: *mut c_void,
) -> c_int {
    if !is_any_named(&RUNTIMES) {
        return real(callback, argument);
    }
    let mut reordered = Reordered { callback, argument, own: None };
    let result = real(skip_own, (&raw mut reordered).cast());
    match reordered.own {
        // SAFETY: the caller's contract; the loader keeps the strings and headers that the copied
        // object refers to.
        Some((mut own, bytes)) if result == 0 => unsafe { callback(&raw mut own, bytes, argument) },
        _ => result,
    }
}

/// Passes one object to the caller's callback, but keeps the agent's for later.
///
/// # Safety
/// `reordered` points to the value that `iterate` passes.
unsafe extern "C" fn skip_own(object: *mut dl_phdr_info, bytes: size_t, reordered: *mut c_void) -> c_int {
    // SAFETY: the caller's contract; the loader passes an object of at least the size that callers
    // know.
    unsafe {
        let reordered = &mut *reordered.cast::<Reordered>();
        if holds_own_code((*object).dlpi_addr as usize) {
            reordered.own = Some((object.read(), bytes));
            return 0;
        }
        (reordered.callback)(object, bytes, reordered.argument)
    }
}
