//! The lab's budget: one program, which has the whole limit.

use super::LabMachine;
use foliomem_core::ports::Budget;
use foliomem_core::sync::atomic::Ordering::Relaxed;

impl Budget for LabMachine {
    #[inline]
    fn try_charge(&self, pages: u32) -> bool {
        let fits = self.room_pages() >= i64::from(pages);
        if fits {
            self.charge(pages);
        }
        fits
    }

    #[inline]
    fn charge(&self, pages: u32) {
        let charged = self.charged_pages.fetch_add(pages.into(), Relaxed) + i64::from(pages);
        self.peak_pages.fetch_max(charged, Relaxed);
    }

    #[inline]
    fn uncharge(&self, pages: u32) {
        self.charged_pages.fetch_sub(pages.into(), Relaxed);
    }

    #[inline]
    fn limit_pages(&self) -> i64 {
        self.limit_pages
    }

    #[inline]
    fn room_pages(&self) -> i64 {
        self.limit_pages - self.charged_pages.load(Relaxed)
    }

    #[inline]
    fn is_shrinking(&self) -> bool {
        // There are no other processes that could free memory.
        false
    }
}
