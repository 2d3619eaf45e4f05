//! Which folio holds which page of a file, and who has it mapped.

use super::FileId;
use foliomem_core::units::BLOCK_PAGES;
use std::ops::Range;

/// Pages that are kept together.
const CHUNK: u32 = 64;

/// Where the content of a file is when it is not in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// In a file system: clean folios can be dropped.
    File,
    /// Nowhere: shared memory.
    Shm,
    /// Nowhere: a program's own.
    Anonymous,
}

/// A folio of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FolioId(pub u32);

impl FolioId {
    /// No folio.
    pub const NONE: FolioId = FolioId(0);
}

/// A page of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Page {
    /// The folio that holds it.
    pub folio: FolioId,
    /// A bit for each address space that maps it.
    pub mapped: u16,
    /// Those of them that have used it since that was looked at.
    pub young: u16,
    /// It was written since it was written back.
    pub dirty: bool,
}

struct Chunk {
    pages: [Page; CHUNK as usize],
    cached: u32,
}

/// A file of any size, of which what is cached takes memory.
pub struct File {
    /// See [`Backing`].
    pub backing: Backing,
    /// Where its content is kept when it was written back, if that is a file of the page cache, too.
    pub image: Option<FileId>,
    chunks: Vec<Option<Box<Chunk>>>,
    /// By 2 MiB, a bit for each address space that has a page table for them.
    tables: Vec<u16>,
    pages: u32,
}

impl File {
    /// A sparse file of `pages` pages, none of which is cached.
    pub fn new(backing: Backing, pages: u32, image: Option<FileId>) -> File {
        let chunks = (0..pages.div_ceil(CHUNK)).map(|_| None).collect();
        File { backing, image, chunks, tables: vec![0; pages.div_ceil(BLOCK_PAGES as u32) as usize], pages }
    }

    /// Its length.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// What is known of a page.
    pub fn page(&self, index: u32) -> Page {
        let chunk = self.chunks[(index / CHUNK) as usize].as_ref();
        chunk.map_or(Page::default(), |chunk| chunk.pages[(index % CHUNK) as usize])
    }

    /// A page that is cached.
    pub fn cached_mut(&mut self, index: u32) -> &mut Page {
        let Some(chunk) = &mut self.chunks[(index / CHUNK) as usize] else {
            unreachable!("page {index} is not cached")
        };
        &mut chunk.pages[(index % CHUNK) as usize]
    }

    /// From now on `folio` holds the pages of `range`.
    pub fn insert(&mut self, range: Range<u32>, folio: FolioId) {
        for index in range {
            let empty = || Box::new(Chunk { pages: [Page::default(); CHUNK as usize], cached: 0 });
            let chunk = self.chunks[(index / CHUNK) as usize].get_or_insert_with(empty);
            let page = &mut chunk.pages[(index % CHUNK) as usize];
            chunk.cached += u32::from(page.folio == FolioId::NONE);
            page.folio = folio;
        }
    }

    /// The pages of `range`, which are cached, are not any more.
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

    /// Whether the address space of that bit has no page table for page `index` yet. From now on it has.
    pub fn needs_table(&mut self, index: u32, mapper: u16) -> bool {
        let table = &mut self.tables[index as usize / BLOCK_PAGES];
        let needs = *table & mapper == 0;
        *table |= mapper;
        needs
    }

    /// All address spaces that had it mapped are gone; returns how many page tables they had for it.
    pub fn drop_tables(&mut self) -> u32 {
        self.tables.iter_mut().map(|table| std::mem::take(table).count_ones()).sum()
    }

    /// The folios that hold anything of it, ascending.
    pub fn folios(&self) -> Vec<FolioId> {
        let cached = self.chunks.iter().flatten().flat_map(|chunk| &chunk.pages);
        let mut folios: Vec<FolioId> = cached.map(|page| page.folio).filter(|&folio| folio != FolioId::NONE).collect();
        folios.dedup();
        folios
    }
}
