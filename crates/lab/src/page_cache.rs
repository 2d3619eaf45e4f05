//! A machine's memory as Linux 6.6 runs it: files in a page cache of large folios, shared and anonymous memory, all from one buddy
//! allocator, with reclaim and compaction where that runs out.
//!
//! Who gets which frames, and what compaction moves, is decided by the engine: its free frames ([`foliomem_core::homes`]) and its
//! compactor ([`foliomem_core::compaction`]). Around them stands what of a kernel decides how fragmented they become: free runs
//! that CPUs keep for themselves ([`per_cpu`]), windows of readahead in growing folios ([`readahead`]), two lists of folios by
//! their use, and the order in which an allocation that finds nothing tries compaction and reclaim (`alloc`).
//!
//! Not modelled: `kswapd` and `kcompactd` as threads of their own (whoever finds too little free does their work, and pays
//! for it), locks, memory that cannot be moved, page tables, and disks: all files are sparse, as those of vm-scalability are.

mod alloc;
mod costs;
mod faults;
mod files;
mod folios;
mod per_cpu;
mod readahead;
mod reads;
mod reclaim;

#[cfg(test)]
mod tests;

pub use costs::KernelCosts;
pub use files::Backing;
pub use readahead::Readahead;
pub use reads::Reader;

use crate::error::LabError;
use files::{File, FolioId};
use foliomem_core::compaction::{Compactor, Variant};
use foliomem_core::stats::{Counters, VmCounters};
use foliomem_core::units::{Frame, FrameRun, ORDERS};
use folios::{Folios, List};
use per_cpu::{Keeps, PerCpu};
use serde::{Deserialize, Serialize};

const COSTS: KernelCosts = KernelCosts::MEASURED;

/// A file of the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileId(u16);

/// An address space: one of 16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapper(pub u8);

impl Mapper {
    fn bit(self) -> u16 {
        1 << self.0
    }
}

/// What was done, and how often.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheCounters {
    /// Folios that were allocated, by order.
    pub allocated: [u64; ORDERS],
    /// Folios that were wanted and not had, by order: smaller ones did.
    pub fallbacks: [u64; ORDERS],
    /// Folios that were dropped, and their pages.
    pub reclaimed_folios: u64,
    /// See `reclaimed_folios`.
    pub reclaimed_pages: u64,
    /// Pages that were written back.
    pub written_back_pages: u64,
    /// The most page tables at a time.
    pub most_table_pages: u64,
}

/// See the module.
pub struct PageCache {
    folios: Folios,
    compactor: Compactor,
    engine: Box<Counters>,
    per_cpu: Vec<PerCpu>,
    keeps: Keeps,
    watermarks: alloc::Watermarks,
    /// Free pages among those that cannot be moved, and page tables.
    unmovable: Vec<Frame>,
    tables: Vec<Frame>,
    cpu: usize,
    counters: CacheCounters,
    /// What the programs have computed themselves.
    computed_ns: u64,
    /// What scanners had looked at when that was last paid for.
    scanned_paid: u64,
}

impl PageCache {
    /// A machine with `frames` frames and `cpus` CPUs; without a variant its compaction leaves large folios where they are, as
    /// Linux did before the series.
    pub fn new(frames: u32, cpus: u16, variant: Option<Variant>) -> PageCache {
        let watermarks = alloc::Watermarks::of(frames);
        PageCache {
            folios: Folios::new(frames, variant.is_some()),
            compactor: Compactor::new(variant.unwrap_or(Variant::FreeSplit)),
            engine: Box::default(),
            per_cpu: vec![PerCpu::default(); cpus.into()],
            keeps: watermarks.keeps(cpus),
            watermarks,
            unmovable: Vec::new(),
            tables: Vec::new(),
            cpu: 0,
            counters: CacheCounters::default(),
            computed_ns: 0,
            scanned_paid: 0,
        }
    }

    /// From now on that CPU runs.
    pub fn set_cpu(&mut self, cpu: u16) {
        self.cpu = cpu.into();
    }

    /// A new file, of which nothing is cached.
    pub fn create(&mut self, backing: Backing, pages: u32) -> FileId {
        let files = &mut self.folios.table.get_mut().files;
        files.push(File::new(backing, pages));
        FileId(files.len() as u16 - 1)
    }

    /// Its length.
    pub fn len_pages(&self, file: FileId) -> u32 {
        self.folios.table.borrow().files[usize::from(file.0)].pages()
    }

    /// What was done.
    pub fn counters(&self) -> CacheCounters {
        self.counters
    }

    /// Pages of page tables.
    pub fn table_pages(&self) -> u32 {
        self.tables.len() as u32
    }

    /// Pages that are neither free nor on a CPU's own list.
    pub fn used_pages(&self) -> u32 {
        self.folios.homes.frames() - self.folios.homes.empty_frames() - self.kept_frames()
    }

    fn kept_frames(&self) -> u32 {
        self.per_cpu.iter().map(PerCpu::frames).sum()
    }

    /// What compaction has counted.
    pub fn vm_counters(&self) -> &VmCounters {
        &self.engine.vm
    }

    /// What was done since this was last asked has cost so much: the kernel, and the programs.
    pub fn take_spent_ns(&mut self) -> (u64, u64) {
        let scanned = self.engine.vm.compact_migrate_scanned.get() + self.engine.vm.compact_free_scanned.get();
        self.spend((scanned - self.scanned_paid) * COSTS.scan_ns);
        self.scanned_paid = scanned;
        (self.folios.spent_ns.take(), std::mem::take(&mut self.computed_ns))
    }

    fn spend(&mut self, ns: u64) {
        *self.folios.spent_ns.get_mut() += ns;
    }

    fn file(&mut self, file: FileId) -> &mut File {
        &mut self.folios.table.get_mut().files[usize::from(file.0)]
    }

    fn folio_at(&mut self, file: FileId, index: u32) -> FolioId {
        self.file(file).page(index).folio
    }

    /// Puts zeros into `run` and that into the file.
    fn insert(&mut self, run: FrameRun, file: FileId, index: u32) -> FolioId {
        self.spend(COSTS.insert_folio_ns + COSTS.zero_page_ns * u64::from(run.frames()));
        let table = self.folios.table.get_mut();
        let id = table.add(run, file.0, index);
        // What has no place elsewhere stays: there is no swap.
        if table.files[usize::from(file.0)].backing == Backing::File {
            table.enlist(id, List::Inactive);
        }
        id
    }

    /// A program computes for so long.
    pub fn compute(&mut self, ns: u64) {
        self.computed_ns += ns;
    }

    /// `msync(MS_SYNC)`: what was written of `range` is copied to where `image` says it is kept.
    pub fn sync(&mut self, file: FileId, range: std::ops::Range<u32>, image: FileId) -> Result<(), LabError> {
        for index in range {
            let id = self.folio_at(file, index);
            if id == FolioId::NONE {
                continue;
            }
            let table = self.folios.table.get_mut();
            if !table.folio(id).dirty {
                continue;
            }
            let first = table.folio(id).index;
            let pages = table.run(id).frames();
            table.clean(id);
            self.write_back(pages);
            for page in first..first + pages {
                if self.folio_at(image, page) == FolioId::NONE {
                    self.insert_page(image, page)?;
                }
            }
        }
        Ok(())
    }

    /// Drops all that is cached of a file: it is removed, or its program ends. What maps it is gone.
    pub fn truncate(&mut self, file: FileId) {
        let folios = self.file(file).folios();
        for id in folios {
            self.free(id);
        }
        let tables = self.tables.len() - self.file(file).drop_tables() as usize;
        self.unmovable.extend(self.tables.drain(tables..));
    }

    /// Walks everything.
    pub fn check(&self) {
        self.folios.homes.check();
        self.folios.table.borrow().check(&self.folios.homes);
        let unmovable = self.unmovable.len() as u32 + self.table_pages();
        let cached: u32 = self.folios.table.borrow().pages();
        assert_eq!(
            cached + unmovable,
            self.used_pages(),
            "a page is free, a CPU's own, some file's, or cannot be moved"
        );
    }
}
