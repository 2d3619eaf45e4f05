//! The reverse map: from frames to their holders, for compaction.
//!
//! Each frame has a word of 32 bits (0.1%), allocated at first use. A word is only a hint: it may
//! be stale, and it names 16 pages, of which at most one holds the frame. The holder decides, under
//! its own lock.
//!
//! | bit 31 | bits 0..31 |
//! |---|---|
//! | 0 | the low bits of the page number |
//! | 1 | the number of a zspage or extent of the store |
//!
//! There is no lock.

use crate::sparse::SparseTable;
use crate::store::HolderId;
// Callers check a word again under the holder's lock, so it needs no ordering.
use crate::sync::unordered::{AtomicU32, Ordering::Relaxed};
use foliomem_types::units::{Frame, FrameRun, PageNumber};

const STORE: u32 = 1 << 31;
/// Bits of a page number in a 47-bit address space.
const PAGE_BITS: u32 = 35;
const KEPT_BITS: u32 = 31;

/// A possible holder of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holder {
    /// One of the pages that [`pages`](Holder::pages) returns for these low bits.
    Page(u32),
    /// The store.
    Store(HolderId),
}

impl Holder {
    /// Iterates over the pages whose numbers have these low bits.
    pub fn pages(low: u32) -> impl Iterator<Item = PageNumber> {
        (0..1 << (PAGE_BITS - KEPT_BITS)).map(move |high: u64| PageNumber(high << KEPT_BITS | u64::from(low)))
    }
}

/// A map from frames to their possible holders.
pub struct Rmap(SparseTable<AtomicU32>);

impl Rmap {
    /// Makes a map for an arena of `frames` frames.
    pub fn new(frames: u32) -> Rmap {
        Rmap(SparseTable::new(frames))
    }

    /// Records that the frames of `run` belong to the folio at `head`.
    #[inline]
    pub fn set_folio(&self, run: FrameRun, head: PageNumber) {
        let frames = run.head.0..run.head.0 + run.frames();
        self.0.for_each(frames, |frame, word| {
            word.store(head.offset(frame - run.head.0).0 as u32 & !STORE, Relaxed);
        });
    }

    /// Records that the frames of `run` belong to the store.
    pub fn set_store(&self, run: FrameRun, holder: HolderId) {
        let frames = run.head.0..run.head.0 + run.frames();
        self.0.for_each(frames, |_, word| word.store(STORE | holder.get(), Relaxed));
    }

    /// Returns the possible holder of `frame`.
    pub fn get(&self, frame: Frame) -> Holder {
        let word = self.0.find(frame.0).map_or(0, |word| word.load(Relaxed));
        if word & STORE == 0 { Holder::Page(word) } else { Holder::Store(HolderId::new(word & !STORE)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::units::Order;

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
