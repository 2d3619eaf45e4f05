//! The swap cache: compressed copies of folios that are in the program again.
//!
//! A folio that was swapped in and is not changed need not be compressed again when it goes out: its slots
//! are kept, and at its next writeback a hash of its content tells whether they still hold it. Hashing
//! costs a twentieth of compressing. (The kernel keeps its swap cache for the same reason, but knows
//! dirty pages by their page table entries, which user space can only see at the price of a fault each.)
//!
//! A copy takes memory while its folio is there, too, so copies are kept only where they pay: if they
//! have compressed well, and as long as enough of them turn out to be good. A sample is kept always, to
//! notice when that changes.
//!
//! Copies are known by the head frame of their folio, which is its own as long as it is resident or at
//! home. Locks: one leaf lock for every 16th of the frames.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::units::{Frame, Order, PAGE_BYTES, Slot};
use std::collections::BTreeMap;

const SHARDS: u32 = 16;
/// Shares are counted in 1024ths.
const WHOLE: u32 = 1024;
/// Copies are kept while at least this share of them is good.
const GOOD_ENOUGH: u32 = WHOLE / 4;
/// How fast the share forgets: 1/2^5 by each copy that is looked at.
const FORGET_SHIFT: u32 = 5;
/// Of copies that do not pay, one in so many is kept.
const SAMPLE: u32 = 16;

/// A compressed copy of a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwapCopy {
    /// Its first slot; it has as many as the folio has pages.
    pub slot: Slot,
    /// The folio's order.
    pub order: Order,
    /// Hash of the content.
    pub hash: u64,
}

/// All copies.
pub struct SwapCache {
    shards: [Mutex<BTreeMap<Frame, SwapCopy>>; SHARDS as usize],
    pages: AtomicU64,
    good_share: AtomicU32,
    refused: AtomicU32,
}

impl Default for SwapCache {
    fn default() -> SwapCache {
        SwapCache {
            shards: std::array::from_fn(|_| Mutex::new(BTreeMap::new())),
            pages: AtomicU64::new(0),
            // Undecided.
            good_share: AtomicU32::new(WHOLE / 2),
            refused: AtomicU32::new(0),
        }
    }
}

impl SwapCache {
    /// Folios' heads are far apart: neighbouring blocks go to different shards.
    fn shard(&self, head: Frame) -> &Mutex<BTreeMap<Frame, SwapCopy>> {
        &self.shards[((head.0 >> 4) % SHARDS) as usize]
    }

    /// Whether a copy of `stored_bytes` of a folio of `order` is worth its memory.
    pub fn wants(&self, order: Order, stored_bytes: u64) -> bool {
        if stored_bytes * 2 > order.bytes() as u64 {
            return false;
        }
        self.good_share.load(Relaxed) >= GOOD_ENOUGH || self.refused.fetch_add(1, Relaxed).is_multiple_of(SAMPLE)
    }

    /// Keeps a copy of the folio whose head frame is `head`. The folio's block is locked.
    pub fn keep(&self, head: Frame, copy: SwapCopy) {
        self.pages.fetch_add(u64::from(copy.order.pages()), Relaxed);
        let before = self.shard(head).lock().insert(head, copy);
        debug_assert!(before.is_none(), "two copies of the folio at {head:?}");
    }

    /// Takes the copy of the folio whose head frame is `head` out, if there is one.
    pub fn take(&self, head: Frame) -> Option<SwapCopy> {
        let copy = self.shard(head).lock().remove(&head)?;
        self.pages.fetch_sub(u64::from(copy.order.pages()), Relaxed);
        Some(copy)
    }

    /// Takes any copy out.
    pub fn take_any(&self) -> Option<SwapCopy> {
        let copy = self.shards.iter().find_map(|shard| shard.lock().pop_first())?.1;
        self.pages.fetch_sub(u64::from(copy.order.pages()), Relaxed);
        Some(copy)
    }

    /// Counts a copy that was looked at.
    pub fn judged(&self, good: bool) {
        let target = if good { WHOLE } else { 0 };
        // Lost updates of concurrent callers do not matter.
        let share = self.good_share.load(Relaxed);
        self.good_share.store(share + (target >> FORGET_SHIFT) - (share >> FORGET_SHIFT), Relaxed);
    }

    /// Pages that have a copy.
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// All copies, for the whole-engine check.
    pub fn copies(&self) -> Vec<(Frame, SwapCopy)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(shard.lock().iter().map(|(&head, &copy)| (head, copy)));
        }
        let pages: u64 = all.iter().map(|(_, copy)| u64::from(copy.order.pages())).sum();
        assert_eq!(pages, self.pages(), "pages with a copy");
        assert!(all.iter().all(|(_, copy)| copy.order.bytes() >= PAGE_BYTES));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_kept_while_they_turn_out_good() {
        let cache = SwapCache::default();
        let order = Order::new(4).unwrap();
        let kept = |cache: &SwapCache| (0..160).filter(|_| cache.wants(order, 10_000)).count();
        assert_eq!(kept(&cache), 160);
        (0..200).for_each(|_| cache.judged(false));
        assert_eq!(kept(&cache), 10, "only the sample");
        (0..200).for_each(|_| cache.judged(true));
        assert_eq!(kept(&cache), 160);
        assert!(!cache.wants(order, 40_000), "what hardly compresses is not kept twice");
    }

    #[test]
    fn a_copy_is_taken_once() {
        let cache = SwapCache::default();
        let copy = SwapCopy { slot: Slot(32), order: Order::new(4).unwrap(), hash: 9 };
        cache.keep(Frame(64), copy);
        assert_eq!(cache.pages(), 16);
        assert_eq!(cache.copies(), [(Frame(64), copy)]);
        assert_eq!(cache.take(Frame(64)), Some(copy));
        assert_eq!(cache.take(Frame(64)), None);
        assert_eq!(cache.take_any(), None);
        assert_eq!(cache.pages(), 0);
    }
}
