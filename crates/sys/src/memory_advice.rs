//! Advice about memory: madvise(2), mlock(2), mprotect(2).
//!
//! If a call fails, the memory stays as it is and the caller does not learn it. There is no lock.

use foliomem_types::units::PAGE_BYTES;
use rustix::mm::{Advice, MprotectFlags, madvise, mlock, mprotect, munlock};
use std::ffi::c_void;
use std::ops::Range;

/// Whether forks copy a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Forks {
    /// The child of a fork gets a copy of the range.
    #[default]
    Copy,
    /// The range is unmapped in the child of a fork.
    LeaveOut,
}

/// Gives the kernel advice about `range`.
fn advise(range: &Range<usize>, advice: Advice) {
    // SAFETY: all callers pass advice that changes no content.
    let _ = unsafe { madvise(pointer(range.start), range.len(), advice) };
}

/// Converts an address to the pointer that system calls take.
fn pointer(address: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

/// Sets whether forks copy `range`.
pub fn set_forks(range: &Range<usize>, forks: Forks) {
    advise(
        range,
        match forks {
            Forks::Copy => Advice::LinuxDoFork,
            Forks::LeaveOut => Advice::LinuxDontFork,
        },
    );
}

/// Lets the kernel use huge pages in `range`.
pub fn ask_for_huge(range: &Range<usize>) {
    advise(range, Advice::LinuxHugepage);
}

/// Leaves `range` out of core dumps. The agent's reserved memory would make a dump of many GiB,
/// which a pipe to a dump handler gets as zeros.
pub fn leave_out_of_dumps(range: &Range<usize>) {
    advise(range, Advice::LinuxDontDump);
}

/// Splits a huge page of which `range` is a part (`MADV_COLD`).
pub fn split_huge(range: &Range<usize>) {
    advise(range, Advice::LinuxCold);
}

/// Makes the page at `start` resident. Nothing need be mapped there.
pub fn map_in_page(start: usize) {
    advise(&(start..start + PAGE_BYTES), Advice::LinuxPopulateRead);
}

/// Makes the page at `start` resident and locks it in memory.
pub fn lock_page(start: usize) {
    // SAFETY: mlock(2) changes no content.
    let _ = unsafe { mlock(pointer(start), PAGE_BYTES) };
}

/// Unlocks a page that [`lock_page`] has locked.
pub fn unlock_page(start: usize) {
    // SAFETY: munlock(2) changes no content.
    let _ = unsafe { munlock(pointer(start), PAGE_BYTES) };
}

/// Frees the pages of `range`, locked ones too. The range must not be registered with a
/// userfaultfd: the call would wait until its message is read.
///
/// # Safety
/// Nobody needs the content of the range.
pub unsafe fn discard(range: &Range<usize>) {
    // SAFETY: nobody needs the content, by the contract.
    let _ = unsafe { madvise(pointer(range.start), range.len(), Advice::LinuxDontneedLocked) };
}

/// Forbids every access to `range`: an accessing thread gets SIGSEGV.
///
/// # Safety
/// The calling process has no reference into the range.
pub unsafe fn forbid_access(range: &Range<usize>) {
    // SAFETY: no reference into the range exists, by the contract.
    let _ = unsafe { mprotect(pointer(range.start), range.len(), MprotectFlags::empty()) };
}
