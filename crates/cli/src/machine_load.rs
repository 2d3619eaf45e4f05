//! The CPU time that all programs of the machine have used, from `/proc/stat`.

use crate::proc_file;
use std::time::Duration;

/// The columns of the line `cpu` that are CPU time of programs and of the kernel: user, nice,
/// system, irq and softirq. The others are idle time, what the host has taken, and guests, whose
/// time is user time, too.
const BUSY_COLUMNS: [usize; 5] = [0, 1, 2, 5, 6];

/// Returns the CPU time on all CPUs since the machine has started. `None` if the kernel does not
/// tell.
pub fn busy_time() -> Option<Duration> {
    let text = proc_file::read_text("/proc/stat").ok()?;
    let ticks = busy_ticks(&text)?;
    Some(Duration::from_secs(1).mul_f64(ticks as f64 / rustix::param::clock_ticks_per_second().max(1) as f64))
}

/// Returns the busy time in the text of `/proc/stat`, in clock ticks.
fn busy_ticks(text: &str) -> Option<u64> {
    let columns = text.strip_prefix("cpu ")?.lines().next()?;
    let columns: Vec<u64> = columns.split_ascii_whitespace().map_while(|column| column.parse().ok()).collect();
    BUSY_COLUMNS.into_iter().map(|at| columns.get(at).copied()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_stolen_time_is_not_busy() {
        assert_eq!(busy_ticks("cpu  1 20 300 4000 50000 600 7000 80000 1 0\ncpu0 9 9 9\n"), Some(7921));
        assert_eq!((busy_ticks("cpu  1 20 300\n"), busy_ticks("")), (None, None));
    }

    #[test]
    fn this_machine_is_busy_while_this_process_computes() {
        let before = busy_time().unwrap();
        while busy_time().unwrap() == before {
            std::hint::spin_loop();
        }
        assert!(busy_time().unwrap() > before);
    }
}
