//! The kernel build workload: `make -jN` of a tree on tmpfs. Each directory has a `make`, whose
//! jobs run one compiler after another. A shell and a driver wait for each compiler; an assembler
//! and an object checker follow it.
//!
//! The model is fitted to a build of Linux 6.1 (docs/lab/models.md has the figures). Long-lived
//! memory is a small part of the build's memory, but it matters for single pages in swap: each
//! `make` stays until its directory is built, and files stay until the end.

use super::process::{Kind, Process, SLICE_NS};
use super::tmpfs::{Files, pages_of_kib};
use super::{MIB, Round, Rounds};
use crate::error::LabError;
use crate::lab::Lab;
use crate::random::Random;
use crate::scenario::Within;
use crate::schedule::{self, Took};
use foliomem_types::units::{MAX_ORDER, PageNumber};
use serde::Deserialize;

/// A kernel build and its parameters.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelBuild {
    /// Number of concurrent jobs.
    jobs: Within<1, 1024>,
    /// Number of files to compile.
    units: Within<1, 1_000_000>,
    /// The median of a compiler's final memory, and the spread within a directory and between
    /// directories: the standard deviation of the logarithm, in hundredths.
    compiler_mib: Within<1, 1024>,
    compiler_spread_percent: Within<0, 100>,
    directory_spread_percent: Within<0, 100>,
    /// The percentage of a compiler's memory that comes from `brk`.
    heap_percent: Within<0, 100>,
    /// Memory of an assembler and checker, relative to their compiler.
    assembler_percent: Within<1, 100>,
    /// Number of directories built at a time, as long as there are others, and their average number
    /// of files.
    directories: Within<1, 1024>,
    directory_units: Within<1, 100_000>,
    /// The parent `make` processes, which stay until everything is built.
    parent_makes: Within<0, 1024>,
    make_kib: Within<4, 65536>,
    /// Files of tmpfs: those before the build, and those that each compiler reads and each job
    /// writes.
    tree_mib: Within<0, 65536>,
    headers_kib: Within<0, 1_048_576>,
    source_kib: Within<0, 1024>,
    object_kib: Within<0, 1024>,
}

/// Maximum memory of a compiler as a multiple of the median.
const MAX_TIMES: u32 = 4;
/// Single pages of a compiler, of a shell and a driver together, of an assembler, of a `make`.
const COMPILER_SMALL: u32 = 55;
const WAITING_SMALL: u32 = 90;
const ASSEMBLER_SMALL: u32 = 40;
const MAKE_SMALL: u32 = 25;
/// Distribution of directory sizes, most of which are small: the median of their files relative to
/// the mean, and the standard deviation of the logarithm.
const UNITS_MEDIAN_BY_MEAN: f64 = 0.47;
const UNITS_SPREAD_PERCENT: u32 = 122;
/// Part of its heap that a `make` touches whenever a job starts or ends.
const MAKE_PERCENT: u32 = 85;

/// The state of a job.
enum Job {
    /// The `make` of a directory reads its targets.
    Read {
        directory: usize,
    },
    Compile {
        waiting: Process,
        compiler: Process,
        unit: Unit,
    },
    Assemble {
        waiting: Process,
        assembler: Process,
        unit: Unit,
    },
}

/// A file to compile.
#[derive(Clone, Copy)]
struct Unit {
    number: u32,
    directory: usize,
    compiler_pages: u32,
}

/// A directory being built.
struct Directory {
    make: Process,
    /// The usual memory of its compilers, relative to the median of all.
    times: f64,
    is_read: bool,
    units_left: u32,
    jobs: u32,
}

/// The state of the build except its jobs.
struct Tree<'a> {
    build: &'a KernelBuild,
    seed: u64,
    /// The directories by their place in the address space.
    directories: Vec<Option<Directory>>,
    parents: Vec<Process>,
    files: Files,
    directories_begun: u32,
    /// Units not yet in a directory, and units started.
    units_left: u32,
    units_begun: u32,
    random: Random,
}

impl KernelBuild {
    fn compiler(&self, pages: u32) -> Kind {
        Kind { pages, heap_percent: self.heap_percent.get(), small_pages: COMPILER_SMALL }
    }

    /// Returns the kind of an assembler: gas keeps its data on the heap.
    fn assembler(&self, compiler_pages: u32) -> Kind {
        let pages = compiler_pages * self.assembler_percent.get() / 100;
        Kind { pages: pages.max(1), heap_percent: 70, small_pages: ASSEMBLER_SMALL }
    }

    fn make(&self) -> Kind {
        Kind { pages: pages_of_kib(self.make_kib.get()), heap_percent: 100, small_pages: MAKE_SMALL }
    }

    const WAITING: Kind = Kind { pages: 0, heap_percent: 0, small_pages: WAITING_SMALL };

    /// Returns the address space of a job: the waiting processes, and the largest compiler after
    /// them.
    fn job_pages(&self) -> u32 {
        let most = self.compiler(self.compiler_mib.get() * MIB * MAX_TIMES);
        let pages = Process::address_pages(Self::WAITING) + Process::address_pages(most);
        pages.next_multiple_of(MAX_ORDER.pages())
    }

    fn make_pages(&self) -> u32 {
        Process::address_pages(self.make()).next_multiple_of(MAX_ORDER.pages())
    }

    /// Returns the maximum number of directories at a time: beyond those being built, each job may
    /// be the last one of a further directory.
    fn most_directories(&self) -> u32 {
        self.directories.get() + self.jobs.get()
    }

    fn files_pages(&self) -> u32 {
        let written = self.units.get() * pages_of_kib(self.object_kib.get());
        Files::address_pages(self.tree_mib.get() * MIB + written)
    }

    /// Returns the base of a job. The address space has jobs, then directories, parents and files.
    fn job_base(&self, number: u32) -> PageNumber {
        PageNumber(0).offset(number * self.job_pages())
    }

    fn directory_base(&self, number: u32) -> PageNumber {
        self.job_base(self.jobs.get()).offset(number * self.make_pages())
    }

    fn parent_base(&self, number: u32) -> PageNumber {
        self.directory_base(self.most_directories()).offset(number * self.make_pages())
    }

    fn files_base(&self) -> PageNumber {
        self.parent_base(self.parent_makes.get())
    }

    /// Returns the pages of address space.
    pub fn pages(&self) -> u32 {
        self.files_base().offset(self.files_pages()).0 as u32
    }

    fn compiler_pages(&self, directory_times: f64, random: &mut Random) -> u32 {
        let median = f64::from(self.compiler_mib.get() * MIB);
        let pages = median * directory_times * lognormal(self.compiler_spread_percent.get(), random);
        (pages as u32).clamp(MIB, self.compiler_mib.get() * MIB * MAX_TIMES)
    }

    /// Runs the workload.
    pub fn run(&self, lab: &mut Lab, seed: u64) -> Result<(Vec<Round>, Took), LabError> {
        let mut tree = Tree::new(self, lab, seed)?;
        let mut rounds = Rounds::new(lab);
        let cpus = lab.engine().config().cpus;
        let mut jobs: Vec<Option<Job>> = (0..self.jobs.get()).map(|_| None).collect();
        let took = schedule::run(lab, cpus, self.jobs.get(), |lab, number| {
            let job = &mut jobs[number as usize];
            *job = match job.take() {
                None if tree.is_begun() => return Ok(false),
                None => tree.begin(lab, number)?,
                Some(job) => tree.go_on(lab, number, job)?,
            };
            Ok(true)
        })?;
        rounds.end(lab);
        Ok((rounds.rounds, took))
    }
}

impl<'a> Tree<'a> {
    /// Makes the files and the parent `make` processes.
    fn new(build: &'a KernelBuild, lab: &mut Lab, seed: u64) -> Result<Tree<'a>, LabError> {
        let directories = (0..build.most_directories()).map(|_| None).collect();
        let random = Random::new(seed << 40 | 1 << 39);
        let files = Files::new(build.files_base());
        let units_left = build.units.get();
        let mut tree = Tree {
            build,
            seed,
            directories,
            parents: Vec::new(),
            files,
            directories_begun: 0,
            units_left,
            units_begun: 0,
            random,
        };
        tree.files.write(lab, build.tree_mib.get() * MIB)?;
        for number in 0..build.parent_makes.get() {
            let mut parent = Process::start(lab, build.parent_base(number), build.make(), tree.random.split())?;
            while parent.work(lab)? {}
            tree.parents.push(parent);
        }
        Ok(tree)
    }

    /// Returns the random numbers of a part of a unit. They depend on nothing else.
    fn random_of(&self, unit: u32, part: u32) -> Random {
        Random::new(self.seed << 40 | u64::from(unit) << 4 | u64::from(part))
    }

    /// Returns whether all files have been started.
    fn is_begun(&self) -> bool {
        self.units_begun == self.build.units.get()
    }

    /// Returns the next work of an idle job; none while everything left is in directories that are
    /// still being read.
    fn begin(&mut self, lab: &mut Lab, job: u32) -> Result<Option<Job>, LabError> {
        let in_build = self.directories.iter().flatten().count() as u32;
        let ready: Vec<usize> = (0..self.directories.len()).filter(|&at| self.has_ready_unit(at)).collect();
        if self.units_left > 0 && (in_build < self.build.directories.get() || ready.is_empty()) {
            return self.open(lab).map(Some);
        }
        if ready.is_empty() {
            lab.machine().compute(SLICE_NS);
            return Ok(None);
        }
        // Every make waits for the next job token, and chance decides which of them gets it.
        let directory = ready[self.random.below(ready.len() as u64) as usize];
        self.compile(lab, job, directory).map(Some)
    }

    fn has_ready_unit(&self, directory: usize) -> bool {
        self.directories[directory].as_ref().is_some_and(|directory| directory.is_read && directory.units_left > 0)
    }

    fn open(&mut self, lab: &mut Lab) -> Result<Job, LabError> {
        let Some(at) = self.directories.iter().position(Option::is_none) else {
            unreachable!("there are more places than jobs")
        };
        // The sequence of directories does not depend on time.
        let mut random = Random::new(self.seed << 40 | 1 << 38 | u64::from(self.directories_begun));
        self.directories_begun += 1;
        let mean = f64::from(self.build.directory_units.get());
        let units = mean * UNITS_MEDIAN_BY_MEAN * lognormal(UNITS_SPREAD_PERCENT, &mut random);
        let units = (units as u32).clamp(1, self.units_left);
        let times = lognormal(self.build.directory_spread_percent.get(), &mut random);
        self.units_left -= units;
        let base = self.build.directory_base(at as u32);
        let make = Process::start(lab, base, self.build.make(), self.random.split())?;
        self.directories[at] = Some(Directory { make, times, is_read: false, units_left: units, jobs: 0 });
        self.wake_parent(lab)?;
        Ok(Job::Read { directory: at })
    }

    fn wake_parent(&mut self, lab: &mut Lab) -> Result<(), LabError> {
        if self.parents.is_empty() {
            return Ok(());
        }
        let parent = self.random.below(self.parents.len() as u64) as usize;
        wake_make(lab, &mut self.parents[parent])
    }

    fn compile(&mut self, lab: &mut Lab, job: u32, at: usize) -> Result<Job, LabError> {
        let (number, times) = (self.units_begun, self.directory(at).times);
        let compiler_pages = self.build.compiler_pages(times, &mut self.random_of(number, 0));
        let unit = Unit { number, directory: at, compiler_pages };
        self.units_begun += 1;
        let directory = self.directory(at);
        directory.units_left -= 1;
        directory.jobs += 1;
        wake_make(lab, &mut directory.make)?;
        let kind = self.build.compiler(unit.compiler_pages);
        let base = self.build.job_base(job);
        let waiting = Process::start(lab, base, KernelBuild::WAITING, self.random_of(unit.number, 1))?;
        let compiler = Process::start(lab, Self::behind_waiting(base), kind, self.random_of(unit.number, 2))?;
        let headers = pages_of_kib(self.build.headers_kib.get());
        let source = pages_of_kib(self.build.source_kib.get());
        let start = headers + unit.number * source;
        self.files.read(lab, 0..headers)?;
        self.files.read(lab, start..start + source)?;
        Ok(Job::Compile { waiting, compiler, unit })
    }

    fn behind_waiting(job_base: PageNumber) -> PageNumber {
        job_base.offset(Process::address_pages(KernelBuild::WAITING))
    }

    fn directory(&mut self, at: usize) -> &mut Directory {
        let Some(directory) = &mut self.directories[at] else { unreachable!("the directory is being built") };
        directory
    }

    /// Runs the next slice of a job; returns its next state, if it has one.
    fn go_on(&mut self, lab: &mut Lab, number: u32, mut job: Job) -> Result<Option<Job>, LabError> {
        let works = match &mut job {
            Job::Read { directory } => self.directory(*directory).make.work(lab)?,
            Job::Compile { compiler: process, .. } | Job::Assemble { assembler: process, .. } => process.work(lab)?,
        };
        if works {
            return Ok(Some(job));
        }
        lab.note_swapped();
        match job {
            Job::Read { directory } => {
                self.directory(directory).is_read = true;
                Ok(None)
            }
            Job::Compile { mut waiting, compiler, unit } => {
                waiting.wake_up(lab)?;
                compiler.exit(lab);
                let kind = self.build.assembler(unit.compiler_pages);
                let base = Self::behind_waiting(self.build.job_base(number));
                let assembler = Process::start(lab, base, kind, self.random_of(unit.number, 3))?;
                Ok(Some(Job::Assemble { waiting, assembler, unit }))
            }
            Job::Assemble { mut waiting, assembler, unit } => {
                waiting.wake_up(lab)?;
                assembler.exit(lab);
                self.files.write(lab, pages_of_kib(self.build.object_kib.get()))?;
                waiting.exit(lab);
                self.end(lab, unit.directory)?;
                Ok(None)
            }
        }
    }

    /// Ends a job in a directory. The last one also ends the directory's `make`.
    fn end(&mut self, lab: &mut Lab, at: usize) -> Result<(), LabError> {
        let directory = self.directory(at);
        directory.jobs -= 1;
        wake_make(lab, &mut directory.make)?;
        let is_built = |directory: &mut Directory| directory.units_left == 0 && directory.jobs == 0;
        if let Some(directory) = self.directories[at].take_if(is_built) {
            directory.make.exit(lab);
            self.wake_parent(lab)?;
        }
        Ok(())
    }
}

/// Returns a lognormal number around 1 with this standard deviation of the logarithm.
fn lognormal(spread_percent: u32, random: &mut Random) -> f64 {
    // The sum of twelve numbers in 0..1 approximates a normal distribution well enough.
    let normal = (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
    // Squaring computes e to its power, because the last bit of exp() depends on the C library.
    let mut times = 1.0 + normal * f64::from(spread_percent) / 100.0 / 1024.0;
    (0..10).for_each(|_| times *= times);
    times
}

/// Wakes a `make` to look for its next target.
fn wake_make(lab: &mut Lab, make: &mut Process) -> Result<(), LabError> {
    make.wake_up(lab)?;
    make.go_through(lab, MAKE_PERCENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_build_has_an_address_space() {
        let most = "jobs = 1024\nunits = 1000000\ncompiler_mib = 1024\ncompiler_spread_percent = 100\n\
                    directory_spread_percent = 100\nheap_percent = 100\n\
                    assembler_percent = 100\ndirectories = 1024\ndirectory_units = 100000\nparent_makes = 1024\n\
                    make_kib = 65536\ntree_mib = 65536\nheaders_kib = 1048576\nsource_kib = 1024\nobject_kib = 1024\n";
        let build: KernelBuild = toml::from_str(most).unwrap();
        let files = u64::from(build.tree_mib.get() * MIB) + u64::from(build.units.get()) * 256;
        assert!(build.files_base().0 + files < u64::from(build.pages()), "the address space overflows");
        let read = pages_of_kib(build.headers_kib.get()) + build.units.get() * pages_of_kib(build.source_kib.get());
        assert!(read < build.pages());
    }
}
