//! A reserved range of the agent's own address space: the arena, or a thread's stack.
//!
//! A region has one owner. Shared access to its memory is unsafe, because the kernel or another
//! thread may change it. There is no lock.

use crate::thread::syscall3;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
#[cfg(not(miri))]
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Regions start at a multiple of this, so that order-9 runs are aligned.
const ALIGN_BYTES: usize = 2 << 20;
/// What lies before a region that the kernel takes for a stack.
#[cfg(not(miri))]
const GUARD_BYTES: usize = foliomem_types::units::PAGE_BYTES;

/// Private anonymous memory that takes no frames until it is touched. Unmapped on drop.
#[derive(Debug)]
pub struct Region {
    start: usize,
    len: usize,
    /// Of the guard that lies before it.
    guard_bytes: usize,
}

impl Region {
    /// Reserves `len` bytes, rounded up to pages, aligned to 2 MiB.
    #[cfg(not(miri))]
    pub fn reserve(len: usize) -> Result<Region, Errno> {
        Region::reserve_with(len, MapFlags::empty())
    }

    /// The same for the arena, which is larger than the program may like: it does not count against
    /// the program's limit for data (`RLIMIT_DATA`), which browsers set for their renderers.
    ///
    /// To the kernel it is a stack. It never grows: there is a guard below it.
    #[cfg(not(miri))]
    pub fn reserve_uncounted(len: usize) -> Result<Region, Errno> {
        let region = Region::reserve_with(len, MapFlags::GROWSDOWN)?;
        let guard = region.start - GUARD_BYTES;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: `reserve_with` has left a page of the region's own mapping there.
        unsafe {
            mmap_anonymous(std::ptr::with_exposed_provenance_mut(guard), GUARD_BYTES, ProtFlags::empty(), flags)
        }?;
        Ok(region)
    }

    #[cfg(not(miri))]
    fn reserve_with(len: usize, extra: MapFlags) -> Result<Region, Errno> {
        let len = len.next_multiple_of(foliomem_types::units::PAGE_BYTES);
        let guard_bytes = if extra.is_empty() { 0 } else { GUARD_BYTES };
        let wide = len + ALIGN_BYTES + guard_bytes;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | extra;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), wide, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        let first = mapped.expose_provenance();
        let start = (first + guard_bytes).next_multiple_of(ALIGN_BYTES);
        for (from, to) in [(first, start - guard_bytes), (start + len, first + wide)] {
            if from < to {
                // SAFETY: the margins of the mapping just made; nobody uses them.
                unsafe { munmap(std::ptr::with_exposed_provenance_mut(from), to - from) }?;
            }
        }
        Ok(Region { start, len, guard_bytes })
    }

    /// The same in memory of the allocator: miri knows no other.
    #[cfg(miri)]
    pub fn reserve(len: usize) -> Result<Region, Errno> {
        let len = len.next_multiple_of(foliomem_types::units::PAGE_BYTES);
        let layout = std::alloc::Layout::from_size_align(len, ALIGN_BYTES).map_err(|_| Errno::INVAL)?;
        // SAFETY: `len` is not 0: nobody reserves nothing.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            Err(Errno::NOMEM)
        } else {
            Ok(Region { start: start.expose_provenance(), len, guard_bytes: 0 })
        }
    }

    /// The same.
    #[cfg(miri)]
    pub fn reserve_uncounted(len: usize) -> Result<Region, Errno> {
        Region::reserve(len)
    }

    /// Its first address.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn pointer(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "{offset}+{len} of {}", self.len);
        std::ptr::with_exposed_provenance_mut(self.start + offset)
    }

    /// Whether the kernel may back the range with huge pages.
    pub fn allow_huge(&self, offset: usize, len: usize, allow: bool) -> Result<(), Errno> {
        self.advise(offset, len, if allow { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage })
    }

    /// Makes pages of their own of a huge page that the range is a part of.
    pub fn split_huge(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.advise(offset, len, Advice::LinuxCold)
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is ours; the callers' advices are documented to keep or drop its content.
        unsafe { madvise(self.pointer(offset, len).cast(), len, advice) }
    }

    fn set_guard(&self, offset: usize, len: usize, advice: u32) -> Result<(), Errno> {
        let start = self.pointer(offset, len).addr();
        // SAFETY: the range is ours; either advice drops content or keeps it, as the callers document. rustix has no name for them.
        let result = unsafe { syscall3(libc::SYS_madvise as usize, start, len, advice as usize) };
        if result == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(-result as i32)) }
    }

    /// Gives every page of the range a frame of its own, as writing to it would.
    pub fn populate(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.advise(offset, len, Advice::LinuxPopulateWrite)
    }

    /// Gives the frames of the range back to the system. It reads as zeros afterwards.
    pub fn discard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.advise(offset, len, Advice::LinuxDontNeed)
    }

    /// Makes any access to the range fail, and drops its content (`MADV_GUARD_INSTALL`, Linux 6.13).
    pub fn guard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.set_guard(offset, len, linux_raw_sys::general::MADV_GUARD_INSTALL)
    }

    /// The reverse: the range reads as zeros.
    pub fn unguard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.set_guard(offset, len, linux_raw_sys::general::MADV_GUARD_REMOVE)
    }

    /// All of it. (Shared access to a region is unsafe, so nobody else has a part of it now.)
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: mapped memory of this region, exclusive because `self` is.
        unsafe { self.slice_mut(0, self.len) }
    }

    /// The bytes of a range, to read.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: mapped memory of this region, written by nobody by the contract.
        unsafe { std::slice::from_raw_parts(self.pointer(offset, len), len) }
    }

    /// The bytes of a range, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the contract")]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: mapped memory of this region, exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(offset, len), len) }
    }
}

/// Calls `act` while `bytes` more of address space are mapped, without access. Returns `None` if the
/// kernel refuses the mapping.
pub fn with_reserved<R>(bytes: usize, act: impl FnOnce() -> R) -> Option<R> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which nobody else knows of.
    let pages = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) }.ok()?;
    let result = act();
    // SAFETY: the pages just mapped.
    let _ = unsafe { munmap(pages, bytes) };
    Some(result)
}

impl Drop for Region {
    #[cfg(not(miri))]
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.start - self.guard_bytes);
        // SAFETY: the region is ours and nobody has a reference into it any more. A failure leaks it.
        let _ = unsafe { munmap(start, self.guard_bytes + self.len) };
    }

    #[cfg(miri)]
    fn drop(&mut self) {
        let Ok(layout) = std::alloc::Layout::from_size_align(self.len, ALIGN_BYTES) else {
            unreachable!("as reserved")
        };
        // SAFETY: as above; allocated with this layout.
        unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(self.start), layout) };
    }
}
