//! The agent's own memory: every allocation of the agent comes from one reserved range, never from
//! the program's malloc, so that the range can be told apart from the program's memory and never be
//! managed itself.
//!
//! Small blocks are dlmalloc's, in segments cut from the range; blocks of [`LARGE_BYTES`] and more are
//! cut from it directly and are zero pages of the kernel, so that tables allocated zeroed cost nothing
//! until used. Address space of freed large blocks is not used again, only their pages are given back:
//! the engine's tables grow by doubling, so what is lost is bounded by what is in use.
//!
//! Lock: one leaf. The forking thread finds it free: the agent's threads allocate and free only inside
//! `crate::gate`, and the program's threads allocate here only while the agent starts.

use dlmalloc::Dlmalloc;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::alloc::{GlobalAlloc, Layout};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Blocks from this size on bypass dlmalloc.
const LARGE_BYTES: usize = 128 << 10;
/// Address space to reserve, largest first; a process with a limit on its address space gets less.
const RANGE_BYTES: [usize; 4] = [64 << 30, 8 << 30, 1 << 30, 256 << 20];
const PAGE: usize = foliomem_core::units::PAGE_BYTES;

static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The reserved range; empty before the first allocation.
pub fn range() -> Range<usize> {
    START.load(Ordering::Acquire)..END.load(Ordering::Acquire)
}

/// Reserves the range. Called under the heap's lock.
fn reserve() -> bool {
    for bytes in RANGE_BYTES {
        // SAFETY: a new private mapping at an address of the kernel's choice; nothing else is affected.
        let mapped = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        if let Ok(start) = mapped {
            NEXT.store(start.addr(), Ordering::Relaxed);
            END.store(start.addr() + bytes, Ordering::Release);
            START.store(start.addr(), Ordering::Release);
            return true;
        }
    }
    false
}

/// Cuts `bytes` off the range, aligned to `align`. Called under the heap's lock.
fn cut(bytes: usize, align: usize) -> *mut u8 {
    if START.load(Ordering::Relaxed) == 0 && !reserve() {
        return std::ptr::null_mut();
    }
    let next = NEXT.load(Ordering::Relaxed).next_multiple_of(align.max(PAGE));
    let Some(end) = next.checked_add(bytes.next_multiple_of(PAGE)) else { return std::ptr::null_mut() };
    if end > END.load(Ordering::Relaxed) {
        return std::ptr::null_mut();
    }
    NEXT.store(end, Ordering::Relaxed);
    std::ptr::with_exposed_provenance_mut(next)
}

struct Segments;

// SAFETY: segments are disjoint cuts of the reserved range, readable, writable and zero; they are never
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

// SAFETY: small blocks obey dlmalloc's contract, large ones are exclusive cuts of the range, aligned as
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
