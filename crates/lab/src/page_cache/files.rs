//! Files: which folio holds which page, and which address spaces map it.

use super::FileId;
use foliomem_types::units::BLOCK_PAGES;
use std::ops::Range;

/// Pages of a chunk of the page index.
const CHUNK: u32 = 64;

/// The backing of a file's content outside of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// A file system: clean folios can be dropped.
    File,
    /// Nothing: shared memory.
    Shm,
    /// Nothing: anonymous memory.
    Anonymous,
}

/// The index of a folio in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FolioId(pub u32);

impl FolioId {
    /// No folio.
    pub const NONE: FolioId = FolioId(0);
}

/// The state of one page of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Page {
    /// The folio that holds the page.
    pub folio: FolioId,
    /// The address spaces that map the page, one bit each.
    pub mapped: u16,
    /// The address spaces that used the page since the last check.
    pub young: u16,
    /// Whether the page was written since its last writeback.
    pub dirty: bool,
}

struct Chunk {
    pages: [Page; CHUNK as usize],
    cached: u32,
}

/// A file of any size. Only cached pages take memory.
pub struct File {
    /// The backing of the content.
    pub backing: Backing,
    /// The file of the page cache that keeps written-back content, if there is one.
    pub image: Option<FileId>,
    chunks: Vec<Option<Box<Chunk>>>,
    /// The address spaces with a page table, one bit each, for each 2 MiB.
    tables: Vec<u16>,
    pages: u32,
}

impl File {
    /// Makes a sparse file of `pages` pages; none is cached.
    pub fn new(backing: Backing, pages: u32, image: Option<FileId>) -> File {
        let chunks = (0..pages.div_ceil(CHUNK)).map(|_| None).collect();
        File { backing, image, chunks, tables: vec![0; pages.div_ceil(BLOCK_PAGES as u32) as usize], pages }
    }

    /// Returns the length in pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the state of a page.
    pub fn page(&self, index: u32) -> Page {
        let chunk = self.chunks[(index / CHUNK) as usize].as_ref();
        chunk.map_or(Page::default(), |chunk| chunk.pages[(index % CHUNK) as usize])
    }

    /// Returns the state of a cached page.
    pub fn cached_mut(&mut self, index: u32) -> &mut Page {
        let Some(chunk) = &mut self.chunks[(index / CHUNK) as usize] else {
            unreachable!("page {index} is not cached")
        };
        &mut chunk.pages[(index % CHUNK) as usize]
    }

    /// Records that `folio` holds the pages of `range`.
    pub fn insert(&mut self, range: Range<u32>, folio: FolioId) {
        for index in range {
            let empty = || Box::new(Chunk { pages: [Page::default(); CHUNK as usize], cached: 0 });
            let chunk = self.chunks[(index / CHUNK) as usize].get_or_insert_with(empty);
            let page = &mut chunk.pages[(index % CHUNK) as usize];
            chunk.cached += u32::from(page.folio == FolioId::NONE);
            page.folio = folio;
        }
    }

    /// Records that the pages of `range` are no longer cached.
    pub fn remove(&mut self, range: Range<u32>) {
        for index in range {
            let slot = &mut self.chunks[(index / CHUNK) as usize];
            let Some(chunk) = slot else { unreachable!("page {index} is not cached") };
            chunk.pages[(index % CHUNK) as usize] = Page::default();
            chunk.cached -= 1;
            if chunk.cached == 0 {
                *slot = None;
            }
        }
    }

    /// Returns whether the address space `mapper` still lacks a page table for page `index`, and
    /// records that it has one now.
    pub fn needs_table(&mut self, index: u32, mapper: u16) -> bool {
        let table = &mut self.tables[index as usize / BLOCK_PAGES];
        let needs = *table & mapper == 0;
        *table |= mapper;
        needs
    }

    /// Drops the page tables of all address spaces; returns their number.
    pub fn drop_tables(&mut self) -> u32 {
        self.tables.iter_mut().map(|table| std::mem::take(table).count_ones()).sum()
    }

    /// Returns the folios of the file, ascending.
    pub fn folios(&self) -> Vec<FolioId> {
        let cached = self.chunks.iter().flatten().flat_map(|chunk| &chunk.pages);
        let mut folios: Vec<FolioId> = cached.map(|page| page.folio).filter(|&folio| folio != FolioId::NONE).collect();
        folios.dedup();
        folios
    }
}
