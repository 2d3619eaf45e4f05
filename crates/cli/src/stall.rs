//! Samples how many threads of a run wait for memory.
//!
//! `/proc/PID/task/TID/wchan` names the kernel function in which a thread sleeps. A thread whose
//! page fault foliomem serves sleeps in `handle_userfault`. The fault counters alone would not do:
//! they miss the time that the kernel takes to stop and wake a thread. Of a process that this user
//! may not look at, all threads count as running.
//!
//! Nothing is sampled while nothing is swapped in.

use crate::thrashing::{self, Need, Remedy, Samples, Threads};
use crate::threads::threads_of;
use foliomem_session::segment::Control;
use foliomem_types::settings::Limit;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Minimum time between two samples.
const INTERVAL: Duration = Duration::from_millis(50);
/// Divisor of the time that samples may take.
const SHARE: u32 = 200;
/// A run that has swapped nothing in for this long is not sampled: a fault may take some time.
const SWAP_IN_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of threads that a sample looks at.
const MAX_THREADS: usize = 256;
/// The function of the kernel in which a thread waits for a fault that user space serves.
const FAULT_WAIT: &str = "handle_userfault";
/// The content of `wchan` for a thread that does not sleep.
const NO_WAIT: &str = "0";

/// Watches how much a run waits for memory.
#[derive(Debug)]
pub struct StallWatch {
    samples: Samples,
    sampled: Instant,
    sample_time: Duration,
    /// The faults that had to swap in, of the living processes, and when that number changed.
    swap_ins: u64,
    swapped_in: Option<Instant>,
    /// Number of samples: if there are too many threads for one sample, each looks at others.
    turn: usize,
}

impl StallWatch {
    /// Starts to watch a run.
    pub fn new() -> StallWatch {
        StallWatch {
            samples: Samples::new(),
            sampled: Instant::now(),
            sample_time: Duration::ZERO,
            swap_ins: 0,
            swapped_in: None,
            turn: 0,
        }
    }

    /// Takes a sample if one is due, and publishes the sum. Returns the line to print if the run
    /// has begun to thrash.
    pub fn look(&mut self, control: &Control) -> Option<String> {
        let now = Instant::now();
        // Torture swaps out whatever it can.
        let is_due = now - self.sampled >= INTERVAL.max(self.sample_time * SHARE);
        if !is_due || control.configuration().torture {
            return None;
        }
        let processes = control.living_processes();
        let add = u64::wrapping_add;
        // The program may have overwritten any of these words.
        let swap_ins = processes.iter().map(|(_, slot)| slot.counters.vm.pgmajfault.get()).fold(0, add);
        if swap_ins != self.swap_ins {
            (self.swap_ins, self.swapped_in) = (swap_ins, Some(now));
        }
        let is_swapping = self.swapped_in.is_some_and(|swapped_in| now - swapped_in < SWAP_IN_TIMEOUT);
        let threads = if is_swapping { self.sample(processes.iter().map(|&(pid, _)| pid)) } else { Threads::default() };
        (self.sampled, self.sample_time) = (now, now.elapsed());
        let share = self.samples.add(control.elapsed(), threads);
        control.note_memory_stall(self.samples.stall());
        share.map(|share| thrashing::onset(share, Need::of(control), remedy(control)))
    }

    /// Looks at the threads of processes.
    fn sample(&mut self, pids: impl Iterator<Item = u32>) -> Threads {
        self.turn = self.turn.wrapping_add(1);
        let all: Vec<PathBuf> = pids.flat_map(threads_of).collect();
        let step = all.len().div_ceil(MAX_THREADS).max(1);
        let mut found = Threads::default();
        for thread in all.iter().skip(self.turn % step).step_by(step) {
            // A thread that has ended meanwhile counts nowhere.
            match fs::read_to_string(thread.join("wchan")).as_deref() {
                Ok(FAULT_WAIT) => found.waiting += 1,
                Ok(NO_WAIT) => found.running += 1,
                _ => {}
            }
        }
        found
    }
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
        let mut watch = StallWatch::new();
        let found = watch.sample([std::process::id()].into_iter());
        assert!(found.running >= 1 && found.waiting == 0, "{found:?}");
        assert_eq!(watch.sample([u32::MAX].into_iter()), Threads::default(), "no such process");
        stop.send(()).unwrap();
        spinning.join().unwrap();
    }
}
