//! What the agent of a recorded process tells of it ([`foliomem_core::trace`]), and what it does to learn more: watching.
//!
//! A thread of its own, the *watcher*, moves units of the program's memory out of reach page by page, over and over, so
//! that a fault tells of the next touch of each. That is what recording costs: a share of its CPU time that a program
//! hardly notices. Where its memory is touched faster than that, fewer units are watched.
//!
//! Lock: the tracer's, a leaf.

use crate::budget::Budget;
use crate::clock::now_ns;
use crate::machine::{LinuxMachine, Worker};
use foliomem_core::engine::Engine;
use foliomem_core::stats::FaultKind;
use foliomem_core::sync::Mutex;
use foliomem_core::trace::{Event, MOST_SHIFT, UNIT, next_watched, unit_of};
use foliomem_core::units::{Order, PageNumber};
use rustix::time::{ClockId, clock_gettime};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// What a touch of a page that is out of reach costs the program beside the time in which it is served; and all of it, until
/// there have been some.
const TRAP_US: u64 = 6;
const TOUCH_US: i64 = 12;
/// What touches may take of the process's CPU time: 1/30, and this to begin with. A page that is out of reach has
/// its touch paid for in advance, so that it never takes more, whatever is touched at once.
const CPU_SHARE: i64 = 30;
const FIRST_US: i64 = 8_000;
/// How many are watched is looked at after so much CPU time. Fewer are where not all could be paid for; more, where they
/// could be four times and touches have taken less than a quarter of their share.
const WINDOW_US: i64 = 10_000;
const PLENTY: i64 = 4;
/// One of 256 to begin with.
const FIRST_SHIFT: u8 = 8;
/// Between two looks, and units looked at in each.
const LOOK: Duration = Duration::from_millis(1);
const UNITS_A_LOOK: u32 = 256;
/// While the process uses no CPU.
const IDLE_LOOK: Duration = Duration::from_millis(10);
const IDLE_US: i64 = 50;
/// Windows between two in which a unit is compressed for the record, which takes some 0.2 ms.
const MEASURE_EVERY: u32 = 4;

/// See the module.
pub(crate) struct Tracer {
    is_on: bool,
    /// Events that had no room.
    lost: Mutex<u64>,
    /// Touches of what was out of reach, and what they have cost.
    touches: AtomicU64,
    spent_us: AtomicU64,
    /// One unit of 2^this is watched.
    shift: AtomicU8,
}

impl Tracer {
    pub fn new(is_on: bool) -> Tracer {
        Tracer {
            is_on,
            lost: Mutex::new(0),
            touches: AtomicU64::new(0),
            spent_us: AtomicU64::new(0),
            shift: AtomicU8::new(FIRST_SHIFT),
        }
    }

    /// Whether the process is recorded.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Tells of something. Called inside the gate, or by the keeper, and under no leaf lock but maybe a block.
    pub fn tell(&self, budget: &Budget, event: impl FnOnce() -> Event) {
        if !self.is_on || !budget.control().is_of(budget.slot(), rustix::process::getpid()) {
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

    /// Tells of a fault that was served.
    pub fn served(&self, engine: &Engine<LinuxMachine>, page: PageNumber, kind: FaultKind, took_ns: u64) {
        if !self.is_on {
            return;
        }
        if kind == FaultKind::Home {
            self.touches.fetch_add(1, Ordering::Relaxed);
            self.spent_us.fetch_add(took_ns / 1000 + TRAP_US, Ordering::Relaxed);
        }
        let unit = unit_of(page);
        let is_watched = next_watched(unit, self.shift.load(Ordering::Relaxed)) == unit;
        self.tell(engine.machine().budget(), || match kind {
            FaultKind::FirstTouch => Event::Fill({
                let order = engine.order_of(page).unwrap_or(Order::ZERO);
                page.head(order).folio(order)
            }),
            FaultKind::Home if is_watched => Event::Touch(page),
            _ => Event::Refault(page),
        });
    }
}

/// What the watcher remembers from one look to the next.
#[derive(Default)]
pub(crate) struct Watcher {
    /// CPU time at the last look, and when the window began; what touches had cost by then.
    cpu_us: i64,
    window_us: i64,
    window_spent_us: i64,
    /// Something could not be paid for in this window.
    was_short: bool,
    windows: u32,
    /// What is left of the lap through all memory, the last range first.
    lap: Vec<Range<u64>>,
}

impl Watcher {
    /// One look; returns when the next is due. Called inside the gate.
    pub fn look(&mut self, engine: &Engine<LinuxMachine>, tracer: &Tracer, worker: &mut Worker) -> Duration {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let cpu_us = time.tv_sec * 1_000_000 + time.tv_nsec / 1000;
        let is_idle = cpu_us - std::mem::replace(&mut self.cpu_us, cpu_us) < IDLE_US;
        let spent_us = tracer.spent_us.load(Ordering::Relaxed) as i64;
        let touch_us = (spent_us / tracer.touches.load(Ordering::Relaxed).max(1) as i64).max(TOUCH_US);
        let balance_us = FIRST_US + cpu_us / CPU_SHARE - spent_us;
        self.adapt(engine, tracer, balance_us, spent_us);
        let shift = tracer.shift.load(Ordering::Relaxed);
        if self.lap.is_empty() {
            let units =
                |range: Range<usize>| (range.start / UNIT.bytes()) as u64..range.end.div_ceil(UNIT.bytes()) as u64;
            self.lap = engine.machine().ranges().snapshot().into_iter().rev().map(units).collect();
        }
        for _ in 0..UNITS_A_LOOK {
            let out_of_reach = engine.staged_pages() as i64 + i64::from(UNIT.pages());
            if out_of_reach * touch_us > balance_us {
                self.was_short = true;
                break;
            }
            let Some(unit) = self.next_unit(shift) else { break };
            let head = PageNumber(unit << UNIT.get());
            if engine.watch(head) == UNIT.pages() && self.windows >= MEASURE_EVERY {
                self.windows = 0;
                engine.measure(worker, head, &mut |order, len_bytes| {
                    tracer.tell(engine.machine().budget(), || Event::Compressed(order, len_bytes));
                });
            }
        }
        if is_idle { IDLE_LOOK } else { LOOK }
    }

    /// Watches more or less of the memory from now on.
    fn adapt(&mut self, engine: &Engine<LinuxMachine>, tracer: &Tracer, balance_us: i64, spent_us: i64) {
        let elapsed_us = self.cpu_us - self.window_us;
        if elapsed_us < WINDOW_US {
            return;
        }
        let shift = tracer.shift.load(Ordering::Relaxed);
        let pages = (engine.resident_pages() + engine.staged_pages()) as i64;
        let cost_us = (pages >> shift.saturating_sub(1)) * TOUCH_US;
        let has_plenty =
            cost_us * PLENTY < balance_us && (spent_us - self.window_spent_us) * PLENTY < elapsed_us / CPU_SHARE;
        let new = match (self.was_short, has_plenty) {
            (true, _) => (shift + 1).min(MOST_SHIFT),
            (false, true) => shift.saturating_sub(1),
            (false, false) => shift,
        };
        (self.window_us, self.window_spent_us, self.was_short) = (self.cpu_us, spent_us, false);
        self.windows += 1;
        if new != shift {
            tracer.shift.store(new, Ordering::Relaxed);
            tracer.tell(engine.machine().budget(), || Event::Watch(new));
        }
    }

    fn next_unit(&mut self, shift: u8) -> Option<u64> {
        while let Some(range) = self.lap.last_mut() {
            let unit = next_watched(range.start, shift);
            if unit < range.end {
                range.start = unit + 1;
                return Some(unit);
            }
            self.lap.pop();
        }
        None
    }

    /// Begins.
    pub fn start(tracer: &Tracer, budget: &Budget) -> Watcher {
        tracer.shift.store(FIRST_SHIFT, Ordering::Relaxed);
        tracer.touches.store(0, Ordering::Relaxed);
        tracer.spent_us.store(0, Ordering::Relaxed);
        tracer.tell(budget, || Event::Watch(FIRST_SHIFT));
        Watcher { windows: MEASURE_EVERY, ..Watcher::default() }
    }
}
