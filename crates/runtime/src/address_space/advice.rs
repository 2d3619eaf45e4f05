//! Advice: what the program says about huge pages in its mappings (MADV_HUGEPAGE, MADV_NOHUGEPAGE).
//!
//! The kernel keeps advice in the flags of a mapping. Only `smaps` shows them, and reading it walks
//! all page tables (18 ms for 1 GiB). So the agent reads `smaps` once, when it activates. From then
//! on the hooks *notify* it of a call after the kernel has made it, and a thread that looks up a
//! mapping *receives* the notices first. Advice for managed memory is kept with its range
//! ([`crate::address_space::ranges`]) and follows it as the kernel's does. Advice for memory that
//! is not managed yet waits until the memory is adopted. It then holds only if it covers the whole
//! mapping, because it would have split the mapping otherwise. An inline system call sends no
//! notice.
//!
//! Notifying takes no lock and never waits: a signal handler of the thread may need a fault served,
//! and the thread may be gone in the child of a fork. If very many calls come at once, the last are
//! lost.
//!
//! Lock order: waiting advice, then the lock of the ranges.

use crate::address_space::ranges::Ranges;
use foliomem_sync::atomic::{AtomicUsize, Ordering};
use foliomem_sync::{Mutex, ranks};
use foliomem_sys::{filters, process_limits};
use foliomem_types::size_policy::{Advice, Disabled};
use std::ops::Range;

/// Calls that can be told of before anybody hears. (An explorer is to see the ring full.)
const CALLS: usize = if cfg!(feature = "shuttle") { 4 } else { 256 };

/// Whether the program has disabled huge pages for itself (PR_SET_THP_DISABLE). The kernel is asked each time: it may have
/// been done before an exec.
pub fn disabled() -> Disabled {
    if !filters::allow(filters::Call::GetThpDisable) {
        return Disabled::No;
    }
    process_limits::disabled_huge_pages()
}

/// One call. Empty for the writer of turn `n` while `turn == n`, written when it is `n + 1`.
#[derive(Debug)]
struct Call {
    turn: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    advice: AtomicUsize,
}

/// See the module.
#[derive(Debug)]
pub struct Advices {
    calls: [Call; CALLS],
    next_told: AtomicUsize,
    next_heard: AtomicUsize,
    waiting: Mutex<Ranges, ranks::Advice>,
}

impl Default for Advices {
    fn default() -> Advices {
        let zero = || AtomicUsize::new(0);
        let call = |turn| Call { turn: AtomicUsize::new(turn), start: zero(), end: zero(), advice: zero() };
        Advices {
            calls: std::array::from_fn(call),
            next_told: zero(),
            next_heard: zero(),
            waiting: Mutex::new(Ranges::default()),
        }
    }
}

impl Advices {
    /// The program has said this, and the kernel has heard it. For any thread, in any state.
    pub fn tell(&self, range: Range<usize>, advice: Advice) {
        if range.is_empty() {
            return;
        }
        let mut turn = self.next_told.load(Ordering::Relaxed);
        loop {
            let call = &self.calls[turn % CALLS];
            // Acquire pairs with the Release in `hear` that empties the call: it has been read.
            let ahead = call.turn.load(Ordering::Acquire).wrapping_sub(turn).cast_signed();
            if ahead < 0 {
                return;
            }
            let taken = ahead == 0
                && self
                    .next_told
                    .compare_exchange(turn, turn.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if taken {
                call.start.store(range.start, Ordering::Relaxed);
                call.end.store(range.end, Ordering::Relaxed);
                call.advice.store(usize::from(advice == Advice::Huge), Ordering::Relaxed);
                // Release pairs with the Acquire in `hear`.
                call.turn.store(turn.wrapping_add(1), Ordering::Release);
                return;
            }
            turn = self.next_told.load(Ordering::Relaxed);
        }
    }

    /// Brings what was told to the ranges that are managed; the rest waits.
    pub fn hear(&self, managed: &Ranges) {
        // Acquire pairs with the Release in `tell`: the call is whole.
        let is_written = |turn: usize| self.calls[turn % CALLS].turn.load(Ordering::Acquire) == turn.wrapping_add(1);
        if !is_written(self.next_heard.load(Ordering::Relaxed)) {
            return;
        }
        let waiting = self.waiting.lock();
        let mut turn = self.next_heard.load(Ordering::Relaxed);
        while is_written(turn) {
            let call = &self.calls[turn % CALLS];
            let range = call.start.load(Ordering::Relaxed)..call.end.load(Ordering::Relaxed);
            let advice = if call.advice.load(Ordering::Relaxed) == 0 { Advice::NoHuge } else { Advice::Huge };
            // Release pairs with the Acquire in `tell`, which writes the call anew.
            call.turn.store(turn.wrapping_add(CALLS), Ordering::Release);
            turn = turn.wrapping_add(1);
            managed.advise(range.clone(), advice);
            for part in managed.missing(range) {
                waiting.remove(part.clone());
                waiting.insert_advised(part, advice);
            }
        }
        self.next_heard.store(turn, Ordering::Relaxed);
    }

    /// What `smaps` says about a mapping.
    pub fn found(&self, mapping: Range<usize>, advice: Advice) {
        let waiting = self.waiting.lock();
        waiting.remove(mapping.clone());
        waiting.insert_advised(mapping, advice);
    }

    /// `part` of the mapping `mapping` is managed from now on.
    pub fn adopt(&self, managed: &Ranges, part: Range<usize>, mapping: Range<usize>) {
        let waiting = self.waiting.lock();
        // A mapping that has grown is as it was before.
        let known = managed.advised_within(mapping.clone()).first().map(|known| known.advice);
        let advice = known.unwrap_or_else(|| {
            let said = waiting.advised_within(mapping.clone());
            let first = said.first().map_or(Advice::None, |said| said.advice);
            let whole = waiting.missing(mapping.clone()).is_empty() && said.iter().all(|said| said.advice == first);
            if whole { first } else { Advice::None }
        });
        waiting.remove(part.clone());
        managed.insert_in(&mapping, part, advice);
    }

    /// Whether something was said about memory that is not managed.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.lock().is_empty()
    }

    /// Forgets what was said about memory that is not mapped any more.
    pub fn forget_unmapped(&self, mapped: &Ranges) {
        let waiting = self.waiting.lock();
        for gone in waiting.snapshot().into_iter().flat_map(|said| mapped.missing(said)) {
            waiting.remove(gone);
        }
    }

    /// In the child of a fork: what a thread of the parent was about to tell never comes. Called before any other thread
    /// of the agent exists.
    pub fn start_anew(&self, managed: &Ranges) {
        self.hear(managed);
        let turn = self.next_told.load(Ordering::Relaxed);
        for next in turn..turn + CALLS {
            self.calls[next % CALLS].turn.store(next, Ordering::Relaxed);
        }
        self.next_heard.store(turn, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: usize = 24;

    fn advice(huge: bool) -> Advice {
        if huge { Advice::Huge } else { Advice::NoHuge }
    }

    fn advice_of(managed: &Ranges, page: usize) -> Option<Advice> {
        managed.containing(page).map(|known| known.advice)
    }

    proptest! {
        #[test]
        fn a_managed_page_has_the_advice_that_was_told_last(
            calls in prop::collection::vec((0..PAGES, 1..PAGES, any::<bool>(), any::<bool>()), 0..600),
        ) {
            let (advices, managed) = (Advices::default(), Ranges::default());
            managed.insert(0..PAGES / 2);
            let mut expected = [Advice::None; PAGES];
            for (start, len, huge, hear) in calls {
                let range = start..(start + len).min(PAGES);
                advices.tell(range.clone(), advice(huge));
                expected[range].fill(advice(huge));
                if hear {
                    advices.hear(&managed);
                    for (page, &expected) in expected.iter().enumerate() {
                        prop_assert_eq!(advice_of(&managed, page), (page < PAGES / 2).then_some(expected));
                    }
                }
            }
            // What was said of the rest has waited for this.
            advices.hear(&managed);
            let rest = PAGES / 2..PAGES;
            advices.adopt(&managed, rest.clone(), rest.clone());
            let first = expected[rest.start];
            let same = expected[rest.clone()].iter().all(|&other| other == first);
            let whole = if same { first } else { Advice::None };
            prop_assert!(rest.clone().all(|page| advice_of(&managed, page) == Some(whole)));
        }
    }

    #[test]
    fn what_many_threads_tell_while_another_hears_is_heard() {
        const THREADS: usize = 4;
        for _ in 0..100 {
            let (advices, managed) = (Advices::default(), Ranges::default());
            managed.insert(0..THREADS);
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let advices = &advices;
                    // As many as there is room for, whether or not somebody hears.
                    let calls = CALLS / THREADS;
                    scope.spawn(move || {
                        (1..=calls).for_each(|call| advices.tell(thread..thread + 1, advice(call == calls)))
                    });
                }
                (0..50).for_each(|_| advices.hear(&managed));
            });
            advices.hear(&managed);
            assert!((0..THREADS).all(|page| advice_of(&managed, page) == Some(Advice::Huge)));
        }
    }

    #[test]
    fn what_is_never_told_to_the_end_is_forgotten_in_a_child() {
        let (advices, managed) = (Advices::default(), Ranges::default());
        managed.insert(0..3);
        advices.tell(0..1, Advice::Huge);
        // A thread that is gone has taken its turn.
        advices.next_told.fetch_add(1, Ordering::Relaxed);
        advices.tell(1..2, Advice::Huge);
        advices.start_anew(&managed);
        (0..CALLS).for_each(|_| advices.tell(2..3, Advice::Huge));
        advices.hear(&managed);
        let heard = [0, 1, 2].map(|page| advice_of(&managed, page).unwrap());
        assert_eq!(heard, [Advice::Huge, Advice::None, Advice::Huge]);
    }
}
