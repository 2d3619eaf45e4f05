//! What the agent of a recorded process tells of it ([`foliomem_core::trace`]), and what it does to learn more: watching.
//!
//! A thread of its own, the *watcher*, moves watched pages of the program out of reach, over and over, so that a fault
//! tells of the next touch of each. What that costs is a share of its CPU time that a program hardly notices. Where its
//! memory is touched faster than that pays for, fewer pages are watched: a page that is watched is so at all times, or what is
//! seen of it would be too little. For one that is touched as soon as it is out of reach it is enough to know that: it is left
//! in reach for longer each time.
//!
//! Under a limit nothing is watched: what that puts out of reach, and when it is touched again, is told as it is.
//!
//! Lock: the tracer's, leaves.

use crate::budget::Budget;
use crate::clock::now_ns;
use crate::control::Recording;
use crate::machine::{LinuxMachine, Worker};
use foliomem_core::engine::Engine;
use foliomem_core::readahead::Ahead;
use foliomem_core::stats::FaultKind;
use foliomem_core::sync::Mutex;
use foliomem_core::trace::{Event, MOST_SHIFT, UNIT, beside, is_watched, watched_page};
use foliomem_core::units::{MAX_ORDER, ORDERS, Order, PAGE_BYTES, PageNumber};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// What a touch of a page that is out of reach costs the program beside the time in which it is served; and all of it, with moving
/// the page out of reach again, at least.
const TRAP_US: u64 = 6;
const TOUCH_US: i64 = 12;
/// What it takes longer to serve one is the fault of whoever else wants the CPU.
const MOST_SERVED_US: u64 = 100;
/// What all of this may take of the process's CPU time: 1/40, and this to begin with. A page that is out of reach has
/// its touch paid for in advance, half of it, so that it takes little more, whatever is touched at once. In a window 1/2^3 of what is left
/// may be taken beside its share.
const CPU_SHARE: i64 = 40;
const FIRST_US: i64 = 30_000;
const LEFT_SHIFT: u32 = 3;
const OUT_OF_REACH: i64 = 2;
/// How many are watched is looked at after so much CPU time: half as many where not all could be paid for, and twice as many where
/// it has taken less than half of what it may, so many times in a row. (Other pages are watched then, and each that was is moved back.)
const WINDOW_US: i64 = 10_000;
const SHORT_WINDOW_US: i64 = 2_000;
const CHEAP_WINDOWS: u32 = 4;
/// Pages that are watched: to begin with, at least, and at most, so that a look takes little.
const FIRST_WATCHED: usize = 64;
/// Of 1024.
const FIRST_SHIFT: u8 = 4;
const LEAST_WATCHED: usize = 8;
const MOST_WATCHED: usize = 1024;
/// Looks between two at all memory for what is gone, or there anew, and blocks that are looked at in one, at most.
const LOOKS_A_LAP: u32 = 64;
const BLOCKS_A_LOOK: usize = 1024;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(1);
/// While the process uses no CPU.
const IDLE_LOOK: Duration = Duration::from_millis(10);
const IDLE_US: i64 = 50;
/// How long a page is in reach after a touch. Twice as long as before where it had been touched at once, half as long where not.
const LEAST_PAUSE_US: u64 = 1_000;
const MOST_PAUSE_US: u64 = 64_000;
const AT_ONCE_US: u64 = 500;
/// The same after it was filled: while a program fills its memory a smaller and smaller part of that is watched, and what has been out
/// of reach by then has cost what is to be spent on touches.
const FILLED_US: u64 = 8_000;
/// Once in so many times the pages beside a page are moved with it.
const BESIDE_EVERY: u64 = 8;
/// Windows between two in which a unit is compressed for the record, which takes up to a millisecond.
const MEASURE_EVERY: u32 = 12;

/// What is not managed is told of where it has changed by so much, 256 KiB; of more only when that has lasted.
const UNMANAGED_STEP_PAGES: i64 = 64;
const UNMANAGED_LASTS_US: u64 = 50_000;

/// A page that is watched.
#[derive(Clone, Copy)]
struct Watched {
    /// Since when it is out of reach.
    armed_us: Option<u64>,
    /// When it is to be so again, and how long after its touch that is.
    due_us: u64,
    pause_us: u64,
    /// How often it was; not from 0 on, so that not all have their turn at once.
    times: u64,
}

impl Watched {
    fn new(page: PageNumber, due_us: u64) -> Watched {
        Watched { armed_us: None, due_us, pause_us: LEAST_PAUSE_US, times: page.0 / u64::from(UNIT.pages()) }
    }

    fn touched(&mut self, now_us: u64) {
        let Some(armed_us) = self.armed_us.take() else { return };
        let waited_us = now_us.saturating_sub(armed_us);
        let pause_us = if waited_us < AT_ONCE_US { self.pause_us * 2 } else { self.pause_us / 2 };
        self.pause_us = pause_us.clamp(LEAST_PAUSE_US, MOST_PAUSE_US);
        self.due_us = now_us + self.pause_us;
    }
}

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
    recording: Recording,
    unmanaged: Mutex<Unmanaged>,
    /// Pieces compressed, and what they came to, by order.
    compressed: [[AtomicU64; 2]; ORDERS],
    /// Events that had no room.
    lost: Mutex<u64>,
    /// Touches of what was out of reach, and what they have cost.
    touches: AtomicU64,
    touches_us: AtomicU64,
    /// One page of 2^this is watched.
    shift: AtomicU8,
    watched: Mutex<BTreeMap<PageNumber, Watched>>,
}

impl Tracer {
    pub fn new(recording: Recording) -> Tracer {
        Tracer {
            recording,
            unmanaged: Mutex::new(Unmanaged::default()),
            compressed: Default::default(),
            lost: Mutex::new(0),
            touches: AtomicU64::new(0),
            touches_us: AtomicU64::new(0),
            shift: AtomicU8::new(FIRST_SHIFT),
            watched: Mutex::new(BTreeMap::new()),
        }
    }

    /// Whether the process is recorded.
    pub fn is_on(&self) -> bool {
        self.recording != Recording::Off
    }

    /// Whether some of its memory is watched.
    pub fn watches(&self) -> bool {
        self.recording == Recording::Watched
    }

    /// The process begins, or goes on as the child of a fork.
    pub fn started(&self, budget: &Budget) {
        self.tell(budget, || Event::Start { pid: std::process::id() });
        *self.unmanaged.lock() = Unmanaged::default();
        if self.recording == Recording::Limited {
            self.tell(budget, || Event::Limit(budget.limit_pages().max(0) as u64));
        }
    }

    /// Tells of what is not managed, if that is news.
    pub fn unmanaged(&self, budget: &Budget, pages: i64) {
        if !self.is_on() {
            return;
        }
        let news = self.unmanaged.lock().see(pages, now_ns() / 1000);
        if let Some(pages) = news {
            self.tell(budget, || Event::Unmanaged(pages.max(0) as u32));
        }
    }

    /// Tells of something. Called inside the gate, or by the keeper, and under no leaf lock but maybe a block.
    pub fn tell(&self, budget: &Budget, event: impl FnOnce() -> Event) {
        if !self.is_on() || !budget.control().is_of(budget.slot(), rustix::process::getpid()) {
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

    /// A piece of `order` was compressed to so many bytes.
    pub fn note_compressed(&self, order: Order, len_bytes: u32) {
        if self.is_on() {
            let [pieces, all_bytes] = &self.compressed[order.index()];
            pieces.fetch_add(1, Ordering::Relaxed);
            all_bytes.fetch_add(len_bytes.into(), Ordering::Relaxed);
        }
    }

    /// Tells what pieces were compressed, and what is out then: what goes in and out often may compress worse than what stays there.
    pub fn compressed(&self, engine: &Engine<LinuxMachine>) {
        let budget = engine.machine().budget();
        let mut are_any = false;
        for (order, counts) in Order::all().zip(&self.compressed) {
            // Those of a piece may come in two parts.
            let [pieces, len_bytes] = counts.each_ref().map(|count| count.swap(0, Ordering::Relaxed));
            if pieces > 0 {
                let len_bytes = len_bytes.min(pieces * order.bytes() as u64);
                self.tell(budget, || Event::Compressed { order, pieces, len_bytes });
                are_any = true;
            }
        }
        if are_any && self.recording == Recording::Limited {
            let stats = engine.store_stats();
            let pages = (stats.orig_data_bytes / PAGE_BYTES as u64).saturating_sub(stats.same_filled_pages);
            let len_bytes = stats.compr_data_bytes.min(pages * PAGE_BYTES as u64);
            self.tell(budget, || Event::Stored { pages, len_bytes });
        }
    }

    /// Tells of what was put out of reach.
    pub fn staged(&self, budget: &Budget, pages: Range<PageNumber>) {
        if self.recording == Recording::Limited && pages.start < pages.end {
            self.tell(budget, || Event::Stage(pages));
        }
    }

    /// Tells of a fault that was served.
    pub fn served(&self, engine: &Engine<LinuxMachine>, page: PageNumber, kind: FaultKind, took_ns: u64) {
        if !self.is_on() {
            return;
        }
        if kind == FaultKind::Home {
            self.touches.fetch_add(1, Ordering::Relaxed);
            self.touches_us.fetch_add((took_ns / 1000).min(MOST_SERVED_US) + TRAP_US, Ordering::Relaxed);
        }
        let budget = engine.machine().budget();
        if kind == FaultKind::FirstTouch {
            let order = engine.order_of(page).unwrap_or(Order::ZERO);
            return self.filled(budget, page.head(order).folio(order));
        }
        let was_armed = kind == FaultKind::Home && self.watches() && self.was_armed(page);
        self.tell(budget, || match kind {
            _ if was_armed => Event::Touch(page),
            FaultKind::Home => Event::Activate(page),
            _ => Event::Refault(page.folio(Order::ZERO)),
        });
        if self.recording == Recording::Limited
            && matches!(kind, FaultKind::Home | FaultKind::SwapIn)
            && let Some(order) = engine.order_of(page).filter(|&order| order > Order::ZERO)
        {
            self.tell(budget, || Event::Along(page.head(order).folio(order)));
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

    /// Tells of pages that have content from now on; some of them are watched.
    pub fn filled(&self, budget: &Budget, pages: Range<PageNumber>) {
        if !self.is_on() {
            return;
        }
        if self.watches() {
            let shift = self.shift.load(Ordering::Relaxed);
            let mut watched = self.watched.lock();
            for page in watched_in(&pages, shift) {
                if watched.len() <= MOST_WATCHED {
                    watched.entry(page).or_insert_with(|| Watched::new(page, now_ns() / 1000 + FILLED_US));
                }
            }
        }
        self.tell(budget, || Event::Fill(pages));
    }

    /// Whether a page that was touched at home had been moved there to be watched, and not for a sample.
    fn was_armed(&self, page: PageNumber) -> bool {
        let shift = self.shift.load(Ordering::Relaxed);
        let mut watched = self.watched.lock();
        match watched.get_mut(&page) {
            Some(watched) => watched.touched(now_ns() / 1000),
            None => return beside(page).any(|other| is_watched(other, shift)),
        }
        true
    }
}

/// What the watcher remembers from one look to the next.
pub(crate) struct Watcher {
    /// What looking has cost.
    looks_us: i64,
    /// CPU time at the last look, and when the window began; what looks and touches had cost by then.
    cpu_us: i64,
    window_us: i64,
    window_spent_us: i64,
    /// Something could not be paid for in this window.
    was_short: bool,
    /// Windows in a row that took less than half of what they might.
    cheap_windows: u32,
    windows: u32,
    looks: u32,
    samples: u64,
    /// So many pages are watched, about.
    wanted: usize,
    /// Blocks that are left of the lap through all memory.
    lap: Vec<PageNumber>,
    /// Pages that are due, and the one after which that is looked for first.
    due: Vec<PageNumber>,
    last: PageNumber,
}

impl Watcher {
    /// One look; returns when the next is due. Called inside the gate.
    pub fn look(&mut self, engine: &Engine<LinuxMachine>, tracer: &Tracer, worker: &mut Worker) -> Duration {
        let cpu_us = cpu_time_us(ClockId::ProcessCPUTime);
        let is_idle = cpu_us - std::mem::replace(&mut self.cpu_us, cpu_us) < IDLE_US;
        let touches_us = tracer.touches_us.load(Ordering::Relaxed) as i64;
        let spent_us = self.looks_us + touches_us;
        let balance_us = FIRST_US + cpu_us / CPU_SHARE - spent_us;
        if balance_us > 0 {
            let started_us = cpu_time_us(ClockId::ThreadCPUTime);
            // Not what looking has cost without a touch: it would wait for one, and nothing be out of reach.
            let touches = tracer.touches.load(Ordering::Relaxed).max(1) as i64;
            let touch_us = (touches_us / touches).max(TOUCH_US);
            self.adapt(tracer, engine, balance_us, spent_us);
            self.look_around(engine, tracer, worker, balance_us, touch_us);
            self.looks_us += cpu_time_us(ClockId::ThreadCPUTime) - started_us;
        }
        if is_idle { IDLE_LOOK } else { LOOK }
    }

    fn look_around(
        &mut self,
        engine: &Engine<LinuxMachine>,
        tracer: &Tracer,
        worker: &mut Worker,
        balance_us: i64,
        touch_us: i64,
    ) {
        self.find(engine, tracer);
        let now_us = now_ns() / 1000;
        let is_due = |&(_, watched): &(&PageNumber, &Watched)| watched.armed_us.is_none() && watched.due_us <= now_us;
        let mut due = std::mem::take(&mut self.due);
        {
            let watched = tracer.watched.lock();
            let all = watched.range(self.last..).chain(watched.range(..self.last));
            due.extend(all.filter(is_due).map(|(&page, _)| page));
        }
        for page in due.drain(..) {
            let all_pages = i64::from(UNIT.get()) + 1;
            if (engine.staged_pages() as i64 + all_pages) * touch_us > balance_us * OUT_OF_REACH {
                self.was_short = true;
                self.last = page;
                break;
            }
            self.arm(engine, tracer, page);
        }
        if self.windows >= MEASURE_EVERY && self.measure(engine, tracer, worker) {
            self.windows = 0;
        }
        self.due = due;
    }

    /// Moves a page out of reach, and maybe those beside it.
    fn arm(&self, engine: &Engine<LinuxMachine>, tracer: &Tracer, page: PageNumber) {
        let budget = engine.machine().budget();
        let Some(times) = tracer.watched.lock().get_mut(&page).map(|watched| {
            // Before it is: it may be touched at once.
            watched.armed_us = Some(now_ns() / 1000);
            watched.times += 1;
            watched.times
        }) else {
            return;
        };
        if times.is_multiple_of(BESIDE_EVERY) && tracer.shift.load(Ordering::Relaxed) > UNIT.get() {
            for other in beside(page).filter(|&other| engine.is_resident(other)) {
                tracer.tell(budget, || Event::Arm(other));
                engine.watch(other);
            }
        }
        tracer.tell(budget, || Event::Arm(page));
        if !engine.watch(page) {
            let is_gone = engine.order_of(page).is_none();
            let mut all = tracer.watched.lock();
            if is_gone {
                all.remove(&page);
            } else if let Some(watched) = all.get_mut(&page) {
                (watched.armed_us, watched.due_us) = (None, now_ns() / 1000 + MOST_PAUSE_US);
            }
        }
    }

    /// Looks for pages that are to be watched.
    fn find(&mut self, engine: &Engine<LinuxMachine>, tracer: &Tracer) {
        self.looks += 1;
        if self.lap.is_empty() && self.looks >= LOOKS_A_LAP {
            self.looks = 0;
            self.lap.extend(engine.blocks());
            // What was out of reach may have been dropped, and be there anew.
            self.due.extend(tracer.watched.lock().keys());
            for page in self.due.drain(..) {
                let (is_resident, is_gone) = (engine.is_resident(page), engine.order_of(page).is_none());
                let mut all = tracer.watched.lock();
                if is_gone {
                    all.remove(&page);
                } else if let Some(watched) = all.get_mut(&page).filter(|_| is_resident) {
                    watched.armed_us = None;
                }
            }
        }
        let shift = tracer.shift.load(Ordering::Relaxed);
        for first in self.lap.drain(self.lap.len().saturating_sub(BLOCKS_A_LOOK)..) {
            for page in watched_in(&first.folio(MAX_ORDER), shift).filter(|&page| engine.is_resident(page)) {
                tracer.watched.lock().entry(page).or_insert_with(|| Watched::new(page, 0));
            }
        }
    }

    /// Compresses a unit for the record, anywhere; whether there was one.
    fn measure(&mut self, engine: &Engine<LinuxMachine>, tracer: &Tracer, worker: &mut Worker) -> bool {
        let page = {
            let watched = tracer.watched.lock();
            self.samples += 1;
            // Far from the last ones: the golden section of all.
            let at = ((self.samples.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) * watched.len() as u64) >> 32;
            watched.keys().nth(at as usize).copied()
        };
        let was_any = page.is_some_and(|page| engine.measure(worker, page.head(UNIT)));
        tracer.compressed(engine);
        was_any
    }

    /// Watches more or less of the memory from now on.
    fn adapt(&mut self, tracer: &Tracer, engine: &Engine<LinuxMachine>, balance_us: i64, spent_us: i64) {
        let elapsed_us = self.cpu_us - self.window_us;
        let watched = tracer.watched.lock().len();
        let shift = tracer.shift.load(Ordering::Relaxed);
        if watched > self.wanted {
            return self.set_shift(tracer, engine, shift + 1);
        }
        if elapsed_us < if self.was_short { SHORT_WINDOW_US } else { WINDOW_US } {
            return;
        }
        let may_spend_us = elapsed_us / CPU_SHARE + (balance_us >> LEFT_SHIFT);
        let is_cheap = !self.was_short && (spent_us - self.window_spent_us) * 2 < may_spend_us;
        self.cheap_windows = if is_cheap { self.cheap_windows + 1 } else { 0 };
        if self.was_short {
            self.wanted = (watched / 2).max(LEAST_WATCHED);
        } else if self.cheap_windows == CHEAP_WINDOWS {
            self.wanted = (self.wanted * 2).min(MOST_WATCHED);
            self.cheap_windows = 0;
        }
        (self.window_us, self.window_spent_us, self.was_short) = (self.cpu_us, spent_us, false);
        self.windows += 1;
        if watched * 5 / 2 < self.wanted {
            self.set_shift(tracer, engine, shift.saturating_sub(1));
        }
    }

    fn set_shift(&mut self, tracer: &Tracer, engine: &Engine<LinuxMachine>, shift: u8) {
        // Where every page is watched nothing would stand for anything.
        let shift = shift.clamp(1, MOST_SHIFT);
        if tracer.shift.swap(shift, Ordering::Relaxed) != shift {
            tracer.tell(engine.machine().budget(), || Event::Watch(shift));
            // What is not watched any more is brought back, or it would cost a fault.
            self.due.extend(tracer.watched.lock().keys().filter(|&&page| !is_watched(page, shift)));
            for page in self.due.drain(..) {
                tracer.watched.lock().remove(&page);
                std::iter::once(page).chain(beside(page)).for_each(|page| engine.unwatch(page));
            }
            self.lap.clear();
            self.looks = LOOKS_A_LAP;
        }
    }

    /// Begins.
    pub fn start(tracer: &Tracer, budget: &Budget) -> Watcher {
        tracer.shift.store(FIRST_SHIFT, Ordering::Relaxed);
        tracer.touches.store(0, Ordering::Relaxed);
        tracer.touches_us.store(0, Ordering::Relaxed);
        tracer.watched.lock().clear();
        tracer.tell(budget, || Event::Watch(FIRST_SHIFT));
        Watcher {
            looks_us: 0,
            cpu_us: 0,
            window_us: 0,
            window_spent_us: 0,
            was_short: false,
            cheap_windows: 0,
            windows: MEASURE_EVERY,
            looks: LOOKS_A_LAP,
            samples: 0,
            wanted: FIRST_WATCHED,
            lap: Vec::new(),
            due: Vec::new(),
            last: PageNumber(0),
        }
    }
}

/// The pages of `pages` that are watched where one of 2^`shift` is.
fn watched_in(pages: &Range<PageNumber>, shift: u8) -> impl Iterator<Item = PageNumber> {
    let cells = pages.start.0 >> shift..pages.end.0.div_ceil(1 << shift);
    cells.map(move |cell| watched_page(cell, shift)).filter(|page| pages.contains(page))
}

fn cpu_time_us(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1000
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
