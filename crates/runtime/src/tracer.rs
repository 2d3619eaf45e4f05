//! The tracer: records the events of a process ([`foliomem_types::trace_event`]).
//!
//! It records which pages the limit makes non-resident, and when the program touches them again. It
//! does no work to learn more. Its locks are leaves.

use crate::ports::LinuxPorts;
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

/// Minimum change of unmanaged memory that is recorded, in pages: 256 KiB; and the time that an
/// increase must last, in microseconds.
const UNMANAGED_STEP_PAGES: i64 = 64;
const UNMANAGED_MIN_US: u64 = 50_000;

/// Minimum change of the limit that is recorded while it goes on changing, as a shift of the limit
/// (1/2^4).
const LIMIT_STEP_SHIFT: u32 = 4;

/// The unmanaged pages. Memory that is new or being unmapped counts as unmanaged for a while.
#[derive(Default)]
struct Unmanaged {
    recorded_pages: i64,
    /// Time since which there are more unmanaged pages than recorded, in microseconds, and their
    /// minimum number since then.
    more: Option<(u64, i64)>,
}

impl Unmanaged {
    /// Notes the number of unmanaged pages. Returns the number to record, if any.
    fn note(&mut self, pages: i64, now_us: u64) -> Option<i64> {
        let mut news = None;
        if pages < self.recorded_pages + UNMANAGED_STEP_PAGES {
            self.more = None;
            news = (pages <= self.recorded_pages - UNMANAGED_STEP_PAGES).then_some(pages);
        } else {
            let (since_us, min_pages) = self.more.unwrap_or((now_us, pages));
            self.more = Some((since_us, min_pages.min(pages)));
            if now_us - since_us >= UNMANAGED_MIN_US {
                news = self.more.take().map(|(_, pages)| pages);
            }
        }
        self.recorded_pages = news.unwrap_or(self.recorded_pages);
        news
    }
}

/// Whether a process is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Recording {
    /// The tracer writes events.
    On,
    /// The tracer does nothing.
    Off,
}

/// Writes the events of a recorded process to its trace ring.
pub(crate) struct Tracer {
    is_on: bool,
    unmanaged: Mutex<Unmanaged>,
    recorded_limit_pages: AtomicI64,
    /// The limit at the monitor's last check.
    seen_limit_pages: AtomicI64,
    /// Number of events that had no room in the ring.
    lost: Mutex<u64>,
}

fn program_pid(budget: &Budget) -> u32 {
    budget.program().map_or(0, |program| program.as_raw_nonzero().get() as u32)
}

impl Tracer {
    /// Creates a tracer.
    pub fn new(recording: Recording) -> Tracer {
        Tracer {
            is_on: recording == Recording::On,
            unmanaged: Mutex::new(Unmanaged::default()),
            recorded_limit_pages: AtomicI64::new(0),
            seen_limit_pages: AtomicI64::new(0),
            lost: Mutex::new(0),
        }
    }

    /// Returns whether the process is recorded.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Records that the process starts, or goes on as the child of a fork.
    pub fn started(&self, budget: &Budget) {
        self.record(budget, || Event::Start { pid: program_pid(budget) });
        *self.unmanaged.lock() = Unmanaged::default();
        self.recorded_limit_pages.store(0, Ordering::Relaxed);
        self.limit(budget);
    }

    /// Records the limit if it has changed by a step, or has come to rest. The monitor calls this.
    pub fn limit(&self, budget: &Budget) {
        let (pages, recorded_pages) = (budget.limit_pages(), self.recorded_limit_pages.load(Ordering::Relaxed));
        let is_at_rest = self.seen_limit_pages.swap(pages, Ordering::Relaxed) == pages;
        let is_step = pages.abs_diff(recorded_pages) > (recorded_pages >> LIMIT_STEP_SHIFT) as u64;
        if is_step || is_at_rest && pages != recorded_pages {
            self.recorded_limit_pages.store(pages, Ordering::Relaxed);
            self.record(budget, || Event::Limit(pages as u64));
        }
    }

    /// Records the unmanaged pages if their number has changed enough. The monitor calls this.
    pub fn unmanaged(&self, budget: &Budget, pages: i64) {
        if !self.is_on {
            return;
        }
        let news = self.unmanaged.lock().note(pages, now_ns() / 1000);
        if let Some(pages) = news {
            self.record(budget, || Event::Unmanaged(pages.max(0) as u32));
        }
    }

    /// Records an event. The caller is inside the gate, or is the monitor, and holds no lock but
    /// that of a block.
    pub fn record(&self, budget: &Budget, event: impl FnOnce() -> Event) {
        if !self.is_on || !budget.has_own_slot() {
            return;
        }
        // Created before the lock is taken, because `event` may use the engine.
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

    /// Records a compressed piece.
    pub fn compressed(&self, budget: &Budget, pages: Range<PageNumber>, len_bytes: u32) {
        self.record(budget, || Event::Compressed { pages, len_bytes });
    }

    /// Records staged pages.
    pub fn staged(&self, budget: &Budget, pages: Range<PageNumber>) {
        if pages.start < pages.end {
            self.record(budget, || Event::Stage(pages));
        }
    }

    /// Records a served fault on `page`, which may have mapped in all of `pages`.
    pub fn served(
        &self,
        budget: &Budget,
        engine: &Engine<LinuxPorts>,
        page: PageNumber,
        pages: &Range<PageNumber>,
        kind: FaultKind,
    ) {
        if !self.is_on {
            return;
        }
        let order = engine.order_of(page).unwrap_or(Order::ZERO);
        let folio = page.head(order).folio(order);
        match kind {
            FaultKind::FirstTouch => return self.filled(budget, folio),
            FaultKind::Staged => self.record(budget, || Event::Activate(page)),
            FaultKind::SwapIn | FaultKind::Spurious | FaultKind::Copy => {
                self.record(budget, || Event::Refault(page.folio(Order::ZERO)));
            }
        }
        if matches!(kind, FaultKind::Staged | FaultKind::SwapIn) && order > Order::ZERO {
            self.record(budget, || Event::Along(folio));
        } else if kind == FaultKind::SwapIn && *pages == (page..page.offset(2)) && engine.is_resident(page.offset(1)) {
            self.record(budget, || Event::Along(pages.clone()));
        }
    }

    /// Records the pages that are read ahead after a fault that has mapped in `folio`; `None` if
    /// that folio is recorded already.
    pub fn note_readahead(&self, budget: &Budget, ahead: &Ahead, folio: Option<Range<PageNumber>>) {
        match ahead {
            Ahead::Stream(pages) => {
                // A sequential reader touches every page that came with the fault; these touches
                // raise no faults.
                folio
                    .into_iter()
                    .chain([pages.clone()])
                    .for_each(|pages| self.record(budget, || Event::Refault(pages)));
            }
            Ahead::Step { page, .. } => self.record(budget, || Event::Refault(page.folio(Order::ZERO))),
            // A recorded process has no readahead of new folios.
            Ahead::New(_) => {}
        }
    }

    /// Records pages that have content from now on.
    pub fn filled(&self, budget: &Budget, pages: Range<PageNumber>) {
        self.record(budget, || Event::Fill(pages));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_increase_of_unmanaged_memory_is_recorded_when_it_lasts() {
        let mut unmanaged = Unmanaged::default();
        let mut see = |pages, time_ms: u64| unmanaged.note(pages, time_ms * 1000);
        assert_eq!((see(500, 0), see(700, 20), see(600, 49)), (None, None, None));
        assert_eq!(see(900, 50), Some(500), "the minimum");
        assert_eq!((see(30_000, 60), see(510, 100), see(30_000, 140)), (None, None, None), "it did not last");
        assert_eq!((see(450, 200), see(430, 210), see(430, 220)), (None, Some(430), None), "fewer, at once");
        assert_eq!((see(600, 230), see(-5, 300), see(600, 310)), (None, Some(-5), None));
    }
}
