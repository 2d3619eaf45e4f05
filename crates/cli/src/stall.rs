//! Samples how many threads of a run wait for memory.
//!
//! `/proc/PID/task/TID/wchan` names the kernel function in which a thread sleeps. A thread whose
//! page fault foliomem serves sleeps in `handle_userfault`. The fault counters alone would not do:
//! they miss the time that the kernel takes to stop and wake a thread. Of a process that this user
//! may not look at, all threads count as running.
//!
//! Nothing is sampled while nothing is swapped in and no process is held. The same samples decide
//! which processes are held ([`crate::turns`]).

use crate::balance::Pressure;
use crate::settings::TakeTurns;
use crate::swap_ins::SwapIns;
use crate::thrashing::{self, Need, Remedy, Samples, Threads};
use crate::threads::threads_of;
use crate::turns::{Memory, Process, Turns};
use foliomem_session::memory_request::Wanted;
use foliomem_session::process_table::ProcessSlot;
use foliomem_session::segment::Control;
use foliomem_sys::clock;
use foliomem_types::settings::Limit;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// Minimum time between two samples.
const INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time between two samples that are due, however long one takes.
const MAX_INTERVAL: Duration = Duration::from_millis(500);
/// Divisor of the CPU time that samples may take.
const SHARE: u32 = 200;
/// Maximum number of threads that a sample looks at.
const MAX_THREADS: usize = 256;
/// The function of the kernel in which a thread waits for a fault that user space serves.
const FAULT_WAIT: &str = "handle_userfault";
/// The content of `wchan` for a thread that does not sleep.
const NO_WAIT: &str = "0";
/// A process is held for this long after the supervisor last said so. It says so at each sample.
const HOLD: Duration = Duration::from_secs(3);
/// Compression ratio of a run that has compressed too little to know it.
const UNKNOWN_RATIO: f64 = 0.5;

/// Watches how much a run waits for memory.
#[derive(Debug)]
pub struct StallWatch {
    samples: Samples,
    sampled: Instant,
    sample_time: Duration,
    swap_ins: SwapIns,
    /// Number of samples: if there are too many threads for one sample, each looks at others.
    number: usize,
    /// The turns of the processes, if they take turns.
    turns: Option<Turns>,
    /// CPU times of each process and of its companion at the last sample, by pid.
    cpu_times: BTreeMap<u32, CpuTimes>,
}

/// CPU times of a process and of its companion.
type CpuTimes = [Duration; 2];

impl StallWatch {
    /// Starts to watch a run.
    pub fn new(turns: TakeTurns) -> StallWatch {
        let cpus = available_parallelism().map_or(1, usize::from);
        StallWatch {
            samples: Samples::new(),
            sampled: Instant::now(),
            sample_time: Duration::ZERO,
            swap_ins: SwapIns::default(),
            number: 0,
            cpu_times: BTreeMap::new(),
            turns: (turns == TakeTurns::On).then(|| Turns::new(cpus)),
        }
    }

    /// Takes a sample if one is due, and publishes the sum. Returns the line to print if the run
    /// has begun to thrash.
    pub fn look(&mut self, control: &Control, pressure: Pressure) -> Option<String> {
        let now = Instant::now();
        // Torture swaps out whatever it can.
        let is_due = now - self.sampled >= (self.sample_time * SHARE).clamp(INTERVAL, MAX_INTERVAL);
        if !is_due || control.configuration().torture {
            return None;
        }
        let started_ns = clock::thread_cpu_ns();
        let processes = control.living_processes();
        let is_sampled = self.swap_ins.look(&processes) || self.holds_any();
        let threads = match is_sampled {
            true => self.sample(&processes.iter().map(|&(pid, _)| pid).collect::<Vec<_>>()),
            false => vec![Threads::default(); processes.len()],
        };
        // A busy machine makes the supervisor wait for a CPU, which takes nothing from anybody.
        self.sample_time = Duration::from_nanos(clock::thread_cpu_ns() - started_ns);
        self.sampled = now;
        let share = self.samples.add(control.elapsed(), threads.iter().copied().sum());
        if is_sampled {
            self.take_turns(control, pressure, &processes, &threads);
        }
        control.note_memory_stall(self.samples.stall());
        share.map(|share| thrashing::onset(share, Need::of(control), remedy(control)))
    }

    /// Holds the processes whose turn it is not, and lets the others run.
    fn take_turns(
        &mut self,
        control: &Control,
        pressure: Pressure,
        processes: &[(u32, &ProcessSlot)],
        threads: &[Threads],
    ) {
        let Some(turns) = &mut self.turns else { return };
        let before = std::mem::take(&mut self.cpu_times);
        let seen = processes.iter().zip(threads).map(|(&(pid, slot), &threads)| {
            let times = cpu_times(pid, slot);
            self.cpu_times.insert(pid, times);
            let since = before.get(&pid).unwrap_or(&times);
            let [worked, served] = [0, 1].map(|of| times[of].saturating_sub(since[of]));
            Process { pid, need_bytes: slot.needed_bytes(), threads, left_faults: slot.left_faults(), worked, served }
        });
        let ratio = control.compression_ratio().unwrap_or(UNKNOWN_RATIO).min(1.0);
        let memory = Memory { limit_bytes: control.limit_bytes(), ratio, pressure };
        turns.look(control.elapsed(), memory, &seen.collect::<Vec<_>>());
        control.note_turns(turns.count());
        for &(pid, slot) in processes {
            if !turns.is_held(pid) {
                let_run(slot);
            } else if slot.hold_until(clock::now_ns() + HOLD.as_nanos() as u64) {
                slot.request.ask(Wanted::Reclaim { pages: u64::MAX });
            }
        }
    }

    /// Returns whether any process is held.
    pub fn holds_any(&self) -> bool {
        self.turns.as_ref().is_some_and(Turns::holds_any)
    }

    /// Lets all processes run, at the end of the watch.
    pub fn end(&mut self, control: &Control) {
        self.turns = None;
        control.living_processes().into_iter().for_each(|(_, slot)| let_run(slot));
    }

    /// Looks at the threads of each of the processes.
    fn sample(&mut self, pids: &[u32]) -> Vec<Threads> {
        self.number = self.number.wrapping_add(1);
        let all: Vec<(usize, PathBuf)> =
            pids.iter().enumerate().flat_map(|(of, &pid)| threads_of(pid).map(move |thread| (of, thread))).collect();
        let step = all.len().div_ceil(MAX_THREADS).max(1);
        let mut found = vec![Threads::default(); pids.len()];
        for (of, thread) in all.iter().skip(self.number % step).step_by(step) {
            // A thread that has ended meanwhile counts nowhere.
            match fs::read_to_string(thread.join("wchan")).as_deref() {
                Ok(FAULT_WAIT) => found[*of].waiting += 1,
                Ok(NO_WAIT) => found[*of].running += 1,
                _ => {}
            }
        }
        found
    }
}

/// Lets a process run. If it was held, its memory is swapped in again.
fn let_run(slot: &ProcessSlot) {
    if slot.let_run() {
        slot.request.ask(Wanted::Resume);
    }
}

/// Returns the CPU times of a process and of its companion, as far as they can be read.
fn cpu_times(pid: u32, slot: &ProcessSlot) -> CpuTimes {
    let companion = slot.companion.load(Ordering::Relaxed);
    [pid, companion].map(|pid| clock::process_cpu_time(pid).unwrap_or_default())
}

impl Need {
    /// Returns that of a run.
    pub fn of(control: &Control) -> Need {
        Need { needed_bytes: control.peaks().needed_bytes, limit_bytes: control.limit_bytes() }
    }
}

fn remedy(control: &Control) -> Remedy {
    let follows_group = matches!(control.configuration().limit, Limit::Container { .. });
    if follows_group && control.wanted_limit().is_none() { Remedy::Group } else { Remedy::Ctl(std::process::id()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn threads_that_run_count_and_those_that_sleep_do_not() {
        let (stop, stopped) = channel::<()>();
        let spinning = std::thread::spawn(move || while stopped.try_recv().is_err() {});
        let mut watch = StallWatch::new(TakeTurns::On);
        let found = watch.sample(&[u32::MAX, std::process::id()]);
        assert_eq!(found[0], Threads::default(), "no such process");
        assert!(found[1].running >= 1 && found[1].waiting == 0, "{found:?}");
        stop.send(()).unwrap();
        spinning.join().unwrap();
    }
}
