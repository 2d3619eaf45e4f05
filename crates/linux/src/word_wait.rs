//! Sleeping on a word until another thread changes it, with a time limit or without.
//!
//! These are futexes of this address space. Under the feature `shuttle` they are a model of
//! futexes, which the schedule explorer sees: a wake-up that comes too early, or goes to another
//! word, fails a schedule test.

#[cfg(not(feature = "shuttle"))]
pub use kernel::{now_ns, wait, wait_for, wake};
#[cfg(feature = "shuttle")]
pub use model::{now_ns, wait, wait_for, wake};

/// Wake all who sleep on a word.
pub const ALL: u32 = i32::MAX as u32;

#[cfg(not(feature = "shuttle"))]
mod kernel {
    pub use crate::clock::now_ns;
    use crate::clock::timespec;
    use rustix::thread::futex;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    /// Sleeps until woken, unless `word` is not `now` any more. May return without reason.
    pub fn wait(word: &AtomicU32, now: u32) {
        // An error is a return without reason: the caller looks again.
        let _ = futex::wait(word, futex::Flags::PRIVATE, now, None);
    }

    /// Likewise, for `most` at most.
    pub fn wait_for(word: &AtomicU32, now: u32, most: Duration) {
        let _ = futex::wait(word, futex::Flags::PRIVATE, now, Some(&timespec(most)));
    }

    /// Wakes up to `threads` of those that sleep on `word`.
    pub fn wake(word: &AtomicU32, threads: u32) {
        let _ = futex::wake(word, futex::Flags::PRIVATE, threads);
    }
}

#[cfg(feature = "shuttle")]
mod model {
    use foliomem_core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
    use shuttle::rand::Rng;
    use shuttle::sync::{Condvar, Mutex};
    use std::time::Duration;

    /// Who sleeps, and on which word.
    #[derive(Default)]
    struct Sleepers {
        asleep: Vec<(usize, u64)>,
        numbers: u64,
    }

    shuttle::lazy_static! {
        static ref SLEEPERS: Mutex<Sleepers> = Mutex::new(Sleepers::default());
        static ref WOKEN: Condvar = Condvar::new();
        static ref CLOCK_NS: AtomicU64 = AtomicU64::new(1);
    }

    fn address(word: &AtomicU32) -> usize {
        std::ptr::from_ref(word).addr()
    }

    /// Goes on when time limits end.
    pub fn now_ns() -> u64 {
        CLOCK_NS.load(SeqCst)
    }

    /// The kernel compares and goes to sleep in one step.
    pub fn wait(word: &AtomicU32, now: u32) {
        let Ok(mut sleepers) = SLEEPERS.lock() else { return };
        if word.load(SeqCst) != now {
            return;
        }
        let me = (address(word), sleepers.numbers);
        sleepers.numbers += 1;
        sleepers.asleep.push(me);
        while sleepers.asleep.contains(&me) {
            let Ok(woken) = WOKEN.wait(sleepers) else { return };
            sleepers = woken;
        }
    }

    /// Every second time the limit ends at once; else nobody comes to the rescue of whoever is not
    /// woken.
    pub fn wait_for(word: &AtomicU32, now: u32, most: Duration) {
        if shuttle::rand::thread_rng().gen_bool(0.5) {
            CLOCK_NS.fetch_add(most.as_nanos() as u64, SeqCst);
            foliomem_core::sync::yield_now();
        } else {
            wait(word, now);
        }
    }

    /// Wakes those that have slept longest.
    pub fn wake(word: &AtomicU32, threads: u32) {
        let Ok(mut sleepers) = SLEEPERS.lock() else { return };
        let (word, mut left) = (address(word), threads);
        sleepers.asleep.retain(|&(on, _)| {
            let is_woken = on == word && left > 0;
            left -= u32::from(is_woken);
            !is_woken
        });
        WOKEN.notify_all();
    }
}
