//! CPU time: the load of other processes does not count.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Returns the CPU time of the calling thread.
pub fn thread() -> Duration {
    of(ClockId::ThreadCPUTime)
}

/// Returns the CPU time of all threads of this process.
pub fn process() -> Duration {
    of(ClockId::ProcessCPUTime)
}

fn of(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_work_takes_cpu_time() {
        let (before, all) = (thread(), process());
        std::thread::sleep(Duration::from_millis(50));
        assert!(thread() - before < Duration::from_millis(40));
        while thread() - before < Duration::from_millis(60) {
            std::hint::black_box(before);
        }
        assert!(process() - all >= Duration::from_millis(60));
    }
}
