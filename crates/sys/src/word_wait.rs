//! Sleeping on a word until another thread changes it, with or without a time limit.
//!
//! The words are futexes of this address space. With the feature `shuttle` they are a model of
//! futexes for the schedule explorer. There a wake-up that comes too early, or goes to another
//! word, fails a schedule test. There is no lock, except inside of the model.

#[cfg(not(feature = "shuttle"))]
pub use kernel::{now_ns, wait, wait_for, wait_for_both, wake};
#[cfg(feature = "shuttle")]
pub use model::{now_ns, wait, wait_for, wait_for_both, wake};

/// A word that the kernel clears when a thread ends, and its value until then.
#[derive(Clone, Copy, Debug)]
pub struct ExitWord {
    /// Address of the word, which may be unmapped.
    pub address: usize,
    /// The thread's id, the value of the word.
    pub id: u32,
}

/// The reason why a wait for two words ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// The first word has changed, or the time is over.
    Change,
    /// The exit word has been cleared.
    Exit,
    /// Nobody can wait for the exit word: it is unmapped, or a filter forbids the call.
    NoExitWord,
}

/// Number of threads for [`wake`]: all that sleep on the word.
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

    /// Sleeps until woken, unless `word` differs from `now`. It may return without a reason.
    pub fn wait(word: &AtomicU32, now: u32) {
        // After an error the caller checks the word again, as after any return.
        let _ = futex::wait(word, futex::Flags::PRIVATE, now, None);
    }

    /// Sleeps until woken, for at most `max_time`, unless `word` differs from `now`. It may return
    /// without a reason.
    pub fn wait_for(word: &AtomicU32, now: u32, max_time: Duration) {
        let _ = futex::wait(word, futex::Flags::PRIVATE, now, Some(&timespec(max_time)));
    }

    /// Sleeps until `word` differs from `now`, the kernel clears `exit`, or `max_time` is over.
    pub fn wait_for_both(word: &AtomicU32, now: u32, exit: ExitWord, max_time: Duration) -> Found {
        let wait = |address: *mut u32, value: u32, flags| {
            let mut wait = futex::Wait::new();
            wait.val = value.into();
            wait.uaddr = futex::WaitPtr::new(address.cast());
            wait.flags = futex::WaitFlags::SIZE_U32 | flags;
            wait
        };
        let waits = [
            wait(word.as_ptr(), now, futex::WaitFlags::PRIVATE),
            // The kernel wakes sleepers on the exit word with a futex of the shared kind.
            wait(std::ptr::with_exposed_provenance_mut(exit.address), exit.id, futex::WaitFlags::empty()),
        ];
        let until = timespec(Duration::from_nanos(now_ns()) + max_time);
        match futex::waitv(&waits, futex::WaitvFlags::empty(), Some(&until), ClockId::Monotonic) {
            Ok(1) => {
                // The kernel wakes only one sleeper, but a thread that joins the ended one needs
                // it, too.
                wake_all_shared(exit.address);
                Found::Exit
            }
            // Relaxed suffices: the value only shows which of the two words has changed.
            Err(Errno::AGAIN) if word.load(Ordering::Relaxed) == now => Found::Exit,
            // The word is unmapped, or the call is not allowed here.
            Err(Errno::FAULT | Errno::NOSYS | Errno::PERM | Errno::INVAL) => Found::NoExitWord,
            _ => Found::Change,
        }
    }

    /// Wakes all threads that sleep at `address` with a futex of the shared kind.
    fn wake_all_shared(address: usize) {
        const FUTEX_WAKE: usize = 1;
        let number = linux_raw_sys::general::__NR_futex as usize;
        // SAFETY: FUTEX_WAKE does not access the word, so any address is allowed.
        unsafe { syscall3(number, address, FUTEX_WAKE, super::ALL as usize) };
    }

    /// Wakes up to `threads` of the threads that sleep on `word`.
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

    /// The sleeping threads, each with its word and its number.
    #[derive(Default)]
    struct Sleepers {
        asleep: Vec<(usize, u64)>,
        numbers: u64,
    }

    shuttle::lazy_static! {
        /// The sleeping threads.
        static ref SLEEPERS: Mutex<Sleepers> = Mutex::new(Sleepers::default());
        /// Signalled whenever threads are woken.
        static ref WOKEN: Condvar = Condvar::new();
        /// The clock of the model, in nanoseconds.
        static ref CLOCK_NS: AtomicU64 = AtomicU64::new(1);
    }

    /// Returns the address that identifies `word`.
    fn address(word: &AtomicU32) -> usize {
        std::ptr::from_ref(word).addr()
    }

    /// Returns a time that advances only when time limits end.
    pub fn now_ns() -> u64 {
        CLOCK_NS.load(SeqCst)
    }

    /// Sleeps until woken, unless `word` differs from `now`. Like the kernel, it compares and goes
    /// to sleep in one step.
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

    /// Waits for `word` only: no thread ends in the model.
    pub fn wait_for_both(word: &AtomicU32, now: u32, _exit: ExitWord, max_time: Duration) -> Found {
        wait_for(word, now, max_time);
        Found::Change
    }

    /// Lets the time limit end at once every second time. In the other cases there is no limit, so
    /// a missing wake-up becomes a deadlock that the explorer finds.
    pub fn wait_for(word: &AtomicU32, now: u32, max_time: Duration) {
        if shuttle::rand::thread_rng().gen_bool(0.5) {
            CLOCK_NS.fetch_add(max_time.as_nanos() as u64, SeqCst);
            foliomem_sync::back_off();
        } else {
            wait(word, now);
        }
    }

    /// Wakes up to `threads` of the threads that sleep on `word`, the longest sleepers first.
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
