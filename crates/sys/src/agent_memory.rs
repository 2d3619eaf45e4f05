//! The agent's own memory, which is never managed: its heap, image, arena and stacks.
//!
//! The list of ranges only grows. The heap reserves its ranges when it needs them, so the list asks
//! it for them through a function. The static data of all libraries that are loaded at the start
//! counts as agent memory, because the agent's functions may use it. The agent uses no library that
//! is loaded later, and a mapping of the program may lie right above such a library.
//!
//! Lock order: the lock of the list is a leaf.

use crate::heap;
use foliomem_sync::Mutex;
use foliomem_types::units::PAGE_BYTES;
use libc::{c_int, c_void, dl_phdr_info, size_t};
use std::ops::Range;

/// The ranges that [`crate::heap::ranges`] reports.
pub type HeapRanges = [Range<usize>; heap::REGIONS];

/// The ranges of the agent's memory.
pub struct AgentMemory {
    heap: fn() -> HeapRanges,
    ranges: Mutex<Vec<Range<usize>>>,
}

impl AgentMemory {
    /// Makes a list that contains only the ranges that `heap` reports.
    pub fn new(heap: fn() -> HeapRanges) -> AgentMemory {
        AgentMemory { heap, ranges: Mutex::new(Vec::new()) }
    }

    /// Adds a range to the agent's memory.
    pub fn add(&self, range: Range<usize>) {
        self.ranges.lock().push(range);
    }

    /// Adds the static data of all libraries that are loaded now.
    pub fn add_libraries(&self) {
        // SAFETY: `add_library` has the type of the callback, and gets the pointer to `self` back
        // while `self` is borrowed here.
        unsafe { libc::dl_iterate_phdr(Some(add_library), std::ptr::from_ref(self).cast_mut().cast()) };
    }

    /// Returns the parts of `range` that are not agent memory.
    pub fn outside(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut rest = vec![range];
        let ranges = self.ranges.lock();
        for own in ranges.iter().cloned().chain((self.heap)()) {
            if rest.iter().all(|part| own.end <= part.start || part.end <= own.start) {
                continue;
            }
            rest = rest.into_iter().flat_map(|part| cut(part, &own)).collect();
        }
        rest
    }
}

/// Adds the writable segments of one object. It skips the first object, the program itself, whose
/// name is empty.
unsafe extern "C" fn add_library(object: *mut dl_phdr_info, _bytes: size_t, own: *mut c_void) -> c_int {
    // SAFETY: the loader passes an object of its list, which it keeps unchanged during the
    // callback; `add_libraries` passes a pointer to an `AgentMemory`.
    let (own, object) = unsafe { (&*own.cast::<AgentMemory>(), &*object) };
    // SAFETY: the loader's names end in zero, and it gives the address and the number of its
    // headers.
    let (name, headers) =
        unsafe { (*object.dlpi_name, std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into())) };
    for header in headers.iter().filter(|_| name != 0) {
        if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W != 0 {
            let start = object.dlpi_addr as usize + header.p_vaddr as usize;
            let end = start + header.p_memsz as usize;
            own.add(start & !(PAGE_BYTES - 1)..end.next_multiple_of(PAGE_BYTES));
        }
    }
    0
}

/// Returns the parts of `part` outside of `own`.
fn cut(part: Range<usize>, own: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (before, after) = if own.start >= own.end || own.end <= part.start || part.end <= own.start {
        (part.clone(), part.end..part.end)
    } else {
        (part.start..own.start.max(part.start), own.end.min(part.end)..part.end)
    };
    [before, after].into_iter().filter(|rest| rest.start < rest.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn heap(first: Range<usize>) -> HeapRanges {
        std::array::from_fn(|index| if index == 0 { first.clone() } else { 0..0 })
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "lists of ranges are what is compared")]
    fn agent_memory_is_cut_out() {
        let own = AgentMemory::new(|| heap(100..200));
        own.add(300..400);
        assert_eq!(own.outside(0..50), [0..50]);
        assert_eq!(own.outside(0..500), [0..100, 200..300, 400..500]);
        assert_eq!(own.outside(150..350), [200..300]);
        assert_eq!(own.outside(300..400), []);
        assert_eq!(own.outside(390..410), [400..410]);
    }

    #[test]
    fn static_data_of_libraries_is_agent_memory() {
        unsafe extern "C" {
            static environ: *const c_void;
        }
        static OURS: AtomicU32 = AtomicU32::new(0);
        let own = AgentMemory::new(|| heap(0..0));
        own.add_libraries();
        let is_own = |address: usize| own.outside(address..address + 1).is_empty();
        assert!(is_own((&raw const environ).addr()));
        assert!(!is_own((&raw const OURS).addr()), "static data of the program");
    }
}
