//! What the program says of memory that it has just got and may touch at once.
//!
//! The keeper samples the size of the process as often as a program could outgrow the limit, if it gets a CPU. On a busy machine it
//! does not, while the program fills what it has mapped. So a thread that gets a large piece of memory, for which there may be no
//! room, waits until the keeper has looked: what has just been mapped is managed before it is touched.
//!
//! What is allocated may also have been there before: the C library gives out again what was freed. Each time that the keeper has found
//! nothing new, twice as much is let pass before it is asked again, up to a quarter of the limit; until something new is found.
//!
//! Any number of threads may tell; the keeper alone answers. Two futex words, without locks.

use crate::clock::timespec;
use rustix::thread::futex;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

/// Nobody waits longer for the keeper: in the child of a fork there may be none yet.
const MOST: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug, Default)]
pub struct Growth {
    /// Times that somebody has told, modulo 2^32.
    told: AtomicU32,
    /// What of that the keeper has looked after.
    seen: AtomicU32,
    /// Times in a row that it has found nothing new.
    futile: AtomicU32,
    /// What may still be got before it is asked again.
    pass_pages: AtomicI64,
}

/// After the first time that nothing new is found, this share of the limit (1/2^n) may pass; after the last that counts, a quarter.
const FIRST_PASS_SHIFT: u32 = 7;
const LAST_PASS_SHIFT: u32 = 2;

impl Growth {
    /// Whether the keeper need not look at `pages` that a thread has got, going by what it has found lately.
    pub fn may_pass(&self, pages: i64) -> bool {
        self.pass_pages.load(Ordering::Relaxed) > 0 && self.pass_pages.fetch_sub(pages, Ordering::Relaxed) >= pages
    }

    /// A thread has got memory, and `wake`s the keeper to look at it; waits for that.
    pub fn tell(&self, wake: impl FnOnce()) {
        let mine = self.told.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        wake();
        let time = timespec(MOST);
        loop {
            let seen = self.seen.load(Ordering::Acquire);
            if seen.wrapping_sub(mine) as i32 >= 0 {
                return;
            }
            if futex::wait(&self.seen, futex::Flags::PRIVATE, seen, Some(&time)) == Err(rustix::io::Errno::TIMEDOUT) {
                return;
            }
        }
    }

    /// The keeper, before it looks: what [`answer`](Self::answer) takes when it has, if somebody waits for that.
    pub fn asked(&self) -> Option<u32> {
        let told = self.told.load(Ordering::Acquire);
        (told != self.seen.load(Ordering::Relaxed)).then_some(told)
    }

    /// The keeper has found something new, whoever asked.
    pub fn found(&self) {
        self.futile.store(0, Ordering::Relaxed);
        self.pass_pages.store(0, Ordering::Relaxed);
    }

    /// The keeper, which has been asked, has found nothing new.
    pub fn found_nothing(&self, limit_pages: i64) {
        let futile = self.futile.load(Ordering::Relaxed);
        let shift = FIRST_PASS_SHIFT.saturating_sub(futile).max(LAST_PASS_SHIFT);
        self.futile.store(futile.saturating_add(1), Ordering::Relaxed);
        self.pass_pages.store(limit_pages >> shift, Ordering::Relaxed);
    }

    /// The keeper has looked.
    pub fn answer(&self, asked: u32) {
        self.seen.store(asked, Ordering::Release);
        let _ = futex::wake(&self.seen, futex::Flags::PRIVATE, i32::MAX as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn who_tells_goes_on_when_the_keeper_has_looked() {
        let (growth, stop) = (Growth::default(), AtomicBool::new(false));
        // What there is, and what the keeper has seen of it.
        let (there, looked) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    if let Some(asked) = growth.asked() {
                        looked.store(there.load(Ordering::Acquire), Ordering::Release);
                        growth.answer(asked);
                    }
                    std::thread::yield_now();
                }
            });
            let tellers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..200 {
                            let mine = there.fetch_add(1, Ordering::AcqRel) + 1;
                            growth.tell(|| {});
                            assert!(looked.load(Ordering::Acquire) >= mine);
                        }
                    })
                })
                .collect();
            let told: Vec<_> = tellers.into_iter().map(|teller| teller.join()).collect();
            stop.store(true, Ordering::Release);
            assert!(told.iter().all(Result::is_ok));
        });
        assert_eq!(growth.asked(), None);
    }

    #[test]
    fn the_more_often_nothing_is_new_the_more_may_pass() {
        let growth = Growth::default();
        let passed = || (0..).take_while(|_| growth.may_pass(10)).count();
        assert_eq!(passed(), 0);
        let after = [(); 8].map(|()| {
            growth.found_nothing(1280);
            passed()
        });
        assert_eq!(after, [1, 2, 4, 8, 16, 32, 32, 32]);
        growth.found_nothing(1280);
        growth.found();
        assert_eq!(passed(), 0);
        growth.found_nothing(1280);
        assert_eq!(passed(), 1);
    }

    #[test]
    fn without_a_keeper_nobody_waits_for_ever() {
        let growth = Growth::default();
        growth.tell(|| {});
        assert_eq!(growth.asked(), Some(1));
    }
}
