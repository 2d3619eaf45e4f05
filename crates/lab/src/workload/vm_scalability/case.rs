//! The cases of vm-scalability: what their tasks do.

use crate::costs::Costs;
use crate::error::LabError;
use crate::machine::Access;
use crate::page_cache::{Backing, FileId, Mapper, PageCache, Readahead, Reader};
use crate::random::Random;
use foliomem_types::units::{MAX_ORDER, PAGE_BYTES};
use serde::Deserialize;

/// A script of vm-scalability. A task is a thread if the name ends in `-mt`, else a process;
/// threads share one address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Case {
    /// Threads read one mapping of a file from start to end.
    MmapXreadSeqMt,
    /// Processes map one file and read it from start to end.
    MmapPreadSeq,
    /// Threads with separate mappings of one open file read it from start to end.
    MmapPreadSeqMt,
    /// Two readers for each of as many files as there are tasks, 4 KiB at a time.
    LruFileReadtwice,
    /// Each task maps its own file and reads it from start to end.
    LruFileMmapRead,
    /// Each task maps its own file and reads it at random.
    LruFileMmapReadRand,
    /// Tasks write half of memory, each one part, from start to end, in an area mapped before they
    /// start.
    AnonWxSeqMt,
    /// Tasks map and write half of memory, each one part, from start to end.
    AnonWSeqMt,
    /// Tasks write half of memory at random, in an area mapped before they start.
    AnonWxRandMt,
    /// Processes map and write half of memory at random.
    AnonWRand,
    /// Threads map and write half of memory at random.
    AnonWRandMt,
    /// Processes write half of memory at random that was written before a fork.
    AnonCowRand,
    /// Threads of forked children write half of memory at random that was written before the fork.
    AnonCowRandMt,
    /// Processes read one half of memory, a file of tmpfs mapped before they start.
    ShmXreadSeq,
    /// Threads read one half of memory, a file of tmpfs mapped before they start.
    ShmXreadSeqMt,
    /// Processes map and read one half of memory, a file of tmpfs.
    ShmPreadSeq,
    /// Each task writes a mapped file and writes it back: half of memory together.
    Msync,
    /// Each task writes a part of one mapped file and writes it back.
    MsyncMt,
    /// Half of memory caches as many files as there are tasks; then the files are removed.
    Truncate,
}

/// Pages that a task uses before another task runs: as many as one fault maps.
const SLICE: u32 = 16;
/// Pages that a task uses before another task on its CPU runs: 3 ms (a turn of Linux 6.6 on 8 CPUs)
/// at 0.8 GB a second, the published speed of a CPU.
const TURN: u32 = 600;
/// Random writes for each page: 511 of 512 words hit memory anyway at an equal cost in all
/// variants, so most are left out.
const RANDOM_BY_PAGE: u32 = 8;
const WORD_BYTES: u64 = 8;
/// Maximum pages of a file: each page gets [`RANDOM_BY_PAGE`] random touches, and the number of all
/// touches must fit into 32 bits.
const MAX_FILE_PAGES: u64 = (u32::MAX / RANDOM_BY_PAGE) as u64;
/// Maximum number of CPUs: a page has one bit for each address space that maps it.
const MAX_CPUS: u32 = 16;
/// Minimum memory for each CPU, so that a task's part of half the memory is at least a block of 2
/// MiB.
const LEAST_CPU_PAGES: u32 = 2 * MAX_ORDER.pages();
/// Size of all files together, as a multiple of memory: `ROTATE_BYTES`.
const ROTATE_MEMORIES: u64 = 256;

/// How a task uses memory.
#[derive(Clone, Debug)]
enum Way {
    Read(Reader),
    /// The task uses a mapping in order, from page `first` on.
    InOrder {
        mapper: Mapper,
        file: FileId,
        ahead: usize,
        first: u32,
        access: Access,
    },
    AtRandom {
        mapper: Mapper,
        file: FileId,
        ahead: usize,
        first: u32,
        pages: u32,
        access: Access,
    },
    /// Pages of `own` are allocated when they are written.
    CopyAtRandom {
        mapper: Mapper,
        own: FileId,
        pages: u32,
    },
    Remove(FileId),
}

#[derive(Clone, Debug)]
struct Task {
    way: Way,
    at: u32,
    /// Number of pages or touches left to do.
    left: u32,
    random: Random,
}

/// A running case.
pub struct Run {
    case: Case,
    cache: PageCache,
    costs: Costs,
    memory_pages: u32,
    cpus: u32,
    tasks: Vec<Task>,
    aheads: Vec<Readahead>,
    files: Vec<FileId>,
    seed: u64,
    round: u64,
    done_bytes: u64,
}

impl Case {
    fn reads_files(self) -> bool {
        use Case::{
            LruFileMmapRead, LruFileMmapReadRand, LruFileReadtwice, MmapPreadSeq, MmapPreadSeqMt, MmapXreadSeqMt,
        };
        matches!(
            self,
            MmapXreadSeqMt | MmapPreadSeq | MmapPreadSeqMt | LruFileReadtwice | LruFileMmapRead | LruFileMmapReadRand
        )
    }

    fn is_random(self) -> bool {
        use Case::{AnonCowRand, AnonCowRandMt, AnonWRand, AnonWRandMt, AnonWxRandMt, LruFileMmapReadRand};
        matches!(self, LruFileMmapReadRand | AnonWxRandMt | AnonWRand | AnonWRandMt | AnonCowRand | AnonCowRandMt)
    }

    fn copies(self) -> bool {
        matches!(self, Case::AnonCowRand | Case::AnonCowRandMt)
    }

    fn syncs(self) -> bool {
        matches!(self, Case::Msync | Case::MsyncMt)
    }

    /// Returns whether all tasks use one address space or one mapping.
    fn shares_mapping(self) -> bool {
        use Case::{
            AnonCowRandMt, AnonWRandMt, AnonWSeqMt, AnonWxRandMt, AnonWxSeqMt, MmapXreadSeqMt, MsyncMt, ShmXreadSeqMt,
        };
        matches!(
            self,
            MmapXreadSeqMt
                | AnonWxSeqMt
                | AnonWSeqMt
                | AnonWxRandMt
                | AnonWRandMt
                | AnonCowRandMt
                | ShmXreadSeqMt
                | MsyncMt
        )
    }

    /// Returns whether all tasks use one open file or one area.
    fn shares_file(self) -> bool {
        use Case::{MmapPreadSeq, MmapPreadSeqMt, ShmPreadSeq, ShmXreadSeq};
        self.shares_mapping() && !self.copies()
            || matches!(self, MmapPreadSeq | MmapPreadSeqMt | ShmXreadSeq | ShmPreadSeq)
    }

    /// Returns whether each task uses all of a shared file instead of a part.
    fn uses_all(self) -> bool {
        use Case::{MmapPreadSeq, MmapPreadSeqMt, MmapXreadSeqMt, ShmPreadSeq, ShmXreadSeq, ShmXreadSeqMt};
        matches!(self, MmapXreadSeqMt | MmapPreadSeq | MmapPreadSeqMt | ShmXreadSeq | ShmXreadSeqMt | ShmPreadSeq)
    }

    fn backing(self) -> Backing {
        match self {
            Case::ShmXreadSeq | Case::ShmXreadSeqMt | Case::ShmPreadSeq => Backing::Shm,
            _ if self.reads_files() || self.syncs() || self == Case::Truncate => Backing::File,
            _ => Backing::Anonymous,
        }
    }
}

impl Run {
    /// Makes the files of the case and its tasks.
    pub fn new(
        case: Case,
        cache: PageCache,
        costs: Costs,
        cpus: u32,
        memory_pages: u32,
        seed: u64,
    ) -> Result<Run, LabError> {
        if cpus > MAX_CPUS || memory_pages < cpus * LEAST_CPU_PAGES {
            return Err(LabError::NoSuchMachine { cpus, memory_mib: memory_pages >> 8 });
        }
        let mut run = Run {
            case,
            cache,
            costs,
            memory_pages,
            cpus,
            tasks: Vec::new(),
            aheads: Vec::new(),
            files: Vec::new(),
            seed,
            round: 0,
            done_bytes: 0,
        };
        run.open()?;
        Ok(run)
    }

    /// Returns the page cache.
    pub fn cache(&mut self) -> &mut PageCache {
        &mut self.cache
    }

    /// Returns the number of tasks.
    pub fn tasks(&self) -> u32 {
        self.tasks.len() as u32
    }

    /// Returns the bytes that the tasks read or wrote in this round.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes
    }

    /// Returns whether an untimed pass fills memory first.
    pub fn fills_memory_first(&self) -> bool {
        self.case.reads_files()
    }

    /// Returns the number of rounds that use `memories` times the memory.
    pub fn rounds(&self, memories: u32) -> u32 {
        if self.case.reads_files() { 1 } else { 2 * memories }
    }

    /// Returns the pages of a file or of a task's part.
    fn file_pages(&self) -> u32 {
        let files = if self.case.shares_file() { 1 } else { self.cpus };
        let all = if self.case.reads_files() {
            ROTATE_MEMORIES * u64::from(self.memory_pages)
        } else {
            u64::from(self.memory_pages / 2)
        };
        let pages = all / u64::from(files);
        pages.min(MAX_FILE_PAGES) as u32 & !(MAX_ORDER.pages() - 1)
    }

    fn open(&mut self) -> Result<(), LabError> {
        let (case, pages) = (self.case, self.file_pages());
        let count = if case.shares_file() { 1 } else { self.cpus };
        if self.files.is_empty() {
            let create = |_| match self.cache.create(if case.syncs() { Backing::Shm } else { case.backing() }, pages) {
                image if case.syncs() => self.cache.create_kept_in(image, pages),
                file => file,
            };
            self.files = (0..count).map(create).collect();
        }
        self.aheads = vec![Readahead::default(); self.cpus as usize];
        self.tasks =
            (0..self.cpus * if case == Case::LruFileReadtwice { 2 } else { 1 }).map(|task| self.task(task)).collect();
        if case == Case::Truncate {
            self.fill_files()?;
        }
        Ok(())
    }

    fn task(&self, task: u32) -> Task {
        let (case, cpu) = (self.case, task % self.cpus);
        let mapper = Mapper(if case.shares_mapping() { 0 } else { cpu as u8 });
        let file = self.files[cpu as usize % self.files.len()];
        // An open file has one readahead state for all its users.
        let ahead =
            if case == Case::MmapXreadSeqMt || case == Case::MmapPreadSeqMt || case == Case::MsyncMt { 0 } else { cpu };
        let ahead = ahead as usize;
        let parts = if case.shares_file() && !case.uses_all() { self.cpus } else { 1 };
        let pages = self.file_pages() / parts;
        let first = if parts > 1 { cpu * pages } else { 0 };
        let writes = case.backing() == Backing::Anonymous || case.syncs();
        let access = if writes { Access::Write } else { Access::Read };
        let way = match case {
            Case::LruFileReadtwice => Way::Read(Reader::new(file)),
            Case::Truncate => Way::Remove(file),
            _ if case.copies() => Way::CopyAtRandom { mapper, own: file, pages },
            _ if case.is_random() => Way::AtRandom { mapper, file, ahead, first, pages, access },
            _ => Way::InOrder { mapper, file, ahead, first, access },
        };
        Task { way, at: 0, left: 0, random: Random::new(self.seed << 32 | self.round << 8 | u64::from(task)) }
    }

    /// Reads all files, to fill a part of memory.
    fn fill_files(&mut self) -> Result<(), LabError> {
        for file in self.files.clone() {
            let mut reader = Reader::new(file);
            (0..self.cache.len_pages(file)).try_for_each(|index| self.cache.read(&mut reader, index))?;
        }
        Ok(())
    }

    /// Starts a round. In a case that reads files, each task reads `memories` times the memory,
    /// divided by the number of files. In other cases each task uses all of its part.
    pub fn start(&mut self, memories: u32) {
        let (case, file_pages) = (self.case, self.file_pages());
        let of_task = if case.reads_files() {
            let all = u64::from(self.memory_pages) * u64::from(memories);
            all.div_ceil(self.files.len() as u64).min(u64::from(file_pages)) as u32
        } else if case.shares_file() && !case.uses_all() {
            file_pages / self.cpus
        } else {
            file_pages
        };
        for task in &mut self.tasks {
            task.left = match task.way {
                Way::AtRandom { .. } | Way::CopyAtRandom { .. } if !case.reads_files() => of_task * RANDOM_BY_PAGE,
                Way::AtRandom { .. } => of_task,
                // A file may end during the round.
                _ => of_task.min(file_pages - task.at),
            };
        }
        self.done_bytes = 0;
    }

    /// Runs a task for a slice; returns false when it is done.
    pub fn slice(&mut self, number: u32) -> Result<bool, LabError> {
        let shares_cpu = self.tasks() > self.cpus;
        let task = &mut self.tasks[number as usize];
        let now = if shares_cpu { TURN } else { SLICE }.min(task.left);
        task.left -= now;
        let own_ns = match task.way {
            Way::InOrder { .. } => self.costs.page_cache.use_page_ns,
            _ => self.costs.touch_ns,
        };
        for _ in 0..now {
            self.cache.compute(task.random.around(own_ns.into()));
            match &mut task.way {
                Way::Read(reader) => {
                    self.cache.read(reader, task.at)?;
                    self.done_bytes += PAGE_BYTES as u64;
                }
                Way::InOrder { mapper, file, ahead, first, access } => {
                    self.cache.touch(*mapper, *file, &mut self.aheads[*ahead], *first + task.at, *access)?;
                    self.done_bytes += PAGE_BYTES as u64;
                }
                Way::AtRandom { mapper, file, ahead, first, pages, access } => {
                    let index = *first + task.random.below(u64::from(*pages)) as u32;
                    self.cache.touch(*mapper, *file, &mut self.aheads[*ahead], index, *access)?;
                    self.done_bytes += WORD_BYTES;
                }
                Way::CopyAtRandom { mapper, own, pages } => {
                    let index = task.random.below(u64::from(*pages)) as u32;
                    self.cache.copy_on_write(*mapper, *own, index)?;
                    self.done_bytes += WORD_BYTES;
                }
                Way::Remove(file) => {
                    self.done_bytes += PAGE_BYTES as u64 * u64::from(self.cache.len_pages(*file));
                    self.cache.truncate(*file);
                    task.left = 0;
                    return Ok(false);
                }
            }
            task.at += 1;
        }
        if task.left == 0
            && self.case.syncs()
            && let Way::InOrder { file, first, .. } = task.way
        {
            self.cache.sync(file, first..first + task.at)?;
        }
        Ok(task.left > 0)
    }

    /// Finishes a round: drops its programs' memory and removes its files.
    pub fn finish(&mut self) -> Result<(), LabError> {
        if self.case.reads_files() {
            return Ok(());
        }
        self.files.iter().for_each(|&file| self.cache.truncate(file));
        self.round += 1;
        self.open()
    }
}
