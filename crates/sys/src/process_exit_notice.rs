//! The process exit notice: the kernel marks a word of the control segment when a process ends.
//!
//! A thread can register a list of locks in memory that it may hold when it ends
//! (set_robust_list(2)). Before the kernel gives the memory back, also after SIGKILL and at exec,
//! it marks each lock that has the thread's id in it. The monitor holds one such word as long as
//! the process has its memory. Where a filter forbids the call, the word is never marked. There is
//! no lock.

use crate::thread;
use rustix::process::Pid;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// `struct robust_list_head` and the one element of its list.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ProcessExitNotice {
    first: AtomicUsize,
    /// From an element to its word.
    offset: AtomicUsize,
    /// A lock that the thread is about to take: none.
    pending: AtomicUsize,
    /// The element points back to the head, so it is the last one.
    next: AtomicUsize,
}

const FUTEX_OWNER_DIED: u32 = 1 << 30;
const HEAD_BYTES: usize = 3 * size_of::<usize>();

impl ProcessExitNotice {
    /// Has `word` marked when the calling thread ends, which has no other such list. Its id is `thread`.
    pub fn leave(&'static self, word: &'static AtomicU32, thread: Pid) {
        let element = (&raw const self.next).expose_provenance();
        self.first.store(element, Ordering::Relaxed);
        self.offset.store((&raw const *word).expose_provenance().wrapping_sub(element), Ordering::Relaxed);
        self.next.store((&raw const *self).expose_provenance(), Ordering::Relaxed);
        word.store(thread.as_raw_nonzero().get() as u32, Ordering::Relaxed);
        // SAFETY: the list and the word live for ever, and are as set_robust_list(2) wants them.
        unsafe { thread::set_robust_list((&raw const *self).expose_provenance(), HEAD_BYTES) };
    }
}

/// Marks `word` as the kernel does.
pub fn mark(word: &AtomicU32) {
    word.fetch_or(FUTEX_OWNER_DIED, Ordering::Relaxed);
}

/// Whether the thread that held `word` has ended.
pub fn is_marked(word: &AtomicU32) -> bool {
    word.load(Ordering::Relaxed) & FUTEX_OWNER_DIED != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_marked_when_its_thread_ends() {
        let (notice, word): (&'static ProcessExitNotice, &'static AtomicU32) =
            (Box::leak(Box::default()), Box::leak(Box::default()));
        let thread = std::thread::spawn(move || {
            notice.leave(word, rustix::thread::gettid());
            assert!(!is_marked(word) && word.load(Ordering::Relaxed) > 0);
        });
        thread.join().unwrap();
        assert!(is_marked(word));
    }
}
