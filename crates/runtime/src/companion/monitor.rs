//! The monitor: the companion's first thread. It samples the process's size and keeps the limit.
//!
//! Before activation nothing is registered, so a program that fits its limit runs at its own speed.
//! The nearer the tree is to its limit, the shorter the monitor sleeps. After activation it adopts
//! new mappings as they appear, and does little else: a program can touch a new mapping at memory
//! speed before it is adopted, so the monitor must get a CPU whenever it wakes.
//!
//! The monitor also receives notices, quiesces the agent for forks, and ends the companion. Lock
//! order: its looks are inside the gate; it closes the gate for a fork.

use crate::address_space::adopt::adopt_mappings;
use crate::address_space::mapping_events::is_receiver_starved;
use crate::companion::activate::activate;
use crate::companion::end::{cannot_activate, look_for_users};
use crate::companion::farewell;
use crate::companion::memory_users::User;
use crate::companion::placement::{APART_WHILE_GROWING_NS, Place};
use crate::companion::receive_notices::receive_notices;
use crate::fork::protocol::quiesce;
use crate::ports::arena_size;
use crate::ports::machine::LinuxMachine;
use crate::runtime::Runtime;
use foliomem_core::engine::Engine;
use foliomem_core::watermark;
use foliomem_sys::clock::{self, now_ns};
use foliomem_sys::companion_process::Woken;
use foliomem_sys::cpus;
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::PAGE_BYTES;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How fast a program can touch memory: 8 GiB/s, as pages per millisecond.
const TOUCH_PAGES_PER_MS: i64 = 2048;
/// How often the monitor looks whether a process still uses the memory.
const USERS_INTERVAL_NS: u64 = 20_000_000;
/// The time from the clearing of the exit word to the end of its thread.
const EXIT_PAUSE: Duration = Duration::from_micros(200);
/// The monitor's priority: it works for some microseconds at a time.
pub(crate) const MONITOR_NICE: i32 = -20;
/// The monitor's shortest and longest sleep.
const SLEEP_MIN: Duration = Duration::from_micros(500);
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// The shortest sleep while program and handler are co-located: while the monitor runs, the
/// scheduler moves the program's thread to another CPU, and the handler has to follow. A program
/// that faults page by page grows by 11 MiB meanwhile, at most.
const SLEEP_TOGETHER: Duration = Duration::from_millis(2);
/// The longest sleep while new mappings may need adoption soon, or the process has just changed its
/// size.
const SLEEP_ACTIVATED_MAX: Duration = Duration::from_millis(4);
/// A recorded process is managed from this size on, 4 MiB. Of a smaller one the trace has the
/// start.
const RECORDED_PAGES: i64 = (4 << 20) / PAGE_BYTES as i64;
/// The longest sleep before that size.
const SLEEP_RECORDING_MAX: Duration = Duration::from_millis(2);
/// This many looks in a row without a change make a quiet process: it sleeps, or works on resident
/// memory. They take an eighth of a second: on a busy machine a program that is about to grow may
/// wait for a CPU for tens of milliseconds.
const QUIET_LOOKS: u32 = 256;
/// A quiet process may touch this much before the monitor looks again, though there is no room: 8
/// MiB and 1/2^6 of the limit. That is half and a third of what a tree may be over its limit for a
/// moment (16 MiB a process and a twentieth). However many processes wake up at the same time, the
/// machine's memory has one speed.
const QUIET_PAGES: i64 = (8 << 20) / PAGE_BYTES as i64;
const QUIET_SHIFT: u32 = 6;
/// A process that has not changed for this many looks is not awake.
const AWAKE_LOOKS: u32 = 4;

/// What the monitor remembers from one look to the next.
#[derive(Default)]
struct Looks {
    /// Unmanaged pages of the program, as of the last search for them.
    unmanaged_pages: i64,
    /// The process's pages, the tree's room and the faults served, at the last look.
    seen: (i64, i64, u64),
    /// Looks in a row that saw the same.
    alike: u32,
    /// Looks in a row that saw the same of this process.
    idle: u32,
    /// The folio sizes that are allowed.
    sizes: SizePolicy,
}

impl Looks {
    fn see(&mut self, seen: (i64, i64, u64)) {
        self.alike = if seen == self.seen { self.alike.saturating_add(1) } else { 0 };
        self.idle = if seen.0 == self.seen.0 { self.idle.saturating_add(1) } else { 0 };
        self.seen = seen;
    }

    fn is_quiet(&self) -> bool {
        self.alike >= QUIET_LOOKS
    }

    /// Before activation: the size of a short program must be seen, and an idle one must not be
    /// woken.
    fn longest_sleep(&self) -> Duration {
        SLEEP_ACTIVATED_MAX.saturating_mul(1 << self.idle.min(8)).min(SLEEP_MAX)
    }

    /// Reclaimers that have freed nothing are woken again after a change, or now and then.
    fn may_free_more(&self) -> bool {
        !self.is_quiet() || self.alike.is_multiple_of(QUIET_LOOKS)
    }
}

/// Watches the process until it ends. `user` is the process that uses the memory.
pub(crate) fn monitor(runtime: &'static Runtime, mut user: User) -> ! {
    let (mut looks, mut place) = (Looks::default(), Place::here());
    let (mut due_ns, mut users_due_ns) = (0, 0);
    loop {
        place.settle(&runtime.placement);
        let kicks = runtime.fork.quiesce.kicks();
        if runtime.fork.quiesce.is_requested() {
            quiesce(runtime, &user);
            // The program may have been killed while it forked.
            (due_ns, users_due_ns) = (0, 0);
        }
        if runtime.companion.is_asked_to_end() {
            farewell::answer(runtime);
        }
        if now_ns() >= users_due_ns {
            look_for_users(runtime, &mut user);
            users_due_ns = now_ns() + USERS_INTERVAL_NS;
        }
        {
            let _inside = runtime.fork.gate.enter();
            if receive_notices(runtime) {
                due_ns = 0;
            }
            if now_ns() >= due_ns {
                let Some(sleep) = look_around(runtime, &mut looks) else { continue };
                let sleep = (sleep * crowd(runtime, &looks)).min(sleep.max(SLEEP_MAX));
                due_ns = now_ns() + sleep.as_nanos() as u64;
            }
        }
        // A notice that came while others were received has woken nobody.
        if runtime.notices.allocations.has_pending() {
            continue;
        }
        let until_ns = due_ns.min(users_due_ns);
        let time = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
        if runtime.companion.doze(runtime.fork.quiesce.kick(), kicks, time) == Woken::Exit {
            // The program executes another one, or its first thread ends: maybe a moment later.
            clock::sleep(EXIT_PAUSE);
            users_due_ns = 0;
        }
    }
}

/// How much rarer the monitor may look because of other processes: how many processes there are for
/// each that can grow at full speed. A process that grows counts against those that are awake, and
/// one that does not against all.
fn crowd(runtime: &'static Runtime, looks: &Looks) -> u32 {
    let control = runtime.context.budget.control();
    let is_awake = looks.idle < AWAKE_LOOKS;
    control.process(runtime.context.budget.slot()).awake.store(u32::from(is_awake), Ordering::Relaxed);
    let (awake, all) = control.awake_processes();
    let looking = if is_awake { awake } else { all };
    if looking <= 2 { 1 } else { (looking / (2 * cpus::cpus().max(1))).max(1) }
}

/// One look at the process; `None` if there is more to do at once. Otherwise how long to sleep.
fn look_around(runtime: &'static Runtime, looks: &mut Looks) -> Option<Duration> {
    runtime.sharing.measure(&runtime.context, || crowd(runtime, looks));
    runtime.context.budget.sample();
    runtime.notices.lenders.look_if_due();
    looks.see((
        runtime.context.budget.own_pages(),
        runtime.context.budget.room_pages(),
        runtime.context.budget.counters().vm.pgfault.get(),
    ));
    let Some(events) = runtime.mapping_events() else {
        let room = runtime.context.budget.room_pages();
        let is_of_interest = runtime.context.tracer.is_on() && runtime.context.budget.own_pages() >= RECORDED_PAGES;
        let now =
            is_of_interest || runtime.context.settings.torture || runtime.activation.manage_now.load(Ordering::Relaxed);
        if now || room < runtime.context.activation_pages() {
            match activate(runtime) {
                Ok(()) => return None,
                Err(error) => cannot_activate(runtime, &error),
            }
        }
        runtime.context.tracer.unmanaged(&runtime.context.budget, runtime.context.budget.own_pages());
        let most = if runtime.context.tracer.is_on() { SLEEP_RECORDING_MAX } else { looks.longest_sleep() };
        return Some(sleep_for(room - runtime.context.activation_pages(), most));
    };
    let engine = &events.activated.engine;
    settle_limit(runtime, engine);
    runtime.sharing.throttle.look(&runtime.context.budget, engine);
    if runtime.placement.cpu().is_some() && is_receiver_starved(engine.machine()) {
        // The program has just raised a mapping event, keeps the follower from its CPU, and grows.
        runtime.placement.come_apart(APART_WHILE_GROWING_NS);
    }
    events.settle();
    let managed = engine.resident_pages() as i64;
    let unmanaged = runtime.context.budget.own_pages() - managed;
    // New mappings show as growth of unmanaged memory.
    if unmanaged > looks.unmanaged_pages + watermark::LOW_MIN_PAGES / 4 || runtime.context.settings.torture {
        if adopt_mappings(events) {
            runtime.notices.allocations.note_found();
        }
        looks.unmanaged_pages = runtime.context.budget.own_pages() - engine.resident_pages() as i64;
    }
    looks.unmanaged_pages = looks.unmanaged_pages.min(unmanaged);
    let unmanaged_pages = runtime.context.budget.own_pages() - engine.held_pages() as i64;
    runtime.context.budget.note_unmanaged(unmanaged_pages);
    runtime.context.tracer.unmanaged(&runtime.context.budget, unmanaged_pages);
    let sizes = runtime.context.budget.control().sizes();
    if std::mem::replace(&mut looks.sizes, sizes) != sizes {
        engine.machine().prepare_for_huge(0..usize::MAX);
    }
    engine.tend();
    Some(balance(runtime, engine, looks))
}

/// Sets everything that depends on the limit, which may have grown.
fn settle_limit(runtime: &'static Runtime, engine: &Engine<LinuxMachine>) {
    let limit_pages = runtime.context.budget.limit_pages();
    runtime.notices.allocations.set_limit(limit_pages);
    engine.limit_is(watermark::floor_pages(limit_pages), arena_size::store_pages(limit_pages));
    runtime.context.tracer.limit(&runtime.context.budget);
}

/// Gives memory back when the tree needs it, and wakes the reclaimers if there is too little.
fn balance(runtime: &'static Runtime, engine: &Engine<LinuxMachine>, looks: &Looks) -> Duration {
    let low = runtime.context.low_pages();
    let room = runtime.context.budget.room_pages();
    let free = i64::from(engine.free_frames());
    if room < 0 && free > low {
        engine.shrink(low as u32, (-room) as u32);
    }
    if looks.is_quiet() {
        // Reclaim keeps this much free by itself.
        engine.give_back_runs(2 * low as u32);
    }
    if (room + free < low && looks.may_free_more()) || runtime.context.settings.torture || engine.awaits_discard() {
        runtime.reclaim.wake();
    }
    let unnoticed =
        if looks.is_quiet() { QUIET_PAGES + (runtime.context.budget.limit_pages() >> QUIET_SHIFT) } else { 0 };
    let sleep = sleep_for((room + free - low).max(unnoticed), SLEEP_ACTIVATED_MAX);
    if runtime.placement.cpu().is_some() { sleep.max(SLEEP_TOGETHER) } else { sleep }
}

/// The shortest time in which a program can touch `pages`.
fn sleep_for(pages: i64, most: Duration) -> Duration {
    let micros = (pages.max(0) * 1000 / TOUCH_PAGES_PER_MS) as u64;
    Duration::from_micros(micros).clamp(SLEEP_MIN, most)
}
