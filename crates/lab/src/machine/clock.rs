//! The lab's clock: virtual time, which advances only by the costs of operations.

use super::LabMachine;
use foliomem_core::ports::Clock;
use foliomem_core::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::CpuNumber;

/// Cost of a pause. No other thread frees memory meanwhile.
const PAUSE_NS: u64 = 500_000;

impl Clock for LabMachine {
    #[inline]
    fn now_ns(&self) -> u64 {
        self.started_ns.load(Relaxed)
    }

    #[inline]
    fn cpu(&self) -> CpuNumber {
        CpuNumber(self.cpu.load(Relaxed))
    }

    #[inline]
    fn pause(&self) {
        self.spend(PAUSE_NS);
    }
}
