//! What the cases do.

use crate::costs::Costs;
use crate::error::LabError;
use crate::page_cache::{Backing, FileId, Mapper, PageCache, Readahead, Reader};
use crate::random::Random;
use foliomem_core::units::{MAX_ORDER, PAGE_BYTES};
use serde::Deserialize;

/// A script of vm-scalability. A "task" is a thread where its name ends in `-mt`, else a process: threads have one address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Case {
    /// Threads read one mapping of a file from start to end.
    MmapXreadSeqMt,
    /// Tasks map the same file and read it from start to end.
    MmapPreadSeq,
    /// See `MmapPreadSeq`: each has a mapping of its own, of one open file.
    MmapPreadSeqMt,
    /// Two readers for each of as many files as there are tasks, 4 KiB at a time.
    LruFileReadtwice,
    /// Each task maps a file of its own and reads it from start to end.
    LruFileMmapRead,
    /// The same at random.
    LruFileMmapReadRand,
    /// Tasks write half of memory, each a part, from start to end. (`x`: the area was mapped before they began.)
    AnonWxSeqMt,
    /// See `AnonWxSeqMt`.
    AnonWSeqMt,
    /// The same at random.
    AnonWxRandMt,
    /// See `AnonWxRandMt`.
    AnonWRand,
    /// See `AnonWxRandMt`.
    AnonWRandMt,
    /// Half of memory was written before a fork; children write it at random.
    AnonCowRand,
    /// See `AnonCowRand`.
    AnonCowRandMt,
    /// All tasks read the same half of memory, a file of tmpfs.
    ShmXreadSeq,
    /// See `ShmXreadSeq`.
    ShmXreadSeqMt,
    /// See `ShmXreadSeq`.
    ShmPreadSeq,
    /// Each task writes a mapped file and has it written back: half of memory together.
    Msync,
    /// The same with parts of one file.
    MsyncMt,
    /// Half of memory holds what was read of as many files as there are tasks, which are removed then.
    Truncate,
}

/// What a task does before another one may: what a fault maps.
const SLICE: u32 = 16;
/// The same where several share a CPU: 3 ms, a turn of Linux 6.6 on 8 CPUs, of reading 0.8 GB a second, as each CPU was published to.
const TURN: u32 = 600;
/// Writes at random by page: 511 words of 512 are found in memory anyway and cost the same for everybody, so most are left out.
const RANDOM_BY_PAGE: u32 = 8;
const WORD_BYTES: u64 = 8;
/// Where a task touches pages at random, it does so this many times as often as there are pages, at most: 2^32 in all.
const MOST_FILE_PAGES: u64 = (u32::MAX / RANDOM_BY_PAGE) as u64;
/// A bit each says which address spaces map a page.
const MOST_CPUS: u32 = 16;
/// So that a task's part of half the memory is a block of 2 MiB at least.
const LEAST_CPU_PAGES: u32 = 2 * MAX_ORDER.pages();
/// How much larger than memory all files together are: `ROTATE_BYTES`.
const ROTATE_MEMORIES: u64 = 256;

/// How a task uses memory.
#[derive(Clone, Debug)]
enum Way {
    Read(Reader),
    /// A mapping, from `first` on.
    InOrder {
        mapper: Mapper,
        file: FileId,
        ahead: usize,
        first: u32,
        write: bool,
    },
    AtRandom {
        mapper: Mapper,
        file: FileId,
        ahead: usize,
        first: u32,
        pages: u32,
        write: bool,
    },
    /// Pages of `own` are made when they are written.
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
    /// Pages, or touches, that are left to do.
    left: u32,
    random: Random,
}

/// A case that runs.
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

    /// Whether all tasks use one address space, or one mapping.
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

    /// Whether all tasks use one open file, or one area.
    fn shares_file(self) -> bool {
        use Case::{MmapPreadSeq, MmapPreadSeqMt, ShmPreadSeq, ShmXreadSeq};
        self.shares_mapping() && !self.copies()
            || matches!(self, MmapPreadSeq | MmapPreadSeqMt | ShmXreadSeq | ShmPreadSeq)
    }

    /// Whether each task uses all of a shared file, not a part of it.
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
    /// The files of the case, and its tasks.
    pub fn new(
        case: Case,
        cache: PageCache,
        costs: Costs,
        cpus: u32,
        memory_pages: u32,
        seed: u64,
    ) -> Result<Run, LabError> {
        if cpus > MOST_CPUS || memory_pages < cpus * LEAST_CPU_PAGES {
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

    /// The page cache.
    pub fn cache(&mut self) -> &mut PageCache {
        &mut self.cache
    }

    /// How many tasks there are.
    pub fn tasks(&self) -> u32 {
        self.tasks.len() as u32
    }

    /// What they have read or written since the round began.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes
    }

    /// Whether memory is full when time begins to be taken.
    pub fn fills_memory_first(&self) -> bool {
        self.case.reads_files()
    }

    /// How many rounds make `memories` times the memory.
    pub fn rounds(&self, memories: u32) -> u32 {
        if self.case.reads_files() { 1 } else { 2 * memories }
    }

    /// Pages of a file, or of a task's part.
    fn file_pages(&self) -> u32 {
        let files = if self.case.shares_file() { 1 } else { self.cpus };
        let all = if self.case.reads_files() {
            ROTATE_MEMORIES * u64::from(self.memory_pages)
        } else {
            u64::from(self.memory_pages / 2)
        };
        let pages = all / u64::from(files);
        pages.min(MOST_FILE_PAGES) as u32 & !(MAX_ORDER.pages() - 1)
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
        // An open file has one state of readahead, whoever uses it.
        let ahead =
            if case == Case::MmapXreadSeqMt || case == Case::MmapPreadSeqMt || case == Case::MsyncMt { 0 } else { cpu };
        let ahead = ahead as usize;
        let parts = if case.shares_file() && !case.uses_all() { self.cpus } else { 1 };
        let pages = self.file_pages() / parts;
        let first = if parts > 1 { cpu * pages } else { 0 };
        let write = case.backing() == Backing::Anonymous || case.syncs();
        let way = match case {
            Case::LruFileReadtwice => Way::Read(Reader::new(file)),
            Case::Truncate => Way::Remove(file),
            _ if case.copies() => Way::CopyAtRandom { mapper, own: file, pages },
            _ if case.is_random() => Way::AtRandom { mapper, file, ahead, first, pages, write },
            _ => Way::InOrder { mapper, file, ahead, first, write },
        };
        Task { way, at: 0, left: 0, random: Random::new(self.seed << 32 | self.round << 8 | u64::from(task)) }
    }

    /// Pages that fill a part of memory are read.
    fn fill_files(&mut self) -> Result<(), LabError> {
        for file in self.files.clone() {
            let mut reader = Reader::new(file);
            (0..self.cache.len_pages(file)).try_for_each(|index| self.cache.read(&mut reader, index))?;
        }
        Ok(())
    }

    /// From now on tasks have to do so much more: what fills memory `memories` times, or all of their part.
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
                // A file that is read ends some time.
                _ => of_task.min(file_pages - task.at),
            };
        }
        self.done_bytes = 0;
    }

    /// Lets a task do a little; false when it has done what it has to.
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
                Way::InOrder { mapper, file, ahead, first, write } => {
                    self.cache.touch(*mapper, *file, &mut self.aheads[*ahead], *first + task.at, *write)?;
                    self.done_bytes += PAGE_BYTES as u64;
                }
                Way::AtRandom { mapper, file, ahead, first, pages, write } => {
                    let index = *first + task.random.below(u64::from(*pages)) as u32;
                    self.cache.touch(*mapper, *file, &mut self.aheads[*ahead], index, *write)?;
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

    /// The round is over: what its programs had is gone, and its files are removed.
    pub fn finish(&mut self) -> Result<(), LabError> {
        if self.case.reads_files() {
            return Ok(());
        }
        self.files.iter().for_each(|&file| self.cache.truncate(file));
        self.round += 1;
        self.open()
    }
}
