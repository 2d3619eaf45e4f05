//! Marks on swapped-out pages: they reveal a discard without a message.
//!
//! `MADV_GUARD_INSTALL` (Linux 6.13) drops the content of its range. The kernel sends no
//! userfaultfd message about it, and `MADV_GUARD_REMOVE` leaves an empty page table entry, as a
//! move out of the program does. The program may make both calls with inline system calls, or
//! `process_madvise(2)` may. So each page that leaves the program gets a *mark*: a write-protection
//! marker of userfaultfd in its empty page table entry. Every way to discard a page removes its
//! mark. If the mark is missing when the page is to return, its content is stale.
//!
//! Marks are set only if the program can make system calls that the agent does not see
//! ([`foliomem_sys::unseen_calls`]). That may show after pages have been swapped out. Then the
//! agent marks all these pages. A missing mark counts only after all are marked.
//!
//! A page can be without a mark for another reason: the kernel refuses to set marks while a mapping
//! change is under way, a fork does not copy them, and a marked range cannot take a huge page as
//! one. [`Marks`] remembers these pages, and their content counts as valid.
//!
//! The mark and the page cannot be exchanged in one step. A guard that is installed and removed
//! between the two system calls is missed. Kernels without guards need no marks.
//!
//! The lock of the ranges is a leaf. The caller holds the lock of the pages' block.

use crate::address_space::ranges::Ranges;
use foliomem_sys::pagemap::{self, Entry};
use foliomem_sys::region::Region;
use foliomem_sys::userfaultfd::Userfaultfd;
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::OwnedFd;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The marks of a process: whether pages get marks, whether a missing mark means that the content
/// is stale, and which pages have none.
#[derive(Debug)]
pub(crate) struct Marks {
    can_guard: bool,
    /// Whether pages get marks.
    are_set: AtomicBool,
    /// Whether a missing mark means that the content is stale.
    are_missed: AtomicBool,
    /// Swapped-out pages without a mark. The set may contain resident pages, too.
    unmarked: Ranges,
}

impl Marks {
    /// Creates the state, after checking on the empty first page of `arena` whether the kernel has
    /// guards.
    pub(crate) fn new(arena: &Region) -> Marks {
        let can_guard = arena.guard(0, PAGE_BYTES).is_ok();
        if can_guard {
            // A guard that could be installed can be removed.
            let _ = arena.unguard(0, PAGE_BYTES);
        }
        let [are_set, are_missed] = [const { AtomicBool::new(false) }; 2];
        Marks { can_guard, are_set, are_missed, unmarked: Ranges::default() }
    }

    /// Starts to mark pages. Returns whether the caller must mark all swapped-out pages, and then
    /// call [`Marks::miss`].
    pub(crate) fn begin(&self) -> bool {
        // Relaxed: a thread that moves a page holds the lock of its block, which the caller takes
        // afterwards.
        self.can_guard && !self.are_set.swap(true, Ordering::Relaxed)
    }

    /// Notes that all swapped-out pages have marks: from now on a missing mark counts.
    pub(crate) fn miss(&self) {
        // Release pairs with the Acquire in `check`: the unmarked pages are known.
        self.are_missed.store(true, Ordering::Release);
    }

    fn are_set(&self) -> bool {
        self.are_set.load(Ordering::Relaxed)
    }

    /// Returns whether the kernel has guards.
    pub(crate) fn can_guard(&self) -> bool {
        self.can_guard
    }

    /// Marks `range`, which has just left the program.
    pub(crate) fn set(&self, program: &Userfaultfd, range: Range<usize>) {
        if !self.are_set() || range.is_empty() {
            return;
        }
        if program.protect(range.start, range.len()).is_err() {
            self.unmarked.insert(range);
        } else if !self.unmarked.is_empty() {
            self.unmarked.remove(range);
        }
    }

    /// Marks the empty pages of `range` again, because the range could not be mapped in. Present
    /// pages in the range stay unmarked: a write to a marked page would wait.
    pub(crate) fn set_again(&self, program: &Userfaultfd, pagemap: &OwnedFd, range: Range<usize>) {
        if !self.are_set() {
            return;
        }
        pagemap::each_run(pagemap, range, &mut |run, entry| {
            if entry == Entry::Empty {
                self.set(program, run);
            }
        });
    }

    /// Remembers that `range`, which has just left the program, gets no marks.
    pub(crate) fn leave_out(&self, range: Range<usize>) {
        if self.are_set() {
            self.unmarked.insert(range);
        }
    }

    /// Calls `lost` with each run of the swapped-out `range` that has lost its mark. Returns
    /// whether any page has a mark.
    pub(crate) fn check(&self, pagemap: &OwnedFd, range: Range<usize>, lost: &mut dyn FnMut(Range<usize>)) -> bool {
        if !self.are_set() {
            return false;
        }
        // Acquire pairs with the Release in `miss`.
        let are_missed = self.are_missed.load(Ordering::Acquire);
        let mut has_mark = false;
        pagemap::each_run(pagemap, range, &mut |run, entry| match entry {
            Entry::Marked => has_mark = true,
            Entry::Content => {}
            _ if !are_missed => {}
            Entry::Guard => lost(run),
            Entry::Empty if self.unmarked.is_empty() => lost(run),
            Entry::Empty => self.unmarked.missing(run).into_iter().for_each(&mut *lost),
        });
        has_mark
    }

    /// Calls `lost` as [`Marks::check`] does, and removes the marks. The caller maps the range in
    /// again.
    pub(crate) fn take(
        &self,
        program: &Userfaultfd,
        pagemap: &OwnedFd,
        range: Range<usize>,
        lost: &mut dyn FnMut(Range<usize>),
    ) {
        if self.check(pagemap, range.clone(), lost) {
            // While a mapping change is under way, the marks stay and the range does not return.
            let _ = program.unprotect(range.start, range.len());
        }
    }

    /// Removes markers from `range` that stand for no swapped-out page. Returns whether its first
    /// page had one.
    ///
    /// Such markers exist even if no marks are set: `MADV_FREE` leaves them, and the copy-on-write
    /// throttle creates one if the program discards a page at the same moment.
    pub(crate) fn clear_stale(program: &Userfaultfd, pagemap: &OwnedFd, range: Range<usize>) -> bool {
        let mut is_marked = false;
        let first = range.start..range.start + PAGE_BYTES;
        pagemap::each_run(pagemap, first, &mut |_, entry| is_marked = entry == Entry::Marked);
        is_marked && program.unprotect(range.start, range.len()).is_ok()
    }

    /// Notes that the program has discarded or unmapped `range`.
    pub(crate) fn forget(&self, range: Range<usize>) {
        if !self.unmarked.is_empty() {
            self.unmarked.remove(range);
        }
    }

    /// Notes that the program has moved `from` to `to`; marks move with their pages.
    pub(crate) fn relocate(&self, from: Range<usize>, to: usize) {
        let moved = self.unmarked.within(from.clone());
        self.forget(from.clone());
        self.forget(to..to + from.len());
        for part in moved {
            self.unmarked.insert(part.start - from.start + to..part.end - from.start + to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_sys::userfaultfd::{Features, Mode, MoveError};

    fn lost(marks: &Marks, pagemap: &OwnedFd, region: &Region) -> Vec<usize> {
        let mut lost = Vec::new();
        let range = region.start()..region.start() + region.len();
        marks.check(pagemap, range, &mut |run| lost.extend(run.step_by(PAGE_BYTES)));
        lost.iter().map(|page| (page - region.start()) / PAGE_BYTES).collect()
    }

    #[test]
    fn only_a_guard_removes_the_mark_of_a_page() {
        let region = Region::reserve(8 * PAGE_BYTES).unwrap();
        let (marks, Ok(program)) = (Marks::new(&region), Userfaultfd::open(Features { events: false })) else { return };
        if !marks.can_guard() {
            return;
        }
        let pagemap = OwnedFd::from(std::fs::File::open("/proc/self/pagemap").unwrap());
        let page = |index: usize| region.start() + index * PAGE_BYTES;
        program.register(region.start(), region.len(), Mode::Faults).unwrap();
        assert!(marks.begin() && !marks.begin());
        assert_eq!(lost(&marks, &pagemap, &region), [], "pages are still being marked");
        marks.miss();
        marks.set(&program, page(0)..page(6));
        marks.leave_out(page(6)..page(8));
        assert_eq!(lost(&marks, &pagemap, &region), []);
        region.guard(PAGE_BYTES, PAGE_BYTES).unwrap();
        region.guard(3 * PAGE_BYTES, PAGE_BYTES).unwrap();
        region.unguard(3 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!(lost(&marks, &pagemap, &region), [1, 3]);
        // Taking the marks leaves none.
        marks.take(&program, &pagemap, page(0)..page(8), &mut |_| {});
        assert_eq!(lost(&marks, &pagemap, &region), [0, 1, 2, 3, 4, 5]);
        marks.forget(page(6)..page(7));
        assert_eq!(lost(&marks, &pagemap, &region), [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_page_of_the_program_is_not_protected() {
        let region = Region::reserve(4 * PAGE_BYTES).unwrap();
        let (marks, Ok(program)) = (Marks::new(&region), Userfaultfd::open(Features { events: false })) else { return };
        if !marks.can_guard() {
            return;
        }
        let pagemap = OwnedFd::from(std::fs::File::open("/proc/self/pagemap").unwrap());
        let range = region.start()..region.start() + region.len();
        program.register(region.start(), region.len(), Mode::Faults).unwrap();
        program.zero(region.start() + PAGE_BYTES).unwrap();
        assert!(marks.begin());
        marks.set_again(&program, &pagemap, range.clone());
        marks.miss();
        assert_eq!(lost(&marks, &pagemap, &region), []);
        let mut bits = [0; 4 * size_of::<u64>()];
        rustix::io::pread(&pagemap, &mut bits, (region.start() / PAGE_BYTES * size_of::<u64>()) as u64).unwrap();
        let is_protected = |bits: &[u8; 8]| u64::from_ne_bytes(*bits) >> 57 & 1 == 1;
        let protected: Vec<bool> = bits.as_chunks().0.iter().map(is_protected).collect();
        assert_eq!(protected, [true, false, true, true]);
    }

    #[test]
    fn a_stale_marker_is_removed() {
        let region = Region::reserve(2 * PAGE_BYTES).unwrap();
        let Ok(program) = Userfaultfd::open(Features { events: false }) else { return };
        let pagemap = OwnedFd::from(std::fs::File::open("/proc/self/pagemap").unwrap());
        program.register(region.start(), region.len(), Mode::Faults).unwrap();
        let range = region.start()..region.start() + region.len();
        assert!(!Marks::clear_stale(&program, &pagemap, range.clone()));
        program.protect(range.start, range.len()).unwrap();
        assert_eq!(program.zero(range.start), Err(MoveError::Exists));
        assert!(Marks::clear_stale(&program, &pagemap, range.clone()));
        program.zero(range.start).unwrap();
        assert!(!Marks::clear_stale(&program, &pagemap, range));
    }
}
