//! The objects that the dynamic loader has loaded, in all its namespaces, and the functions in
//! them.
//!
//! Read from the loader's own list (`r_debug` of `<link.h>`), which it offers to debuggers.
//! Namespaces other than the first are in it since glibc 2.35.

use crate::loader;
use std::ffi::{CStr, c_char};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};

/// `struct r_debug_extended`.
#[repr(C)]
struct DebugInfo {
    version: i32,
    maps: *const LinkMap,
    notify: usize,
    state: i32,
    loader: usize,
    /// Of the next namespace; only there from version 2 on.
    next: *const DebugInfo,
}

/// `DebugInfo::state` while a list is complete.
const RT_CONSISTENT: i32 = 0;

/// `struct link_map`.
#[repr(C)]
struct LinkMap {
    bias: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// `Elf64_Dyn`.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// `Elf64_Sym`.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    bytes: usize,
}

static DEBUG_INFO: AtomicPtr<DebugInfo> = AtomicPtr::new(std::ptr::null_mut());

/// A loaded object.
#[derive(Default)]
pub struct Object {
    bias: usize,
    strings: usize,
    symbols: usize,
    hash: usize,
    soname: Option<usize>,
}

/// Finds the loader's list. Called once, before anything else here.
pub fn find() {
    // Release pairs with the Acquire of each look: the list is found.
    DEBUG_INFO.store(loader::debug_info().cast_mut().cast(), Ordering::Release);
}

/// The address of the function that the loader calls before and after it changes its list.
pub fn notify_function() -> Option<usize> {
    // Acquire pairs with the Release of the search.
    let info = DEBUG_INFO.load(Ordering::Acquire);
    // SAFETY: the loader's, which stays.
    (!info.is_null()).then(|| unsafe { (*info).notify }).filter(|&address| address != 0)
}

/// Visits all objects of all lists that are complete. Returns whether all are. The caller has the
/// loader's lock, or there is one thread.
pub fn visit(mut each: impl FnMut(&Object)) -> bool {
    let mut are_complete = true;
    // Acquire pairs with the Release of the search.
    let mut info = DEBUG_INFO.load(Ordering::Acquire).cast_const();
    while !info.is_null() {
        // SAFETY: the loader's lists, which nobody changes meanwhile.
        unsafe {
            let is_complete = (*info).state == RT_CONSISTENT;
            are_complete &= is_complete;
            let mut map = if is_complete { (*info).maps } else { std::ptr::null() };
            while !map.is_null() {
                each(&Object::of(&*map));
                map = (*map).next;
            }
            info = if (*info).version >= 2 { (*info).next } else { std::ptr::null() };
        }
    }
    are_complete
}

impl Object {
    /// # Safety
    /// `map` is the loader's, of an object that is mapped.
    unsafe fn of(map: &LinkMap) -> Object {
        let mut object = Object { bias: map.bias, ..Object::default() };
        let mut entry = map.dynamic;
        // The loader relocates addresses in this table, where it can be written.
        let address = |value: usize| if value < map.bias { value + map.bias } else { value };
        while !entry.is_null() {
            // SAFETY: the table ends with DT_NULL.
            let Dynamic { tag, value } = unsafe { entry.read() };
            match tag {
                DT_NULL => break,
                DT_STRTAB => object.strings = address(value),
                DT_SYMTAB => object.symbols = address(value),
                DT_GNU_HASH => object.hash = address(value),
                DT_SONAME => object.soname = Some(value),
                _ => {}
            }
            entry = entry.wrapping_add(1);
        }
        object
    }

    /// The name that others link to it by.
    pub fn soname(&self) -> Option<&CStr> {
        let offset = self.soname.filter(|_| self.strings != 0)?;
        // SAFETY: a string of the object's table, which ends in zero.
        Some(unsafe { CStr::from_ptr(std::ptr::with_exposed_provenance(self.strings + offset)) })
    }

    /// Where the code of the function `name` lies, if the object exports it.
    pub fn function(&self, name: &CStr) -> Option<Range<usize>> {
        if self.hash == 0 || self.symbols == 0 || self.strings == 0 {
            return None;
        }
        let wanted =
            name.to_bytes().iter().fold(5381u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()));
        // SAFETY: the object's tables have the layout of `DT_GNU_HASH`: four counts, the filter,
        // the buckets, and the chains, each of which ends with a hash whose lowest bit is set.
        unsafe {
            let header = std::ptr::with_exposed_provenance::<u32>(self.hash);
            let [buckets, first, filter_words] = [0, 1, 2].map(|index| header.add(index).read() as usize);
            if buckets == 0 {
                return None;
            }
            let bucket = header.add(4 + 2 * filter_words);
            let chain = bucket.add(buckets);
            let mut index = bucket.add(wanted as usize % buckets).read() as usize;
            while index >= first {
                let hash = chain.add(index - first).read();
                if hash | 1 == wanted | 1
                    && let Some(code) = self.code(index, name)
                {
                    return Some(code);
                }
                if hash & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
        None
    }

    /// Where the code of the symbol at `index` lies, if it is a function called `name`.
    ///
    /// # Safety
    /// There is a symbol at `index`.
    unsafe fn code(&self, index: usize, name: &CStr) -> Option<Range<usize>> {
        const STT_FUNC: u8 = 2;
        // SAFETY: by the contract; names are offsets of strings that end in zero.
        unsafe {
            let symbol = &*std::ptr::with_exposed_provenance::<Symbol>(self.symbols).add(index);
            let text = CStr::from_ptr(std::ptr::with_exposed_provenance(self.strings + symbol.name as usize));
            let is_defined = symbol.section != 0 && symbol.info & 0xf == STT_FUNC && symbol.bytes > 0;
            let start = self.bias + symbol.value;
            (is_defined && text == name).then(|| start..start + symbol.bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_where_the_loader_finds_them() {
        find();
        assert!(notify_function().is_some());
        let (mut libraries, mut found) = (0, Vec::new());
        visit(|object| {
            if object.soname() == Some(c"libc.so.6") {
                libraries += 1;
                found = [c"fork", c"syscall", c"clone", c"no_such_function"].map(|name| object.function(name)).to_vec();
            }
        });
        assert_eq!(libraries, 1);
        for (name, found) in [c"fork", c"syscall", c"clone"].into_iter().zip(&found) {
            // SAFETY: a lookup by name.
            let known = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert_eq!(found.as_ref().map(|code| code.start), Some(known.addr()), "{name:?}");
        }
        assert_eq!(found[3], None);
    }
}
