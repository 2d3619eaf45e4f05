//! The scheduler of virtual CPUs: the CPU whose clock is furthest behind runs its next task.

use crate::error::LabError;
use crate::lab::{Lab, Spent};
use foliomem_types::units::CpuNumber;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// The virtual time that tasks took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Took {
    /// Time until the last CPU was done.
    pub elapsed_ns: u64,
    /// CPU time of all CPUs.
    pub cpu_ns: u64,
    /// The part of it in which programs computed.
    pub computed_ns: u64,
    /// The part of the rest that CPUs waited for the list lock of the slot allocator.
    pub waited_ns: u64,
    /// Time to swap everything out, if the workload does that by itself.
    pub page_out_ns: u64,
    /// Time to swap everything in again.
    pub page_in_ns: u64,
}

impl Took {
    /// Adds the work of a CPU that was at `now_ns`; returns its new time.
    pub fn add(&mut self, now_ns: u64, spent: Spent) -> u64 {
        self.cpu_ns += spent.ns;
        self.computed_ns += spent.computed_ns;
        self.waited_ns += spent.waited_ns;
        self.elapsed_ns = self.elapsed_ns.max(now_ns + spent.ns);
        now_ns + spent.ns
    }
}

/// Runs `tasks` tasks on `cpus` CPUs; task n runs on CPU n modulo `cpus`. `slice` lets a task do a
/// little and returns whether it continues.
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
