//! The control blocks of threads whose stacks may be managed: they stay in the program.
//!
//! The C library keeps a thread's control block at the top of its stack. When the thread ends, the kernel clears its id there, wakes
//! who joins it, and reads its list of robust mutexes; all of that while the thread counts as exiting, and Linux serves no
//! faults of userfaultfds then: who joins would wait for ever. So a thread on such a stack tells the keeper, before
//! anything else, where its block is. From then on nothing moves these pages out or protects them.
//!
//! They are known until a thread of that id is no more, which is looked up when twice as many are known as the last time.
//! Only the keeper changes them, while it holds the mappings: who moves a page out looks in the same hold. One leaf lock.

use foliomem_core::sync::Mutex;
use foliomem_core::units::PAGE_BYTES;
use rustix::process::Pid;
use std::arch::asm;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A block is not larger: glibc's `struct pthread`, with the area for rseq(2), has 2.3 KiB.
const BLOCK_BYTES: usize = 0xb00;
/// Pages that a block can lie across.
pub const BLOCK_PAGES: usize = BLOCK_BYTES.div_ceil(PAGE_BYTES) + 1;
/// So many pages are known before ended threads are looked for.
const LOOK_MIN: usize = 64;

/// The control block of the calling thread.
pub fn own() -> Range<usize> {
    let start: usize;
    // SAFETY: the x86-64 ABI keeps the address of the control block in its first word.
    unsafe { asm!("mov {}, fs:[0]", out(reg) start, options(nostack, readonly)) };
    start..start + BLOCK_BYTES
}

/// The pages of `block`; one twice where it lies in one.
pub fn pages(block: &Range<usize>) -> [usize; BLOCK_PAGES] {
    [block.start, block.end - 1].map(|address| address & !(PAGE_BYTES - 1))
}

/// See the module.
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

    /// In the child of a fork: only the pages of who has forked are a thread's, which has another id.
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

    fn thread(id: i32) -> Pid {
        Pid::from_raw(id).unwrap()
    }

    #[test]
    fn the_own_block_is_where_the_thread_id_is() {
        let (block, id) = (own(), rustix::thread::gettid().as_raw_nonzero().get());
        // SAFETY: it is the calling thread's, which is there and is read only.
        let words = unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<i32>(block.start), BLOCK_BYTES / 4 - 128)
        };
        assert!(words.contains(&id));
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
