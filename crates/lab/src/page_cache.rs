//! The page cache: a machine's memory as Linux 6.6 runs it. It has files in large folios, shared
//! and anonymous memory, all from one buddy allocator, with reclaim and compaction when that runs
//! out.
//!
//! The engine decides which frames an allocation gets and what compaction moves: this module uses
//! its free frames ([`foliomem_core::homes`]) and its compactor ([`foliomem_core::compaction`]). It
//! adds the parts of a kernel that decide how fragmented memory becomes: per-CPU lists of free runs
//! ([`per_cpu`]), readahead windows with growing folios ([`readahead`]), an active and an inactive
//! list, and the order in which a failing allocation tries compaction and reclaim (`alloc`).
//!
//! Page tables are the only immovable memory. Not modelled: `kswapd` and `kcompactd` as threads (an
//! allocation that finds too little free memory does their work and pays for it), locks, and disks:
//! all files are sparse, as those of vm-scalability are.

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
use foliomem_types::counters::{Counters, VmCounters};
use foliomem_types::units::{Frame, FrameRun, ORDERS};
use folios::{Folios, List, Movable};
use per_cpu::{Keeps, PerCpu};
use serde::{Deserialize, Serialize};

/// A file of the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileId(u16);

/// An address space, one of 16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapper(pub u8);

impl Mapper {
    fn bit(self) -> u16 {
        1 << self.0
    }
}

/// Counters of the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheCounters {
    /// Allocated folios by order.
    pub allocated: [u64; ORDERS],
    /// Failed folio allocations by order; smaller folios were used instead.
    pub fallbacks: [u64; ORDERS],
    /// Reclaimed folios.
    pub reclaimed_folios: u64,
    /// Pages of the reclaimed folios.
    pub reclaimed_pages: u64,
    /// Pages written back.
    pub written_back_pages: u64,
    /// Peak number of page tables.
    pub most_table_pages: u64,
}

/// The initial content of a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// Zeros, as in a hole of a file.
    Zeros,
    /// A copy of other content.
    Copy,
}

/// A machine with a page cache.
pub struct PageCache {
    folios: Folios,
    compactor: Compactor,
    engine: Box<Counters>,
    per_cpu: Vec<PerCpu>,
    keeps: Keeps,
    watermarks: alloc::Watermarks,
    /// Free pages of the immovable group, and pages used as page tables.
    unmovable: Vec<Frame>,
    tables: Vec<Frame>,
    cpu: usize,
    counters: CacheCounters,
    costs: Costs,
    /// Time in which the programs computed.
    computed_ns: u64,
}

impl PageCache {
    /// Makes a machine with `frames` frames and `cpus` CPUs. Without a `variant` compaction does
    /// not move large folios, as in Linux before the series.
    pub fn new(frames: u32, cpus: u16, variant: Option<Variant>, pick: Pick, costs: Costs) -> PageCache {
        let watermarks = alloc::Watermarks::of(frames);
        let movable = if variant.is_some() { Movable::AllFolios } else { Movable::SinglePages };
        PageCache {
            folios: Folios::new(frames, movable, pick, costs.page_cache),
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

    /// Makes `cpu` the running CPU.
    pub fn set_cpu(&mut self, cpu: u16) {
        self.cpu = cpu.into();
    }

    /// Creates a file; nothing of it is cached.
    pub fn create(&mut self, backing: Backing, pages: u32) -> FileId {
        self.add(File::new(backing, pages, None))
    }

    /// Creates a file whose pages are kept in `image` after they are written back.
    pub fn create_kept_in(&mut self, image: FileId, pages: u32) -> FileId {
        self.add(File::new(Backing::File, pages, Some(image)))
    }

    fn add(&mut self, file: File) -> FileId {
        let files = &mut self.folios.table.get_mut().files;
        files.push(file);
        FileId(files.len() as u16 - 1)
    }

    /// Returns the length of a file in pages.
    pub fn len_pages(&self, file: FileId) -> u32 {
        self.folios.table.borrow().files[usize::from(file.0)].pages()
    }

    /// Returns the counters.
    pub fn counters(&self) -> CacheCounters {
        self.counters
    }

    /// Returns the number of page tables.
    pub fn table_pages(&self) -> u32 {
        self.tables.len() as u32
    }

    /// Returns the number of pages that are neither free nor on a per-CPU list.
    pub fn used_pages(&self) -> u32 {
        self.folios.homes.frames() - self.folios.homes.empty_frames() - self.kept_frames()
    }

    fn kept_frames(&self) -> u32 {
        self.per_cpu.iter().map(PerCpu::frames).sum()
    }

    /// Returns the counters of compaction.
    pub fn vm_counters(&self) -> &VmCounters {
        &self.engine.vm
    }

    /// Returns the time spent since the last call: by the kernel, and by the programs.
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

    /// Adds `run` to the file as a folio of zeros or copied content.
    fn insert(&mut self, run: FrameRun, file: FileId, index: u32, content: Content) -> FolioId {
        self.spend(1, self.costs.page_cache.insert_folio_ns);
        let page_ns = match content {
            Content::Zeros => self.costs.zero_page_ns,
            Content::Copy => self.costs.copy_page_ns,
        };
        self.spend(run.frames(), page_ns);
        let table = self.folios.table.get_mut();
        let id = table.add(run, file.0, index);
        // Memory without a backing store stays: there is no swap.
        if table.files[usize::from(file.0)].backing == Backing::File {
            table.enlist(id, List::Inactive);
        }
        id
    }

    /// Lets a program compute for `ns`.
    pub fn compute(&mut self, ns: u64) {
        self.computed_ns += ns;
    }

    /// Writes back the dirty pages of `range`: `msync(MS_SYNC)`.
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

    /// Copies a page to its image. If the image has no page there, `alloc` allocates one.
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
            // A file without an image only costs the work.
            _ => self.spend(1, self.costs.copy_page_ns),
        }
        Ok(())
    }

    /// Drops all cached pages of a file that is removed or whose program ended. Nothing maps it any
    /// more.
    pub fn truncate(&mut self, file: FileId) {
        let folios = self.file(file).folios();
        for id in folios {
            self.free(id);
        }
        let tables = self.tables.len() - self.file(file).drop_tables() as usize;
        self.unmovable.extend(self.tables.drain(tables..));
    }

    /// Checks everything.
    pub fn check(&self) {
        self.folios.homes.check();
        self.folios.table.borrow().check(&self.folios.homes);
        let unmovable = self.unmovable.len() as u32 + self.table_pages();
        let cached: u32 = self.folios.table.borrow().pages();
        assert_eq!(
            cached + unmovable,
            self.used_pages(),
            "every page is free, on a per-CPU list, of a file, or immovable"
        );
    }
}
