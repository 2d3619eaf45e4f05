//! The lab's address space: mappings, and the version of each page.

use super::{Home, LabMachine, PRESENT};
use foliomem_core::page_table::Entries;
use foliomem_core::ports::{AddressSpace, Corrupted, Mapping, MoveError, Stopped};
use foliomem_core::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, OrderSet, PageNumber};
use std::ops::Range;

impl LabMachine {
    /// Makes `page` present. `content` must be the content that the page had last.
    fn map_in(&self, page: PageNumber, content: u32) -> Result<(), MoveError> {
        let word = &self.pages.folio(page, 1)[0];
        let version = word.load(Relaxed);
        if version & PRESENT != 0 {
            return Err(MoveError::Exists);
        }
        assert_right(page.0 as u32, version, content);
        word.store(version | PRESENT, Relaxed);
        Ok(())
    }
}

/// Panics unless `content` is that of page `number`, which has `version`.
#[inline]
fn assert_right(number: u32, version: u32, content: u32) {
    let is_right = content == number + Home::FIRST_PAGE || content == Home::ANY && version == 0;
    assert!(is_right, "page {number:x}, version {version:x}, was given the content {content:x}");
}

impl AddressSpace for LabMachine {
    type Steady<'a> = ();

    #[inline]
    fn steady(&self) -> Option<()> {
        Some(())
    }

    #[inline]
    fn mapping(&self, page: PageNumber) -> Option<Mapping> {
        let mappings = self.mappings.lock();
        let (&start, &end) = mappings.range(..=page).next_back()?;
        (page < end).then_some(Mapping { pages: start..end, sizes: self.sizes })
    }

    #[inline]
    fn sizes_of_return(&self, _page: PageNumber) -> OrderSet {
        self.sizes
    }

    #[inline]
    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>)) {
        let mut start = None;
        for number in pages.start.0..pages.end.0 {
            let present = self.pages.find(number).is_some_and(|word| word.load(Relaxed) & PRESENT != 0);
            match start {
                None if present => start = Some(number),
                Some(first) if !present => {
                    found(PageNumber(first)..PageNumber(number));
                    start = None;
                }
                _ => {}
            }
        }
        if let Some(first) = start {
            found(PageNumber(first)..pages.end);
        }
    }

    fn is_shared(&self, _page: PageNumber) -> bool {
        false
    }

    #[inline]
    fn move_in(&self, _steady: &(), _block: &Entries, run: FrameRun, to: PageNumber) -> Result<(), Stopped> {
        self.spend_by_page(self.costs.move_ns, self.costs.move_page_ns, run.frames());
        let pages = self.pages.folio(to, run.frames());
        for (number, (home, page)) in (to.0 as u32..).zip(self.staged(run).iter().zip(pages)) {
            let (content, version) = (home.load(Relaxed), page.load(Relaxed));
            assert_right(number, version, content);
            page.store(version | PRESENT, Relaxed);
            home.store(Home::EMPTY, Relaxed);
        }
        Ok(())
    }

    #[inline]
    fn move_out(&self, _steady: &(), _block: &Entries, from: PageNumber, to: Frame, count: u32) -> Result<(), Stopped> {
        self.spend_by_page(self.costs.move_ns, self.costs.move_page_ns, count);
        let pages = self.pages.folio(from, count);
        let homes = &self.homes[to.0 as usize..(to.0 + count) as usize];
        for (number, (home, page)) in (from.0 as u32..).zip(homes.iter().zip(pages)) {
            let word = page.load(Relaxed);
            assert_ne!(word & PRESENT, 0, "page {number:x} is not resident");
            assert_eq!(home.load(Relaxed), Home::EMPTY, "one of {count} frames from {to:?} on was populated");
            page.store(word & !PRESENT, Relaxed);
            home.store(number + Home::FIRST_PAGE, Relaxed);
        }
        if let Some(moved_home) = &mut *self.moved_home.lock() {
            moved_home.push(from..from.offset(count));
        }
        Ok(())
    }

    #[inline]
    fn copy_in(&self, _steady: &(), _block: &Entries, frame: Frame, to: PageNumber) -> Result<(), MoveError> {
        self.spend(self.costs.copy_page_ns.into());
        let content = self.homes[frame.0 as usize].load(Relaxed);
        self.map_in(to, content)
    }

    #[inline]
    fn zero_in(&self, _steady: &(), _block: &Entries, to: PageNumber) -> Result<(), MoveError> {
        self.spend(self.costs.zero_page_ns.into());
        self.map_in(to, Home::ANY)
    }

    #[inline]
    fn poison(&self, _steady: &(), _block: &Entries, page: PageNumber, why: Corrupted) -> Result<(), MoveError> {
        // Each run touches a lost page at once, because a fault fetched it.
        panic!("{page:?}: {why}")
    }

    #[inline]
    fn split_huge(&self, _block: &Entries, head: PageNumber, border: PageNumber) {
        // Pages of the lab cost the same whatever maps them.
        assert!(head < border && border < head.offset(MAX_ORDER.pages()), "{border:?} is not within {head:?}");
    }

    #[inline]
    fn wake(&self, _pages: Range<PageNumber>) {
        // There is one thread: it faulted, and continues after the call of the engine.
    }
}
