//! The way back from frames to who holds them, for compaction.
//!
//! A word of 32 bits for each frame (0.1%), made when first used. A word is only a claim: it may be stale, and names 16
//! pages, of which at most one has the frame; its holder decides, under its own lock.
//!
//! | bit 31 | bits 0..31 |
//! |---|---|
//! | 0 | the page number's low bits |
//! | 1 | the number of a zspage or extent of the store |
//!
//! No lock.

use crate::sparse::SparseTable;
use crate::store::HolderId;
// What is read here is looked up again under a lock.
use crate::sync::unordered::{AtomicU32, Ordering::Relaxed};
use crate::units::{Frame, FrameRun, PageNumber};

const STORE: u32 = 1 << 31;
/// Bits of the number of a page in a 47-bit address space.
const PAGE_BITS: u32 = 35;
const KEPT_BITS: u32 = 31;

/// Who may hold a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holder {
    /// One of the pages [`pages`](Holder::pages) tells.
    Page(u32),
    /// The store.
    Store(HolderId),
}

impl Holder {
    /// The pages with these low bits.
    pub fn pages(low: u32) -> impl Iterator<Item = PageNumber> {
        (0..1 << (PAGE_BITS - KEPT_BITS)).map(move |high: u64| PageNumber(high << KEPT_BITS | u64::from(low)))
    }
}

/// See the module.
pub struct Rmap(SparseTable<AtomicU32>);

impl Rmap {
    /// For an arena of `frames` frames.
    pub fn new(frames: u32) -> Rmap {
        Rmap(SparseTable::new(frames))
    }

    /// The frames of `run` are those of the folio at `head`.
    #[inline]
    pub fn set_folio(&self, run: FrameRun, head: PageNumber) {
        let frames = run.head.0..run.head.0 + run.frames();
        self.0.for_each(frames, |frame, word| {
            word.store(head.offset(frame - run.head.0).0 as u32 & !STORE, Relaxed);
        });
    }

    /// The frames of `run` are the store's.
    pub fn set_store(&self, run: FrameRun, holder: HolderId) {
        let frames = run.head.0..run.head.0 + run.frames();
        self.0.for_each(frames, |_, word| word.store(STORE | holder.get(), Relaxed));
    }

    /// Who may hold `frame`.
    pub fn get(&self, frame: Frame) -> Holder {
        let word = self.0.find(frame.0).map_or(0, |word| word.load(Relaxed));
        if word & STORE == 0 { Holder::Page(word) } else { Holder::Store(HolderId::new(word & !STORE)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Order;

    #[test]
    fn holders_are_found_again() {
        let rmap = Rmap::new(2000);
        let run = FrameRun::new(Frame(1024), Order::new(9).unwrap());
        let head = PageNumber((1 << PAGE_BITS) - 512);
        rmap.set_folio(run, head);
        let Holder::Page(low) = rmap.get(Frame(1024 + 300)) else { panic!() };
        assert!(Holder::pages(low).any(|page| page == head.offset(300)));
        assert!(Holder::pages(low).all(|page| page == head.offset(300) || page.0 < head.0));
        rmap.set_store(FrameRun::new(Frame(1999), Order::ZERO), HolderId::new(77));
        assert_eq!(rmap.get(Frame(1999)), Holder::Store(HolderId::new(77)));
    }
}
