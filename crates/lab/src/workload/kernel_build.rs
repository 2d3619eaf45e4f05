//! `make -jN`: jobs that run one compiler after the other, each with a shell and a driver that wait for it, and an
//! assembler behind it.

use super::process::{Kind, Process};
use super::{MIB, Round, Rounds};
use crate::error::LabError;
use crate::lab::Lab;
use crate::random::Random;
use crate::scenario::Within;
use crate::schedule::{self, Took};
use foliomem_core::units::{MAX_ORDER, PageNumber};
use serde::Deserialize;

/// See the module.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelBuild {
    /// Jobs at a time.
    jobs: Within<1, 1024>,
    /// Files to compile.
    units: Within<1, 1_000_000>,
    /// The median of what a compiler takes in the end, and how far they differ: the logarithm's standard deviation, in
    /// hundredths.
    compiler_mib: Within<1, 1024>,
    compiler_spread_percent: Within<0, 100>,
    /// What of it comes from `brk`.
    heap_percent: Within<0, 100>,
    /// An assembler, by its compiler.
    assembler_percent: Within<1, 100>,
}

/// No compiler takes more than this many times the median.
const MOST_TIMES: u32 = 4;
/// Single pages: of a compiler, of a shell, the driver and make's own child together, of an assembler.
const COMPILER_SMALL: u32 = 60;
const WAITING_SMALL: u32 = 125;
const ASSEMBLER_SMALL: u32 = 40;

/// What a job does now.
enum Stage {
    Compile(Process),
    Assemble(Process),
}

struct Job {
    waiting: Process,
    stage: Stage,
    unit: u32,
}

impl KernelBuild {
    fn compiler(&self, pages: u32) -> Kind {
        Kind { pages, heap_percent: self.heap_percent.get(), small_pages: COMPILER_SMALL }
    }

    /// gas keeps what it assembles on the heap.
    fn assembler(&self, compiler_pages: u32) -> Kind {
        let pages = compiler_pages * self.assembler_percent.get() / 100;
        Kind { pages: pages.max(1), heap_percent: 70, small_pages: ASSEMBLER_SMALL }
    }

    const WAITING: Kind = Kind { pages: 0, heap_percent: 0, small_pages: WAITING_SMALL };

    /// Address space of a job: what waits, and the largest compiler behind it.
    fn job_pages(&self) -> u32 {
        let most = self.compiler(self.compiler_mib.get() * MIB * MOST_TIMES);
        let pages = Process::address_pages(Self::WAITING) + Process::address_pages(most);
        pages.next_multiple_of(MAX_ORDER.pages())
    }

    /// Pages of address space.
    pub fn pages(&self) -> u32 {
        self.jobs.get() * self.job_pages()
    }

    fn compiler_pages(&self, random: &mut Random) -> u32 {
        // Twelve numbers in 0..1 are as good as a normal distribution here.
        let normal = (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
        let median = f64::from(self.compiler_mib.get() * MIB);
        // e to the power of it by squares: what exp() says in its last bit depends on the C library.
        let mut times = 1.0 + normal * f64::from(self.compiler_spread_percent.get()) / 100.0 / 1024.0;
        (0..10).for_each(|_| times *= times);
        let pages = median * times;
        (pages as u32).clamp(MIB, self.compiler_mib.get() * MIB * MOST_TIMES)
    }

    /// Does it.
    pub fn run(&self, lab: &mut Lab, seed: u64) -> Result<(Vec<Round>, Took), LabError> {
        let mut rounds = Rounds::new(lab);
        let cpus = lab.engine().config().cpus;
        let mut jobs: Vec<Option<Job>> = (0..self.jobs.get()).map(|_| None).collect();
        let mut next_unit = 0;
        let random = |unit: u32, stage: u32| Random::new(seed << 40 | u64::from(unit) << 4 | u64::from(stage));
        let took = schedule::run(lab, cpus, self.jobs.get(), |lab, number| {
            let base = PageNumber(u64::from(number * self.job_pages()));
            let own = base.offset(Process::address_pages(Self::WAITING));
            let job = &mut jobs[number as usize];
            let Some(running) = job else {
                if next_unit == self.units.get() {
                    return Ok(false);
                }
                let kind = self.compiler(self.compiler_pages(&mut random(next_unit, 0)));
                let waiting = Process::start(lab, base, Self::WAITING, random(next_unit, 1))?;
                let stage = Stage::Compile(Process::start(lab, own, kind, random(next_unit, 2))?);
                *job = Some(Job { waiting, stage, unit: next_unit });
                next_unit += 1;
                return Ok(true);
            };
            let (Stage::Compile(process) | Stage::Assemble(process)) = &mut running.stage;
            if process.work(lab)? {
                return Ok(true);
            }
            lab.note_swapped();
            running.waiting.wake_up(lab)?;
            let Some(Job { waiting, stage, unit }) = job.take() else { unreachable!("it runs") };
            match stage {
                Stage::Compile(compiler) => {
                    let kind = self.assembler(self.compiler_pages(&mut random(unit, 0)));
                    compiler.exit(lab);
                    let stage = Stage::Assemble(Process::start(lab, own, kind, random(unit, 3))?);
                    *job = Some(Job { waiting, stage, unit });
                }
                Stage::Assemble(assembler) => {
                    assembler.exit(lab);
                    waiting.exit(lab);
                }
            }
            Ok(true)
        })?;
        rounds.end(lab);
        Ok((rounds.rounds, took))
    }
}
