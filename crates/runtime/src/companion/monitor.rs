//! The monitor: the companion's first thread. It samples the process's size and keeps the limit.
//!
//! Before activation nothing is registered, so a program that fits its limit runs at its own speed.
//! The nearer the tree is to its limit, the shorter the monitor sleeps. After activation it adopts
//! new mappings as they appear, and does little else: a program can touch a new mapping at memory
//! speed before it is adopted, so the monitor must get a CPU whenever it wakes.
//!
//! The monitor also receives notices, quiesces the agent for forks, and ends the companion.
//!
//! Lock order: it samples inside the gate, and closes the gate for a fork.

use crate::address_space::adopt::adopt_mappings;
use crate::address_space::mapping_events::{MappingEvents, is_receiver_starved};
use crate::companion::activate::activate;
use crate::companion::asleep::{Asleep, Looks};
use crate::companion::content_sampling::ContentSampling;
use crate::companion::end::{cannot_activate, check_users};
use crate::companion::farewell;
use crate::companion::memory_users::User;
use crate::companion::placement::{SEPARATE_WHILE_GROWING_NS, ThreadPlacement, own_thread};
use crate::companion::receive_notices::receive_notices;
use crate::fork::protocol::quiesce;
use crate::ports::LinuxPorts;
use crate::runtime::Runtime;
use foliomem_core::engine::Engine;
use foliomem_core::pacing::{Activity, Protection, Room};
use foliomem_session::memory_request::{Pending, Wanted};
use foliomem_session::process_table::LeftFaults;
use foliomem_sys::clock::{self, now_ns};
use foliomem_sys::companion_process::Woken;
use foliomem_sys::cpus::{self, Urgency, set_urgency};
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::PAGE_BYTES;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum speed at which a program touches memory: 8 GiB/s, in pages per millisecond.
const TOUCH_PAGES_PER_MS: i64 = 2048;
/// Interval at which the monitor checks whether a process still uses the memory. The interval is
/// longer among many processes if the kernel notifies the monitor of the end.
const USERS_INTERVAL: Duration = Duration::from_millis(20);
/// Time from the clearing of the exit word to the end of the program's first thread.
const EXIT_PAUSE: Duration = Duration::from_micros(200);
/// The monitor's nice value: it works for some microseconds at a time.
pub(crate) const MONITOR_NICE: i32 = -20;
/// Minimum and maximum sleep of the monitor.
const SLEEP_MIN: Duration = Duration::from_micros(500);
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// Minimum sleep while the agent is co-located. When the monitor runs, the scheduler moves the
/// program's thread to another CPU, and the pinned handler must follow. A program that faults page
/// by page grows by at most 11 MiB meanwhile.
const SLEEP_CO_LOCATED_MIN: Duration = Duration::from_millis(2);
/// Minimum sleep of the monitor of a calm process among many, more than two for each CPU: the
/// searches of the last second have found no memory that no hook has announced. Each sample costs
/// 50 us of a CPU that the handlers need.
const SLEEP_CALM_MIN: Duration = Duration::from_millis(2);
const CALM_AFTER_NS: u64 = 1_000_000_000;
/// Maximum sleep near the limit, where new mappings need adoption soon, or while the process has
/// just changed its size.
const SLEEP_ACTIVATED_MAX: Duration = Duration::from_millis(4);
/// Number of samples, a quarter of a second, after which a process is no longer young: then a
/// change of its size is no reason to sample it more often than this far from the limit.
const YOUNG_SAMPLES: u32 = 64;
/// Maximum sleep far from the limit while a process that is no longer young changes its size.
const SLEEP_GROWING: Duration = Duration::from_millis(16);
/// Unmanaged memory that has grown by this much shows new mappings: 256 KiB.
const NEW_MAPPING_PAGES: i64 = (256 << 10) / PAGE_BYTES as i64;
/// Size from which a recorded process is managed, in pages: 4 MiB. The trace of a smaller one has
/// only its start.
const RECORDED_PAGES: i64 = (4 << 20) / PAGE_BYTES as i64;
/// Maximum sleep of a recorded process before that size.
const SLEEP_RECORDING_MAX: Duration = Duration::from_millis(2);
/// Number of samples in a row without a change that make a quiet process: it sleeps, or works on
/// resident memory. They take an eighth of a second, because on a busy machine a growing program
/// may wait for a CPU for tens of milliseconds.
const QUIET_SAMPLES: u32 = 256;
/// Memory that a quiet process may touch before the next sample even without room: 8 MiB and 1/2^6
/// of the limit. The tree may exceed its limit for a moment by 16 MiB for each process and 1/20 of
/// the limit; this is half of the former and a third of the latter. The total does not depend on
/// the number of processes that wake up at once, because they share one memory speed.
const QUIET_PAGES: i64 = (8 << 20) / PAGE_BYTES as i64;
const QUIET_SHIFT: u32 = 6;
/// Time without a change after which the monitor of an idle process is dormant, in nanoseconds. The
/// supervisor checks at the same interval whether the process is idle.
const DORMANT_AFTER_NS: u64 = 1_000_000_000;
/// Maximum sleep of a dormant monitor: it bounds how late a request is seen.
const SLEEP_DORMANT: Duration = Duration::from_millis(500);
/// Maximum sleep far from the limit while nothing happens in the process.
const SLEEP_STILL: Duration = Duration::from_millis(200);
/// While nothing happens in the process, a check of its descriptors may be overdue for this long.
const LENDERS_OVERDUE_STILL_NS: u64 = 1_000_000_000;
/// A dormant monitor checks the tree's room only if more than this share of the process's memory is
/// resident, as a shift (1/2^2). A process with less resident memory faults when it wakes, before
/// it can grow.
const RESIDENT_SHIFT: u32 = 2;
/// Number of samples without a change after which a process is not awake.
const AWAKE_SAMPLES: u32 = 4;

/// The monitor's memory of earlier samples.
#[derive(Default)]
struct History {
    /// The program's unmanaged pages at the last search for them.
    unmanaged_pages: i64,
    /// The process's pages, the tree's room and the number of faults, at the last sample.
    seen: (i64, i64, u64),
    /// Number of samples so far.
    samples: u32,
    /// Number of samples in a row without any change.
    alike: u32,
    /// Number of samples in a row without a change of this process's size.
    idle: u32,
    /// When the process last changed its size or faulted.
    changed_ns: u64,
    /// When a search last found memory that no hook has announced; at first when the agent has
    /// activated.
    found_ns: u64,
    /// The folio sizes that are allowed.
    sizes: SizePolicy,
    /// The factor by which the monitor samples more rarely because of other processes, at the last
    /// sample.
    crowd: u32,
    /// Number of processes of the run, at the last sample.
    processes: u32,
}

impl History {
    fn add(&mut self, seen: (i64, i64, u64)) {
        self.samples = self.samples.saturating_add(1);
        self.alike = if seen == self.seen { self.alike.saturating_add(1) } else { 0 };
        self.idle = if seen.0 == self.seen.0 { self.idle.saturating_add(1) } else { 0 };
        if (seen.0, seen.2) != (self.seen.0, self.seen.2) {
            self.changed_ns = now_ns();
        }
        self.seen = seen;
    }

    /// Sets the factor by which the monitor samples more rarely. Among many monitors none is a
    /// real-time thread: together they would leave no CPU to the threads that free memory.
    fn set_crowd(&mut self, crowd: u32) {
        let before = std::mem::replace(&mut self.crowd, crowd);
        if (before > 1) != (crowd > 1) {
            set_urgency(own_thread(), if crowd > 1 { Urgency::Normal } else { Urgency::RealTime });
        }
    }

    fn is_quiet(&self) -> bool {
        self.alike >= QUIET_SAMPLES
    }

    /// Returns the maximum sleep far from the limit: the monitor must see the size of a short-lived
    /// program, and must not wake for an idle one.
    fn max_sleep(&self) -> Duration {
        let while_growing = if self.samples < YOUNG_SAMPLES { SLEEP_ACTIVATED_MAX } else { SLEEP_GROWING };
        while_growing.saturating_mul(1 << self.idle.min(8)).min(SLEEP_MAX)
    }

    /// Returns whether nothing has happened in the process for a while.
    fn is_still(&self) -> bool {
        now_ns() >= self.changed_ns + DORMANT_AFTER_NS
    }

    /// Returns whether hooks announce all memory that the process takes.
    fn is_calm(&self) -> bool {
        now_ns() >= self.found_ns + CALM_AFTER_NS
    }

    /// Returns whether the run has more than two processes for each CPU.
    fn is_among_many(&self) -> bool {
        self.processes > 2 * cpus::cpus().max(1)
    }

    /// Returns whether reclaimers that have freed nothing may succeed now: after a change, or from
    /// time to time.
    fn may_free_more(&self) -> bool {
        !self.is_quiet() || self.alike.is_multiple_of(QUIET_SAMPLES)
    }
}

/// Watches the process until it ends. `user` is a process that uses the memory.
pub(crate) fn monitor(runtime: &'static Runtime, mut user: User) -> ! {
    let (mut history, mut place) = (History { crowd: 1, ..History::default() }, ThreadPlacement::here());
    let (mut due_ns, mut users_due_ns, mut asleep) = (0, 0, Asleep::default());
    let mut content = ContentSampling::default();
    loop {
        place.update(&runtime.placement);
        let kicks = runtime.fork.quiesce.kicks();
        if runtime.fork.quiesce.is_requested() {
            quiesce(runtime, &user);
            // The program may have been killed while it forked.
            (due_ns, users_due_ns) = (0, 0);
            asleep.end();
        }
        if runtime.companion.is_asked_to_end() {
            farewell::answer(runtime);
        }
        if now_ns() >= users_due_ns {
            check_users(runtime, &mut user);
            let interval = match runtime.companion.notices_exit() {
                true if runtime.dormancy.lasts() => SLEEP_DORMANT,
                true if history.is_still() => SLEEP_STILL,
                true => (USERS_INTERVAL * history.crowd).min(SLEEP_DORMANT),
                false => USERS_INTERVAL,
            };
            users_due_ns = now_ns() + interval.as_nanos() as u64;
        }
        {
            let _inside = runtime.fork.gate.enter();
            if receive_notices(runtime) {
                due_ns = 0;
                asleep.end();
            }
            if now_ns() >= due_ns {
                let next_look_ns = look_at_sleeper(runtime, &user, &asleep);
                let next_ns =
                    next_look_ns.or_else(|| sample_and_plan(runtime, &user, &mut history, &mut asleep, &mut content));
                let Some(next_ns) = next_ns else { continue };
                due_ns = next_ns;
                if history.is_still() && users_due_ns < due_ns {
                    // One wake serves both: at rest, the wakes are what costs CPU time.
                    users_due_ns = 0;
                    continue;
                }
            }
        }
        // A notice that came while others were received has not woken the monitor.
        if runtime.notices.allocations.has_pending() {
            continue;
        }
        let is_dormant = runtime.dormancy.lasts();
        let until_ns = due_ns.min(users_due_ns);
        let time = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
        if runtime.companion.doze(runtime.fork.quiesce.kick(), kicks, time) == Woken::Exit {
            // The program executes another program, or its first thread ends, perhaps a moment
            // after the kernel has cleared the exit word.
            clock::sleep(EXIT_PAUSE);
            users_due_ns = 0;
        }
        if is_dormant && !runtime.dormancy.lasts() {
            // The process has woken.
            (due_ns, users_due_ns) = (0, 0);
        }
    }
}

/// Samples the process. Returns when to do so again; `None` if there is more to do at once.
fn sample_and_plan(
    runtime: &'static Runtime,
    user: &User,
    history: &mut History,
    asleep: &mut Asleep,
    content: &mut ContentSampling,
) -> Option<u64> {
    let sleep = sample(runtime, history)?;
    note_sleep(runtime, user, history, sleep, asleep);
    let crowd = crowd(runtime, history);
    history.set_crowd(crowd);
    if let Some(events) = runtime.mapping_events() {
        content.step(&runtime.context, &events.activated.engine, crowd);
    }
    let sleep = (sleep * history.crowd).min(sleep.max(SLEEP_MAX));
    Some(now_ns() + sleep.as_nanos() as u64)
}

/// Returns the time of the next look if the process is asleep, so that it needs no sample now.
fn look_at_sleeper(runtime: &'static Runtime, user: &User, asleep: &Asleep) -> Option<u64> {
    let (budget, now_ns) = (&runtime.context.budget, now_ns());
    if !asleep.lasts(now_ns, budget.room_pages(), || user.cpu_time()) || budget.own_slot().request.pending().is_some() {
        return None;
    }
    let are_others_awake = budget.control().awake_processes().0 > 0;
    // Those that share pages wait for each other's measurements.
    if are_others_awake && budget.shares() {
        return None;
    }
    let looks = if are_others_awake || runtime.activation.get().is_none() { Looks::Often } else { Looks::Rarely };
    Some(asleep.next_look_ns(now_ns, looks))
}

/// Notes after a sample, which asks for the next one after `pause`, whether the process may be
/// asleep. That of a dormant monitor is known to be, and it looks more rarely.
fn note_sleep(runtime: &'static Runtime, user: &User, history: &History, pause: Duration, asleep: &mut Asleep) {
    let has_work = runtime.context.settings.torture
        || runtime.dormancy.lasts()
        || runtime.held_faults.are_left()
        || runtime.mapping_events().is_some_and(|events| events.activated.engine.always_has_work());
    match history.is_quiet() && !has_work {
        true => asleep.note_quiet(now_ns(), user.cpu_time(), history.seen.1, pause),
        false => asleep.end(),
    }
}

/// Returns the factor by which the monitor samples more rarely because of other processes: the
/// number of processes for each one that can grow at full speed. A growing process counts the
/// processes that are awake, an idle one counts all.
fn crowd(runtime: &'static Runtime, history: &mut History) -> u32 {
    let control = runtime.context.budget.control();
    let is_awake = history.idle < AWAKE_SAMPLES;
    control.process(runtime.context.budget.slot()).awake.store(u32::from(is_awake), Ordering::Relaxed);
    let (awake, all) = control.awake_processes();
    history.processes = all;
    let sampling = if is_awake { awake } else { all };
    if sampling <= 2 { 1 } else { (sampling / (2 * cpus::cpus().max(1))).max(1) }
}

/// Samples the process. Returns how long to sleep; `None` if there is more to do at once.
fn sample(runtime: &'static Runtime, history: &mut History) -> Option<Duration> {
    runtime.sharing.measure(&runtime.context, history.crowd);
    runtime.context.budget.sample();
    runtime.notices.lenders.check_if_due(if history.is_still() { LENDERS_OVERDUE_STILL_NS } else { 0 });
    history.add((
        runtime.context.budget.own_pages(),
        runtime.context.budget.room_pages(),
        runtime.context.budget.counters().vm.pgfault.get(),
    ));
    let slot = runtime.context.budget.own_slot();
    match slot.is_idle() && history.is_still() && !runtime.held_faults.are_left() {
        true => runtime.dormancy.begin(),
        false => runtime.dormancy.end(),
    }
    let request = slot.request.pending();
    let Some(events) = runtime.mapping_events() else {
        let room = runtime.context.room();
        let is_recorded = runtime.context.tracer.is_on() && runtime.context.budget.own_pages() >= RECORDED_PAGES;
        // Without management nothing is swapped out.
        request.filter(|request| !must_manage(request)).iter().for_each(|resume| slot.request.finish(resume.number));
        let is_asked = request.as_ref().is_some_and(must_manage);
        let now = is_recorded || runtime.activation.manage_now.load(Ordering::Relaxed) || is_asked;
        let wanted = now || runtime.context.pacing().activates(&room);
        let is_small = !now && wanted && runtime.context.is_small();
        if is_small {
            runtime.context.budget.report_small();
        }
        if wanted && !is_small && runtime.activation.may_try() {
            match activate(runtime) {
                Ok(()) => return None,
                Err(error) => cannot_activate(runtime, &error),
            }
        }
        runtime.context.tracer.unmanaged(&runtime.context.budget, runtime.context.budget.own_pages());
        return Some(unmanaged_sleep(runtime, history, &room, is_small));
    };
    let engine = &events.activated.engine;
    let uffd = &engine.ports().space.descriptors().program;
    runtime.held_faults.wake_if_over(|| slot.is_held(now_ns), || uffd.wake_all());
    slot.note_left_faults(if runtime.held_faults.are_left() { LeftFaults::Some } else { LeftFaults::None });
    apply_limit(runtime, engine, request);
    if let Some(request) = request {
        runtime.reclaim.serve(request);
    }
    runtime.sharing.throttle.update(&runtime.context.budget, engine);
    if runtime.placement.cpu().is_some() && is_receiver_starved(&engine.ports().space) {
        // The program has just raised a mapping event, keeps the pinned handler from its CPU, and
        // grows.
        runtime.placement.separate(SEPARATE_WHILE_GROWING_NS);
    }
    events.settle();
    look_for_mappings(runtime, events, history);
    engine.ports().space.ask_disabled();
    let sizes = runtime.context.budget.control().sizes();
    if std::mem::replace(&mut history.sizes, sizes) != sizes {
        engine.ports().space.prepare_for_huge(0..usize::MAX);
    }
    engine.maintain();
    let sleep = balance(runtime, engine, history);
    // A held process hardly grows, and waits for the end of that.
    Some(if runtime.held_faults.are_left() { SLEEP_ACTIVATED_MAX } else { sleep })
}

/// Returns how long to sleep while the process is not managed, perhaps because it `is_small`.
fn unmanaged_sleep(runtime: &'static Runtime, history: &History, room: &Room, is_small: bool) -> Duration {
    let is_recording = runtime.context.tracer.is_on();
    let max = match is_recording {
        true => SLEEP_RECORDING_MAX,
        false if runtime.dormancy.lasts() => SLEEP_DORMANT,
        // Hundreds of idle processes would keep the CPUs busy. None can grow beyond the room
        // meanwhile.
        false => (history.max_sleep() * history.crowd).min(SLEEP_DORMANT),
    };
    if is_small {
        return max;
    }
    let max = if history.is_still() && !is_recording { max.max(SLEEP_STILL) } else { max };
    sleep_for(room.pages - room.watermarks.activation_pages(), max)
}

/// Searches the mappings for memory to manage if the process has grown by unmanaged memory. Memory
/// that moves between the program, the store and free frames does not count as growth: each search
/// reads all mappings, and pauses threads that map.
fn look_for_mappings(runtime: &'static Runtime, events: MappingEvents, history: &mut History) {
    let engine = &events.activated.engine;
    let unmanaged_pages = || runtime.context.budget.own_pages() - engine.held_pages() as i64;
    if history.found_ns == 0 {
        history.found_ns = now_ns();
    }
    if unmanaged_pages() > history.unmanaged_pages + NEW_MAPPING_PAGES || runtime.context.settings.torture {
        if adopt_mappings(events) {
            history.found_ns = now_ns();
            runtime.notices.allocations.note_found();
            if runtime.context.budget.room_pages() < 0 {
                runtime.reclaim.wake_urgently();
            }
        }
        history.unmanaged_pages = unmanaged_pages();
    }
    let unmanaged_pages = unmanaged_pages();
    history.unmanaged_pages = history.unmanaged_pages.min(unmanaged_pages);
    runtime.context.budget.note_unmanaged(unmanaged_pages);
    runtime.context.tracer.unmanaged(&runtime.context.budget, unmanaged_pages);
}

/// Returns whether memory must be managed to serve `request`.
fn must_manage(request: &Pending) -> bool {
    request.wanted != Wanted::Resume
}

/// Applies the limit, which may have grown, to everything that depends on it. The protected minimum
/// is 0 during a request to reclaim.
fn apply_limit(runtime: &'static Runtime, engine: &Engine<LinuxPorts>, request: Option<Pending>) {
    let limit_pages = runtime.context.budget.limit_pages();
    runtime.notices.allocations.set_limit(limit_pages);
    let is_reclaiming = request.is_some_and(|request| matches!(request.wanted, Wanted::Reclaim { .. }));
    engine.follow_limit(if is_reclaiming { Protection::Off } else { Protection::Minimum });
    runtime.context.tracer.limit(&runtime.context.budget);
}

/// Gives memory back if the tree needs it, and wakes the reclaimers if there is too little. Returns
/// how long to sleep.
fn balance(runtime: &'static Runtime, engine: &Engine<LinuxPorts>, history: &History) -> Duration {
    let room = engine.room();
    engine.release_surplus(if history.is_quiet() { Activity::Quiet } else { Activity::Busy });
    if (room.is_low() && history.may_free_more()) || engine.always_has_work() {
        runtime.reclaim.wake();
    }
    if runtime.dormancy.lasts() {
        // Handlers that stand by for a pinned one would wake all the time.
        runtime.placement.separate(0);
        let resident_pages = engine.resident_pages() + engine.staged_pages();
        if resident_pages <= engine.swapped_pages() >> RESIDENT_SHIFT {
            return SLEEP_DORMANT;
        }
        return sleep_for(room.pages - room.watermarks.low_pages(), SLEEP_DORMANT);
    }
    let unnoticed =
        if history.is_quiet() { QUIET_PAGES + (runtime.context.budget.limit_pages() >> QUIET_SHIFT) } else { 0 };
    // Far from the limit, new mappings are no more urgent than before activation.
    let far = sleep_for(room.pages - room.watermarks.activation_pages(), history.max_sleep());
    let sleep = sleep_for((room.pages - room.watermarks.low_pages()).max(unnoticed), SLEEP_ACTIVATED_MAX).max(far);
    match runtime.placement.cpu() {
        Some(_) => sleep.max(SLEEP_CO_LOCATED_MIN),
        None if history.is_calm() && history.is_among_many() => sleep.max(SLEEP_CALM_MIN),
        None => sleep,
    }
}

/// Returns the minimum time in which a program can touch `pages`, limited to the range of sleeps.
fn sleep_for(pages: i64, max: Duration) -> Duration {
    let micros = (pages.max(0) * 1000 / TOUCH_PAGES_PER_MS) as u64;
    Duration::from_micros(micros).clamp(SLEEP_MIN, max)
}
