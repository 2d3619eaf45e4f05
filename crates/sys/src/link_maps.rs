//! The objects that the dynamic loader has loaded, in all its namespaces.
//!
//! The loader keeps lists of them for debuggers (`r_debug` of `<link.h>`, see [`crate::loader`]).
//! Since glibc 2.35 they contain the namespaces other than the first.

use crate::loader::{self, Object};

/// `DebugInfo::state` while a list is complete.
const RT_CONSISTENT: i32 = 0;

/// Returns the address of the function that the loader calls before and after it changes a list.
pub fn notify_function() -> Option<usize> {
    // SAFETY: the structure belongs to the loader and exists as long as the process.
    Some(unsafe { (*loader::debug_info()).notify }).filter(|&address| address != 0)
}

/// Visits all objects of all complete lists. Returns whether all lists are complete. The caller
/// holds the loader's lock, or the process has one thread.
pub fn visit(mut each: impl FnMut(Object<'_>)) -> bool {
    let mut are_complete = true;
    let mut info = loader::debug_info();
    while !info.is_null() {
        // SAFETY: the pointers belong to the loader, and the caller ensures that no other thread
        // changes its lists.
        unsafe {
            let is_complete = (*info).state == RT_CONSISTENT;
            are_complete &= is_complete;
            if is_complete {
                loader::objects_of(info).for_each(&mut each);
            }
            info = if (*info).version >= 2 { (*info).next } else { std::ptr::null() };
        }
    }
    are_complete
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_where_the_loader_finds_them() {
        assert!(notify_function().is_some());
        let (mut libraries, mut found) = (0, Vec::new());
        visit(|object| {
            if object.is_named(c"libc.so.6") {
                libraries += 1;
                found = [c"fork", c"syscall", c"clone", c"no_such_function"].map(|name| object.code(name)).to_vec();
            }
        });
        assert_eq!(libraries, 1);
        for (name, found) in [c"fork", c"syscall", c"clone"].into_iter().zip(&found) {
            // SAFETY: `name` is a C string, and dlsym(3) only looks it up.
            let known = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert_eq!(found.as_ref().map(|code| code.start), Some(known.addr()), "{name:?}");
        }
        assert_eq!(found[3], None);
    }
}
