//! A reserved range of the agent's address space: the arena, or a thread's stack.
//!
//! A region has one owner. Shared access to its memory is unsafe, because the kernel or another
//! thread may change it. There is no lock.

#[cfg(not(miri))]
use crate::memory_advice;
use crate::thread::syscall3;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Alignment of a region's start, in bytes: the size of an order-9 folio, so that its runs are
/// aligned.
const ALIGN_BYTES: usize = 2 << 20;
/// Size of the guard below a region with `MAP_GROWSDOWN`, in bytes.
#[cfg(not(miri))]
const GUARD_BYTES: usize = foliomem_types::units::PAGE_BYTES;

/// Private anonymous memory that takes no frames until it is touched. Unmapped on drop.
#[derive(Debug)]
pub struct Region {
    start: usize,
    len: usize,
    /// Size of the guard below the region, in bytes; 0 if there is none.
    guard_bytes: usize,
}

impl Region {
    /// Reserves `len` bytes, rounded up to pages, aligned to 2 MiB.
    ///
    /// # Errors
    /// Fails if the kernel refuses the mapping, for example because of `RLIMIT_AS` or
    /// `RLIMIT_DATA`.
    #[cfg(not(miri))]
    pub fn reserve(len: usize) -> Result<Region, Errno> {
        Region::reserve_with(len, MapFlags::empty())
    }

    /// Reserves `len` bytes like [`Region::reserve`], but without counting them against
    /// `RLIMIT_DATA`. It is for the arena: browsers set this limit for their renderers, and the
    /// arena would exceed it.
    ///
    /// The kernel does not count the mapping because it has `MAP_GROWSDOWN`, like a stack. A guard
    /// below it keeps it from growing.
    ///
    /// # Errors
    /// Fails if the kernel refuses the mapping.
    #[cfg(not(miri))]
    pub fn reserve_uncounted(len: usize) -> Result<Region, Errno> {
        let region = Region::reserve_with(len, MapFlags::GROWSDOWN)?;
        let guard = region.start - GUARD_BYTES;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: `reserve_with` has mapped a page for the guard there, which nothing uses.
        unsafe {
            mmap_anonymous(std::ptr::with_exposed_provenance_mut(guard), GUARD_BYTES, ProtFlags::empty(), flags)
        }?;
        Ok(region)
    }

    /// Reserves `len` bytes with `extra` flags. With any flag, it maps a guard below the region,
    /// too.
    #[cfg(not(miri))]
    fn reserve_with(len: usize, extra: MapFlags) -> Result<Region, Errno> {
        let len = len.next_multiple_of(foliomem_types::units::PAGE_BYTES);
        let guard_bytes = if extra.is_empty() { 0 } else { GUARD_BYTES };
        let wide = len + ALIGN_BYTES + guard_bytes;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | extra;
        // SAFETY: the kernel chooses the address of the new mapping, so nothing else is affected.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), wide, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        let first = mapped.expose_provenance();
        let start = (first + guard_bytes).next_multiple_of(ALIGN_BYTES);
        for (from, to) in [(first, start - guard_bytes), (start + len, first + wide)] {
            if from < to {
                // SAFETY: the range is a margin of the mapping made above, which nothing uses.
                unsafe { munmap(std::ptr::with_exposed_provenance_mut(from), to - from) }?;
            }
        }
        memory_advice::leave_out_of_dumps(&(start..start + len));
        Ok(Region { start, len, guard_bytes })
    }

    /// Reserves `len` bytes from the allocator, as miri does not support the flags of the mapping.
    #[cfg(miri)]
    pub fn reserve(len: usize) -> Result<Region, Errno> {
        let len = len.next_multiple_of(foliomem_types::units::PAGE_BYTES);
        let layout = std::alloc::Layout::from_size_align(len, ALIGN_BYTES).map_err(|_| Errno::INVAL)?;
        // SAFETY: `len` is not 0, because no caller reserves an empty region.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            Err(Errno::NOMEM)
        } else {
            Ok(Region { start: start.expose_provenance(), len, guard_bytes: 0 })
        }
    }

    /// Reserves `len` bytes from the allocator, like [`Region::reserve`].
    #[cfg(miri)]
    pub fn reserve_uncounted(len: usize) -> Result<Region, Errno> {
        Region::reserve(len)
    }

    /// Returns the first address.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of `offset`.
    ///
    /// # Panics
    /// If the `len` bytes at `offset` do not lie in the region.
    fn pointer(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "{offset}+{len} of {}", self.len);
        std::ptr::with_exposed_provenance_mut(self.start + offset)
    }

    /// Sets whether the kernel may back the range with huge pages.
    ///
    /// # Errors
    /// Fails if the kernel refuses the advice, for example because it has no huge pages.
    pub fn set_huge_pages(&self, offset: usize, len: usize, huge_pages: HugePages) -> Result<(), Errno> {
        let advice = match huge_pages {
            HugePages::Allowed => Advice::LinuxHugepage,
            HugePages::Forbidden => Advice::LinuxNoHugepage,
        };
        self.advise(offset, len, advice)
    }

    /// Splits a huge page that the range is a part of into single pages.
    ///
    /// # Errors
    /// Fails if the kernel refuses the advice (`MADV_COLD`).
    pub fn split_huge(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.advise(offset, len, Advice::LinuxCold)
    }

    /// Gives the kernel advice about a range.
    fn advise(&self, offset: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range lies in the region, by `pointer`. The caller's advice keeps or drops
        // content, as the caller documents.
        unsafe { madvise(self.pointer(offset, len).cast(), len, advice) }
    }

    /// Gives the kernel advice about guards in a range, with the raw number of the advice.
    fn set_guard(&self, offset: usize, len: usize, advice: u32) -> Result<(), Errno> {
        let start = self.pointer(offset, len).addr();
        // SAFETY: the range lies in the region, by `pointer`. The caller's advice keeps or drops
        // content, as the caller documents. rustix does not know the advice.
        let result = unsafe { syscall3(libc::SYS_madvise as usize, start, len, advice as usize) };
        if result == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(-result as i32)) }
    }

    /// Allocates a frame for every page of the range, as writing to it would.
    ///
    /// # Errors
    /// Fails if the kernel cannot allocate the frames.
    pub fn populate(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.advise(offset, len, Advice::LinuxPopulateWrite)
    }

    /// Frees the frames of the range. It reads as zeros afterwards.
    ///
    /// # Errors
    /// Fails if the kernel refuses the advice.
    pub fn discard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.advise(offset, len, Advice::LinuxDontNeed)
    }

    /// Drops the content of the range and makes every access to it raise SIGSEGV
    /// (`MADV_GUARD_INSTALL`, Linux 6.13).
    ///
    /// # Errors
    /// Fails if the kernel does not support guards.
    pub fn guard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.set_guard(offset, len, linux_raw_sys::general::MADV_GUARD_INSTALL)
    }

    /// Removes the guards of the range, which reads as zeros afterwards.
    ///
    /// # Errors
    /// Fails if the kernel does not support guards.
    pub fn unguard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        self.set_guard(offset, len, linux_raw_sys::general::MADV_GUARD_REMOVE)
    }

    /// Returns the whole region. Nobody else has a slice of it, because shared access is unsafe.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory is mapped, and borrowed exclusively like `self`.
        unsafe { self.slice_mut(0, self.len) }
    }

    /// Returns the bytes of a range, to read.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: the memory is mapped, and nobody writes it, by the contract.
        unsafe { std::slice::from_raw_parts(self.pointer(offset, len), len) }
    }

    /// Returns the bytes of a range, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the contract")]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: the memory is mapped, and nobody else uses it, by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(offset, len), len) }
    }
}

/// Whether the kernel may back a range with huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HugePages {
    /// `MADV_HUGEPAGE`.
    Allowed,
    /// `MADV_NOHUGEPAGE`.
    Forbidden,
}

/// Calls `act` while `bytes` more of address space are mapped, without access. Returns `None` if
/// the kernel refuses the mapping.
pub fn with_reserved<R>(bytes: usize, act: impl FnOnce() -> R) -> Option<R> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses the address of the new mapping, and nobody else knows it.
    let pages = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) }.ok()?;
    let result = act();
    // SAFETY: the pages were mapped above, and nobody uses them.
    let _ = unsafe { munmap(pages, bytes) };
    Some(result)
}

impl Drop for Region {
    #[cfg(not(miri))]
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.start - self.guard_bytes);
        // SAFETY: the region owns the range, and no reference into it is left. A failure leaks the
        // range.
        let _ = unsafe { munmap(start, self.guard_bytes + self.len) };
    }

    #[cfg(miri)]
    fn drop(&mut self) {
        let Ok(layout) = std::alloc::Layout::from_size_align(self.len, ALIGN_BYTES) else {
            unreachable!("as reserved")
        };
        // SAFETY: `reserve` allocated the memory with this layout, and no reference into it is
        // left.
        unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(self.start), layout) };
    }
}
