//! What the program says of memory that it has just got and may touch at once.
//!
//! The keeper samples the size of the process as often as a program could outgrow the limit, if it gets a CPU. On a busy machine it
//! does not, while the program fills what it has mapped. So a thread that gets a large piece of memory, for which there may be no
//! room, waits until the keeper has looked at that piece: it is registered before it is touched.
//!
//! What is allocated may also have been there before: the C library gives out again what was freed. Each time that the keeper has found
//! nothing new, twice as much is let pass before it is asked again, up to a quarter of the limit; until something new is found.
//!
//! | slot | meaning | left by |
//! |---|---|---|
//! | free | | a thread: taken |
//! | taken | a thread writes its range | that thread: told |
//! | told | the thread waits | the keeper: looked at; the thread, which has waited too long: free |
//! | looked at | the thread waits on | the keeper: answered; the thread, likewise: left |
//! | answered | | the thread: free |
//! | left | nobody waits | the keeper: free |
//!
//! Futex words, without locks: a thread of the program may be anywhere when another one forks.

use crate::clock::{now_ns, timespec};
use rustix::thread::futex;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// Nobody waits longer for the keeper: in the child of a fork there may be none yet.
const MOST_NS: u64 = 100_000_000;
/// Threads that can wait at a time. Others go on at once.
const SLOTS: usize = 8;
/// After the first time that nothing new is found, this share of the limit (1/2^n) may pass; after the last that counts, a quarter.
const FIRST_PASS_SHIFT: u32 = 7;
const LAST_PASS_SHIFT: u32 = 2;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const TOLD: u32 = 2;
const LOOKED_AT: u32 = 3;
const ANSWERED: u32 = 4;
const LEFT: u32 = 5;

#[derive(Debug, Default)]
struct Slot {
    state: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Slot {
    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Growth {
    slots: [Slot; SLOTS],
    /// Somebody has waited in vain since the keeper looked last.
    is_unheard: AtomicBool,
    /// Times in a row that nothing new was found.
    futile: AtomicU32,
    /// What may still be got before the keeper is asked again.
    pass_pages: AtomicI64,
}

/// A range that a thread waits for.
#[derive(Debug)]
pub struct Told<'a> {
    slot: &'a Slot,
    /// What the thread has got.
    pub range: Range<usize>,
}

impl Told<'_> {
    /// The keeper: the thread may go on.
    pub fn answer(self) {
        if self.slot.change(LOOKED_AT, ANSWERED) {
            let _ = futex::wake(&self.slot.state, futex::Flags::PRIVATE, 1);
        } else {
            self.slot.state.store(FREE, Ordering::Release);
        }
    }
}

impl Growth {
    /// Whether the keeper need not look at `pages` that a thread has got, going by what it has found lately.
    pub fn may_pass(&self, pages: i64) -> bool {
        self.pass_pages.load(Ordering::Relaxed) > 0 && self.pass_pages.fetch_sub(pages, Ordering::Relaxed) >= pages
    }

    /// A thread has got `range`, and `wake`s the keeper to look at it; waits for that.
    pub fn tell(&self, range: Range<usize>, wake: impl FnOnce()) {
        if self.is_unheard.load(Ordering::Relaxed) {
            return;
        }
        let Some(slot) = self.slots.iter().find(|slot| slot.change(FREE, TAKEN)) else { return };
        slot.start.store(range.start, Ordering::Relaxed);
        slot.end.store(range.end, Ordering::Relaxed);
        slot.state.store(TOLD, Ordering::Release);
        wake();
        let until_ns = now_ns() + MOST_NS;
        loop {
            let state = slot.state.load(Ordering::Acquire);
            if state == ANSWERED {
                slot.state.store(FREE, Ordering::Release);
                return;
            }
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 {
                self.is_unheard.store(true, Ordering::Relaxed);
                if slot.change(TOLD, FREE) || slot.change(LOOKED_AT, LEFT) {
                    return;
                }
                continue;
            }
            let _ =
                futex::wait(&slot.state, futex::Flags::PRIVATE, state, Some(&timespec(Duration::from_nanos(left_ns))));
        }
    }

    /// The keeper: it looks. What a thread waits for, if one does.
    pub fn next(&self) -> Option<Told<'_>> {
        self.is_unheard.store(false, Ordering::Relaxed);
        let slot = self.slots.iter().find(|slot| slot.change(TOLD, LOOKED_AT))?;
        Some(Told { slot, range: slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed) })
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

    /// In the child of a fork, where nobody waits.
    pub fn reset(&self) {
        self.slots.iter().for_each(|slot| slot.state.store(FREE, Ordering::Relaxed));
        self.is_unheard.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_tells_goes_on_when_the_keeper_has_looked() {
        const THREADS: usize = SLOTS / 2;
        let (growth, stop) = (Growth::default(), AtomicBool::new(false));
        let seen: [AtomicUsize; THREADS] = Default::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    while let Some(told) = growth.next() {
                        seen[told.range.start].store(told.range.end, Ordering::Release);
                        told.answer();
                    }
                    std::thread::yield_now();
                }
            });
            let tellers: Vec<_> = (0..THREADS)
                .map(|teller| {
                    let (growth, seen) = (&growth, &seen);
                    scope.spawn(move || {
                        (0..200)
                            .filter(|&turn| {
                                growth.tell(teller..turn, || {});
                                seen[teller].load(Ordering::Acquire) == turn
                            })
                            .count()
                    })
                })
                .collect();
            let heard: Vec<_> = tellers.into_iter().map(|teller| teller.join().unwrap()).collect();
            stop.store(true, Ordering::Release);
            // A test's keeper may starve, too.
            assert!(heard.iter().all(|&heard| heard > 100), "{heard:?}");
        });
        assert!(growth.slots.iter().all(|slot| slot.state.load(Ordering::Relaxed) == FREE));
    }

    #[test]
    fn without_a_keeper_nobody_waits_for_ever_and_no_more_than_once() {
        let growth = Growth::default();
        let mut woken = 0;
        (0..3).for_each(|_| growth.tell(0..1, || woken += 1));
        assert_eq!(woken, 1);
        // It looks too late, and hears the next one.
        assert!(growth.next().is_none());
        growth.tell(0..1, || woken += 1);
        assert_eq!(woken, 2);
    }

    #[test]
    fn who_leaves_while_the_keeper_looks_leaves_a_slot_that_is_free_in_the_end() {
        let growth = Growth::default();
        std::thread::scope(|scope| {
            let teller = scope.spawn(|| growth.tell(5..6, || {}));
            let told = loop {
                if let Some(told) = growth.next() {
                    break told;
                }
                std::thread::yield_now();
            };
            assert_eq!(told.range, 5..6);
            teller.join().unwrap();
            told.answer();
        });
        assert!(growth.slots.iter().all(|slot| slot.state.load(Ordering::Relaxed) == FREE));
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
}
