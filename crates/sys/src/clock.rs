//! The monotonic clock, the CPU time of processes, and sleeping for a time.

use crate::thread::syscall3;
use linux_raw_sys::general::__NR_clock_gettime;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::time::Duration;

/// Returns the time of the monotonic clock in nanoseconds.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the CPU time of the calling thread in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let taken = clock_gettime(ClockId::ThreadCPUTime);
    taken.tv_sec as u64 * 1_000_000_000 + taken.tv_nsec as u64
}

/// Returns the CPU time that all threads of process `pid` have used. Returns `None` if there is no
/// such process.
pub fn process_cpu_time(pid: u32) -> Option<Duration> {
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 0)?;
    let mut time = Timespec { tv_sec: 0, tv_nsec: 0 };
    let address = (&raw mut time).expose_provenance();
    // SAFETY: the call only writes `time`.
    let failed = unsafe { syscall3(__NR_clock_gettime as usize, cpu_clock(pid), address, 0) };
    (failed == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Returns the clock of the CPU time of a process (`MAKE_PROCESS_CPUCLOCK` in
/// `linux/posix-timers_types.h`).
fn cpu_clock(pid: i32) -> usize {
    const CPUCLOCK_SCHED: i32 = 2;
    ((!pid << 3) | CPUCLOCK_SCHED) as usize
}

/// Converts `time` to the type that system calls take.
pub fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Sleeps for `time`. A signal handler that runs ends the sleep early.
pub fn sleep(time: Duration) {
    let _ = rustix::thread::nanosleep(&timespec(time));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_grows_with_work_and_not_with_sleep() {
        let before = process_cpu_time(std::process::id()).unwrap();
        let mut sum = 0u64;
        while process_cpu_time(std::process::id()).unwrap() < before + Duration::from_millis(2) {
            sum = std::hint::black_box(sum + 1);
        }
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let time = || process_cpu_time(child.id());
        // It sleeps as soon as its CPU time stays the same for a while.
        let mut last = time();
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = time();
            if now == last {
                break;
            }
            last = now;
        }
        assert!(last.is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(process_cpu_time(child.id()), None);
        assert_eq!(process_cpu_time(0), None);
    }
}
