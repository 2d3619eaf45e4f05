//! The swap cache: compressed copies of folios that are mapped in again.
//!
//! A folio that was swapped in and not changed need not be compressed again when it is swapped out.
//! Its slots are kept, and at its next writeback a hash of its content tells whether they still
//! hold that content. Hashing costs a twentieth of compressing. (The kernel keeps its swap cache
//! for this reason, too. It knows dirty pages from the page table; user space could know them only
//! at the price of a fault each.)
//!
//! An entry takes memory while its folio is resident, so entries are kept only where they pay: if
//! the folio compressed well, and as long as enough entries turn out to be good. A sample is always
//! kept, to notice when that changes.
//!
//! An entry is found by the head frame of its folio, which the folio owns as long as it is resident
//! or staged. It is also found by its slots, so that the slot allocator can reclaim them. The
//! thread that removes an entry by either key owns it. Locks: one leaf lock for every 16th of the
//! frames, and one for every 16th of the clusters; no thread holds two of them.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use foliomem_types::units::{Frame, Order, PAGE_BYTES, Slot};
use std::collections::BTreeMap;
use std::ops::Range;

const SHARDS: u32 = 16;
/// Denominator of shares: shares are counted in 1024ths.
const WHOLE: u32 = 1024;
/// Minimum share of good entries: below it, only the sample is kept.
const GOOD_ENOUGH: u32 = WHOLE / 4;
/// Weight of the moving average as a shift: each checked entry replaces 1/2^5 of the share.
const FORGET_SHIFT: u32 = 5;
/// Sampling rate while entries do not pay: one entry in 16 is kept.
const SAMPLE: u32 = 16;

/// A swap-cache entry: the compressed copy of a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheEntry {
    /// The first slot. The entry has as many slots as the folio has pages.
    pub slot: Slot,
    /// The folio's order.
    pub order: Order,
    /// Hash of the folio's content.
    pub hash: u64,
}

/// What writeback found when it compared an entry with its folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryCheck {
    /// The folio is unchanged, so that the entry spared its compression.
    Good,
    /// The folio was written or split, so that the entry took memory for nothing.
    Stale,
}

/// All swap-cache entries.
pub struct SwapCache {
    shards: [Mutex<BTreeMap<Frame, CacheEntry>>; SHARDS as usize],
    /// The folio's head frame by the entry's first slot. An entry is added here before it is added
    /// to `shards`, and removed after it is removed there. Entries never cross clusters, because
    /// folios' slots are aligned.
    by_slot: [Mutex<BTreeMap<Slot, Frame>>; SHARDS as usize],
    pages: AtomicU64,
    good_share: AtomicU32,
    refused: AtomicU32,
}

impl Default for SwapCache {
    fn default() -> SwapCache {
        SwapCache {
            shards: std::array::from_fn(|_| Mutex::new(BTreeMap::new())),
            by_slot: std::array::from_fn(|_| Mutex::new(BTreeMap::new())),
            pages: AtomicU64::new(0),
            // Neither good nor bad.
            good_share: AtomicU32::new(WHOLE / 2),
            refused: AtomicU32::new(0),
        }
    }
}

impl SwapCache {
    /// Returns the shard of `head`. Neighbouring blocks of 16 frames have different shards.
    fn shard(&self, head: Frame) -> &Mutex<BTreeMap<Frame, CacheEntry>> {
        &self.shards[((head.0 >> 4) % SHARDS) as usize]
    }

    fn slot_shard(&self, slot: Slot) -> &Mutex<BTreeMap<Slot, Frame>> {
        &self.by_slot[(slot.cluster().0 % SHARDS) as usize]
    }

    /// Returns whether to keep an entry of `stored_bytes` bytes for a folio of `order`.
    pub fn wants(&self, order: Order, stored_bytes: u64) -> bool {
        if stored_bytes * 2 > order.bytes() as u64 {
            return false;
        }
        self.good_share.load(Relaxed) >= GOOD_ENOUGH || self.refused.fetch_add(1, Relaxed).is_multiple_of(SAMPLE)
    }

    /// Adds an entry for the folio whose head frame is `head`. The folio's block must be locked.
    pub fn keep(&self, head: Frame, entry: CacheEntry) {
        self.pages.fetch_add(u64::from(entry.order.pages()), Relaxed);
        self.slot_shard(entry.slot).lock().insert(entry.slot, head);
        let before = self.shard(head).lock().insert(head, entry);
        debug_assert!(before.is_none(), "two entries of the folio at {head:?}");
    }

    /// Removes and returns the entry of the folio whose head frame is `head`, if there is one.
    #[inline]
    pub fn take(&self, head: Frame) -> Option<CacheEntry> {
        let entry = self.shard(head).lock().remove(&head)?;
        Some(self.taken(entry))
    }

    /// Returns whether the folio whose head frame is `head` has an entry.
    #[inline]
    pub fn has(&self, head: Frame) -> bool {
        self.shard(head).lock().contains_key(&head)
    }

    /// Removes and returns any entry.
    pub fn take_any(&self) -> Option<CacheEntry> {
        let entry = self.shards.iter().find_map(|shard| shard.lock().pop_first())?.1;
        Some(self.taken(entry))
    }

    /// Removes and returns all entries that have some of these slots. The slots must be of one
    /// cluster.
    pub fn take_overlapping(&self, slots: Range<Slot>) -> Vec<CacheEntry> {
        let first_of_cluster = slots.start.cluster().slots().start;
        // An entry that starts before the range may reach into it; only the nearest one can.
        let heads: Vec<(Slot, Frame)> = {
            let by_slot = self.slot_shard(slots.start).lock();
            let before = by_slot.range(first_of_cluster..slots.start).next_back();
            before.into_iter().chain(by_slot.range(slots.clone())).map(|(&slot, &head)| (slot, head)).collect()
        };
        let overlapping = |(slot, head): (Slot, Frame)| {
            let mut shard = self.shard(head).lock();
            let entry = shard
                .get(&head)
                .filter(|entry| entry.slot == slot && slot.offset(entry.order.pages()) > slots.start)?;
            let entry = *entry;
            shard.remove(&head);
            Some(entry)
        };
        heads.into_iter().filter_map(overlapping).map(|entry| self.taken(entry)).collect()
    }

    /// Finishes the removal of an entry from `shards`, before another thread gets its slots.
    fn taken(&self, entry: CacheEntry) -> CacheEntry {
        self.pages.fetch_sub(u64::from(entry.order.pages()), Relaxed);
        self.slot_shard(entry.slot).lock().remove(&entry.slot);
        entry
    }

    /// Records what the check of an entry found.
    pub fn note_check(&self, check: EntryCheck) {
        let target = match check {
            EntryCheck::Good => WHOLE,
            EntryCheck::Stale => 0,
        };
        // Updates lost to concurrent callers do not matter.
        let share = self.good_share.load(Relaxed);
        self.good_share.store(share + (target >> FORGET_SHIFT) - (share >> FORGET_SHIFT), Relaxed);
    }

    /// Returns the number of pages that have an entry.
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Returns all entries and checks their totals, for the whole-engine check.
    pub fn entries(&self) -> Vec<(Frame, CacheEntry)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(shard.lock().iter().map(|(&head, &entry)| (head, entry)));
        }
        let pages: u64 = all.iter().map(|(_, entry)| u64::from(entry.order.pages())).sum();
        assert_eq!(pages, self.pages(), "pages with an entry");
        let by_slot: usize = self.by_slot.iter().map(|shard| shard.lock().len()).sum();
        assert_eq!(by_slot, all.len(), "entries by slot");
        for (head, entry) in &all {
            assert_eq!(self.slot_shard(entry.slot).lock().get(&entry.slot), Some(head), "{entry:?}");
        }
        assert!(all.iter().all(|(_, entry)| entry.order.bytes() >= PAGE_BYTES));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_kept_while_they_turn_out_good() {
        let cache = SwapCache::default();
        let order = Order::new(4).unwrap();
        let kept = |cache: &SwapCache| (0..160).filter(|_| cache.wants(order, 10_000)).count();
        assert_eq!(kept(&cache), 160);
        (0..200).for_each(|_| cache.note_check(EntryCheck::Stale));
        assert_eq!(kept(&cache), 10, "only the sample is kept");
        (0..200).for_each(|_| cache.note_check(EntryCheck::Good));
        assert_eq!(kept(&cache), 160);
        assert!(!cache.wants(order, 40_000), "a folio that hardly compresses gets no entry");
    }

    #[test]
    fn an_entry_is_taken_once() {
        let cache = SwapCache::default();
        let entry = CacheEntry { slot: Slot(32), order: Order::new(4).unwrap(), hash: 9 };
        cache.keep(Frame(64), entry);
        assert_eq!(cache.pages(), 16);
        assert_eq!(cache.entries(), [(Frame(64), entry)]);
        assert_eq!(cache.take(Frame(64)), Some(entry));
        assert_eq!(cache.take(Frame(64)), None);
        assert_eq!(cache.take_any(), None);
        assert_eq!(cache.pages(), 0);
    }

    #[test]
    fn entries_are_taken_by_any_of_their_slots() {
        let cache = SwapCache::default();
        let entry = |slot| CacheEntry { slot: Slot(slot), order: Order::new(2).unwrap(), hash: 9 };
        for slot in [508, 512, 520, 524, 532] {
            cache.keep(Frame(slot * 64), entry(slot));
        }
        assert_eq!(cache.take_overlapping(Slot(516)..Slot(520)), []);
        assert_eq!(cache.take_overlapping(Slot(522)..Slot(525)), [entry(520), entry(524)]);
        assert_eq!(cache.take_overlapping(Slot(512)..Slot(528)), [entry(512)]);
        assert_eq!(cache.entries(), [(Frame(508 * 64), entry(508)), (Frame(532 * 64), entry(532))]);
    }
}
