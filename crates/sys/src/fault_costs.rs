//! A short measurement of what faults cost on this machine, in CPU time: the load of other
//! processes does not count.

use crate::cpus;
use crate::move_probe::{HandlerCpu, MoveProbe, MoveProbeError};
use crate::region::Region;
use crate::tlb_flush::{self, EXPENSIVE_NS};
use foliomem_types::units::PAGE_BYTES;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Pages that are faulted in in each round: 4 MiB, more than the caches of a core.
const PAGES: usize = 1024;
/// Rounds, of which the fastest counts: 20 ms together.
const ROUNDS: usize = 3;

/// Costs of faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultCosts {
    /// A fault that does nothing but move a page in: both sides of it, on the CPUs on which the
    /// agent serves the faults of one thread.
    pub round_trip_ns: u64,
    /// A page that the kernel allocates and zeroes.
    pub populate_page_ns: u64,
}

/// Measures the costs.
///
/// # Errors
/// Fails if the kernel refuses a userfaultfd or memory.
pub fn measure() -> Result<FaultCosts, MoveProbeError> {
    let mut best = FaultCosts { round_trip_ns: u64::MAX, populate_page_ns: u64::MAX };
    let handler_cpu = handler_cpu().map_err(MoveProbeError::Memory)?;
    for _ in 0..ROUNDS {
        let started_ns = cpu_time_ns();
        let mut probe = MoveProbe::new(PAGES * PAGE_BYTES)?;
        let populated_ns = cpu_time_ns();
        probe.fault_all(handler_cpu)?;
        let ended_ns = cpu_time_ns();
        best.populate_page_ns = best.populate_page_ns.min((populated_ns - started_ns) / PAGES as u64);
        best.round_trip_ns = best.round_trip_ns.min((ended_ns - populated_ns) / PAGES as u64);
    }
    Ok(best)
}

/// Returns where the agent serves the faults of one thread: on another CPU, unless flushes are
/// expensive.
fn handler_cpu() -> Result<HandlerCpu, Errno> {
    let Some(other) = cpus::another_than(rustix::thread::sched_getcpu() as u32) else { return Ok(HandlerCpu::Same) };
    let page = Region::reserve(PAGE_BYTES)?;
    let (begin, is_over) = (Barrier::new(2), AtomicBool::new(false));
    let flush_ns = std::thread::scope(|scope| {
        scope.spawn(|| {
            cpus::run_on(other);
            begin.wait();
            while !is_over.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        begin.wait();
        let flush_ns = tlb_flush::measure_ns(&page);
        is_over.store(true, Relaxed);
        flush_ns
    });
    Ok(if flush_ns < EXPENSIVE_NS { HandlerCpu::Another } else { HandlerCpu::Same })
}

/// Returns the CPU time of this process.
fn cpu_time_ns() -> u64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_costs_more_than_a_page() {
        match measure() {
            Ok(costs) => {
                assert!(costs.round_trip_ns > costs.populate_page_ns && costs.populate_page_ns > 0, "{costs:?}")
            }
            // Without root, userfaultfd may be refused.
            Err(error) => assert!(error.to_string().contains("userfaultfd"), "{error}"),
        }
    }
}
