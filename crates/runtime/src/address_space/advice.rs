//! Advice: what the program says about huge pages in its mappings (MADV_HUGEPAGE, MADV_NOHUGEPAGE),
//! and whether forks copy them (MADV_DOFORK, MADV_DONTFORK).
//!
//! The kernel keeps advice in the flags of a mapping. Only `smaps` shows them, and reading it walks
//! all page tables. So the agent reads `smaps` once, when it activates. From then on the hooks
//! *notify* it of a call after the kernel has made it. A thread that looks up a mapping *receives*
//! the notices first. Advice for managed memory is kept with its range
//! ([`crate::address_space::ranges`]) and follows it as the kernel's advice does. Advice for memory
//! that is not managed yet waits until the memory is adopted. It then holds only if it covers the
//! whole mapping, because it would have split the mapping otherwise. An inline system call sends no
//! notice.
//!
//! Notifying takes no lock and never waits: a signal handler of the thread may need a fault served,
//! and the thread may be gone in the child of a fork. If very many calls come at once, the last
//! ones are lost. A child that has memory that it should not have is better than one that lacks
//! memory: after a lost MADV_DOFORK, forks copy everything.
//!
//! Lock order: waiting advice, then the lock of the ranges.

use crate::address_space::ranges::{Madvice, RangeAdvice, Ranges};
use foliomem_sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use foliomem_sync::{Mutex, ranks};
use foliomem_sys::memory_advice::Forks;
use foliomem_types::size_policy::Advice;
use std::ops::Range;

/// Number of notices that can wait to be received. (Small for the schedule explorer, so that it
/// fills the ring.)
const CALLS: usize = if cfg!(feature = "shuttle") { 4 } else { 256 };

/// One notice. The writer with turn `n` may fill it while `turn == n`; it is complete when `turn ==
/// n + 1`.
#[derive(Debug)]
struct Call {
    turn: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    /// [`Madvice::word`].
    advice: AtomicUsize,
}

impl Madvice {
    fn word(self) -> usize {
        match self {
            Madvice::HugePages(Advice::NoHuge | Advice::None) => 0,
            Madvice::HugePages(Advice::Huge) => 1,
            Madvice::Forks(Forks::Copy) => 2,
            Madvice::Forks(Forks::LeaveOut) => 3,
        }
    }

    fn from_word(word: usize) -> Madvice {
        match word {
            0 => Madvice::HugePages(Advice::NoHuge),
            1 => Madvice::HugePages(Advice::Huge),
            2 => Madvice::Forks(Forks::Copy),
            _ => Madvice::Forks(Forks::LeaveOut),
        }
    }
}

/// The program's advice: a ring of notices, and the advice for memory that is not managed yet.
#[derive(Debug)]
pub struct Advices {
    calls: [Call; CALLS],
    next_posted: AtomicUsize,
    next_received: AtomicUsize,
    /// A notice of MADV_DOFORK was lost.
    has_lost_copies: AtomicBool,
    waiting: Mutex<Ranges, ranks::Advice>,
}

impl Default for Advices {
    fn default() -> Advices {
        let zero = || AtomicUsize::new(0);
        let call = |turn| Call { turn: AtomicUsize::new(turn), start: zero(), end: zero(), advice: zero() };
        Advices {
            calls: std::array::from_fn(call),
            next_posted: zero(),
            next_received: zero(),
            has_lost_copies: AtomicBool::new(false),
            waiting: Mutex::new(Ranges::default()),
        }
    }
}

impl Advices {
    /// Notes advice that the kernel has accepted. Any thread may call, in any state.
    pub fn notify(&self, range: Range<usize>, advice: Madvice) {
        if range.is_empty() {
            return;
        }
        let mut turn = self.next_posted.load(Ordering::Relaxed);
        loop {
            let call = &self.calls[turn % CALLS];
            // Acquire pairs with the Release in `receive` that empties the notice: it has been
            // read.
            let ahead = call.turn.load(Ordering::Acquire).wrapping_sub(turn).cast_signed();
            if ahead < 0 {
                if advice == Madvice::Forks(Forks::Copy) {
                    self.has_lost_copies.store(true, Ordering::Relaxed);
                }
                return;
            }
            let taken = ahead == 0
                && self
                    .next_posted
                    .compare_exchange(turn, turn.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if taken {
                call.start.store(range.start, Ordering::Relaxed);
                call.end.store(range.end, Ordering::Relaxed);
                call.advice.store(advice.word(), Ordering::Relaxed);
                // Release pairs with the Acquire in `receive`.
                call.turn.store(turn.wrapping_add(1), Ordering::Release);
                return;
            }
            turn = self.next_posted.load(Ordering::Relaxed);
        }
    }

    /// Applies the notices to the managed ranges; advice about other memory waits.
    pub fn receive(&self, managed: &Ranges) {
        // Acquire pairs with the Release in `notify`: the notice is complete.
        let is_written = |turn: usize| self.calls[turn % CALLS].turn.load(Ordering::Acquire) == turn.wrapping_add(1);
        if !is_written(self.next_received.load(Ordering::Relaxed)) {
            return;
        }
        let waiting = self.waiting.lock();
        let mut turn = self.next_received.load(Ordering::Relaxed);
        while is_written(turn) {
            let call = &self.calls[turn % CALLS];
            let range = call.start.load(Ordering::Relaxed)..call.end.load(Ordering::Relaxed);
            let advice = Madvice::from_word(call.advice.load(Ordering::Relaxed));
            // Release pairs with the Acquire in `notify`, which overwrites the notice.
            call.turn.store(turn.wrapping_add(CALLS), Ordering::Release);
            turn = turn.wrapping_add(1);
            managed.advise(range.clone(), advice);
            for part in managed.missing(range) {
                waiting.insert(part.clone());
                waiting.advise(part, advice);
            }
        }
        self.next_received.store(turn, Ordering::Relaxed);
    }

    /// Notes the advice that `smaps` shows for a mapping.
    pub fn found(&self, mapping: Range<usize>, advice: RangeAdvice) {
        let waiting = self.waiting.lock();
        waiting.remove(mapping.clone());
        waiting.insert_advised(mapping, advice);
    }

    /// Returns the advice that holds for `part` of `mapping`, which becomes managed: it waits no
    /// longer. The mapping is as the kernel showed it before the part was left out of forks.
    pub fn take_for(&self, managed: &Ranges, part: &Range<usize>, mapping: &Range<usize>) -> RangeAdvice {
        let waiting = self.waiting.lock();
        // A mapping that has grown keeps its advice.
        let known = managed.advised_within(mapping.clone()).first().map(|known| known.advice);
        let advice = known.unwrap_or_else(|| {
            let said = waiting.advised_within(mapping.clone());
            let first = said.first().map_or(RangeAdvice::default(), |said| said.advice);
            let whole = waiting.missing(mapping.clone()).is_empty() && said.iter().all(|said| said.advice == first);
            if whole { first } else { RangeAdvice::default() }
        });
        waiting.remove(part.clone());
        advice
    }

    /// Returns the parts of the managed ranges that forks copy.
    pub fn copied_by_forks(&self, managed: &Ranges) -> Vec<Range<usize>> {
        self.receive(managed);
        let copies_all = self.has_lost_copies.load(Ordering::Relaxed);
        let mut parts = managed.advised_within(0..usize::MAX);
        parts.retain(|part| copies_all || part.advice.forks == Forks::Copy);
        parts.into_iter().map(|part| part.range).collect()
    }

    /// Returns whether there is advice about memory that is not managed.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.lock().is_empty()
    }

    /// Forgets advice about memory that is no longer mapped.
    pub fn forget_unmapped(&self, mapped: &Ranges) {
        let waiting = self.waiting.lock();
        for gone in waiting.snapshot().into_iter().flat_map(|said| mapped.missing(said)) {
            waiting.remove(gone);
        }
    }

    /// Drops notices that threads of the parent have not completed, in the child of a fork. The
    /// caller is the only thread of the agent.
    pub fn start_anew(&self, managed: &Ranges) {
        self.receive(managed);
        let turn = self.next_posted.load(Ordering::Relaxed);
        for next in turn..turn + CALLS {
            self.calls[next % CALLS].turn.store(next, Ordering::Relaxed);
        }
        self.next_received.store(turn, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: usize = 24;

    fn madvice(word: usize) -> Madvice {
        Madvice::from_word(word)
    }

    fn advice_of(managed: &Ranges, page: usize) -> Option<RangeAdvice> {
        managed.containing(page).map(|known| known.advice)
    }

    proptest! {
        #[test]
        fn a_managed_page_has_the_last_advice(
            calls in prop::collection::vec((0..PAGES, 1..PAGES, 0usize..4, any::<bool>()), 0..600),
        ) {
            let (advices, managed) = (Advices::default(), Ranges::default());
            managed.insert(0..PAGES / 2);
            let mut expected = [RangeAdvice::default(); PAGES];
            for (start, len, word, receive) in calls {
                let range = start..(start + len).min(PAGES);
                advices.notify(range.clone(), madvice(word));
                expected[range].iter_mut().for_each(|advice| *advice = advice.after(madvice(word)));
                if receive {
                    advices.receive(&managed);
                    for (page, &expected) in expected.iter().enumerate() {
                        prop_assert_eq!(advice_of(&managed, page), (page < PAGES / 2).then_some(expected));
                    }
                }
            }
            // Advice about the rest has waited for its adoption.
            advices.receive(&managed);
            let rest = PAGES / 2..PAGES;
            let advice = advices.take_for(&managed, &rest, &rest);
            managed.insert_in(&rest, rest.clone(), advice);
            let first = expected[rest.start];
            let same = expected[rest.clone()].iter().all(|&other| other == first);
            let whole = if same { first } else { RangeAdvice::default() };
            prop_assert!(rest.clone().all(|page| advice_of(&managed, page) == Some(whole)));
        }
    }

    #[test]
    fn concurrent_notices_are_all_received() {
        const THREADS: usize = 4;
        for _ in 0..100 {
            let (advices, managed) = (Advices::default(), Ranges::default());
            managed.insert(0..THREADS);
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let advices = &advices;
                    // As many notices as the ring has room for, received or not.
                    let calls = CALLS / THREADS;
                    scope.spawn(move || {
                        (1..=calls)
                            .for_each(|call| advices.notify(thread..thread + 1, madvice(usize::from(call == calls))))
                    });
                }
                (0..50).for_each(|_| advices.receive(&managed));
            });
            advices.receive(&managed);
            assert!((0..THREADS).all(|page| advice_of(&managed, page).unwrap().huge_pages == Advice::Huge));
        }
    }

    #[test]
    fn an_incomplete_notice_is_dropped_in_a_child() {
        let (advices, managed) = (Advices::default(), Ranges::default());
        managed.insert(0..3);
        advices.notify(0..1, madvice(1));
        // A thread that no longer exists has taken a turn.
        advices.next_posted.fetch_add(1, Ordering::Relaxed);
        advices.notify(1..2, madvice(1));
        advices.start_anew(&managed);
        (0..CALLS).for_each(|_| advices.notify(2..3, madvice(1)));
        advices.receive(&managed);
        let received = [0, 1, 2].map(|page| advice_of(&managed, page).unwrap().huge_pages);
        assert_eq!(received, [Advice::Huge, Advice::None, Advice::Huge]);
    }

    #[test]
    fn forks_leave_out_only_what_the_program_has_left_out() {
        let (advices, managed) = (Advices::default(), Ranges::default());
        managed.insert(0..10);
        advices.notify(2..8, Madvice::Forks(Forks::LeaveOut));
        advices.notify(4..5, Madvice::Forks(Forks::Copy));
        assert_eq!(advices.copied_by_forks(&managed), [0..2, 4..5, 8..10]);
        (0..CALLS).for_each(|_| advices.notify(0..1, madvice(0)));
        advices.notify(2..8, Madvice::Forks(Forks::Copy));
        let copied: usize = advices.copied_by_forks(&managed).iter().map(Range::len).sum();
        assert_eq!(copied, 10, "a notice was lost");
    }
}
