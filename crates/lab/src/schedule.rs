//! Virtual CPUs that run tasks by turns: always the CPU whose clock is furthest behind.

use crate::error::LabError;
use crate::lab::{Lab, Spent};
use foliomem_core::units::CpuNumber;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// What running tasks took, in virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Took {
    /// Until the last CPU was done.
    pub elapsed_ns: u64,
    /// Of all CPUs.
    pub cpu_ns: u64,
    /// What of that programs computed.
    pub computed_ns: u64,
    /// What of the rest was waiting for the lists of clusters.
    pub waited_ns: u64,
    /// How long it took to page out what was to go, and to bring it back, where the workload does that by itself.
    pub page_out_ns: u64,
    /// See `page_out_ns`.
    pub page_in_ns: u64,
}

impl Took {
    /// A CPU that was at `now_ns` has done that; returns where it is now.
    pub fn add(&mut self, now_ns: u64, spent: Spent) -> u64 {
        self.cpu_ns += spent.ns;
        self.computed_ns += spent.computed_ns;
        self.waited_ns += spent.waited_ns;
        self.elapsed_ns = self.elapsed_ns.max(now_ns + spent.ns);
        now_ns + spent.ns
    }
}

/// Runs `tasks` tasks on `cpus` CPUs, each on the CPU of its number modulo those there are. `slice` lets a task do a
/// little, and says whether it goes on.
pub fn run(
    lab: &mut Lab,
    cpus: u16,
    tasks: u32,
    mut slice: impl FnMut(&mut Lab, u32) -> Result<bool, LabError>,
) -> Result<Took, LabError> {
    let of_cpu = |cpu: u16| (u32::from(cpu)..tasks).step_by(cpus.into()).collect::<VecDeque<u32>>();
    let mut queues: Vec<VecDeque<u32>> = (0..cpus).map(of_cpu).collect();
    let mut clocks: BinaryHeap<Reverse<(u64, u16)>> = (0..cpus).map(|cpu| Reverse((0, cpu))).collect();
    let mut took = Took::default();
    while let Some(Reverse((now_ns, cpu))) = clocks.pop() {
        let queue = &mut queues[usize::from(cpu)];
        let Some(task) = queue.pop_front() else { continue };
        lab.begin(CpuNumber(cpu), now_ns);
        if slice(lab, task)? {
            queue.push_back(task);
        }
        let then_ns = took.add(now_ns, lab.end(now_ns));
        clocks.push(Reverse((then_ns, cpu)));
    }
    Ok(took)
}
