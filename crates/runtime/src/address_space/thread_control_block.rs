//! Thread control blocks: they identify stacks, and stay resident.
//!
//! The C library keeps a thread's control block at the top of its stack. When the thread ends, the
//! kernel clears the thread's id there, wakes a joining thread, and reads the list of robust
//! mutexes. An exiting thread cannot take userfaultfd faults, so a joining thread would hang if the
//! block were swapped out. So the pages of these blocks are neither swapped out nor protected. A
//! mapping right above a guard with a block at its top is a stack, and is not managed. Other stacks
//! may be managed: the program's own, without a guard, very large, or joined with a mapping above.
//!
//! Where a block is, [`foliomem_sys::thread_control_block`] finds out for threads that exist at
//! activation. A thread that starts later sends a notice before anything else.
//!
//! A block is known until its thread has ended, which is checked when twice as many blocks are
//! known as at the last check. Only the monitor changes the list, under the lock of the mappings: a
//! thread that swaps a page out looks under that lock, too. The list's own lock is a leaf.

use foliomem_sync::Mutex;
use foliomem_sys::thread_control_block::{BLOCK_PAGES, pages};
use rustix::process::Pid;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// This many pages are known before the first check for ended threads.
const LOOK_MIN: usize = 64;

/// The pages of control blocks that stay resident.
#[derive(Debug, Default)]
pub struct ControlBlocks {
    /// The threads of the pages, by address.
    kept: Mutex<BTreeMap<usize, Pid>>,
    /// How many there are.
    len: AtomicUsize,
    /// How many there were when ended threads were looked for.
    looked_at: AtomicUsize,
}

impl ControlBlocks {
    /// The block of `thread` stays from now on.
    pub fn keep(&self, block: &Range<usize>, thread: Pid, has_ended: impl Fn(Pid) -> bool) {
        let mut kept = self.kept.lock();
        kept.extend(pages(block).map(|page| (page, thread)));
        if kept.len() > 2 * self.looked_at.load(Relaxed).max(LOOK_MIN / 2) {
            kept.retain(|_, &mut thread| !has_ended(thread));
            self.looked_at.store(kept.len(), Relaxed);
        }
        self.len.store(kept.len(), Relaxed);
    }

    /// In the child of a fork: only the pages of who has forked are a thread's, which has another
    /// id.
    pub fn forked(&self, own: [usize; BLOCK_PAGES], thread: Pid) {
        let mut kept = self.kept.lock();
        kept.retain(|page, _| own.contains(page));
        kept.values_mut().for_each(|known| *known = thread);
        self.len.store(kept.len(), Relaxed);
    }

    /// The first page in `range` that stays.
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
        for index in 1..=LOOK_MIN {
            blocks.keep(&block(index), thread(index as i32), |thread| thread.as_raw_nonzero().get() % 2 == 0);
        }
        assert_eq!(blocks.first_within(around(1)), Some(border(1) - PAGE_BYTES));
        assert_eq!(blocks.first_within(border(1)..border(2)), Some(border(1)));
        assert_eq!(blocks.first_within(around(2)), None, "thread 2 has ended");
        assert!(blocks.first_within(around(LOOK_MIN)).is_some(), "who ended later is not looked for yet");
        blocks.forked(pages(&block(3)), thread(99));
        assert_eq!(blocks.first_within(0..usize::MAX), Some(border(3) - PAGE_BYTES));
        assert_eq!(blocks.first_within(around(1)), None);
    }
}
