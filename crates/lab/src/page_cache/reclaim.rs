//! Reclaim of folios as `shrink_inactive_list` and `shrink_active_list` of Linux do it for files.

use super::files::FolioId;
use super::folios::List;
use super::{FileId, PageCache};
use foliomem_types::units::Order;

/// Maximum ratio of active to inactive pages: the square root of ten times the GiB
/// (`inactive_is_low`), of a machine of 16 GiB.
const ACTIVE_BY_INACTIVE: u32 = 12;

/// The decision about a scanned folio.
#[derive(Debug)]
pub(super) enum Fate {
    Activate,
    Keep,
    Free,
}

impl PageCache {
    /// Frees at least `pages` pages if possible; returns the number of freed pages.
    pub(super) fn reclaim(&mut self, pages: u32) -> u32 {
        let (mut freed, mut not_written) = (0, 0);
        // To write a dirty folio back may take free pages for its copy. When all folios that are
        // left have failed for lack of such pages, reclaim ends.
        while freed < pages && not_written <= self.folios.table.get_mut().listed_pages(List::Inactive) {
            self.deactivate();
            let Some(id) = self.folios.table.get_mut().pop(List::Inactive) else { break };
            match self.fate(id) {
                Fate::Activate => self.folios.table.get_mut().enlist(id, List::Active),
                Fate::Keep => self.folios.table.get_mut().enlist(id, List::Inactive),
                Fate::Free => {
                    let pages = self.folios.table.get_mut().run(id).frames();
                    if self.folios.table.get_mut().folio(id).dirty && !self.write_back(id) {
                        self.folios.table.get_mut().enlist(id, List::Inactive);
                        not_written += pages;
                        continue;
                    }
                    let mappings = self.folios.table.get_mut().mappings(id);
                    self.spend(mappings, self.cache_costs().rmap_page_ns);
                    self.free(id);
                    self.counters.reclaimed_folios += 1;
                    self.counters.reclaimed_pages += u64::from(pages);
                    freed += pages;
                }
            }
        }
        freed
    }

    /// Decides about a folio (`folio_check_references`): used by several address spaces, or a
    /// second time by one, it is activated; used once, it is kept.
    pub(super) fn fate(&mut self, id: FolioId) -> Fate {
        let users = self.take_young(id);
        let folio = self.folios.table.get_mut().folio_mut(id);
        let was_referenced = std::mem::replace(&mut folio.referenced, users > 0);
        match users {
            0 => Fate::Free,
            1 if !was_referenced => Fate::Keep,
            _ => Fate::Activate,
        }
    }

    /// Returns how many address spaces used a folio since the last call. (`folio_referenced`:
    /// regardless of how many of its pages.)
    fn take_young(&mut self, id: FolioId) -> u32 {
        let table = self.folios.table.get_mut();
        let (file, range) = (usize::from(table.folio(id).file), table.folio_range(id));
        let (mut young, mut mapped) = (0, 0);
        for index in range {
            let page = table.files[file].cached_mut(index);
            young |= std::mem::take(&mut page.young);
            mapped += page.mapped.count_ones();
        }
        self.spend(mapped, self.cache_costs().rmap_page_ns);
        young.count_ones()
    }

    /// Moves the oldest surplus folios of the active list to the inactive list.
    fn deactivate(&mut self) {
        loop {
            let table = self.folios.table.get_mut();
            let (inactive, active) = (table.listed_pages(List::Inactive), table.listed_pages(List::Active));
            if active <= inactive.saturating_mul(ACTIVE_BY_INACTIVE) {
                return;
            }
            let Some(id) = table.pop(List::Active) else { return };
            self.take_young(id);
            self.folios.table.get_mut().enlist(id, List::Inactive);
        }
    }

    /// Removes a folio from its file and frees it.
    pub(super) fn free(&mut self, id: FolioId) {
        let run = self.folios.table.get_mut().remove(id);
        let costs = self.cache_costs();
        self.spend(1, costs.free_folio_ns);
        self.spend(run.frames(), costs.free_page_ns);
        self.per_cpu[self.cpu].give(&self.folios.homes, run, self.keeps);
    }

    /// Writes back a dirty folio into free pages; it does not reclaim memory for that. Returns
    /// false if there are none.
    fn write_back(&mut self, id: FolioId) -> bool {
        let (file, pages) = (self.folios.table.get_mut().folio(id).file, self.folios.table.get_mut().folio_range(id));
        let count = pages.end - pages.start;
        let mut is_kept = |page| self.keep(FileId(file), page, |cache| cache.take(Order::ZERO).ok_or(()));
        if pages.into_iter().any(|page| is_kept(page).is_err()) {
            return false;
        }
        self.folios.table.get_mut().clean(id);
        self.counters.written_back_pages += u64::from(count);
        true
    }
}
