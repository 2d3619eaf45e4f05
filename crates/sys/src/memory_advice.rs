//! Advice about the program's memory that changes no content: madvise(2), mlock(2), mprotect(2).
//!
//! A failure leaves the memory as it is. There is no lock.

use foliomem_types::units::PAGE_BYTES;
use rustix::mm::{Advice, MprotectFlags, madvise, mlock, mprotect, munlock};
use std::ffi::c_void;
use std::ops::Range;

/// Whether forks copy a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Forks {
    /// The child of a fork gets a copy.
    Copy,
    /// The child of a fork has nothing there.
    LeaveOut,
}

fn advise(range: &Range<usize>, advice: Advice) {
    // SAFETY: the callers pass advice that changes no content.
    let _ = unsafe { madvise(pointer(range.start), range.len(), advice) };
}

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

/// Asks for huge pages in `range`.
pub fn ask_for_huge(range: &Range<usize>) {
    advise(range, Advice::LinuxHugepage);
}

/// Splits a huge page of which `range` is a part: the kernel does that with memory that is cold.
pub fn split_huge(range: &Range<usize>) {
    advise(range, Advice::LinuxCold);
}

/// Makes the page at `start` resident and locks it in memory.
pub fn lock_page(start: usize) {
    // SAFETY: changes no content.
    let _ = unsafe { mlock(pointer(start), PAGE_BYTES) };
}

/// Ends [`lock_page`].
pub fn unlock_page(start: usize) {
    // SAFETY: changes no content.
    let _ = unsafe { munlock(pointer(start), PAGE_BYTES) };
}

/// Forbids every access to `range`: the accessing thread gets SIGSEGV.
///
/// # Safety
/// The calling process keeps no reference into the range.
pub unsafe fn forbid_access(range: &Range<usize>) {
    // SAFETY: by the contract.
    let _ = unsafe { mprotect(pointer(range.start), range.len(), MprotectFlags::empty()) };
}
