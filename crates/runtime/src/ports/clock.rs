//! The engine's clock: the system's. There is no lock.

use foliomem_core::ports;
use foliomem_sys::clock;
use foliomem_types::units::CpuNumber;
use std::time::Duration;

/// The time in which a reclaimer frees about a hundred pages.
const PAUSE: Duration = Duration::from_micros(500);

/// The clock of the system.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock;

impl ports::Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        clock::now_ns()
    }

    fn cpu(&self) -> CpuNumber {
        CpuNumber(rustix::thread::sched_getcpu() as u16)
    }

    fn pause(&self) {
        clock::sleep(PAUSE);
    }
}
