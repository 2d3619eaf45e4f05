//! Thread control blocks: they identify stacks, and their pages stay resident.
//!
//! The C library keeps a thread's control block at the top of its stack. When the thread ends, the
//! kernel clears the thread's id there, wakes a joining thread, and reads the list of robust
//! mutexes. An exiting thread cannot take userfaultfd faults, so a joining thread would hang if the
//! block were swapped out. Hence the pages of these blocks are neither swapped out nor protected. A
//! mapping right above a guard with a block at its top is a stack, and is not managed. Other stacks
//! may be managed: those that the program allocates itself, those without a guard, very large ones,
//! and stacks merged with a mapping above.
//!
//! For threads that exist at activation, [`foliomem_sys::thread_control_block`] finds the blocks.
//! Before a later thread exists, its creator sends a notice in its own name, because a debugger
//! reads the block as soon as there is a thread, and cannot take faults either
//! (`foliomem_sys::interception::fork_call`). The thread sends another notice before
//! it does anything else; from then on the block is known under its own name.
//!
//! A block stays known until its thread has ended. The list is checked when twice as many blocks
//! are known as after the last check. Only the monitor changes the list, under the lock of the
//! mappings: a thread that swaps a page out reads the list under that lock, too. The list's own
//! lock is a leaf.

use foliomem_sync::Mutex;
use foliomem_sys::thread_control_block::{BLOCK_PAGES, pages};
use rustix::process::Pid;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Minimum number of known pages at which ended threads are checked for.
const CHECK_MIN: usize = 64;

/// The pages of control blocks that stay resident.
#[derive(Debug, Default)]
pub struct ControlBlocks {
    /// The threads of the pages, by address.
    kept: Mutex<BTreeMap<usize, Pid>>,
    /// Number of known pages.
    len: AtomicUsize,
    /// Number of known pages after the last check for ended threads.
    checked_len: AtomicUsize,
}

impl ControlBlocks {
    /// Keeps the pages of the control block of `thread` resident from now on.
    pub fn keep(&self, block: &Range<usize>, thread: Pid, has_ended: impl Fn(Pid) -> bool) {
        let mut kept = self.kept.lock();
        kept.extend(pages(block).map(|page| (page, thread)));
        if kept.len() > 2 * self.checked_len.load(Relaxed).max(CHECK_MIN / 2) {
            kept.retain(|_, &mut thread| !has_ended(thread));
            self.checked_len.store(kept.len(), Relaxed);
        }
        self.len.store(kept.len(), Relaxed);
    }

    /// Keeps only the forking thread's pages, under its new id, in the child of a fork.
    pub fn forked(&self, own: [usize; BLOCK_PAGES], thread: Pid) {
        let mut kept = self.kept.lock();
        kept.retain(|page, _| own.contains(page));
        kept.values_mut().for_each(|known| *known = thread);
        self.len.store(kept.len(), Relaxed);
    }

    /// Returns the first page in `range` that must stay resident.
    pub fn first_within(&self, range: Range<usize>) -> Option<usize> {
        if self.len.load(Relaxed) == 0 {
            return None;
        }
        self.kept.lock().range(range).next().map(|(&page, _)| page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_sys::thread_control_block::BLOCK_BYTES;
    use foliomem_types::units::PAGE_BYTES;

    fn thread(id: i32) -> Pid {
        Pid::from_raw(id).unwrap()
    }

    #[test]
    fn pages_stay_until_their_threads_have_ended() {
        let blocks = ControlBlocks::default();
        assert_eq!(blocks.first_within(0..usize::MAX), None);
        let border = |index: usize| index * (64 << 10);
        let block = |index| border(index) - BLOCK_BYTES / 2..border(index) + BLOCK_BYTES / 2;
        let around = |index| border(index) - PAGE_BYTES..border(index) + PAGE_BYTES;
        for index in 1..=CHECK_MIN {
            blocks.keep(&block(index), thread(index as i32), |thread| thread.as_raw_nonzero().get() % 2 == 0);
        }
        assert_eq!(blocks.first_within(around(1)), Some(border(1) - PAGE_BYTES));
        assert_eq!(blocks.first_within(border(1)..border(2)), Some(border(1)));
        assert_eq!(blocks.first_within(around(2)), None, "thread 2 has ended");
        assert!(blocks.first_within(around(CHECK_MIN)).is_some(), "the next check is not due yet");
        blocks.forked(pages(&block(3)), thread(99));
        assert_eq!(blocks.first_within(0..usize::MAX), Some(border(3) - PAGE_BYTES));
        assert_eq!(blocks.first_within(around(1)), None);
    }
}
