//! The monotonic clock, and sleeping for a time.

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

/// Converts `time` to the type that system calls take.
pub fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Sleeps for `time`. A signal handler that runs ends the sleep early.
pub fn sleep(time: Duration) {
    let _ = rustix::thread::nanosleep(&timespec(time));
}
