//! Unseen calls: what is known about system calls that the agent does not see.
//!
//! The program *can make unseen calls* if it has code with system calls of its own that change what
//! memory means. The facts are process-wide flags. [`crate::interception::patches`] sets them for
//! the C library, and the agent for other code that it has looked at. There is no lock.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The C libraries of a process, one for each namespace of the loader, and what else is known.
const MAX_SEEN: usize = 32;

static CAN_BE_MADE: AtomicBool = AtomicBool::new(false);
static HAVE_LENT: AtomicBool = AtomicBool::new(false);
static IS_WATCHING: AtomicBool = AtomicBool::new(false);
/// Addresses in code whose calls are seen or are none of the program's; 0 where there is none.
static SEEN: [AtomicUsize; MAX_SEEN] = [const { AtomicUsize::new(0) }; MAX_SEEN];

/// Whether the program can make unseen calls.
#[inline]
pub fn can_be_made() -> bool {
    CAN_BE_MADE.load(Ordering::Relaxed)
}

/// The program counts as one that can make unseen calls from now on.
pub fn assume() {
    CAN_BE_MADE.store(true, Ordering::Relaxed);
}

/// Whether a call that was seen may have lent pages.
#[inline]
pub fn have_lent() -> bool {
    HAVE_LENT.load(Ordering::Relaxed)
}

/// The byte that patched calls set before they lend pages.
pub fn lending_flag() -> usize {
    HAVE_LENT.as_ptr().expose_provenance()
}

/// Whether libraries that are loaded must be looked at: the program's code has been, or is being.
pub fn is_watching() -> bool {
    // SeqCst pairs with `watch`: a library is found there, or its loading is told.
    IS_WATCHING.load(Ordering::SeqCst)
}

/// From now on libraries that are loaded must be looked at.
pub fn watch() {
    // SeqCst pairs with `is_watching`.
    IS_WATCHING.store(true, Ordering::SeqCst);
}

/// Whether `range` has code whose calls are seen or are none of the program's.
pub fn has_seen_code_in(range: &Range<usize>) -> bool {
    SEEN.iter().any(|entry| range.contains(&entry.load(Ordering::Relaxed)))
}

/// The calls of the code at `address` are seen, or are none of the program's.
pub fn are_seen_in(address: usize) {
    let claim = |entry: &AtomicUsize| entry.compare_exchange(0, address, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    // Where there are too many, the code is looked at like that of the program.
    let _ = SEEN.iter().any(claim);
}
