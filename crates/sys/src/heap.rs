//! The agent's heap: regions of address space that the agent reserves, apart from the program's
//! memory.
//!
//! No allocation of the agent comes from the program's malloc, so the agent's memory is never
//! managed.
//!
//! A program may limit its address space (`RLIMIT_AS`) and its writable memory (`RLIMIT_DATA`). So
//! each region is as large as all regions before it together, and becomes writable step by step.
//! The unused rest of a region is readable. Neither a heap nor a reservation of the program is
//! read-only, so a scan of the mappings never mistakes a new region for one of them.
//!
//! dlmalloc serves small blocks, from segments that are cut off the regions. Blocks of
//! [`LARGE_BYTES`] and more are cut off the regions directly. They are zero pages of the kernel, so
//! a zeroed table costs nothing until it is used. A freed large block gives its pages back, but not
//! its address space. The engine's tables grow by doubling, so the loss is bounded by the memory in
//! use.
//!
//! Lock order: the heap's lock is below all others. The forking thread finds it free: the agent's
//! threads allocate and free only inside the gate, and the program's threads use this heap only
//! while the agent starts.

use crate::memory_advice;
use dlmalloc::Dlmalloc;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};
use std::alloc::{GlobalAlloc, Layout};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Minimum size of a large block, in bytes. Large blocks bypass dlmalloc.
const LARGE_BYTES: usize = 128 << 10;
/// Size of the first region, in bytes. With it, the last of [`REGIONS`] regions has 64 GiB.
const FIRST_BYTES: usize = 128 << 20;
/// Maximum number of regions.
pub const REGIONS: usize = 11;
/// Minimum number of bytes that become writable at once.
const STEP_BYTES: usize = 4 << 20;
/// Size of a page, in bytes.
const PAGE: usize = foliomem_types::units::PAGE_BYTES;

/// Start of each region, 0 if it does not exist. Regions are added in order.
static STARTS: [AtomicUsize; REGIONS] = [const { AtomicUsize::new(0) }; REGIONS];
/// End of each region.
static ENDS: [AtomicUsize; REGIONS] = [const { AtomicUsize::new(0) }; REGIONS];
/// Number of regions. Read and written under the heap's lock, like `NEXT` and `OPEN`.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Address of the next block, in the last region.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// End of the writable part of the last region.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// Returns the regions. A region that does not exist is an empty range.
pub fn ranges() -> [Range<usize>; REGIONS] {
    // Acquire pairs with the Release in `reserve`, which stores the end first: a new region is seen
    // whole or not at all.
    std::array::from_fn(|index| STARTS[index].load(Ordering::Acquire)..ENDS[index].load(Ordering::Acquire))
        .map(|range| if range.start == 0 { 0..0 } else { range })
}

/// Returns the end of the last region, 0 if there is none. The caller holds the heap's lock.
fn last_end() -> usize {
    COUNT.load(Ordering::Relaxed).checked_sub(1).map_or(0, |last| ENDS[last].load(Ordering::Relaxed))
}

/// Adds a region of at least `least_bytes` and returns whether it could. The caller holds the
/// heap's lock.
fn reserve(least_bytes: usize) -> bool {
    let index = COUNT.load(Ordering::Relaxed);
    if index == REGIONS {
        return false;
    }
    let wanted = (FIRST_BYTES << index.saturating_sub(1)).max(least_bytes.next_multiple_of(PAGE));
    // A limit of the program may leave room for a smaller region only.
    let sizes = std::iter::successors(Some(wanted), |&bytes| Some((bytes / 2).next_multiple_of(PAGE)));
    for bytes in sizes.take_while(|&bytes| bytes >= least_bytes && bytes > PAGE) {
        // SAFETY: the kernel chooses the address of the new private mapping, so nothing else is
        // affected.
        let mapped = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::NORESERVE)
        };
        let Ok(start) = mapped else { continue };
        let start = start.addr();
        memory_advice::leave_out_of_dumps(&(start..start + bytes));
        // Release pairs with the Acquire in `ranges`: a thread that sees the start sees the end.
        ENDS[index].store(start + bytes, Ordering::Release);
        STARTS[index].store(start, Ordering::Release);
        COUNT.store(index + 1, Ordering::Relaxed);
        [&NEXT, &OPEN].into_iter().for_each(|at| at.store(start, Ordering::Relaxed));
        return true;
    }
    false
}

/// Makes the last region writable up to `end` and returns whether it could. The caller holds the
/// heap's lock.
fn open(end: usize) -> bool {
    let from = OPEN.load(Ordering::Relaxed);
    let start = std::ptr::with_exposed_provenance_mut(from);
    let wanted = end.max(from + STEP_BYTES).min(last_end());
    let opened = [wanted, end].into_iter().find(|to| {
        // SAFETY: the range lies in the last region, and no block lies there yet.
        unsafe { mprotect(start, to - from, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok()
    });
    opened.iter().for_each(|&to| OPEN.store(to, Ordering::Relaxed));
    opened.is_some()
}

/// Cuts `bytes` off the last region, aligned to `align`. Returns null if there is no room. The
/// caller holds the heap's lock.
fn cut(bytes: usize, align: usize) -> *mut u8 {
    let align = align.max(PAGE);
    let Some(bytes) = bytes.checked_next_multiple_of(PAGE) else { return std::ptr::null_mut() };
    let start = loop {
        let next = NEXT.load(Ordering::Relaxed).next_multiple_of(align);
        match next.checked_add(bytes) {
            Some(end) if end <= last_end() => break next,
            _ if !bytes.checked_add(align).is_some_and(reserve) => return std::ptr::null_mut(),
            _ => {}
        }
    };
    if start + bytes > OPEN.load(Ordering::Relaxed) && !open(start + bytes) {
        return std::ptr::null_mut();
    }
    NEXT.store(start + bytes, Ordering::Relaxed);
    std::ptr::with_exposed_provenance_mut(start)
}

/// dlmalloc's source of segments: the regions.
struct Segments;

// SAFETY: segments are disjoint parts of the regions, readable, writable and zero. They are never
// released: the functions that would do so refuse.
unsafe impl dlmalloc::Allocator for Segments {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let start = cut(size, PAGE);
        if start.is_null() { (start, 0, 0) } else { (start, size.next_multiple_of(PAGE), 0) }
    }

    fn remap(&self, _ptr: *mut u8, _oldsize: usize, _newsize: usize, _can_move: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, _ptr: *mut u8, _oldsize: usize, _newsize: usize) -> bool {
        false
    }

    fn free(&self, _ptr: *mut u8, _size: usize) -> bool {
        false
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE
    }
}

/// The agent's global allocator.
pub struct AgentHeap(Mutex<Dlmalloc<Segments>>);

impl Default for AgentHeap {
    fn default() -> AgentHeap {
        AgentHeap::new()
    }
}

impl AgentHeap {
    /// Makes an empty heap.
    pub const fn new() -> AgentHeap {
        AgentHeap(Mutex::new(Dlmalloc::new_with_allocator(Segments)))
    }

    /// Calls `act` with the heap locked.
    fn with<R>(&self, act: impl FnOnce(&mut Dlmalloc<Segments>) -> R) -> R {
        // A panic aborts, so the lock cannot be poisoned; take it either way.
        act(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

// SAFETY: small blocks obey dlmalloc's contract. Large ones are exclusive parts of the regions,
// aligned as requested. A block's size alone decides between the two, at allocation and at release.
unsafe impl GlobalAlloc for AgentHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE_BYTES {
            return self.with(|_| cut(layout.size(), layout.align()));
        }
        // SAFETY: the size is not zero, by the contract of GlobalAlloc.
        self.with(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE_BYTES {
            return self.with(|_| cut(layout.size(), layout.align()));
        }
        // SAFETY: the size is not zero, by the contract of GlobalAlloc.
        self.with(|heap| unsafe { heap.calloc(layout.size(), layout.align()) })
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() >= LARGE_BYTES {
            // SAFETY: the pages belong to the block alone, which its owner frees. If the call
            // fails, the pages stay populated.
            let _ = unsafe { madvise(block.cast(), layout.size().next_multiple_of(PAGE), Advice::LinuxDontNeed) };
            return;
        }
        // SAFETY: `alloc` or `alloc_zeroed` allocated the block here with this layout, by the
        // contract.
        self.with(|heap| unsafe { heap.free(block, layout.size(), layout.align()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_lie_in_successive_regions() {
        const BYTES: usize = 3 << 20;
        let heap = AgentHeap::new();
        let is_own = |start: usize, end: usize| {
            ranges().iter().filter(|region| region.contains(&start) && end <= region.end).count() == 1
        };
        let mut last = 0;
        // The blocks need more room than the first two regions have.
        for block in 0..2 * FIRST_BYTES / BYTES + 20 {
            let layout = Layout::from_size_align(BYTES + block, 4096 << (block % 10)).unwrap();
            // SAFETY: the layout has a size; only the first and the last byte of the block are
            // used.
            let start = unsafe {
                let start = heap.alloc_zeroed(layout);
                assert!(!start.is_null());
                assert_eq!((*start, *start.add(layout.size() - 1)), (0, 0));
                start.write(1);
                start.add(layout.size() - 1).write(1);
                start.addr()
            };
            assert!(start.is_multiple_of(layout.align()));
            assert!(is_own(start, start + layout.size()), "block {block}");
            assert!(block == 0 || start != last);
            last = start;
        }
        assert!(ranges().iter().filter(|region| !region.is_empty()).count() >= 3);
    }
}
