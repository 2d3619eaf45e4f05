//! The agent's heap: regions that the agent has reserved, apart from the program's memory.
//!
//! No allocation of the agent comes from the program's malloc, so the agent's memory is never
//! managed.
//!
//! A program may limit its address space (`RLIMIT_AS`) and its writable memory (`RLIMIT_DATA`). So
//! each region is as large as all regions before it, and becomes writable step by step. The rest of
//! a region is readable: neither a heap of the program nor a reserve is readable only, so a scan of
//! the mappings takes a new region for neither of them.
//!
//! Small blocks are dlmalloc's, in segments cut from the regions. Blocks of [`LARGE_BYTES`] and
//! more are cut from the regions directly. They are zero pages of the kernel, so a zeroed table
//! costs nothing until it is used. A freed large block gives its pages back, but its address space
//! is not used again: the engine's tables grow by doubling, so the loss is bounded by the memory in
//! use.
//!
//! Lock: one leaf. The forking thread finds it free: the agent's threads allocate and free only
//! inside the gate, and the program's threads allocate here only while the agent starts.

use dlmalloc::Dlmalloc;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};
use std::alloc::{GlobalAlloc, Layout};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Blocks from this size on bypass dlmalloc.
const LARGE_BYTES: usize = 128 << 10;
/// What is reserved first. The last of all regions has 64 GiB.
const FIRST_BYTES: usize = 128 << 20;
/// How many there can be.
pub const REGIONS: usize = 11;
/// What is opened at once.
const STEP_BYTES: usize = 4 << 20;
const PAGE: usize = foliomem_types::units::PAGE_BYTES;

/// The regions: where each starts, and where it ends. They are filled in order.
static STARTS: [AtomicUsize; REGIONS] = [const { AtomicUsize::new(0) }; REGIONS];
static ENDS: [AtomicUsize; REGIONS] = [const { AtomicUsize::new(0) }; REGIONS];
/// How many there are. What follows is of the last one, and like this is read and changed under the heap's lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Where the next block goes.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// How far it may be written.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// What is reserved; those of the regions that are not are empty.
pub fn ranges() -> [Range<usize>; REGIONS] {
    // An end is stored first: a region that is being added is known as a whole, or not at all.
    // Acquire pairs with the Release in `reserve`.
    std::array::from_fn(|index| STARTS[index].load(Ordering::Acquire)..ENDS[index].load(Ordering::Acquire))
        .map(|range| if range.start == 0 { 0..0 } else { range })
}

/// Where the last region ends; 0 where there is none. Called under the heap's lock.
fn last_end() -> usize {
    COUNT.load(Ordering::Relaxed).checked_sub(1).map_or(0, |last| ENDS[last].load(Ordering::Relaxed))
}

/// Adds a region of `least_bytes` at least. Called under the heap's lock.
fn reserve(least_bytes: usize) -> bool {
    let index = COUNT.load(Ordering::Relaxed);
    if index == REGIONS {
        return false;
    }
    let wanted = (FIRST_BYTES << index.saturating_sub(1)).max(least_bytes.next_multiple_of(PAGE));
    // Where the program may not have so much any more, there may be room for less.
    let sizes = std::iter::successors(Some(wanted), |&bytes| Some((bytes / 2).next_multiple_of(PAGE)));
    for bytes in sizes.take_while(|&bytes| bytes >= least_bytes && bytes > PAGE) {
        // SAFETY: a new private mapping at an address of the kernel's choice; nothing else is affected.
        let mapped = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::NORESERVE)
        };
        let Ok(start) = mapped else { continue };
        let start = start.addr();
        // Release pairs with the Acquire in `ranges`: who sees the start sees the end.
        ENDS[index].store(start + bytes, Ordering::Release);
        STARTS[index].store(start, Ordering::Release);
        COUNT.store(index + 1, Ordering::Relaxed);
        [&NEXT, &OPEN].into_iter().for_each(|at| at.store(start, Ordering::Relaxed));
        return true;
    }
    false
}

/// Opens the last region up to `end`. Called under the heap's lock.
fn open(end: usize) -> bool {
    let from = OPEN.load(Ordering::Relaxed);
    let start = std::ptr::with_exposed_provenance_mut(from);
    let most = end.max(from + STEP_BYTES).min(last_end());
    let opened = [most, end].into_iter().find(|to| {
        // SAFETY: it is reserved, and nobody else's.
        unsafe { mprotect(start, to - from, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok()
    });
    opened.iter().for_each(|&to| OPEN.store(to, Ordering::Relaxed));
    opened.is_some()
}

/// Cuts `bytes` off the last region, aligned to `align`. Called under the heap's lock.
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

struct Segments;

// SAFETY: segments are disjoint cuts of the regions, readable, writable and zero; they are never
// released, which the three refusals below say.
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

/// The allocator of this library.
pub struct AgentHeap(Mutex<Dlmalloc<Segments>>);

impl Default for AgentHeap {
    fn default() -> AgentHeap {
        AgentHeap::new()
    }
}

impl AgentHeap {
    /// An empty heap.
    pub const fn new() -> AgentHeap {
        AgentHeap(Mutex::new(Dlmalloc::new_with_allocator(Segments)))
    }

    fn with<R>(&self, act: impl FnOnce(&mut Dlmalloc<Segments>) -> R) -> R {
        // A panic aborts, so the lock cannot be poisoned; take it either way.
        act(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

// SAFETY: small blocks obey dlmalloc's contract, large ones are exclusive cuts of the regions, aligned as
// asked; which of the two a block is follows from its size alone, at allocation and at release.
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
        // SAFETY: as in `alloc`.
        self.with(|heap| unsafe { heap.calloc(layout.size(), layout.align()) })
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() >= LARGE_BYTES {
            // SAFETY: the block's pages are its own, and nobody uses them any more. A failure only means
            // that they stay.
            let _ = unsafe { madvise(block.cast(), layout.size().next_multiple_of(PAGE), Advice::LinuxDontNeed) };
            return;
        }
        // SAFETY: allocated by `malloc` or `calloc` above with the same layout.
        self.with(|heap| unsafe { heap.free(block, layout.size(), layout.align()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_lie_in_regions_that_follow_each_other() {
        const BYTES: usize = 3 << 20;
        let heap = AgentHeap::new();
        let is_own = |start: usize, end: usize| {
            ranges().iter().filter(|region| region.contains(&start) && end <= region.end).count() == 1
        };
        let mut last = 0;
        // More than the first two regions have.
        for block in 0..2 * FIRST_BYTES / BYTES + 20 {
            let layout = Layout::from_size_align(BYTES + block, 4096 << (block % 10)).unwrap();
            // SAFETY: the layout has a size; the block is written where it begins and where it ends.
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
