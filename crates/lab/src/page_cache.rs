//! A machine's memory as Linux 6.6 runs it: files in a page cache of large folios, shared and anonymous memory, all from one buddy
//! allocator, with reclaim and compaction where that runs out.
//!
//! Who gets which frames, and what compaction moves, is decided by the engine: its free frames ([`foliomem_core::homes`]) and its
//! compactor ([`foliomem_core::compaction`]). Around them stands what of a kernel decides how fragmented they become: free runs
//! that CPUs keep for themselves ([`per_cpu`]), windows of readahead in growing folios ([`readahead`]), two lists of folios by
//! their use, and the order in which an allocation that finds nothing tries compaction and reclaim (`alloc`).
//!
//! Page tables are the one kind of memory that cannot be moved. Not modelled: `kswapd` and `kcompactd` as threads of their own
//! (whoever finds too little free does their work, and pays for it), locks, and disks: all files are sparse, as those of
//! vm-scalability are.

mod alloc;
mod faults;
mod files;
mod folios;
mod per_cpu;
mod readahead;
mod reads;
mod reclaim;

#[cfg(test)]
mod tests;

pub use files::Backing;
pub use readahead::Readahead;
pub use reads::Reader;

use crate::costs::{Costs, PageCacheCosts};
use crate::error::LabError;
use files::{File, FolioId};
use foliomem_core::buddy::Pick;
use foliomem_core::compaction::{Compactor, Variant};
use foliomem_core::stats::{Counters, VmCounters};
use foliomem_core::units::{Frame, FrameRun, ORDERS};
use folios::{Folios, List};
use per_cpu::{Keeps, PerCpu};
use serde::{Deserialize, Serialize};

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

/// What a new folio holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// As a hole of a file does.
    Zeros,
    /// What lies elsewhere.
    Copy,
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
    costs: Costs,
    /// What the programs have computed themselves.
    computed_ns: u64,
}

impl PageCache {
    /// A machine with `frames` frames and `cpus` CPUs; without a variant its compaction leaves large folios where they are, as
    /// Linux did before the series.
    pub fn new(frames: u32, cpus: u16, variant: Option<Variant>, pick: Pick, costs: Costs) -> PageCache {
        let watermarks = alloc::Watermarks::of(frames);
        PageCache {
            folios: Folios::new(frames, variant.is_some(), pick, costs.page_cache),
            compactor: Compactor::new(variant.unwrap_or(Variant::FreeSplit)),
            engine: Box::default(),
            per_cpu: vec![PerCpu::default(); cpus.into()],
            keeps: watermarks.keeps(cpus),
            watermarks,
            unmovable: Vec::new(),
            tables: Vec::new(),
            cpu: 0,
            counters: CacheCounters::default(),
            costs,
            computed_ns: 0,
        }
    }

    /// From now on that CPU runs.
    pub fn set_cpu(&mut self, cpu: u16) {
        self.cpu = cpu.into();
    }

    /// A new file, of which nothing is cached.
    pub fn create(&mut self, backing: Backing, pages: u32) -> FileId {
        self.add(File::new(backing, pages, None))
    }

    /// A new file whose content is kept in `image`, page by page, once it is written back.
    pub fn create_kept_in(&mut self, image: FileId, pages: u32) -> FileId {
        self.add(File::new(Backing::File, pages, Some(image)))
    }

    fn add(&mut self, file: File) -> FileId {
        let files = &mut self.folios.table.get_mut().files;
        files.push(file);
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
        (self.folios.spent_ns.take(), std::mem::take(&mut self.computed_ns))
    }

    fn cache_costs(&self) -> PageCacheCosts {
        self.costs.page_cache
    }

    fn spend(&mut self, times: u32, ns: u32) {
        *self.folios.spent_ns.get_mut() += u64::from(times) * u64::from(ns);
    }

    fn file(&mut self, file: FileId) -> &mut File {
        &mut self.folios.table.get_mut().files[usize::from(file.0)]
    }

    fn folio_at(&mut self, file: FileId, index: u32) -> FolioId {
        self.file(file).page(index).folio
    }

    /// Puts `run` into the file, with zeros in it or what is copied there.
    fn insert(&mut self, run: FrameRun, file: FileId, index: u32, content: Content) -> FolioId {
        self.spend(1, self.costs.page_cache.insert_folio_ns);
        let page_ns = match content {
            Content::Zeros => self.costs.zero_page_ns,
            Content::Copy => self.costs.copy_page_ns,
        };
        self.spend(run.frames(), page_ns);
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

    /// `msync(MS_SYNC)`: what was written of `range` is copied to where it is kept.
    pub fn sync(&mut self, file: FileId, range: std::ops::Range<u32>) -> Result<(), LabError> {
        for index in range {
            let id = self.folio_at(file, index);
            if id == FolioId::NONE || !self.folios.table.get_mut().folio(id).dirty {
                continue;
            }
            let pages = self.folios.table.get_mut().folio_range(id);
            self.folios.table.get_mut().clean(id);
            self.counters.written_back_pages += u64::from(pages.end - pages.start);
            for page in pages {
                self.keep(file, page, PageCache::alloc_page)?;
            }
        }
        Ok(())
    }

    /// Copies a page to where it is kept; what has no page there yet gets the one that `alloc` finds.
    fn keep<E>(
        &mut self,
        file: FileId,
        page: u32,
        alloc: impl FnOnce(&mut PageCache) -> Result<FrameRun, E>,
    ) -> Result<(), E> {
        let image = self.file(file).image;
        match image {
            Some(image) if self.folio_at(image, page) == FolioId::NONE => {
                let run = alloc(self)?;
                self.insert(run, image, page, Content::Copy);
            }
            // Of a file that is kept nowhere only the work is done.
            _ => self.spend(1, self.costs.copy_page_ns),
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
