//! The tracer: records the events of a process ([`foliomem_types::trace_event`]).
//!
//! It records which pages the limit makes non-resident, and when the program touches them again. It
//! does nothing to learn more. Lock: one leaf.

use crate::ports::machine::LinuxMachine;
use foliomem_core::engine::Engine;
use foliomem_core::readahead::Ahead;
use foliomem_session::budget::Budget;
use foliomem_sync::Mutex;
use foliomem_sys::clock::now_ns;
use foliomem_types::counters::FaultKind;
use foliomem_types::trace_event::Event;
use foliomem_types::units::{Order, PageNumber};
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering};

/// What is not managed is told of where it has changed by so much, 256 KiB; of more only when that has lasted.
const UNMANAGED_STEP_PAGES: i64 = 64;
const UNMANAGED_LASTS_US: u64 = 50_000;

/// A limit that has grown is told of where it has by 1/2^4.
const LIMIT_STEP_SHIFT: u32 = 4;

/// Pages that are not managed. What is being unmapped, or is new, looks like them for a while.
#[derive(Default)]
struct Unmanaged {
    told_pages: i64,
    /// Since when there are more, and the fewest since.
    more: Option<(u64, i64)>,
}

impl Unmanaged {
    /// There are so many; how many is to be told, if anything.
    fn see(&mut self, pages: i64, now_us: u64) -> Option<i64> {
        let mut news = None;
        if pages < self.told_pages + UNMANAGED_STEP_PAGES {
            self.more = None;
            news = (pages <= self.told_pages - UNMANAGED_STEP_PAGES).then_some(pages);
        } else {
            let (since_us, fewest_pages) = self.more.unwrap_or((now_us, pages));
            self.more = Some((since_us, fewest_pages.min(pages)));
            if now_us - since_us >= UNMANAGED_LASTS_US {
                news = self.more.take().map(|(_, pages)| pages);
            }
        }
        self.told_pages = news.unwrap_or(self.told_pages);
        news
    }
}

/// See the module.
pub(crate) struct Tracer {
    is_on: bool,
    unmanaged: Mutex<Unmanaged>,
    told_limit_pages: AtomicI64,
    /// Events that had no room.
    lost: Mutex<u64>,
}

fn program_pid(budget: &Budget) -> u32 {
    budget.program().map_or(0, |program| program.as_raw_nonzero().get() as u32)
}

impl Tracer {
    pub fn new(is_on: bool) -> Tracer {
        Tracer {
            is_on,
            unmanaged: Mutex::new(Unmanaged::default()),
            told_limit_pages: AtomicI64::new(0),
            lost: Mutex::new(0),
        }
    }

    /// Whether the process is recorded.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// The process begins, or goes on as the child of a fork.
    pub fn started(&self, budget: &Budget) {
        self.tell(budget, || Event::Start { pid: program_pid(budget) });
        *self.unmanaged.lock() = Unmanaged::default();
        self.told_limit_pages.store(0, Ordering::Relaxed);
        self.limit(budget);
    }

    /// Tells of the limit, if it has grown. Called by the keeper.
    pub fn limit(&self, budget: &Budget) {
        let (pages, told_pages) = (budget.limit_pages(), self.told_limit_pages.load(Ordering::Relaxed));
        if pages > told_pages + (told_pages >> LIMIT_STEP_SHIFT) {
            self.told_limit_pages.store(pages, Ordering::Relaxed);
            self.tell(budget, || Event::Limit(pages as u64));
        }
    }

    /// Tells of what is not managed, if that is news.
    pub fn unmanaged(&self, budget: &Budget, pages: i64) {
        if !self.is_on {
            return;
        }
        let news = self.unmanaged.lock().see(pages, now_ns() / 1000);
        if let Some(pages) = news {
            self.tell(budget, || Event::Unmanaged(pages.max(0) as u32));
        }
    }

    /// Tells of something. Called inside the gate, or by the keeper, and under no leaf lock but maybe a block.
    pub fn tell(&self, budget: &Budget, event: impl FnOnce() -> Event) {
        if !self.is_on || !budget.has_own_slot() {
            return;
        }
        // Made before the lock is taken, for it may look something up in the engine.
        let event = event();
        let ring = budget.control().trace(budget.slot());
        let mut lost = self.lost.lock();
        let time_us = now_ns() / 1000;
        if *lost > 0 && ring.push(time_us, &Event::Lost(*lost)) {
            *lost = 0;
        }
        if *lost > 0 || !ring.push(time_us, &event) {
            *lost += 1;
        }
    }

    /// Tells of a piece that was compressed.
    pub fn compressed(&self, budget: &Budget, pages: Range<PageNumber>, len_bytes: u32) {
        self.tell(budget, || Event::Compressed { pages, len_bytes });
    }

    /// Tells of what was put out of reach.
    pub fn staged(&self, budget: &Budget, pages: Range<PageNumber>) {
        if pages.start < pages.end {
            self.tell(budget, || Event::Stage(pages));
        }
    }

    /// Tells of a fault that was served.
    pub fn served(&self, engine: &Engine<LinuxMachine>, page: PageNumber, kind: FaultKind) {
        if !self.is_on {
            return;
        }
        let budget = engine.machine().budget();
        let order = engine.order_of(page).unwrap_or(Order::ZERO);
        let folio = page.head(order).folio(order);
        match kind {
            FaultKind::FirstTouch => return self.filled(budget, folio),
            FaultKind::Home => self.tell(budget, || Event::Activate(page)),
            FaultKind::SwapIn | FaultKind::Spurious | FaultKind::Copy => {
                self.tell(budget, || Event::Refault(page.folio(Order::ZERO)));
            }
        }
        if matches!(kind, FaultKind::Home | FaultKind::SwapIn) && order > Order::ZERO {
            self.tell(budget, || Event::Along(folio));
        }
    }

    /// Tells of what comes before it is touched, after a fault that brought `folio`, if that is not told of yet.
    pub fn comes_ahead(&self, budget: &Budget, ahead: &Ahead, folio: Option<Range<PageNumber>>) {
        match ahead {
            Ahead::Stream(pages) => {
                // Who reads in order touches all that came with the fault, which shows no touches.
                folio.into_iter().chain([pages.clone()]).for_each(|pages| self.tell(budget, || Event::Refault(pages)));
            }
            Ahead::Step { page, .. } => self.tell(budget, || Event::Refault(page.folio(Order::ZERO))),
            // Nothing is made ahead in a process that is recorded.
            Ahead::New(_) => {}
        }
    }

    /// Tells of pages that have content from now on.
    pub fn filled(&self, budget: &Budget, pages: Range<PageNumber>) {
        self.tell(budget, || Event::Fill(pages));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_managed_is_told_of_when_it_lasts() {
        let mut unmanaged = Unmanaged::default();
        let mut see = |pages, time_ms: u64| unmanaged.see(pages, time_ms * 1000);
        assert_eq!((see(500, 0), see(700, 20), see(600, 49)), (None, None, None));
        assert_eq!(see(900, 50), Some(500), "the fewest");
        assert_eq!((see(30_000, 60), see(510, 100), see(30_000, 140)), (None, None, None), "it did not last");
        assert_eq!((see(450, 200), see(430, 210), see(430, 220)), (None, Some(430), None), "fewer, at once");
        assert_eq!((see(600, 230), see(-5, 300), see(600, 310)), (None, Some(-5), None));
    }
}
