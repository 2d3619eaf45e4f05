//! How long the threads of a recorded run waited for a CPU, from `/proc/PID/task/TID/schedstat`:
//! that is the load of other programs, which no limit is to blame for.

use crate::proc_file;
use crate::threads::threads_of;
use foliomem_session::segment::Control;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Time between two samples. The delay of a thread after the last sample is estimated from the
/// earlier ones.
const INTERVAL: Duration = Duration::from_millis(50);

/// CPU time of a thread and its time in the run queue, in nanoseconds. A wait in the run queue
/// counts when it is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// CPU time.
    pub ran_ns: u64,
    /// Time in the run queue.
    pub queued_ns: u64,
}

impl Schedule {
    /// Reads the `schedstat` of a thread, whose directory under `/proc` is given. `None` if it has
    /// ended, or if the kernel does not count.
    pub fn of(thread: &Path) -> Option<Schedule> {
        Schedule::parse(&proc_file::read_text(thread.join("schedstat")).ok()?)
    }

    /// Parses the content of `schedstat`.
    fn parse(text: &str) -> Option<Schedule> {
        let mut numbers = text.split_ascii_whitespace().map(str::parse);
        Some(Schedule { ran_ns: numbers.next()?.ok()?, queued_ns: numbers.next()?.ok()? })
    }
}

/// The threads of some processes, by their ids.
#[derive(Debug, Default)]
struct Threads(BTreeMap<u32, Schedule>);

impl Threads {
    fn sample(&mut self, pid: u32) {
        for thread in threads_of(pid) {
            let id = thread.file_name().and_then(|name| name.to_str()?.parse().ok());
            if let (Some(id), Some(schedule)) = (id, Schedule::of(&thread)) {
                self.0.insert(id, schedule);
            }
        }
    }

    /// Returns the CPU time of the threads until the last sample.
    fn cpu_time(&self) -> Duration {
        Duration::from_nanos(self.0.values().map(|thread| thread.ran_ns).sum())
    }

    /// Returns the time in the run queue of threads that ran for `cpu_time`.
    fn delay(&self, cpu_time: Duration) -> Duration {
        let sum = |of: fn(&Schedule) -> u64| self.0.values().map(of).sum::<u64>();
        cpu_time.mul_f64(sum(|thread| thread.queued_ns) as f64 / sum(|thread| thread.ran_ns).max(1) as f64)
    }
}

/// The samples of a run.
#[derive(Debug, Default)]
pub struct RunDelay {
    sampled: Option<Instant>,
    program: Threads,
    companions: Threads,
}

impl RunDelay {
    /// Samples all threads, if that is due.
    pub fn sample_if_due(&mut self, control: &Control) {
        if self.sampled.is_some_and(|sampled| sampled.elapsed() < INTERVAL) {
            return;
        }
        self.sampled = Some(Instant::now());
        for (pid, slot) in control.living_processes() {
            self.program.sample(pid);
            self.companions.sample(slot.companion.load(Relaxed));
        }
    }

    /// Returns the delay of the program's threads, which ran for `cpu_time`.
    pub fn of_program(&self, cpu_time: Duration) -> Duration {
        self.program.delay(cpu_time)
    }

    /// Returns the CPU time of the companions' threads until the last sample.
    pub fn cpu_time_of_companions(&self) -> Duration {
        self.companions.cpu_time()
    }

    /// Returns the delay of the companions' threads, which ran for `cpu_time`.
    pub fn of_companions(&self, cpu_time: Duration) -> Duration {
        self.companions.delay(cpu_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_is_a_share_of_the_cpu_time() {
        assert_eq!(Schedule::parse("300 150 7\n"), Some(Schedule { ran_ns: 300, queued_ns: 150 }));
        assert_eq!((Schedule::parse(""), Schedule::parse("3 x 1")), (None, None));
        let threads = Threads(
            [(1, Schedule { ran_ns: 300, queued_ns: 100 }), (2, Schedule { ran_ns: 100, queued_ns: 100 })].into(),
        );
        assert_eq!(threads.delay(Duration::from_secs(8)), Duration::from_secs(4));
        assert_eq!(threads.cpu_time(), Duration::from_nanos(400));
        assert_eq!(Threads::default().delay(Duration::from_secs(8)), Duration::ZERO, "nothing was seen");
    }

    #[test]
    fn this_process_has_threads() {
        let mut threads = Threads::default();
        threads.sample(std::process::id());
        assert!(threads.0.values().any(|thread| thread.ran_ns > 0), "{threads:?}");
    }
}
