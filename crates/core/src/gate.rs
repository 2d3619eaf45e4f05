//! The gate that stops the agent's threads for a fork.
//!
//! `fork` copies the engine as it stands at that instant, so no thread may be inside it then, nor in the agent's
//! heap. A worker passes the gate before it touches the engine or allocates, and leaves it before it sleeps; the
//! thread that has everything hold still closes the gate, which waits until nobody is inside, and opens it after
//! the fork. A worker inside the gate never waits for a thread of the program, except through the kernel.
//!
//! One word: bit 31 = closed, the rest counts who is inside. Nobody enters while it is closed, so that whoever
//! waits for that to end changes nothing and wakes nobody. Top of the lock order: the gate is passed before any
//! lock is taken.

use crate::sync::Shared;
use crate::sync::atomic::{AtomicU32, Ordering};

const CLOSED: u32 = 1 << 31;

/// How a thread sleeps until a word changes: a futex.
pub trait WordWait: Default + Shared {
    /// Sleeps until woken, unless `word` is not `now` any more. May return without reason.
    fn wait(&self, word: &AtomicU32, now: u32);
    /// Wakes whoever sleeps on `word`.
    fn wake_all(&self, word: &AtomicU32);
}

/// See the module.
#[derive(Debug, Default)]
pub struct Gate<W: WordWait> {
    word: AtomicU32,
    waiting: W,
}

/// Proof of being inside; leaves on drop.
#[derive(Debug)]
pub struct Inside<'a, W: WordWait>(&'a Gate<W>);

impl<W: WordWait> Gate<W> {
    /// Passes the gate, waiting while it is closed.
    pub fn enter(&self) -> Inside<'_, W> {
        let mut now = self.word.load(Ordering::Relaxed);
        loop {
            if now & CLOSED != 0 {
                self.waiting.wait(&self.word, now);
                now = self.word.load(Ordering::Relaxed);
                continue;
            }
            // Acquire pairs with the Release in `open`: what the closing thread did is seen.
            match self.word.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Inside(self),
                Err(changed) => now = changed,
            }
        }
    }

    fn leave(&self) {
        // Release pairs with the Acquire in `close`: what was done inside is seen by the closing
        // thread.
        if self.word.fetch_sub(1, Ordering::Release) == CLOSED | 1 {
            self.waiting.wake_all(&self.word);
        }
    }

    /// Closes the gate and waits until nobody is inside. One thread at a time may close it.
    pub fn close(&self) {
        // Acquire pairs with the Release in `leave`.
        let mut now = self.word.fetch_or(CLOSED, Ordering::Acquire) | CLOSED;
        while now != CLOSED {
            self.waiting.wait(&self.word, now);
            // Acquire pairs with the Release in `leave`.
            now = self.word.load(Ordering::Acquire);
        }
    }

    /// Opens it again.
    pub fn open(&self) {
        // Release pairs with the Acquire in `enter`.
        self.word.fetch_and(!CLOSED, Ordering::Release);
        self.waiting.wake_all(&self.word);
    }

    /// In a fork's child, where no thread but the caller exists: open, with nobody inside, whatever the
    /// word said at the instant of the fork.
    pub fn reset(&self) {
        // Relaxed: threads that are started later see it.
        self.word.store(0, Ordering::Relaxed);
    }
}

impl<W: WordWait> Drop for Inside<'_, W> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
