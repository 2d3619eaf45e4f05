//! Which folios go, as `shrink_inactive_list` and `shrink_active_list` of Linux decide it for files.

use super::files::FolioId;
use super::folios::List;
use super::{COSTS, PageCache};

/// How many times as much may be active as inactive: the square root of ten times the GiB (`inactive_is_low`), of a machine of 16 GiB.
const ACTIVE_BY_INACTIVE: u32 = 12;

/// What becomes of a folio that is looked at.
enum Fate {
    Activate,
    Keep,
    Free,
}

impl PageCache {
    /// Frees `pages` pages or more; returns how many it has.
    pub(super) fn reclaim(&mut self, pages: u32) -> u32 {
        let mut freed = 0;
        while freed < pages {
            self.deactivate();
            let Some(id) = self.folios.table.get_mut().pop(List::Inactive) else { break };
            match self.fate(id) {
                Fate::Activate => self.folios.table.get_mut().enlist(id, List::Active),
                Fate::Keep => self.folios.table.get_mut().enlist(id, List::Inactive),
                Fate::Free => {
                    let pages = self.folios.table.get_mut().run(id).frames();
                    if std::mem::take(&mut self.folios.table.get_mut().folio_mut(id).dirty) {
                        self.write_back(pages);
                    }
                    let mappings = self.folios.table.get_mut().mappings(id);
                    self.spend(u64::from(mappings) * COSTS.rmap_page_ns);
                    self.free(id);
                    self.counters.reclaimed_folios += 1;
                    self.counters.reclaimed_pages += u64::from(pages);
                    freed += pages;
                }
            }
        }
        freed
    }

    /// `folio_check_references`: what several page tables have used, or one a second time, becomes active; what one has used stays.
    fn fate(&mut self, id: FolioId) -> Fate {
        let used = self.take_young(id);
        let folio = self.folios.table.get_mut().folio_mut(id);
        match used {
            0 => Fate::Free,
            1 if !folio.referenced => {
                folio.referenced = true;
                Fate::Keep
            }
            _ => {
                folio.referenced = false;
                Fate::Activate
            }
        }
    }

    /// How many page-table entries of a folio were used since this was last asked.
    fn take_young(&mut self, id: FolioId) -> u32 {
        let table = self.folios.table.get_mut();
        let (folio, run) = (*table.folio(id), table.run(id));
        let file = &mut table.files[usize::from(folio.file)];
        let (mut young, mut mapped) = (0, 0);
        for index in folio.range(run) {
            let page = file.cached_mut(index);
            young += std::mem::take(&mut page.young).count_ones();
            mapped += page.mapped.count_ones();
        }
        self.spend(u64::from(mapped) * COSTS.rmap_page_ns);
        young
    }

    /// Takes from the active list what it has too much, oldest first.
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

    /// Takes a folio out of its file and frees it.
    pub(super) fn free(&mut self, id: FolioId) {
        let run = self.folios.table.get_mut().remove(id);
        self.spend(COSTS.free_folio_ns + COSTS.free_page_ns * u64::from(run.frames()));
        self.per_cpu[self.cpu].give(&self.folios.homes, run, self.keeps);
    }

    /// Copies pages to where they are kept.
    pub(super) fn write_back(&mut self, pages: u32) {
        self.counters.written_back_pages += u64::from(pages);
        self.spend(COSTS.copy_page_ns * u64::from(pages));
    }
}
