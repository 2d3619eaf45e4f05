//! The lab's arena: the page that is staged in each frame.

use super::{Home, LabMachine};
use foliomem_core::ports::{Arena, Stopped};
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::Frame;

impl Arena for LabMachine {
    #[inline]
    fn populate(&self, run: RunMut<'_>) {
        self.spend_by_page(0, self.costs.populate_page_ns, run.frames());
        for home in self.staged(*run) {
            assert_eq!(home.load(Relaxed), Home::EMPTY, "{run:?} was populated");
            home.store(Home::ANY, Relaxed);
        }
    }

    #[inline]
    fn release(&self, run: RunMut<'_>) {
        for home in self.staged(*run) {
            assert_ne!(home.load(Relaxed), Home::EMPTY, "{run:?} was unpopulated");
            home.store(Home::EMPTY, Relaxed);
        }
    }

    #[inline]
    fn zero(&self, run: RunMut<'_>) {
        self.spend_by_page(0, self.costs.zero_page_ns, run.frames());
        for home in self.staged(*run) {
            assert_ne!(home.load(Relaxed), Home::EMPTY, "{run:?} was unpopulated");
            home.store(Home::ANY, Relaxed);
        }
    }

    #[inline]
    fn copy(&self, from: RunRef<'_>, to: RunMut<'_>) {
        for (from, to) in self.staged(*from).iter().zip(self.staged(*to)) {
            to.store(from.load(Relaxed), Relaxed);
        }
    }

    #[inline]
    fn regroup(&self, from: Frame, to: Frame, pages: u32) -> Result<(), Stopped> {
        self.spend_by_page(self.costs.move_ns, self.costs.move_page_ns, pages);
        let homes = |frame: Frame| &self.homes[frame.0 as usize..(frame.0 + pages) as usize];
        for (from, to) in homes(from).iter().zip(homes(to)) {
            assert_ne!(from.load(Relaxed), Home::EMPTY, "an unpopulated frame");
            assert_eq!(to.load(Relaxed), Home::EMPTY, "a populated frame");
            to.store(from.load(Relaxed), Relaxed);
            from.store(Home::EMPTY, Relaxed);
        }
        Ok(())
    }

    #[inline]
    fn hash(&self, run: RunRef<'_>) -> u64 {
        self.spend_by_page(0, self.costs.hash_page_ns, run.frames());
        self.content(*run).map_or(0, |content| content.name())
    }

    #[inline]
    fn frames_escape(&self) -> bool {
        // Programs of the lab have neither pipes nor sockets.
        false
    }

    #[inline]
    fn note_full(&self) {
        // The engine counts the unmanaged pages; there is nobody to tell.
    }
}
