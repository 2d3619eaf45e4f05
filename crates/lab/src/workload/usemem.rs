//! The `usemem` workload of vm-scalability: tasks map memory and write it once, from start to end.

use super::{MIB, Round, Rounds};
use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::Access;
use crate::scenario::Within;
use crate::schedule::{self, Took};
use foliomem_types::units::{MAX_ORDER, PageNumber};
use serde::Deserialize;
use std::ops::Range;

/// Pages that a task writes before the next task of its CPU runs.
const SLICE_PAGES: u32 = MAX_ORDER.pages();

/// The usemem workload and its parameters.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usemem {
    tasks: Within<1, 4096>,
    /// Memory that each task writes.
    task_mib: Within<1, 65536>,
}

impl Usemem {
    /// Returns the pages of address space; gaps keep the mappings of tasks apart.
    pub fn pages(&self) -> u32 {
        self.tasks.get() * self.stride()
    }

    fn stride(&self) -> u32 {
        (self.task_mib.get() * MIB + 1).next_multiple_of(MAX_ORDER.pages())
    }

    fn memory(&self, task: u32) -> Range<PageNumber> {
        let start = PageNumber(u64::from(task) * u64::from(self.stride()));
        start..start.offset(self.task_mib.get() * MIB)
    }

    /// Runs the workload.
    pub fn run(&self, lab: &mut Lab) -> Result<(Vec<Round>, Took), LabError> {
        let mut rounds = Rounds::new(lab);
        let mut next: Vec<PageNumber> = (0..self.tasks.get()).map(|task| self.memory(task).start).collect();
        let cpus = lab.engine().config().cpus;
        let took = schedule::run(lab, cpus, self.tasks.get(), |lab, task| {
            let (memory, next) = (self.memory(task), &mut next[task as usize]);
            if *next == memory.start {
                lab.map(memory.clone());
            }
            let end = next.offset(SLICE_PAGES).min(memory.end);
            lab.touch_all(*next..end, Access::Write)?;
            *next = end;
            if end == memory.end {
                lab.note_swapped();
                lab.unmap(memory);
                return Ok(false);
            }
            Ok(true)
        })?;
        rounds.end(lab);
        Ok((rounds.rounds, took))
    }
}
