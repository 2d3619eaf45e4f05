//! What the program says of memory that it has just got and may touch at once.
//!
//! The keeper samples the size of the process as often as a program could outgrow the limit, if it gets a CPU. On a busy machine it
//! does not, while the program fills what it has mapped. So whenever threads have got much, for which there may be no
//! room, the one that got the last of it waits until the keeper has looked: it is registered before it is touched, and so is what
//! the kernel has joined with it. For what was got before in small pieces the keeper looks everywhere then, before it hears the next one.
//!
//! What is allocated may also have been there before: the C library gives out again what was freed. Each time that the keeper has found
//! nothing new, twice as much is let pass before it is asked again, up to a quarter of the limit; until something new is found.
//! But of the heap that grows by `brk` it is known how far it is managed: what lies above that is new. (What grows within a mapping
//! that forbids access faults by itself: [`crate::adopt`].)
//!
//! While the keeper engages, anybody registers what is new, or waits in vain for an instant at which no mapping changes, all that allocate are *held*: many threads that
//! grow at the speed of memory keep a lock of the kernel's (that of the mappings) for themselves, each time that the keeper needs it, for some tens of milliseconds,
//! and of many that unmap all the time one is always at it.
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
use foliomem_core::units::PAGE_BYTES;
use rustix::process::Pid;
use rustix::thread::futex;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// Nobody waits longer for the keeper: in the child of a fork there may be none yet.
const MOST_NS: u64 = 100_000_000;
/// Threads that can wait at a time. Others go on at once.
const SLOTS: usize = 64;
/// Much is this share of the limit (1/2^n), and this at least: so much may pass after something new was found, and so much of
/// the heap need not be managed.
const MUCH_SHIFT: u32 = 6;
const MUCH_MIN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;
/// After the first time that nothing new is found, this share of the limit may pass; after the last that counts, a quarter.
const FIRST_PASS_SHIFT: u32 = 5;
const LAST_PASS_SHIFT: u32 = 2;
/// What lies further above the heap's end is elsewhere.
const HEAP_REACH_BYTES: usize = 1 << 40;
/// Where a heap ends of which nothing is managed: nothing is right above that.
const NO_HEAP: usize = usize::MAX / 2;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const TOLD: u32 = 2;
const LOOKED_AT: u32 = 3;
const ANSWERED: u32 = 4;
const LEFT: u32 = 5;

fn pages(range: &Range<usize>) -> i64 {
    range.len().div_ceil(PAGE_BYTES) as i64
}

/// What a thread tells of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// It has got a range, and may touch it at once.
    Got,
    /// It needs the mappings there whole, as the program has made them.
    Whole,
    /// It has begun, and has this id: the range is its control block, which is to stay.
    Begun(Pid),
}

impl What {
    /// As a word: thread ids are positive.
    fn word(self) -> i32 {
        match self {
            What::Got => 0,
            What::Whole => -1,
            What::Begun(thread) => thread.as_raw_nonzero().get(),
        }
    }

    fn from_word(word: i32) -> What {
        Pid::from_raw(word.max(0)).map_or(if word == 0 { What::Got } else { What::Whole }, What::Begun)
    }
}

#[derive(Debug, Default)]
struct Slot {
    state: AtomicU32,
    /// [`What::word`].
    what: AtomicI32,
    start: AtomicUsize,
    end: AtomicUsize,
    /// How often something had been found by then.
    finds: AtomicU32,
}

impl Slot {
    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// See the module.
#[derive(Debug)]
pub struct Growth {
    limit_pages: AtomicI64,
    slots: [Slot; SLOTS],
    /// After the slot that the keeper has heard last.
    heard: AtomicUsize,
    /// Somebody has waited in vain since the keeper looked last.
    is_unheard: AtomicBool,
    /// Times that something new was found.
    finds: AtomicU32,
    /// Times in a row that nothing was.
    futile: AtomicU32,
    /// What may still be got before the keeper is asked again.
    pass_pages: AtomicI64,
    /// Where the managed part of the heap ends.
    heap_end: AtomicUsize,
    /// What ends so far above this is told of: from there on the heap is to be managed.
    border: AtomicUsize,
    reach: AtomicUsize,
    /// How many hold all others: not 0 while they are held.
    held: AtomicU32,
}

/// All who allocate are held as long as this is there.
#[derive(Debug)]
pub struct Held<'a>(&'a Growth);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.0.held.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.release();
        }
    }
}

/// A range that a thread waits for.
#[derive(Debug)]
pub struct Told<'a> {
    slot: &'a Slot,
    /// What the thread tells of it.
    pub what: What,
    /// Where.
    pub range: Range<usize>,
    /// How often something had been found when the thread told it.
    pub finds: u32,
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
    /// Of a process under that limit.
    pub fn new(limit_pages: i64) -> Growth {
        Growth {
            limit_pages: AtomicI64::new(limit_pages),
            slots: std::array::from_fn(|_| Slot::default()),
            heard: AtomicUsize::new(0),
            is_unheard: AtomicBool::new(false),
            finds: AtomicU32::new(0),
            futile: AtomicU32::new(0),
            pass_pages: AtomicI64::new(0),
            heap_end: AtomicUsize::new(NO_HEAP),
            border: AtomicUsize::new(NO_HEAP),
            reach: AtomicUsize::new(HEAP_REACH_BYTES),
            held: AtomicU32::new(0),
        }
    }

    /// The limit is this now.
    pub fn limit_is(&self, limit_pages: i64) {
        self.limit_pages.store(limit_pages, Ordering::Relaxed);
    }

    fn much_pages(&self) -> i64 {
        (self.limit_pages.load(Ordering::Relaxed) >> MUCH_SHIFT).max(MUCH_MIN_PAGES)
    }

    /// Whether `range` alone is worth telling of.
    pub fn is_much(&self, range: &Range<usize>) -> bool {
        pages(range) >= self.much_pages()
    }

    /// Whether somebody is to be told of what ends at `end`, however small it is: well above the part of the heap that is managed,
    /// or anywhere while all are held.
    #[inline]
    pub fn is_watched(&self, end: usize) -> bool {
        end.wrapping_sub(self.border.load(Ordering::Relaxed)) < self.reach.load(Ordering::Relaxed)
    }

    /// Whether the keeper need not look at `range`, which a thread has got, going by what it has found lately.
    pub fn may_pass(&self, range: &Range<usize>) -> bool {
        let pages = pages(range);
        !self.is_watched(range.end)
            && self.pass_pages.load(Ordering::Relaxed) > 0
            && self.pass_pages.fetch_sub(pages, Ordering::Relaxed) >= pages
    }

    /// Holds all who allocate, until the returned guard is gone. For threads of the agent.
    pub fn hold(&self) -> Held<'_> {
        self.held.fetch_add(1, Ordering::Relaxed);
        self.reach.store(usize::MAX, Ordering::Release);
        Held(self)
    }

    fn release(&self) {
        self.reach.store(HEAP_REACH_BYTES, Ordering::Relaxed);
        let _ = futex::wake(&self.held, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// A thread has got something; returns when nobody is held.
    pub fn wait_while_held(&self) {
        let held = self.held.load(Ordering::Acquire);
        if held != 0 {
            // Woken by the wrong one, it goes on.
            let most = timespec(Duration::from_nanos(MOST_NS));
            let _ = futex::wait(&self.held, futex::Flags::PRIVATE, held, Some(&most));
        }
    }

    /// A part of the heap is managed up to `end`. (Others may be further up.)
    pub fn heap_is_managed(&self, end: usize) {
        let known = self.heap_end.load(Ordering::Relaxed);
        if known == NO_HEAP || known < end {
            self.heap_ends(end);
        }
    }

    fn heap_ends(&self, end: usize) {
        self.heap_end.store(end, Ordering::Relaxed);
        self.border.store(end + self.much_pages() as usize * PAGE_BYTES, Ordering::Relaxed);
    }

    /// The program has unmapped `range`, which may be the heap's end.
    pub fn unmapped(&self, range: &Range<usize>) {
        let end = self.heap_end.load(Ordering::Relaxed);
        if range.start < end && end <= range.end {
            self.heap_ends(range.start);
        }
    }

    /// A thread tells of `range`, and `wake`s the keeper to look at it; waits for that. Whether it has looked.
    pub fn tell(&self, what: What, range: Range<usize>, wake: impl FnOnce()) -> bool {
        if self.is_unheard.load(Ordering::Relaxed) {
            return false;
        }
        let Some(slot) = self.slots.iter().find(|slot| slot.change(FREE, TAKEN)) else { return false };
        slot.what.store(what.word(), Ordering::Relaxed);
        slot.start.store(range.start, Ordering::Relaxed);
        slot.end.store(range.end, Ordering::Relaxed);
        slot.finds.store(self.finds.load(Ordering::Relaxed), Ordering::Relaxed);
        slot.state.store(TOLD, Ordering::Release);
        wake();
        let until_ns = now_ns() + MOST_NS;
        loop {
            let state = slot.state.load(Ordering::Acquire);
            if state == ANSWERED {
                slot.state.store(FREE, Ordering::Release);
                return true;
            }
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 {
                self.is_unheard.store(true, Ordering::Relaxed);
                if slot.change(TOLD, FREE) || slot.change(LOOKED_AT, LEFT) {
                    return false;
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
        // All in turn: who tells again at once does not keep others waiting.
        let start = self.heard.load(Ordering::Relaxed);
        let index = (start..start + SLOTS).find(|index| self.slots[index % SLOTS].change(TOLD, LOOKED_AT))?;
        self.heard.store((index + 1) % SLOTS, Ordering::Relaxed);
        let slot = &self.slots[index % SLOTS];
        let what = What::from_word(slot.what.load(Ordering::Relaxed));
        let range = slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed);
        Some(Told { slot, what, range, finds: slot.finds.load(Ordering::Relaxed) })
    }

    /// The keeper: whether somebody waits for it to look.
    pub fn is_told(&self) -> bool {
        self.slots.iter().any(|slot| slot.state.load(Ordering::Acquire) == TOLD)
    }

    /// The keeper has found something new, whoever asked.
    pub fn found(&self) {
        self.finds.fetch_add(1, Ordering::Relaxed);
        self.futile.store(0, Ordering::Relaxed);
        self.pass_pages.store(self.much_pages(), Ordering::Relaxed);
    }

    /// The keeper, which has been asked to look at `range` when something had been found so often, has found nothing new.
    pub fn found_nothing(&self, range: &Range<usize>, finds: u32) {
        if finds != self.finds.load(Ordering::Relaxed) {
            // It was new then, and found with something else.
            return;
        }
        // (Not what is watched only because somebody holds.)
        if range.end.wrapping_sub(self.border.load(Ordering::Relaxed)) < HEAP_REACH_BYTES {
            // Whatever it is, it cannot be managed.
            self.heap_ends(range.end);
        }
        let futile = self.futile.load(Ordering::Relaxed);
        let shift = FIRST_PASS_SHIFT.saturating_sub(futile).max(LAST_PASS_SHIFT);
        self.futile.store(futile.saturating_add(1), Ordering::Relaxed);
        self.pass_pages.store(self.limit_pages.load(Ordering::Relaxed) >> shift, Ordering::Relaxed);
    }

    /// In the child of a fork, where nobody waits.
    pub fn reset(&self) {
        self.slots.iter().for_each(|slot| slot.state.store(FREE, Ordering::Relaxed));
        self.is_unheard.store(false, Ordering::Relaxed);
        self.held.store(0, Ordering::Relaxed);
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT_PAGES: i64 = 128 * MUCH_MIN_PAGES;

    #[test]
    fn who_tells_goes_on_when_the_keeper_has_looked() {
        const THREADS: usize = SLOTS / 2;
        let (growth, stop) = (Growth::new(LIMIT_PAGES), AtomicBool::new(false));
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
                                growth.tell(What::Got, teller..turn, || {})
                                    && seen[teller].load(Ordering::Acquire) == turn
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
        let growth = Growth::new(LIMIT_PAGES);
        let mut woken = 0;
        assert!(!(0..3).any(|_| growth.tell(What::Got, 0..1, || woken += 1)));
        assert_eq!(woken, 1);
        // It looks too late, and hears the next one.
        assert!(growth.next().is_none());
        growth.tell(What::Got, 0..1, || woken += 1);
        assert_eq!(woken, 2);
    }

    #[test]
    fn the_keeper_hears_what_a_thread_tells() {
        let growth = Growth::new(LIMIT_PAGES);
        for what in [What::Got, What::Whole, What::Begun(Pid::from_raw(7).unwrap())] {
            std::thread::scope(|scope| {
                let teller = scope.spawn(|| growth.tell(what, 5..6, || {}));
                let told = loop {
                    if let Some(told) = growth.next() {
                        break told;
                    }
                };
                assert_eq!((told.what, told.range.clone()), (what, 5..6));
                told.answer();
                assert!(teller.join().unwrap());
            });
        }
    }

    #[test]
    fn who_leaves_while_the_keeper_looks_leaves_a_slot_that_is_free_in_the_end() {
        let growth = Growth::new(LIMIT_PAGES);
        std::thread::scope(|scope| {
            let teller = scope.spawn(|| growth.tell(What::Whole, 5..6, || {}));
            let told = loop {
                if let Some(told) = growth.next() {
                    break told;
                }
                std::thread::yield_now();
            };
            assert_eq!((told.what, told.range.clone()), (What::Whole, 5..6));
            teller.join().unwrap();
            told.answer();
        });
        assert!(growth.slots.iter().all(|slot| slot.state.load(Ordering::Relaxed) == FREE));
    }

    #[test]
    fn who_is_held_goes_on_when_released() {
        let growth = Growth::new(LIMIT_PAGES);
        growth.wait_while_held();
        let (held, other) = (growth.hold(), growth.hold());
        drop(other);
        assert!([64, 0x5555_0000_0000, 0x7f00_0000_0000].iter().all(|&end| growth.is_watched(end)));
        let gone_on = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let wait = || {
                growth.wait_while_held();
                gone_on.fetch_add(1, Ordering::Release);
            };
            let waiting = [(); 3].map(|()| scope.spawn(wait));
            drop(held);
            waiting.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(gone_on.load(Ordering::Acquire), 3);
        });
        assert!(!growth.is_watched(64));
        // The child of a fork has the word, but not who holds.
        std::mem::forget(growth.hold());
        growth.wait_while_held();
        growth.reset();
        assert!(!growth.is_watched(64));
    }

    #[test]
    fn the_more_often_nothing_is_new_the_more_may_pass() {
        let growth = Growth::new(LIMIT_PAGES);
        let piece = 0..MUCH_MIN_PAGES as usize * PAGE_BYTES;
        let passed = || (0..).take_while(|_| growth.may_pass(&piece)).count();
        assert_eq!(passed(), 0);
        let after = [(); 6].map(|()| {
            growth.found_nothing(&(0..0), growth.finds.load(Ordering::Relaxed));
            passed()
        });
        assert_eq!(after, [4, 8, 16, 32, 32, 32]);
        let before = growth.finds.load(Ordering::Relaxed);
        growth.found();
        assert_eq!(passed(), 2);
        growth.found_nothing(&(0..0), before);
        assert_eq!(passed(), 0, "it was found with something else");
        growth.found_nothing(&(0..0), growth.finds.load(Ordering::Relaxed));
        assert_eq!(passed(), 4);
    }

    #[test]
    fn what_lies_above_the_managed_heap_is_new() {
        const END: usize = 0x5555_0000_0000;
        let growth = Growth::new(LIMIT_PAGES);
        let is_new = |start: usize, bytes: usize| {
            growth.found_nothing(&(0..0), growth.finds.load(Ordering::Relaxed));
            !growth.may_pass(&(start..start + bytes))
        };
        let above = END + growth.much_pages() as usize * PAGE_BYTES;
        assert!([END, above, 0x40_0000, 0x7f00_0000_0000].iter().all(|&start| !is_new(start, 64)), "no heap is known");
        growth.heap_is_managed(END);
        assert_eq!([END - 64, END, above - 64, above].map(|start| is_new(start, 32)), [false, false, false, true]);
        assert!(!is_new(0x7f00_0000_0000, 64), "another mapping");
        growth.unmapped(&(END..END + 64));
        growth.unmapped(&(END - 128..END - 64));
        assert!(!is_new(above - 64, 32));
        growth.unmapped(&(END - 64..END + 64));
        assert!(is_new(above - 64, 64), "it has shrunk");
        growth.heap_is_managed(END);
        growth.heap_is_managed(END - 4096);
        assert_eq!([above - 64, above].map(|start| is_new(start, 32)), [false, true], "no end, but further down");
        growth.found_nothing(&(above..above + 64), 0);
        assert!(!is_new(above, 32), "it cannot be managed");
    }
}
