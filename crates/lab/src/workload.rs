//! Workloads: what programs do.

mod kernel_build;
mod process;
mod replay;
mod swap_allocator;
mod swap_bandwidth;
mod tmpfs;
mod usemem;
mod vm_scalability;

use crate::costs::Costs;
use crate::density::Density;
use crate::error::LabError;
use crate::lab::Lab;
use crate::schedule::Took;
use foliomem_core::pacing::Watermarks;
use foliomem_types::units::Order;
use serde::{Deserialize, Serialize};

pub use kernel_build::KernelBuild;
pub use replay::{FaultSum, Leak, Recorded, Replay, Summary};
pub use swap_allocator::SwapAllocator;
pub use swap_bandwidth::SwapBandwidth;
pub use usemem::Usemem;
pub use vm_scalability::{CacheOutcome, Case, VmScalability};

/// Pages in a MiB.
const MIB: u32 = 256;

/// Maximum memory of a program, as a multiple of the limit; beyond it the program is out of memory.
const MAX_LIMITS: u32 = 2;

/// A workload and its parameters.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// The kernel's `thp_swap_allocator_test`.
    SwapAllocator(SwapAllocator),
    /// A kernel build: compilers that start and exit.
    KernelBuild(KernelBuild),
    /// A recorded run.
    Replay(Replay),
    /// Tasks that write much memory once.
    Usemem(Usemem),
    /// An area that is swapped out and in.
    SwapBandwidth(SwapBandwidth),
    /// A case of vm-scalability.
    VmScalability(VmScalability),
}

/// The counts of a round of a workload, for folios of the largest enabled size.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Round {
    /// Folios swapped out whole.
    pub swpout: u64,
    /// Folios split at swap-out.
    pub swpout_fallback: u64,
}

impl Round {
    /// Returns the percentage of allocations of contiguous slots that failed.
    pub fn percent(&self) -> Option<f64> {
        fallback_percent(self.swpout, self.swpout_fallback)
    }
}

/// Returns the percentage of fallbacks among all swap-outs of contiguous slots; `None` if there
/// were none.
pub fn fallback_percent(swpout: u64, fallback: u64) -> Option<f64> {
    let all = swpout + fallback;
    (all > 0).then(|| fallback as f64 * 100.0 / all as f64)
}

impl Workload {
    /// Returns the pages of address space that the workload needs.
    pub fn pages(&self) -> u32 {
        match self {
            Workload::SwapAllocator(test) => test.pages(),
            Workload::KernelBuild(build) => build.pages(),
            Workload::Replay(replay) => replay.pages(),
            Workload::Usemem(usemem) => usemem.pages(),
            Workload::SwapBandwidth(bandwidth) => bandwidth.pages(),
            Workload::VmScalability(case) => case.pages(),
        }
    }

    /// Returns the maximum of the pages in use; with more the program is out of memory. A recorded
    /// run may take what it took.
    pub fn most_pages(&self, limit_pages: u32) -> u32 {
        match self {
            Workload::Replay(replay) => (limit_pages * MAX_LIMITS).max(limit_pages + replay.peak_pages()),
            _ => limit_pages * MAX_LIMITS,
        }
    }

    /// Returns the protected minimum: foliomem's, or none.
    pub fn protected_pages(&self, limit_pages: u32) -> u64 {
        match self {
            Workload::Replay(_) => Watermarks::of(limit_pages.into()).protected_pages(),
            _ => 0,
        }
    }

    /// Returns the densities of the workload's memory, if they are known.
    pub fn density(&self, costs: &Costs) -> Option<Density> {
        match self {
            Workload::Replay(replay) => Some(replay.density(costs)),
            _ => None,
        }
    }

    /// Returns whether every page repeats one word.
    pub fn is_filled(&self) -> bool {
        matches!(self, Workload::SwapBandwidth(bandwidth) if bandwidth.filled)
    }

    /// Runs the workload. Random numbers start at `seed`, unless the workload brings its own.
    pub fn run(&self, lab: &mut Lab, seed: u64) -> Result<(Vec<Round>, Took), LabError> {
        match self {
            Workload::SwapAllocator(test) => test.run(lab),
            Workload::KernelBuild(build) => build.run(lab, seed),
            Workload::Replay(replay) => replay.run(lab, seed),
            Workload::Usemem(usemem) => usemem.run(lab),
            Workload::SwapBandwidth(bandwidth) => bandwidth.run(lab),
            Workload::VmScalability(case) => case.run(lab, seed),
        }
    }
}

/// A counter of rounds.
struct Rounds {
    order: Order,
    swpout: u64,
    fallback: u64,
    rounds: Vec<Round>,
}

impl Rounds {
    fn new(lab: &Lab) -> Rounds {
        let order = lab.machine().sizes().highest();
        let mut rounds = Rounds { order, swpout: 0, fallback: 0, rounds: Vec::new() };
        rounds.end(lab);
        rounds.rounds.clear();
        rounds
    }

    fn end(&mut self, lab: &Lab) {
        let counters = lab.engine().counters().of(self.order);
        let (swpout, fallback) = (counters.swpout.get(), counters.swpout_fallback.get());
        self.rounds.push(Round { swpout: swpout - self.swpout, swpout_fallback: fallback - self.fallback });
        (self.swpout, self.fallback) = (swpout, fallback);
    }
}
