//! Reads by `read()`, and filling readahead windows.

use super::files::FolioId;
use super::folios::List;
use super::readahead::{Readahead, WINDOW_PAGES, Window};
use super::{Content, FileId, PageCache};
use crate::error::LabError;

/// A sequential reader of a file by `read()`.
#[derive(Clone, Debug)]
pub struct Reader {
    file: FileId,
    readahead: Readahead,
}

impl Reader {
    /// Makes a reader at the beginning of `file`.
    pub fn new(file: FileId) -> Reader {
        Reader { file, readahead: Readahead::default() }
    }
}

impl PageCache {
    /// Reads a page with `read()`.
    pub fn read(&mut self, reader: &mut Reader, index: u32) -> Result<(), LabError> {
        let mut id = self.folio_at(reader.file, index);
        if id == FolioId::NONE {
            let window = reader.readahead.missed(index);
            self.fill(reader.file, window)?;
            id = self.folio_at(reader.file, index);
        }
        if id == FolioId::NONE {
            id = self.insert_page(reader.file, index)?;
        }
        let head = self.folios.table.get_mut().folio(id).index;
        // The request is for a page; the part of the folio before it is counted with it.
        self.use_mark(reader.file, &mut reader.readahead, id, head, index + 1 - head)?;
        let last = reader.readahead.read(index);
        self.spend(1, self.cache_costs().read_page_ns);
        // Readahead may have reclaimed the folio of this very page.
        let id = self.folio_at(reader.file, index);
        // The read of the previous page already used the folio if both are in it.
        if id != FolioId::NONE && last.is_none_or(|last| self.folio_at(reader.file, last) != id) {
            self.spend(1, self.cache_costs().read_folio_ns);
            self.note_use(id);
        }
        Ok(())
    }

    /// Records a use (`mark_page_accessed`): a second use on the inactive list activates the folio.
    fn note_use(&mut self, id: FolioId) {
        let table = self.folios.table.get_mut();
        let folio = table.folio_mut(id);
        if !folio.referenced {
            folio.referenced = true;
        } else if folio.list == List::Inactive {
            folio.referenced = false;
            table.enlist(id, List::Active);
        }
    }

    /// Starts the next window if `id` is marked for that; it is used at `index`, for `pages` pages.
    pub(super) fn use_mark(
        &mut self,
        file: FileId,
        readahead: &mut Readahead,
        id: FolioId,
        index: u32,
        pages: u32,
    ) -> Result<(), LabError> {
        let folio = self.folios.table.get_mut().folio_mut(id);
        if !std::mem::take(&mut folio.marked) {
            return Ok(());
        }
        let order = self.folios.table.get_mut().run(id).order;
        let table = &self.folios.table;
        let next_miss = || {
            let table = table.borrow();
            let file = &table.files[usize::from(file.0)];
            let end = (index + 1 + WINDOW_PAGES).min(file.pages());
            (index + 1..end).find(|&index| file.page(index).folio == FolioId::NONE)
        };
        let window = readahead.marked(index, order, pages, next_miss);
        window.map_or(Ok(()), |window| self.fill(file, window))
    }

    /// Reads a window in the largest folios; with single pages from where such a folio cannot be
    /// allocated or a page is cached already.
    pub(super) fn fill(&mut self, file: FileId, window: Window) -> Result<(), LabError> {
        let end = (window.start + window.pages).min(self.len_pages(file));
        let window = Window { pages: end.saturating_sub(window.start), ..window };
        let mut index = window.start;
        while index < end {
            let order = window.order_at(index);
            if (index..index + order.pages()).any(|index| self.folio_at(file, index) != FolioId::NONE) {
                break;
            }
            let Some(run) = self.alloc(order)? else { break };
            let id = self.insert(run, file, index, Content::Zeros);
            self.folios.table.get_mut().folio_mut(id).marked = index == window.mark.next_multiple_of(order.pages());
            index += order.pages();
        }
        let lookahead = (window.start + window.pages).saturating_sub(window.mark);
        let by_pages = index..(index + window.pages * u32::from(index < end)).min(self.len_pages(file));
        let mark = by_pages.end.saturating_sub(lookahead);
        for index in by_pages {
            if self.folio_at(file, index) == FolioId::NONE {
                let id = self.insert_page(file, index)?;
                self.folios.table.get_mut().folio_mut(id).marked = index == mark;
            }
        }
        Ok(())
    }

    pub(super) fn insert_page(&mut self, file: FileId, index: u32) -> Result<FolioId, LabError> {
        let run = self.alloc_page()?;
        Ok(self.insert(run, file, index, Content::Zeros))
    }
}
