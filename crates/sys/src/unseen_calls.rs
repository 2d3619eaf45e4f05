//! Unseen calls: what is known about system calls that the agent does not see.
//!
//! The program *can make unseen calls* if it contains code with system calls of its own that change
//! the meaning of memory. The facts are flags of the process. [`crate::interception::patches`] sets
//! them for the C library, and the agent for other code that it has scanned. There is no lock.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Maximum number of code addresses in `SEEN`: one for each namespace of the loader (glibc allows
/// 16), and the agent's and the loader's own.
const MAX_SEEN: usize = 32;

/// Whether the program can make unseen calls.
static CAN_BE_MADE: AtomicBool = AtomicBool::new(false);
/// Whether a call that was seen may have lent pages.
static HAVE_LENT: AtomicBool = AtomicBool::new(false);
/// Whether new libraries must be scanned.
static IS_WATCHING: AtomicBool = AtomicBool::new(false);
/// Addresses in code whose calls the agent sees or which makes none for the program; 0 if unused.
static SEEN: [AtomicUsize; MAX_SEEN] = [const { AtomicUsize::new(0) }; MAX_SEEN];

/// Returns whether the program can make unseen calls.
#[inline]
pub fn can_be_made() -> bool {
    CAN_BE_MADE.load(Ordering::Relaxed)
}

/// Makes the program count as one that can make unseen calls, from now on.
pub fn assume() {
    CAN_BE_MADE.store(true, Ordering::Relaxed);
}

/// Returns whether a call that was seen may have lent pages.
#[inline]
pub fn have_lent() -> bool {
    HAVE_LENT.load(Ordering::Relaxed)
}

/// Returns the address of the flag that patched calls set before they lend pages.
pub fn lending_flag() -> usize {
    HAVE_LENT.as_ptr().expose_provenance()
}

/// Returns whether libraries must be scanned when they are loaded, because the program's code is.
pub fn is_watching() -> bool {
    // SeqCst pairs with `watch`: the scan finds a library, or its loading is noticed.
    IS_WATCHING.load(Ordering::SeqCst)
}

/// Makes libraries count as code that must be scanned when it is loaded, from now on.
pub fn watch() {
    // SeqCst pairs with `is_watching`.
    IS_WATCHING.store(true, Ordering::SeqCst);
}

/// Returns whether `range` contains code whose calls the agent sees or which makes none for the
/// program.
pub fn has_seen_code_in(range: &Range<usize>) -> bool {
    SEEN.iter().any(|entry| range.contains(&entry.load(Ordering::Relaxed)))
}

/// Notes that the agent sees the calls of the code at `address`, or that the code makes none for
/// the program.
pub fn note_seen_code(address: usize) {
    let claim = |entry: &AtomicUsize| entry.compare_exchange(0, address, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    // If there is no free entry, the code is scanned like that of the program.
    let _ = SEEN.iter().any(claim);
}
