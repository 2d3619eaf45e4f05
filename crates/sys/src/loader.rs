//! The dynamic loader's list of objects and the functions that they define, read without calling
//! the loader.
//!
//! A program may define `dlsym` or `dl_iterate_phdr` itself, so the agent reads the list that the
//! loader keeps for debuggers. While the program starts, the list only grows at its end, and its
//! order is the order of symbol lookup. Objects that are loaded later are at the end of the list;
//! the agent finds every function that it needs before them. There is no lock.

use std::arch::asm;
use std::ffi::{CStr, c_char};
use std::ops::Range;

/// Tag of the last dynamic entry. The next constants are tags, too.
const DT_NULL: i64 = 0;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// The bit of a symbol's version that marks a version other than the default one.
const VERSION_HIDDEN: u16 = 0x8000;
/// Prefix of the file name of musl's loader.
const MUSL: &[u8] = b"ld-musl-";
/// Types of symbols (`STT_NOTYPE`, `STT_FUNC`, `STT_GNU_IFUNC`).
const TYPE_NONE: u8 = 0;
const TYPE_OBJECT: u8 = 1;
const TYPE_FUNCTION: u8 = 2;
const TYPE_INDIRECT_FUNCTION: u8 = 10;

/// `Elf64_Dyn` of `<elf.h>`.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym` of `<elf.h>`.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    bytes: u64,
}

/// The public part of `struct link_map` of `<link.h>`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// `struct r_debug_extended` of `<link.h>`: one namespace.
#[repr(C)]
pub(crate) struct DebugInfo {
    pub(crate) version: i32,
    maps: *const LinkMap,
    /// Address of the function that the loader calls before and after it changes a list.
    pub(crate) notify: usize,
    pub(crate) state: i32,
    loader: usize,
    /// The next namespace. The field exists only from version 2 on.
    pub(crate) next: *const DebugInfo,
}

unsafe extern "C" {
    /// The dynamic section of the object into which this code is linked; the linker defines it.
    static _DYNAMIC: Dynamic;
}

/// An object of the loader's lists.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a>(&'a LinkMap);

/// Returns the loader's information for debuggers about the base namespace.
///
/// glibc's loader calls it `_r_debug`, musl's loader has a pointer to it. Both symbols are weak and
/// have no version. So either loader, of any version, can load this code, which depends on neither
/// C library by name.
pub(crate) fn debug_info() -> *const DebugInfo {
    let (glibc, musl): (*const DebugInfo, *const *const DebugInfo);
    // SAFETY: this reads two entries of the global offset table, which are 0 without such a symbol.
    unsafe {
        asm!(
            ".weak _r_debug",
            ".weak _dl_debug_addr",
            "mov {}, [rip + _r_debug@GOTPCREL]",
            "mov {}, [rip + _dl_debug_addr@GOTPCREL]",
            out(reg) glibc, out(reg) musl, options(nostack, readonly, preserves_flags),
        );
    }
    if musl.is_null() {
        return glibc;
    }
    // SAFETY: it is musl's pointer, which musl never changes.
    unsafe { *musl }
}

/// Returns the objects of a namespace, in the order of symbol lookup. The structure of older
/// loaders is shorter than a [`DebugInfo`], so this takes a pointer instead of a reference.
///
/// # Safety
/// `info` is a structure of the loader. The loader keeps the objects as long as the caller uses
/// them, and adds objects only at the end.
pub(crate) unsafe fn objects_of<'a>(info: *const DebugInfo) -> impl Iterator<Item = Object<'a>> + use<'a> {
    // SAFETY: `info` is a structure of the loader, by the contract, and every version has `maps`.
    let first = unsafe { (*info).maps.as_ref() };
    // SAFETY: the loader keeps the entries, by the contract, and writes `next` when an entry is
    // complete.
    std::iter::successors(first, |map| unsafe { map.next.as_ref() }).map(Object)
}

/// Returns the objects of the base namespace, in the order of symbol lookup.
fn objects() -> impl Iterator<Item = Object<'static>> {
    // SAFETY: the loader fills the list before it runs code of this object, and keeps the entries
    // of objects that are in use.
    unsafe { objects_of(debug_info()) }
}

impl<'a> Object<'a> {
    /// Returns the value of the first dynamic entry with tag `wanted`.
    fn entry(self, wanted: i64) -> Option<usize> {
        let mut at = self.0.dynamic;
        // SAFETY: the loader keeps the dynamic section, which ends with DT_NULL.
        unsafe {
            while !at.is_null() && (*at).tag != DT_NULL {
                if (*at).tag == wanted {
                    return Some((*at).value);
                }
                at = at.add(1);
            }
        }
        None
    }

    /// Returns the table to which a dynamic entry refers. The loader has added the base to such
    /// entries in place, unless the section is read-only.
    fn table<T>(self, wanted: i64) -> Option<*const T> {
        let value = self.entry(wanted)?;
        let address = if value < self.0.base { value + self.0.base } else { value };
        Some(std::ptr::with_exposed_provenance(address))
    }

    /// Returns whether other objects link to this one by `name`.
    pub(crate) fn is_named(self, name: &CStr) -> bool {
        let strings = self.table::<c_char>(DT_STRTAB).zip(self.entry(DT_SONAME));
        // SAFETY: the entry is the offset of a string in the string table.
        strings.is_some_and(|(strings, offset)| unsafe { CStr::from_ptr(strings.add(offset)) } == name)
    }

    /// Returns the name of the object's file, without folders.
    fn file_name(self) -> &'a [u8] {
        // SAFETY: the loader's names end with zero, and it keeps them.
        let path = if self.0.name.is_null() { c"" } else { unsafe { CStr::from_ptr(self.0.name) } };
        path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default()
    }

    /// Returns whether the object is a C library: glibc, or musl. The library of musl is also its
    /// loader, so only the name of its file identifies it.
    fn is_c_library(self) -> bool {
        self.is_named(c"libc.so.6") || self.file_name().starts_with(MUSL)
    }

    /// Returns whether this code is part of the object.
    fn is_own(self) -> bool {
        std::ptr::eq(self.0.dynamic, &raw const _DYNAMIC)
    }

    /// Returns the first symbol called `name` that the object defines and `accepts`. `accepts` also
    /// gets the symbol's index.
    fn symbol(self, name: &CStr, accepts: impl Fn(&Symbol, usize) -> bool) -> Option<&'a Symbol> {
        let symbols = self.table::<Symbol>(DT_SYMTAB)?;
        let strings = self.table::<c_char>(DT_STRTAB)?;
        let is_wanted = |index: usize| {
            // SAFETY: the hash table contains only indices of the symbol table, and names are
            // offsets in the string table.
            unsafe {
                let symbol = &*symbols.add(index);
                symbol.section != 0
                    && accepts(symbol, index)
                    && CStr::from_ptr(strings.add(symbol.name as usize)) == name
            }
        };
        let index = match self.table::<u32>(DT_GNU_HASH) {
            // SAFETY: DT_GNU_HASH refers to a table of this kind.
            Some(table) => unsafe { find_gnu(table, name, is_wanted) },
            // SAFETY: DT_HASH refers to a table of this kind.
            None => unsafe { find_old(self.table::<u32>(DT_HASH)?, name, is_wanted) },
        }?;
        // SAFETY: the index is from the hash table, so the symbol exists; the loader keeps it for
        // 'a.
        Some(unsafe { &*symbols.add(index) })
    }

    /// Returns the addresses of the code of function `name`, if the object defines it.
    pub(crate) fn code(self, name: &CStr) -> Option<Range<usize>> {
        let symbol = self.symbol(name, |symbol, _| symbol.kind() == TYPE_FUNCTION && symbol.bytes > 0)?;
        let start = self.0.base + symbol.value;
        Some(start..start + symbol.bytes as usize)
    }

    /// Returns the addresses of the code within `reach_bytes` of `address` that lies in the same
    /// segment. Returns `None` if no segment of code contains `address`.
    pub(crate) fn code_around(self, address: usize, reach_bytes: usize) -> Option<Range<usize>> {
        let base = self.0.base;
        let header = std::ptr::with_exposed_provenance::<libc::Elf64_Ehdr>(base);
        // SAFETY: a library's first segment begins with the headers of its file; the loader keeps
        // them mapped. The magic number shows that this one's does.
        let headers = unsafe {
            if !(*header).e_ident.starts_with(b"\x7fELF") {
                return None;
            }
            let first = header.byte_add((*header).e_phoff as usize).cast::<libc::Elf64_Phdr>();
            std::slice::from_raw_parts(first, (*header).e_phnum.into())
        };
        let mut segments = headers.iter().filter(|part| part.p_type == libc::PT_LOAD && part.p_flags & libc::PF_X != 0);
        segments.find_map(|part| {
            let start = base + part.p_vaddr as usize;
            let end = start + part.p_filesz as usize;
            let reach = address.saturating_sub(reach_bytes)..address.saturating_add(reach_bytes);
            (start..end).contains(&address).then(|| start.max(reach.start)..end.min(reach.end))
        })
    }

    /// Returns the address of variable `name`, if the object defines it.
    fn variable(self, name: &CStr) -> Option<usize> {
        self.symbol(name, |symbol, _index| symbol.kind() == TYPE_OBJECT).map(|symbol| self.0.base + symbol.value)
    }

    /// Returns the address of the default version of function `name`, if the object defines it.
    fn function(self, name: &CStr) -> Option<usize> {
        let versions = self.table::<u16>(DT_VERSYM);
        let symbol = self.symbol(name, |symbol, index| {
            // SAFETY: the table of versions, if it exists, has an entry for each symbol.
            let is_default = |versions: *const u16| unsafe { *versions.add(index) } & VERSION_HIDDEN == 0;
            matches!(symbol.kind(), TYPE_NONE | TYPE_FUNCTION | TYPE_INDIRECT_FUNCTION)
                && versions.is_none_or(is_default)
        })?;
        let address = self.0.base + symbol.value;
        if symbol.kind() != TYPE_INDIRECT_FUNCTION {
            return Some(address);
        }
        // SAFETY: the value of an indirect symbol is a function without arguments that returns the
        // address.
        let resolver: extern "C" fn() -> usize = unsafe { std::mem::transmute(address) };
        Some(resolver())
    }
}

impl Symbol {
    /// Returns the type of the symbol.
    fn kind(&self) -> u8 {
        self.info & 15
    }
}

/// Looks up `name` in a DT_GNU_HASH table and returns the index of the symbol that `is_wanted`
/// accepts. It ignores the Bloom filter, which only saves time.
///
/// # Safety
/// `table` is a DT_GNU_HASH table.
unsafe fn find_gnu(table: *const u32, name: &CStr, is_wanted: impl Fn(usize) -> bool) -> Option<usize> {
    let hash = name.to_bytes().iter().fold(5381u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()));
    // SAFETY: this follows the layout of the table, in which a bucket's chain ends with an odd
    // word.
    unsafe {
        let [buckets, first, bloom_words] = [0, 1, 2].map(|at| *table.add(at) as usize);
        let bucket_table = table.add(4 + bloom_words * 2);
        let chains = bucket_table.add(buckets);
        let mut index = *bucket_table.add(hash as usize % buckets.max(1)) as usize;
        if buckets == 0 || index < first {
            return None;
        }
        loop {
            let word = *chains.add(index - first);
            if word | 1 == hash | 1 && is_wanted(index) {
                return Some(index);
            }
            if word & 1 != 0 {
                return None;
            }
            index += 1;
        }
    }
}

/// Looks up `name` in a DT_HASH table and returns the index of the symbol that `is_wanted` accepts.
///
/// # Safety
/// `table` is a DT_HASH table.
unsafe fn find_old(table: *const u32, name: &CStr, is_wanted: impl Fn(usize) -> bool) -> Option<usize> {
    let hash = name.to_bytes().iter().fold(0u32, |hash, &byte| {
        let hash = (hash << 4).wrapping_add(byte.into());
        let high = hash & 0xf000_0000;
        (hash ^ (high >> 24)) & !high
    });
    // SAFETY: this follows the layout of the table, in which a chain ends with 0.
    unsafe {
        let buckets = *table as usize;
        if buckets == 0 {
            return None;
        }
        let chains = table.add(2 + buckets);
        let first = *table.add(2 + hash as usize % buckets) as usize;
        let mut chain = std::iter::successors(Some(first), |&index| Some(*chains.add(index) as usize));
        chain.by_ref().take_while(|&index| index != 0).find(|&index| is_wanted(index))
    }
}

/// Returns the first definition of a function in an object after this one, as `dlsym(RTLD_NEXT)`
/// does.
pub fn next_function(name: &CStr) -> Option<usize> {
    objects().skip_while(|object| !object.is_own()).skip(1).find_map(|object| object.function(name))
}

/// Returns the C library's own definition of a function, even if other objects define it, too.
pub fn c_library_function(name: &CStr) -> Option<usize> {
    objects().find(|object| object.is_c_library()).and_then(|object| object.function(name))
}

/// Returns the address of the first definition of a variable.
pub fn variable(name: &CStr) -> Option<usize> {
    objects().find_map(|object| object.variable(name))
}

/// Returns whether the program's C library is musl.
pub fn has_musl() -> bool {
    is_any_named(&[MUSL])
}

/// Returns whether the file name of any object begins with one of `names`.
pub fn is_any_named(names: &[&[u8]]) -> bool {
    objects().any(|object| names.iter().any(|wanted| object.file_name().starts_with(wanted)))
}

/// Returns the path by which the object with this code was loaded.
pub fn own_path() -> Option<&'static CStr> {
    // SAFETY: the loader's names end with zero, and it keeps them as long as this code runs.
    objects().find(|object| object.is_own()).map(|object| unsafe { CStr::from_ptr(object.0.name) })
}

/// Returns whether this code is part of the object that is loaded at `base`.
pub fn holds_own_code(base: usize) -> bool {
    objects().any(|object| object.is_own() && object.0.base == base)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&CStr; 8] =
        [c"fork", c"malloc", c"mmap64", c"pthread_create", c"memcpy", c"__errno_location", c"dlsym", c"posix_memalign"];

    fn by_loader(name: &CStr) -> usize {
        // SAFETY: dlsym(3) only looks up the name.
        unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }.addr()
    }

    #[test]
    fn functions_are_found_as_by_the_loader() {
        for name in NAMES {
            assert_eq!(next_function(name), Some(by_loader(name)), "{name:?}");
            assert_eq!(c_library_function(name), Some(by_loader(name)), "{name:?}");
        }
    }

    #[test]
    fn unknown_functions_are_not_found() {
        assert_eq!(next_function(c"foliomem_no_such_function"), None);
        assert_eq!(c_library_function(c"foliomem_no_such_function"), None);
    }

    #[test]
    fn both_kinds_of_hash_table_find_each_symbol() {
        let libc = objects().find(|object| object.is_named(c"libc.so.6")).unwrap();
        // The vDSO has a DT_HASH table, or both.
        let old = objects().filter(|object| object.entry(DT_HASH).is_some()).count();
        assert!(libc.entry(DT_GNU_HASH).is_some() && old <= objects().count());
        for object in objects().filter(|object| object.entry(DT_GNU_HASH).is_some()) {
            let Some(table) = object.table::<u32>(DT_HASH) else { continue };
            let strings = object.table::<c_char>(DT_STRTAB).unwrap();
            let symbols = object.table::<Symbol>(DT_SYMTAB).unwrap();
            // SAFETY: the second word of the table is the number of symbols.
            let count = unsafe { *table.add(1) } as usize;
            for index in 1..count {
                // SAFETY: the index is below the number of symbols, and names are offsets in the
                // string table.
                unsafe {
                    let name = CStr::from_ptr(strings.add((*symbols.add(index)).name as usize));
                    if (*symbols.add(index)).section != 0 {
                        assert_eq!(find_old(table, name, |found| found == index), Some(index), "{name:?}");
                    }
                }
            }
        }
    }
}
