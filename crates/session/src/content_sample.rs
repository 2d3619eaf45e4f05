//! Content samples: how much of what the child of a fork has swapped out is its parent's.
//!
//! A fork shares all pages. A page that both sides swap out later is in both stores, but without
//! foliomem the two would share it still. So `needed` counts what a child has swapped out only if
//! it differs from what its parent has swapped out at the same page. To know that, the companion of
//! each process with relatives publishes a sample of it, and the supervisor compares the samples of
//! child and parent ([`Control::compare_with_parents`]). Siblings are not compared: what both have
//! changed or made in the same way is equal, but they do not share it.
//!
//! An entry of a sample has a hash of a piece's checksum and page. A sample of level `n` has the
//! hashes that begin with `n` zero bits. Two samples of different levels are compared at the higher
//! one. Up to [`MAX_ENTRIES`] pieces are compared as a whole.
//!
//! What a child has swapped out since its last sample is taken for repeated: the peak of `needed`
//! never falls, so it must not include what is not known yet.
//!
//! These count twice all the same: equal pages that only one of the two has swapped out, or in
//! pieces of different sizes, and those whose parent has ended.
//!
//! Each sample has one writer and one reader. There is no lock: the reader drops what it has read
//! if the writer has begun another sample meanwhile.

use crate::process_table::{ProcessSlot, SlotIndex};
use crate::segment::Control;
use foliomem_sync::atomic::{AtomicU64, Ordering, fence};
use foliomem_sys::shared_words;
use foliomem_types::units::PageNumber;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of entries of a sample. The share of equal content is known to 3%.
pub const MAX_ENTRIES: usize = if cfg!(feature = "shuttle") { 3 } else { 1024 };
/// The bits of an entry that hold the number of pages. The others are those of the hash.
const PAGES: u64 = 0xffff;
/// Maximum level: beyond, too few bits of a hash would be left to tell it from others.
const MAX_LEVEL: u32 = 32;
const LEVEL_SHIFT: u32 = 16;
const NUMBER_SHIFT: u32 = 32;
/// The share of everything, in 1/65,536.
const ALL: u64 = 1 << 16;

shared_words! {
    /// The published sample of one process.
    #[cfg_attr(all(test, feature = "shuttle"), derive(Default))]
    #[derive(Debug)]
    pub struct ContentSample {
        /// Bits 0..16 the number of entries, 16..32 the level, 32..64 the number of the sample; 0
        /// if there is none, or while one is written.
        head: AtomicU64,
        /// Number of samples begun so far.
        begun: AtomicU64,
        /// The size of what was swapped out when the sample was taken, in bytes.
        swapped_out_bytes: AtomicU64,
        entries: [AtomicU64; MAX_ENTRIES],
    }
}

/// A sample that is being taken, or was read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    level: u32,
    entries: Vec<u64>,
}

impl Sample {
    /// Adds some pages from `page` on with this content, at most a folio, if they belong to the
    /// sample.
    pub fn add(&mut self, page: PageNumber, pages: u32, content: u64) {
        let hash = hash(page.0, content);
        while hash.leading_zeros() >= self.level {
            if self.entries.len() < MAX_ENTRIES {
                self.entries.push(hash & !PAGES | u64::from(pages) & PAGES);
                return;
            }
            if self.level == MAX_LEVEL {
                return;
            }
            self.raise_level(self.level + 1);
        }
    }

    /// Removes all entries, for the next sample.
    pub fn clear(&mut self) {
        self.level = 0;
        self.entries.clear();
    }

    fn raise_level(&mut self, level: u32) {
        self.level = level;
        self.entries.retain(|entry| (entry & !PAGES).leading_zeros() >= level);
    }

    /// Returns the pages of each content.
    fn pages(&self) -> HashMap<u64, u64> {
        let mut pages = HashMap::with_capacity(self.entries.len());
        for entry in &self.entries {
            *pages.entry(entry & !PAGES).or_default() += entry & PAGES;
        }
        pages
    }
}

/// Returns a hash of which each bit depends on all bits of both numbers (MurmurHash3's finalizer).
fn hash(page: u64, content: u64) -> u64 {
    let mut mixed = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ content;
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        mixed = (mixed ^ mixed >> 33).wrapping_mul(factor);
    }
    mixed ^ mixed >> 33
}

impl ContentSample {
    /// Publishes a sample of the `swapped_out_bytes` of a process. Only its companion calls this.
    pub fn publish(&self, sample: &Sample, swapped_out_bytes: u64) {
        let number = self.begun.load(Ordering::Relaxed).wrapping_add(1) & u64::from(u32::MAX);
        self.begun.store(number, Ordering::Relaxed);
        self.head.store(0, Ordering::Relaxed);
        // Release pairs with the Acquire fence in `read`: a reader of any word below finds the head
        // changed.
        fence(Ordering::Release);
        self.swapped_out_bytes.store(swapped_out_bytes, Ordering::Relaxed);
        self.entries.iter().zip(&sample.entries).for_each(|(word, &entry)| word.store(entry, Ordering::Relaxed));
        let head = number << NUMBER_SHIFT | u64::from(sample.level) << LEVEL_SHIFT | sample.entries.len() as u64;
        // Release pairs with the Acquire in `read`: the sample is complete.
        self.head.store(head, Ordering::Release);
    }

    /// Removes the sample. Only the caller uses the slot.
    pub(crate) fn clear(&self) {
        self.head.store(0, Ordering::Relaxed);
    }

    /// Returns the sample and the size of what was swapped out; `None` if there is no sample, or if
    /// it has changed meanwhile.
    pub(crate) fn read(&self) -> Option<(Sample, u64)> {
        // Acquire pairs with the Release in `publish`: the sample is complete.
        let head = self.head.load(Ordering::Acquire);
        // The program may have overwritten any of these words.
        let len = (head & PAGES) as usize;
        let level = (head >> LEVEL_SHIFT) as u32 & u32::from(u16::MAX);
        if head == 0 || len > MAX_ENTRIES || level > MAX_LEVEL {
            return None;
        }
        let entries = self.entries[..len].iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let swapped_out_bytes = self.swapped_out_bytes.load(Ordering::Relaxed);
        // Acquire pairs with the Release fence in `publish`.
        fence(Ordering::Acquire);
        (self.head.load(Ordering::Relaxed) == head).then_some((Sample { level, entries }, swapped_out_bytes))
    }
}

/// Returns the share of the pages of a child's sample that its parent's has, too, in 1/65,536.
fn repeated_share(mut child: Sample, mut parent: Sample) -> u64 {
    let level = child.level.max(parent.level);
    child.raise_level(level);
    parent.raise_level(level);
    let parents = parent.pages();
    let (mut repeated_pages, mut pages) = (0, 0);
    for (content, childs) in child.pages() {
        repeated_pages += parents.get(&content).map_or(0, |&parents| childs.min(parents));
        pages += childs;
    }
    (repeated_pages * ALL).checked_div(pages).unwrap_or(0)
}

impl ProcessSlot {
    /// Returns the part of what is swapped out that counts for the parent, in bytes.
    pub(crate) fn repeated_bytes(&self) -> u64 {
        let swapped_out_bytes = self.swapped_out_bytes();
        if self.parent.load(Relaxed) == 0 {
            return 0;
        }
        let [compared_bytes, share] = [&self.compared_bytes, &self.repeated_share].map(|word| word.load(Relaxed));
        // The program may have overwritten any of these words.
        let known_bytes = swapped_out_bytes.min(compared_bytes);
        let repeated_bytes = u128::from(known_bytes) * u128::from(share.min(ALL)) / u128::from(ALL);
        repeated_bytes as u64 + (swapped_out_bytes - known_bytes)
    }

    /// Notes which share of the first `compared_bytes` that are swapped out is repeated, in
    /// 1/65,536.
    fn set_repeated(&self, compared_bytes: u64, repeated_share: u64) {
        self.repeated_share.store(repeated_share, Relaxed);
        self.compared_bytes.store(compared_bytes, Relaxed);
    }

    /// Notes that all that the process has swapped out is its parent's: it has just been forked.
    pub(crate) fn repeat_all(&self) {
        self.set_repeated(0, 0);
    }
}

impl Control {
    /// Publishes a sample of the `swapped_out_bytes` of the process of `slot`.
    pub fn publish_sample(&self, slot: SlotIndex, sample: &Sample, swapped_out_bytes: u64) {
        self.samples[slot.get() as usize].publish(sample, swapped_out_bytes);
    }

    /// Returns for each living process its id and the head of its sample, which is another one for
    /// each sample. As long as these stay, a comparison has nothing new to find.
    pub fn sample_heads(&self) -> impl Iterator<Item = (u32, u64)> {
        let living = self.each_slot().filter(|(_, is_alive)| *is_alive);
        living.map(|(slot, _)| {
            let head = &self.samples[slot.get() as usize].head;
            (self.process(slot).pid.load(Relaxed), head.load(Relaxed))
        })
    }

    /// Compares what children of forks have swapped out with what their parents have, and notes how
    /// much is repeated. The supervisor calls this.
    pub fn compare_with_parents(&self) {
        let read = |slot: SlotIndex| self.samples[slot.get() as usize].read();
        for (slot, _) in self.each_slot().filter(|(_, is_alive)| *is_alive) {
            let process = self.process(slot);
            if process.parent.load(Relaxed) == 0 {
                continue;
            }
            let Some(parent) = self.living_parent(slot) else {
                process.set_repeated(u64::MAX, 0);
                continue;
            };
            if let (Some((sample, swapped_out_bytes)), Some((parents, _))) = (read(slot), read(parent)) {
                process.set_repeated(swapped_out_bytes, repeated_share(sample, parents));
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};
    use foliomem_types::units::PAGE_BYTES;
    use proptest::prelude::*;
    use rustix::fd::OwnedFd;

    const MIB: u64 = 1 << 20;

    fn sample(contents: impl IntoIterator<Item = u64>) -> Sample {
        let mut sample = Sample::default();
        contents.into_iter().for_each(|number| sample.add(PageNumber(number * 16), 16, number));
        sample
    }

    fn percent(share: u64) -> f64 {
        share as f64 * 100.0 / 65536.0
    }

    #[test]
    fn small_stores_are_compared_as_a_whole() {
        let share = |child, parent: &Sample| repeated_share(child, parent.clone());
        let parent = sample(0..100);
        assert_eq!(share(sample(50..150), &parent), 1 << 15);
        assert_eq!(share(sample(0..1024), &parent), 100 * 65536 / 1024);
        assert_eq!(share(sample([]), &parent), 0);
        assert_eq!(share(sample(0..100), &sample([])), 0);
        let mut half = Sample::default();
        (0..100).for_each(|number| half.add(PageNumber(number * 16), 8, number));
        assert_eq!(share(sample(0..100), &half), 1 << 15, "8 of 16 pages each");
        assert_eq!(share(half, &sample(0..100)), 1 << 16);
        let mut copy = Sample::default();
        (0..100).for_each(|number| copy.add(PageNumber(number * 16 + 4000), 16, number));
        assert_eq!(share(copy, &parent), 0, "a copy elsewhere is not shared");
    }

    #[test]
    fn a_sample_with_too_many_entries_is_thinned() {
        let mut sample = sample(0..1_000_000);
        assert!(sample.entries.len() <= MAX_ENTRIES && sample.entries.len() > MAX_ENTRIES / 4);
        (0..2 * MAX_ENTRIES).for_each(|_| sample.add(PageNumber(0), 1, 0));
        assert!(sample.entries.len() <= MAX_ENTRIES && sample.level == MAX_LEVEL, "hashes that are all equal");
        sample.clear();
        assert_eq!(sample, Sample::default());
    }

    proptest! {
        #[test]
        fn large_stores_are_compared_to_some_percent(
            pieces in 10_000u64..300_000,
            other_pieces in 500u64..300_000,
            equal in 0.0..1.0f64,
        ) {
            let equal_pieces = (pieces.min(other_pieces) as f64 * equal) as u64;
            let first = pieces - equal_pieces;
            let share = repeated_share(sample(first..first + other_pieces), sample(0..pieces));
            // At the level of the larger sample, the smaller one may have few entries.
            let entries = (other_pieces as f64 * (MAX_ENTRIES as f64 / pieces.max(other_pieces) as f64) / 2.0).max(2.0);
            let expected = equal_pieces as f64 / other_pieces as f64;
            let tolerated = 4.0 * (expected * (1.0 - expected) / entries).sqrt() * 100.0 + 4.0;
            prop_assert!((percent(share) - expected * 100.0).abs() < tolerated.max(20.0 / entries * 100.0));
        }
    }

    /// A run with `count` processes, all of which live.
    fn run(count: usize) -> (&'static Control, OwnedFd, Vec<SlotIndex>) {
        let (control, fd) = Control::create(&Configuration::plain(Limit::Bytes(1 << 30))).unwrap();
        let slots = (0..count).map(|_| control.claim_slot(rustix::process::getpid()).unwrap()).collect();
        (control, fd, slots)
    }

    fn store(control: &Control, slot: SlotIndex, mib: u64) {
        control.process(slot).counters.store.orig_data_size.set(mib * MIB);
    }

    fn needed_mib(control: &Control) -> u64 {
        control.tree_needed_bytes() / MIB
    }

    #[test]
    fn what_a_child_has_of_its_parent_is_needed_once() {
        let (control, _fd, slots) = run(4);
        let heads = || control.sample_heads().collect::<Vec<_>>();
        let [parent, child, grandchild, stranger] = slots[..] else { panic!("four slots") };
        store(control, parent, 100);
        store(control, stranger, 50);
        control.compare_with_parents();
        assert_eq!(needed_mib(control), 150);
        control.note_fork(child, parent);
        store(control, child, 100);
        assert_eq!(needed_mib(control), 150, "a fork needs nothing");
        store(control, parent, 120);
        store(control, child, 140);
        assert_eq!(needed_mib(control), 170, "it is not known whether the child's new content is equal");
        let without_samples = heads();
        control.publish_sample(child, &sample(20..160), 140 * MIB);
        let with_one = heads();
        assert_ne!(with_one, without_samples);
        control.compare_with_parents();
        assert_eq!(needed_mib(control), 170, "there is no sample of the parent");
        control.publish_sample(parent, &sample(0..120), 120 * MIB);
        control.publish_sample(stranger, &sample(0..50), 50 * MIB);
        control.compare_with_parents();
        assert_eq!(needed_mib(control), 120 + 40 + 50, "a stranger has made its content itself");
        control.note_fork(grandchild, child);
        store(control, grandchild, 140);
        assert_eq!(needed_mib(control), 210);
        store(control, child, 70);
        assert_eq!(needed_mib(control), 120 + 20 + 50, "of less, the same share");
        store(control, child, 140);
        control.process(parent).mark_ended();
        control.compare_with_parents();
        assert_eq!(needed_mib(control), 140 + 50, "a child whose parent has ended counts as a whole");
        assert_ne!(heads().len(), with_one.len(), "the parent has ended");
        control.publish_sample(grandchild, &sample(10..150), 140 * MIB);
        let first = heads();
        control.publish_sample(grandchild, &sample(10..150), 140 * MIB);
        assert_ne!(heads(), first);
        control.compare_with_parents();
        assert_eq!(needed_mib(control), 140 + 10 + 50);
    }

    #[test]
    fn a_slot_that_is_used_again_has_no_sample() {
        let (control, _fd, slots) = run(2);
        control.note_fork(slots[1], slots[0]);
        control.publish_sample(slots[1], &sample(0..5), 5 * PAGE_BYTES as u64);
        assert_eq!(control.samples[1].read().map(|(sample, _)| sample.entries.len()), Some(5));
        control.process(slots[1]).mark_ended();
        control.process(slots[1]).pid.store(i32::MAX as u32, Relaxed);
        assert_eq!(control.reap(), 1);
        assert_eq!(control.samples[1].read(), None);
    }

    proptest! {
        #[test]
        fn overwritten_samples_do_no_harm(words in prop::collection::vec(any::<u64>(), 8), head: u64) {
            let (control, _fd, slots) = run(2);
            control.note_fork(slots[1], slots[0]);
            for slot in &slots {
                let published = &control.samples[slot.get() as usize];
                published.head.store(head, Relaxed);
                published.entries.iter().zip(words.iter().cycle()).for_each(|(word, &noise)| word.store(noise, Relaxed));
                let process = control.process(*slot);
                process.counters.store.orig_data_size.set(words[0]);
                process.set_repeated(words[1], words[2]);
            }
            control.tree_needed_bytes();
            control.compare_with_parents();
            control.tree_needed_bytes();
        }
    }
}
