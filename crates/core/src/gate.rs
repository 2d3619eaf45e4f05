//! The gate: it stops the agent's threads while the program forks.
//!
//! `fork` copies the engine as it is at that moment, so no thread may be inside the engine or the
//! agent's heap. A worker enters the gate before it touches the engine or allocates, and leaves it
//! before it sleeps. The thread that quiesces the agent closes the gate, which waits until no
//! thread is inside, and opens it after the fork. A worker inside the gate never waits for a thread
//! of the program, except through the kernel.
//!
//! The gate is one word: bit 31 means closed, the other bits count the threads inside. No thread
//! enters a closed gate, so a thread that waits for the gate to open changes nothing and wakes
//! nobody. The gate is first in the lock order: a thread enters it before it takes any lock.

use crate::sync::Shared;
use crate::sync::atomic::{AtomicU32, Ordering};

const CLOSED: u32 = 1 << 31;

/// A way to sleep until a word changes: a futex.
pub trait WordWait: Default + Shared {
    /// Sleeps until woken, unless `word` differs from `now`. May return spuriously.
    fn wait(&self, word: &AtomicU32, now: u32);
    /// Wakes all threads that sleep on `word`.
    fn wake_all(&self, word: &AtomicU32);
}

/// The gate of one engine. A thread enters it to use the engine.
#[derive(Debug, Default)]
pub struct Gate<W: WordWait> {
    word: AtomicU32,
    waiting: W,
}

/// A guard that proves that the thread is inside the gate. Dropping it leaves the gate.
#[derive(Debug)]
pub struct Inside<'a, W: WordWait>(&'a Gate<W>);

impl<W: WordWait> Gate<W> {
    /// Enters the gate; waits while it is closed.
    pub fn enter(&self) -> Inside<'_, W> {
        let mut now = self.word.load(Ordering::Relaxed);
        loop {
            if now & CLOSED != 0 {
                self.waiting.wait(&self.word, now);
                now = self.word.load(Ordering::Relaxed);
                continue;
            }
            // Acquire pairs with the Release in `open`: this thread sees the changes of the closing
            // thread.
            match self.word.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Inside(self),
                Err(changed) => now = changed,
            }
        }
    }

    fn leave(&self) {
        // Release pairs with the Acquire in `close`: the closing thread sees the changes made
        // inside.
        if self.word.fetch_sub(1, Ordering::Release) == CLOSED | 1 {
            self.waiting.wake_all(&self.word);
        }
    }

    /// Closes the gate and waits until no thread is inside. One thread at a time may close it.
    pub fn close(&self) {
        // Acquire pairs with the Release in `leave`.
        let mut now = self.word.fetch_or(CLOSED, Ordering::Acquire) | CLOSED;
        while now != CLOSED {
            self.waiting.wait(&self.word, now);
            // Acquire pairs with the Release in `leave`.
            now = self.word.load(Ordering::Acquire);
        }
    }

    /// Opens the gate.
    pub fn open(&self) {
        // Release pairs with the Acquire in `enter`.
        self.word.fetch_and(!CLOSED, Ordering::Release);
        self.waiting.wake_all(&self.word);
    }

    /// Opens the gate in a fork's child, where only the caller exists. No thread is inside there,
    /// whatever the word was at the fork.
    pub fn reset(&self) {
        // Relaxed, because starting a thread orders this store before the thread's first step.
        self.word.store(0, Ordering::Relaxed);
    }
}

impl<W: WordWait> Drop for Inside<'_, W> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
