//! `--idle`: has a process compressed as a whole once it has used no CPU for a while.
//!
//! The supervisor reads the CPU time of each process once a second by a system call; the program
//! does nothing. When a process becomes idle, the supervisor leaves a reclaim request in its slot,
//! as `foliomem ctl PID reclaim all` does, and withdraws the request if the process wakes
//! meanwhile. The next request follows only after the process has used CPU and is idle again.
//!
//! In a process that works, the supervisor has cold memory searched for and compressed
//! ([`crate::cold`]).
//!
//! The slot also says that the process is idle: its monitor then sleeps for longer. If all
//! processes of a run are idle, so does the supervisor.

use crate::cold::{ColdSearch, Used};
use crate::proc_stat::ProcStat;
use foliomem_session::memory_request::Wanted;
use foliomem_session::process_table::ProcessSlot;
use foliomem_session::segment::Control;
use foliomem_sys::clock;
use foliomem_types::counters::FaultKind;
use foliomem_types::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time between two looks at all processes.
const INTERVAL: Duration = Duration::from_secs(1);
/// A process that uses more than this share of a CPU between two looks, as a divisor, is not idle.
/// Timers of a sleeping Java or Python program stay below it.
const BUSY_SHARE: u32 = 100;
/// Maximum CPU time that a process may use while it is compressed. More CPU time ends the
/// compression. A process that only handles a timer needs less.
const MAX_AWAKE: Duration = Duration::from_millis(10);
/// Size in bytes below which a process is not compressed: managing it would take more memory than
/// compression saves.
const MIN_BYTES: u64 = 8 << 20;

/// The state of a process that is watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It has used CPU lately.
    Busy,
    /// The request with this number compresses the process. `cpu_time` is what the process had used
    /// when the request was made.
    Compressing { number: u32, cpu_time: Duration },
    /// It is compressed, and has used no CPU since.
    Idle,
}

/// The action that a look at a process leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Nothing,
    /// The process has become idle: compress it.
    Compress,
    /// The process is no longer idle: take back the request with this number.
    TakeBack(u32),
}

/// A process that is watched.
#[derive(Clone, Copy, Debug)]
struct Watched {
    /// The time of the last look at the process, and its CPU time at that look.
    looked: Instant,
    cpu_time: Duration,
    /// Since when it has been idle.
    since: Instant,
    state: State,
    cold: ColdSearch,
}

impl Watched {
    fn new(now: Instant, cpu_time: Duration) -> Watched {
        Watched { looked: now, cpu_time, since: now, state: State::Busy, cold: ColdSearch::new(now) }
    }

    /// Updates the state of a process that has used `cpu_time` until `now`. `is_served` returns
    /// whether the request with a number is served.
    fn look(
        &mut self,
        now: Instant,
        cpu_time: Duration,
        idle_time: Duration,
        is_served: impl FnOnce(u32) -> bool,
    ) -> Verdict {
        let used = cpu_time.saturating_sub(std::mem::replace(&mut self.cpu_time, cpu_time));
        let elapsed = now - std::mem::replace(&mut self.looked, now);
        match self.state {
            State::Busy if used > elapsed / BUSY_SHARE => self.since = now,
            State::Busy if now - self.since >= idle_time => return Verdict::Compress,
            State::Compressing { number, cpu_time: before } if cpu_time.saturating_sub(before) > MAX_AWAKE => {
                (self.state, self.since) = (State::Busy, now);
                return Verdict::TakeBack(number);
            }
            State::Compressing { number, .. } if is_served(number) => self.state = State::Idle,
            State::Idle if used > Duration::ZERO => (self.state, self.since) = (State::Busy, now),
            State::Busy | State::Compressing { .. } | State::Idle => {}
        }
        Verdict::Nothing
    }

    fn is_compressing(&self) -> bool {
        matches!(self.state, State::Compressing { .. })
    }
}

/// Watches the processes of a run.
#[derive(Debug)]
pub struct IdleWatcher {
    idle_time: Duration,
    looked: Option<Instant>,
    /// The processes by pid. A process gets a new slot when it executes another program.
    processes: BTreeMap<u32, (&'static ProcessSlot, Watched)>,
    /// Whether all processes of the run are idle.
    are_all_idle: bool,
}

impl IdleWatcher {
    /// Creates a watcher that has processes compressed once they were idle for `idle_time`.
    pub fn new(idle_time: Duration) -> IdleWatcher {
        IdleWatcher { idle_time, looked: None, processes: BTreeMap::new(), are_all_idle: false }
    }

    /// Looks at the processes of the run: once a second, and whenever it is called while one is
    /// being compressed.
    pub fn look(&mut self, control: &'static Control) {
        let now = Instant::now();
        let is_due = self.looked.is_none_or(|looked| now - looked >= INTERVAL);
        if is_due {
            self.looked = Some(now);
        } else if !self.processes.values().any(|(_, watched)| watched.is_compressing()) {
            return;
        }
        let living = control.living_processes();
        self.processes
            .retain(|pid, (slot, _)| living.iter().any(|(other, its)| other == pid && std::ptr::eq(*its, *slot)));
        for (pid, slot) in &living {
            let known = self.processes.get(pid);
            if is_due || known.is_some_and(|(_, watched)| watched.is_compressing()) {
                self.look_at(now, *pid, slot);
            }
        }
        // The CPU time of a process in another pid namespace cannot be read.
        let is_watched = control.each_slot().filter(|(_, is_alive)| *is_alive).count() == self.processes.len();
        self.are_all_idle = is_watched && self.processes.values().all(|(_, watched)| watched.state == State::Idle);
    }

    fn look_at(&mut self, now: Instant, pid: u32, slot: &'static ProcessSlot) {
        // A process that has just ended is gone at the next look.
        let Some(cpu_time) = clock::process_cpu_time(pid) else { return };
        let (_, watched) = self.processes.entry(pid).or_insert_with(|| (slot, Watched::new(now, cpu_time)));
        match watched.look(now, cpu_time, self.idle_time, |number| slot.request.is_finished(number)) {
            Verdict::Nothing if watched.state == State::Busy => {
                if let Some(pages) = find_cold(watched, now, self.idle_time, pid, slot) {
                    slot.request.ask_unless_pending(Wanted::FindCold { pages });
                }
            }
            Verdict::Nothing => {}
            Verdict::Compress if slot.measured_bytes() < MIN_BYTES => watched.state = State::Idle,
            Verdict::Compress => {
                let number = slot.request.ask(Wanted::Reclaim { pages: u64::MAX });
                watched.state = State::Compressing { number, cpu_time };
            }
            Verdict::TakeBack(number) => {
                slot.request.replace(number, Wanted::Reclaim { pages: 0 });
            }
        }
        match watched.state {
            State::Idle => slot.mark_idle(),
            State::Busy | State::Compressing { .. } => slot.mark_busy(),
        }
    }

    /// Returns whether all processes of the run are idle, as of the last look.
    pub fn are_all_idle(&self) -> bool {
        self.are_all_idle
    }
}

/// Returns how many pages of a process that works to stage now, if a round of the search for cold
/// memory is due.
fn find_cold(watched: &mut Watched, now: Instant, idle_time: Duration, pid: u32, slot: &ProcessSlot) -> Option<u64> {
    let resident_bytes = slot.measured_bytes().saturating_sub(slot.counters.store.mem_used_total.get());
    if resident_bytes < MIN_BYTES || slot.request.pending().is_some() {
        return None;
    }
    let cpu_time = watched.cpu_time;
    watched.cold.round(now, idle_time, resident_bytes / PAGE_BYTES as u64, || {
        let faults = slot.counters.faults(FaultKind::Staged);
        let (touches, served) = (faults.count(), Duration::from_nanos(faults.sum_ns.get()));
        Some(Used { cpu_time, touches, served, new_pages: ProcStat::of(pid)?.minor_faults()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};
    use std::process::{Child, Command};

    const IDLE_TIME: Duration = Duration::from_secs(5);

    /// A process whose clocks are set by hand.
    struct Clocks {
        watched: Watched,
        now: Instant,
        cpu_time: Duration,
    }

    impl Clocks {
        fn new() -> Clocks {
            let (now, cpu_time) = (Instant::now(), Duration::from_secs(1000));
            Clocks { watched: Watched::new(now, cpu_time), now, cpu_time }
        }

        /// Looks a second later. The process has used `used_us` microseconds of CPU meanwhile.
        fn second(&mut self, used_us: u64, is_served: bool) -> Verdict {
            self.now += INTERVAL;
            self.cpu_time += Duration::from_micros(used_us);
            let verdict = self.watched.look(self.now, self.cpu_time, IDLE_TIME, |_| is_served);
            if verdict == Verdict::Compress {
                self.watched.state = State::Compressing { number: 7, cpu_time: self.cpu_time };
            }
            verdict
        }

        /// Returns the verdicts of the next `seconds`.
        fn seconds(&mut self, seconds: u32, used_us: u64) -> Vec<Verdict> {
            (0..seconds).map(|_| self.second(used_us, true)).filter(|verdict| *verdict != Verdict::Nothing).collect()
        }
    }

    #[test]
    fn a_process_is_compressed_once_after_its_idle_time() {
        let mut clocks = Clocks::new();
        assert_eq!(clocks.seconds(4, 0), []);
        assert_eq!(clocks.second(0, false), Verdict::Compress);
        assert_eq!(clocks.second(0, false), Verdict::Nothing);
        assert!(clocks.watched.is_compressing());
        assert_eq!(clocks.seconds(1000, 0), []);
        assert_eq!(clocks.watched.state, State::Idle);
    }

    #[test]
    fn a_process_is_compressed_again_only_after_it_has_used_cpu() {
        let mut clocks = Clocks::new();
        assert_eq!(clocks.seconds(100, 0), [Verdict::Compress]);
        assert_eq!(clocks.second(3000, true), Verdict::Nothing);
        assert_eq!(clocks.watched.state, State::Busy);
        assert_eq!(clocks.seconds(4, 0), []);
        assert_eq!(clocks.seconds(100, 0), [Verdict::Compress]);
    }

    #[test]
    fn nothing_is_done_to_a_busy_process_and_timers_do_not_keep_one_busy() {
        let mut clocks = Clocks::new();
        assert_eq!(clocks.seconds(1000, 20_000), []);
        // Busy for a moment, again and again.
        assert!((0..200).all(|_| clocks.seconds(4, 0).is_empty() && clocks.second(15_000, true) == Verdict::Nothing));
        assert_eq!(clocks.seconds(6, 2000), [Verdict::Compress]);
    }

    #[test]
    fn a_request_to_a_process_that_wakes_is_taken_back() {
        let mut clocks = Clocks::new();
        while clocks.second(0, false) != Verdict::Compress {}
        assert_eq!(clocks.second(9000, false), Verdict::Nothing, "a timer");
        assert_eq!(clocks.second(2000, false), Verdict::TakeBack(7));
        assert_eq!(clocks.watched.state, State::Busy);
        assert_eq!(clocks.seconds(4, 0), []);
        assert_eq!(clocks.second(0, false), Verdict::Compress);
    }

    /// A process of a run that has taken `bytes`. It ends with the test, however that ends.
    struct Sleeper {
        child: Child,
        slot: &'static ProcessSlot,
    }

    impl Sleeper {
        fn new(control: &'static Control, bytes: u64) -> Sleeper {
            let child = Command::new("sleep").arg("1000").spawn().unwrap();
            let slot = control.process(control.claim_slot(rustix::process::Pid::from_child(&child)).unwrap());
            slot.measured_bytes.store(bytes, std::sync::atomic::Ordering::Relaxed);
            Sleeper { child, slot }
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }

    #[test]
    fn the_slot_of_an_idle_process_gets_a_request() {
        let (control, _segment) = Control::create(&Configuration::plain(Limit::Bytes(1 << 30))).unwrap();
        let (large, small) = (Sleeper::new(control, 100 << 20), Sleeper::new(control, 1 << 20));
        let mut watcher = IdleWatcher::new(Duration::ZERO);
        let look = |watcher: &mut IdleWatcher| {
            watcher.looked = None;
            watcher.look(control);
            std::thread::sleep(Duration::from_millis(1));
        };
        let request = loop {
            look(&mut watcher);
            if let Some(request) = large.slot.request.pending() {
                break request;
            }
        };
        assert!(matches!(request.wanted, Wanted::Reclaim { pages } if pages > 1 << 30), "{request:?}");
        assert!(!watcher.are_all_idle() && !large.slot.is_idle());
        while !watcher.are_all_idle() {
            // The process gets another request where it was still starting at the first one.
            if let Some(request) = large.slot.request.pending() {
                large.slot.request.finish(request.number);
            }
            look(&mut watcher);
        }
        assert!(large.slot.is_idle() && small.slot.is_idle());
        assert!(large.slot.request.pending().is_none() && small.slot.request.pending().is_none(), "too small");
    }
}
