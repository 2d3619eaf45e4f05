//! Touches of mapped memory: files, shared and anonymous memory.

use super::files::{Backing, FolioId};
use super::readahead::{Readahead, WINDOW_PAGES};
use super::{Content, FileId, Mapper, PageCache};
use crate::error::LabError;
use crate::machine::Access;
use foliomem_types::units::MAX_ORDER;

/// Maximum pages that a fault maps around: `fault_around_bytes`.
const AROUND_PAGES: u32 = 16;

impl PageCache {
    /// Reads or writes a page of a file that the program mapped.
    pub fn touch(
        &mut self,
        mapper: Mapper,
        file: FileId,
        readahead: &mut Readahead,
        index: u32,
        access: Access,
    ) -> Result<(), LabError> {
        let was_mapped = self.file(file).page(index).mapped & mapper.bit() != 0;
        if !was_mapped {
            self.spend(1, self.cache_costs().fault_ns);
            if self.file(file).needs_table(index, mapper.bit()) {
                self.add_table()?;
            }
            match self.file(file).backing {
                Backing::File => self.fault_file(mapper, file, readahead, index)?,
                Backing::Shm => self.fault_shm(mapper, file, index)?,
                Backing::Anonymous => self.fault_anonymous(mapper, file, index)?,
            }
        }
        let page = self.file(file).cached_mut(index);
        page.young |= mapper.bit();
        let is_first_write = access == Access::Write && !std::mem::replace(&mut page.dirty, true);
        let id = page.folio;
        if is_first_write && self.file(file).backing == Backing::File {
            // Linux maps file pages read-only first, to notice the first write; a fault for the
            // mapping itself already knows.
            self.spend(u32::from(was_mapped), self.cache_costs().fault_ns);
            self.folios.table.get_mut().folio_mut(id).dirty = true;
        }
        Ok(())
    }

    /// Allocates a page table. It stays until its address space is gone, whatever it still maps.
    fn add_table(&mut self) -> Result<(), LabError> {
        let frame = self.alloc_unmovable()?;
        self.spend(1, self.costs.page_cache.insert_folio_ns + self.costs.zero_page_ns);
        self.tables.push(frame);
        self.counters.most_table_pages = self.counters.most_table_pages.max(self.tables.len() as u64);
        Ok(())
    }

    /// Maps the cached, unmarked pages around `index`; returns their number.
    fn map_around(&mut self, mapper: Mapper, file: FileId, index: u32) -> u32 {
        let first = index & !(AROUND_PAGES - 1);
        let end = (first + AROUND_PAGES).min(self.len_pages(file));
        let (mut mapped, mut folios, mut last) = (0, 0, FolioId::NONE);
        for index in first..end {
            let table = self.folios.table.get_mut();
            let page = table.files[usize::from(file.0)].page(index);
            let is_ready = page.folio != FolioId::NONE && !table.folio(page.folio).marked;
            if !is_ready || page.mapped & mapper.bit() != 0 {
                continue;
            }
            let page = table.files[usize::from(file.0)].cached_mut(index);
            page.mapped |= mapper.bit();
            page.young |= mapper.bit();
            mapped += 1;
            folios += u32::from(page.folio != last);
            last = page.folio;
        }
        self.spend(folios, self.cache_costs().map_folio_ns);
        mapped
    }

    fn map_page(&mut self, mapper: Mapper, file: FileId, index: u32) {
        self.spend(1, self.cache_costs().map_folio_ns);
        let page = self.file(file).cached_mut(index);
        page.mapped |= mapper.bit();
        page.young |= mapper.bit();
    }

    fn fault_file(
        &mut self,
        mapper: Mapper,
        file: FileId,
        readahead: &mut Readahead,
        index: u32,
    ) -> Result<(), LabError> {
        let mapped = self.map_around(mapper, file, index);
        readahead.hit_mapped(mapped);
        if self.file(file).page(index).mapped & mapper.bit() != 0 {
            return Ok(());
        }
        let id = self.folio_at(file, index);
        if id == FolioId::NONE {
            if let Some(window) = readahead.missed_mapped(index) {
                self.fill(file, window)?;
            }
        } else {
            readahead.hit_mapped(1);
            self.use_mark(file, readahead, id, index, WINDOW_PAGES)?;
        }
        if self.folio_at(file, index) == FolioId::NONE {
            self.insert_page(file, index)?;
        }
        self.map_page(mapper, file, index);
        Ok(())
    }

    /// Handles a fault on shared memory, which has single pages (default of Linux 6.6).
    fn fault_shm(&mut self, mapper: Mapper, file: FileId, index: u32) -> Result<(), LabError> {
        if self.folio_at(file, index) == FolioId::NONE {
            self.insert_page(file, index)?;
            self.map_page(mapper, file, index);
        } else {
            self.map_around(mapper, file, index);
        }
        Ok(())
    }

    /// Handles a fault on anonymous memory: with 2 MiB if that range is untouched and a run is
    /// free, else with a page. (Linux 6.6 with huge pages always and `defrag=madvise`, its default:
    /// it does not compact for this.)
    fn fault_anonymous(&mut self, mapper: Mapper, file: FileId, index: u32) -> Result<(), LabError> {
        let block = index & !(MAX_ORDER.pages() - 1);
        let len = self.len_pages(file);
        let pages = block..(block + MAX_ORDER.pages());
        let table = self.folios.table.get_mut();
        let is_untouched = |index| table.files[usize::from(file.0)].page(index).folio == FolioId::NONE;
        if pages.end <= len
            && pages.clone().all(is_untouched)
            && let Some(run) = self.alloc_free(MAX_ORDER)
        {
            self.insert(run, file, block, Content::Zeros);
            pages.for_each(|index| self.file(file).cached_mut(index).mapped |= mapper.bit());
            return Ok(());
        }
        if self.folio_at(file, index) == FolioId::NONE {
            self.insert_page(file, index)?;
        }
        self.map_page(mapper, file, index);
        Ok(())
    }

    /// Gives a program its own copy of a page shared with its parent since a fork, in the file
    /// `own`.
    pub fn copy_on_write(&mut self, mapper: Mapper, own: FileId, index: u32) -> Result<(), LabError> {
        if self.folio_at(own, index) == FolioId::NONE {
            if self.file(own).needs_table(index, mapper.bit()) {
                self.add_table()?;
            }
            let run = self.alloc_page()?;
            self.insert(run, own, index, Content::Copy);
            self.map_page(mapper, own, index);
            self.spend(1, self.cache_costs().fault_ns);
        }
        Ok(())
    }
}
