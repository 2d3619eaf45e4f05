//! The process exit notice: the kernel marks a word of the control segment when a process ends.
//!
//! A thread can register a list of locks that it may hold when it ends (set_robust_list(2)). Before
//! the kernel frees the thread's memory, also after SIGKILL and at exec, it marks each lock that
//! contains the thread's id. The monitor holds one such word as long as the process has its memory.
//! If a filter forbids the call, the word is never marked. There is no lock.

use crate::thread;
use rustix::process::Pid;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// A `struct robust_list_head` and the only element of its list.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ProcessExitNotice {
    /// Address of the first element.
    first: AtomicUsize,
    /// Distance from an element to its word, in bytes.
    offset: AtomicUsize,
    /// Address of a lock that the thread is about to take; always 0.
    pending: AtomicUsize,
    /// Address of the next element: the head, because there is only one.
    next: AtomicUsize,
}

/// The bit that the kernel sets in the word.
const FUTEX_OWNER_DIED: u32 = 1 << 30;
/// Size of `struct robust_list_head`, in bytes.
const HEAD_BYTES: usize = 3 * size_of::<usize>();

impl ProcessExitNotice {
    /// Lets the kernel mark `word` when the calling thread ends. `thread` is the thread's id; the
    /// thread has no other robust list.
    pub fn leave(&'static self, word: &'static AtomicU32, thread: Pid) {
        let element = (&raw const self.next).expose_provenance();
        self.first.store(element, Ordering::Relaxed);
        self.offset.store((&raw const *word).expose_provenance().wrapping_sub(element), Ordering::Relaxed);
        self.next.store((&raw const *self).expose_provenance(), Ordering::Relaxed);
        word.store(thread.as_raw_nonzero().get() as u32, Ordering::Relaxed);
        // SAFETY: the list and the word are static, and have the layout that set_robust_list(2)
        // requires.
        unsafe { thread::set_robust_list((&raw const *self).expose_provenance(), HEAD_BYTES) };
    }
}

/// Marks `word` as the kernel does when the thread ends.
pub fn mark(word: &AtomicU32) {
    word.fetch_or(FUTEX_OWNER_DIED, Ordering::Relaxed);
}

/// Returns whether the thread that registered `word` has ended.
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
