//! Sleeping on a word until another thread changes it, with a time limit or without.
//!
//! These are futexes of this address space. Under the feature `shuttle` they are a model of
//! futexes, which the schedule explorer sees: a wake-up that comes too early, or goes to another
//! word, fails a schedule test.

#[cfg(not(feature = "shuttle"))]
pub use kernel::{now_ns, wait, wait_for, wait_for_both, wake};
#[cfg(feature = "shuttle")]
pub use model::{now_ns, wait, wait_for, wait_for_both, wake};

/// A word that the kernel clears when a thread ends, and what it holds before.
#[derive(Clone, Copy, Debug)]
pub struct ExitWord {
    /// Where it is: maybe not mapped any more.
    pub address: usize,
    /// The thread's id.
    pub id: u32,
}

/// What a wait for two words has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// The first one has changed, or the time is over.
    Change,
    /// The exit word has been cleared.
    Exit,
    /// The exit word cannot be waited for.
    NoExitWord,
}

/// Wake all who sleep on a word.
pub const ALL: u32 = i32::MAX as u32;

#[cfg(not(feature = "shuttle"))]
mod kernel {
    use super::{ExitWord, Found};
    pub use crate::clock::now_ns;
    use crate::clock::timespec;
    use crate::thread::syscall3;
    use rustix::io::Errno;
    use rustix::thread::futex;
    use rustix::time::ClockId;
    use std::sync::atomic::{AtomicU32, Ordering};
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

    /// Sleeps until `word` is not `now` any more, or `exit` is cleared, or for `most`.
    pub fn wait_for_both(word: &AtomicU32, now: u32, exit: ExitWord, most: Duration) -> Found {
        let wait = |address: *mut u32, value: u32, flags| {
            let mut wait = futex::Wait::new();
            wait.val = value.into();
            wait.uaddr = futex::WaitPtr::new(address.cast());
            wait.flags = futex::WaitFlags::SIZE_U32 | flags;
            wait
        };
        let waits = [
            wait(word.as_ptr(), now, futex::WaitFlags::PRIVATE),
            // The kernel wakes by the shared kind of futex.
            wait(std::ptr::with_exposed_provenance_mut(exit.address), exit.id, futex::WaitFlags::empty()),
        ];
        let until = timespec(Duration::from_nanos(now_ns()) + most);
        match futex::waitv(&waits, futex::WaitvFlags::empty(), Some(&until), ClockId::Monotonic) {
            Ok(1) => {
                // The kernel wakes one only: whoever joins the thread is to be woken, too.
                wake_all_shared(exit.address);
                Found::Exit
            }
            // Relaxed: it only tells which of the words has changed.
            Err(Errno::AGAIN) if word.load(Ordering::Relaxed) == now => Found::Exit,
            // Unmapped, or the call is not allowed here.
            Err(Errno::FAULT | Errno::NOSYS | Errno::PERM | Errno::INVAL) => Found::NoExitWord,
            _ => Found::Change,
        }
    }

    fn wake_all_shared(address: usize) {
        const FUTEX_WAKE: usize = 1;
        let number = linux_raw_sys::general::__NR_futex as usize;
        // SAFETY: wakes those who wait at an address, whatever is there.
        unsafe { syscall3(number, address, FUTEX_WAKE, super::ALL as usize) };
    }

    /// Wakes up to `threads` of those that sleep on `word`.
    pub fn wake(word: &AtomicU32, threads: u32) {
        let _ = futex::wake(word, futex::Flags::PRIVATE, threads);
    }
}

#[cfg(feature = "shuttle")]
mod model {
    use super::{ExitWord, Found};
    use foliomem_sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
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

    /// Nothing ends in the model.
    pub fn wait_for_both(word: &AtomicU32, now: u32, _exit: ExitWord, most: Duration) -> Found {
        wait_for(word, now, most);
        Found::Change
    }

    /// Every second time the limit ends at once; else nobody comes to the rescue of whoever is not
    /// woken.
    pub fn wait_for(word: &AtomicU32, now: u32, most: Duration) {
        if shuttle::rand::thread_rng().gen_bool(0.5) {
            CLOCK_NS.fetch_add(most.as_nanos() as u64, SeqCst);
            foliomem_sync::back_off();
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
