//! A buddy allocator over frame numbers.
//!
//! Each order has one bitmap of naturally aligned runs: bit `i` of order `k` is 1 when the run of
//! frames `i*2^k .. (i+1)*2^k` is free *at that order*. A frame is free at one order only, the
//! largest at which its whole run is free: buddies are always merged. Above each bitmap are
//! summaries with one bit for each nonzero word below, so a search for the lowest or highest free
//! run takes one step a level (four levels cover 2^24 runs, five all 2^32 frames). The bitmaps of
//! all orders together take two bits (0.25 bytes) for each frame; untouched parts of a large arena
//! cost nothing.
//!
//! There is no lock: the owner provides one.

use crate::frame_set::FrameSet;
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, ORDERS, Order};
use std::collections::BTreeSet;
use std::ops::Range;

/// Maximum number of levels: those of a bitmap of 2^32 bits.
const MAX_LEVELS: usize = 6;

/// A bitmap with summaries. Level 0 holds the bits; bit `i` of level `n + 1` is set if word `i` of
/// level `n` is not zero. The top level is one word.
struct BitTree {
    /// The words of level 0, then those of the other levels.
    words: Vec<u64>,
    /// The start of each level, and the end of the last.
    starts: [usize; MAX_LEVELS + 1],
    levels: usize,
    ones: u32,
}

impl BitTree {
    fn new(bits: usize) -> BitTree {
        let (mut starts, mut levels) = ([0; MAX_LEVELS + 1], 0);
        let mut words = bits;
        while levels == 0 || words > 1 {
            words = words.div_ceil(64).max(1);
            starts[levels + 1] = starts[levels] + words;
            levels += 1;
        }
        BitTree { words: vec![0; starts[levels]], starts, levels, ones: 0 }
    }

    fn level(&self, level: usize) -> &[u64] {
        &self.words[self.starts[level]..self.starts[level + 1]]
    }

    fn get(&self, bit: usize) -> bool {
        self.level(0).get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    fn set(&mut self, bit: usize) {
        debug_assert!(!self.get(bit));
        self.ones += 1;
        let mut at = bit;
        for start in &self.starts[..self.levels] {
            let word = &mut self.words[start + at / 64];
            let was = *word;
            *word |= 1 << (at % 64);
            if was != 0 {
                return;
            }
            at /= 64;
        }
    }

    #[inline]
    fn clear(&mut self, bit: usize) {
        debug_assert!(self.get(bit));
        self.ones -= 1;
        let mut at = bit;
        for start in &self.starts[..self.levels] {
            let word = &mut self.words[start + at / 64];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
    }

    #[inline]
    fn find(&self, pick: impl Fn(u64) -> u32) -> Option<usize> {
        let mut at = 0;
        for start in self.starts[..self.levels].iter().rev() {
            let word = self.words[start + at];
            if word == 0 {
                return None;
            }
            at = at * 64 + pick(word) as usize;
        }
        Some(at)
    }

    fn lowest(&self) -> Option<usize> {
        self.find(u64::trailing_zeros)
    }

    fn highest(&self) -> Option<usize> {
        self.find(|word| 63 - word.leading_zeros())
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.ones_in(0..self.level(0).len() * 64)
    }

    /// Iterates over the set bits of `bits`.
    fn ones_in(&self, bits: Range<usize>) -> impl Iterator<Item = usize> + '_ {
        let words = bits.start / 64..bits.end.div_ceil(64).min(self.level(0).len());
        words.flat_map(move |index| {
            let mut word = self.words[index];
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| index * 64 + word.trailing_zeros() as usize)?;
                word &= word - 1;
                Some(bit)
            })
            .filter({
                let bits = bits.clone();
                move |bit| bits.contains(bit)
            })
        })
    }

    fn check(&self) {
        let ones: u32 = self.level(0).iter().map(|word| word.count_ones()).sum();
        assert_eq!(ones, self.ones);
        for above in 1..self.levels {
            for (index, word) in self.level(above - 1).iter().enumerate() {
                assert_eq!(
                    self.level(above)[index / 64] >> (index % 64) & 1 == 1,
                    *word != 0,
                    "summary of word {index}"
                );
            }
        }
    }
}

/// The choice among the free runs of an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Pick {
    /// The lowest run first, so that free frames gather above it.
    #[default]
    Lowest,
    /// The most recently freed run first: Linux's free lists are stacks.
    LastFreed,
}

/// The runs of an order, as bits, in the order in which they became free. Stale entries remain
/// among them: runs that are used again or were freed again since.
type Stack = Vec<u32>;

/// Maximum number of entries beyond twice the free runs before stale ones are removed.
const SPARE_ENTRIES: usize = 1024;

/// A buddy allocator for one range of frames.
pub struct Buddy {
    frames: u32,
    free: [BitTree; ORDERS],
    free_frames: u32,
    /// The stacks of [`Pick::LastFreed`]; every free run has an entry.
    stacks: Option<Box<[Stack; ORDERS]>>,
}

impl Buddy {
    /// Makes an allocator for frames `0..frames`; none of them is free yet.
    pub fn new(frames: u32) -> Buddy {
        Buddy::with_pick(frames, Pick::default())
    }

    /// Makes an allocator that chooses among free runs as `pick` says.
    pub fn with_pick(frames: u32, pick: Pick) -> Buddy {
        let tree = |order: usize| BitTree::new((frames >> order) as usize + 1);
        let stacks = (pick == Pick::LastFreed).then(Box::default);
        Buddy { frames, free: std::array::from_fn(tree), free_frames: 0, stacks }
    }

    fn set(&mut self, order: usize, bit: usize) {
        let free = &mut self.free[order];
        free.set(bit);
        let Some(stack) = self.stacks.as_mut().map(|stacks| &mut stacks[order]) else { return };
        stack.push(bit as u32);
        if stack.len() > 2 * free.ones as usize + SPARE_ENTRIES {
            let mut seen = BTreeSet::new();
            stack.reverse();
            stack.retain(|&bit| free.get(bit as usize) && seen.insert(bit));
            stack.reverse();
        }
    }

    /// Returns the bit of the run of exactly `order` that is allocated next.
    #[inline]
    fn pick(&mut self, order: usize) -> Option<usize> {
        let free = &self.free[order];
        match &mut self.stacks {
            None => free.lowest(),
            Some(stacks) => loop {
                let bit = stacks[order].pop()? as usize;
                if free.get(bit) {
                    break Some(bit);
                }
            },
        }
    }

    fn run(bit: usize, order: Order) -> FrameRun {
        FrameRun::new(Frame((bit as u32) << order.get()), order)
    }

    fn bit(run: FrameRun) -> usize {
        (run.head.0 >> run.order.get()) as usize
    }

    /// Makes the `frames` frames from `head` on free. They must not be free yet.
    pub fn add_free(&mut self, head: Frame, frames: u32) {
        let (mut at, end) = (head.0, head.0 + frames);
        while at < end {
            let order = Order::largest_at(at, end - at);
            self.free(FrameRun::new(Frame(at), order));
            at += order.pages();
        }
    }

    /// Allocates a run of `order`; splits a larger one if needed. [`Pick`] chooses the run.
    #[inline]
    pub fn alloc(&mut self, order: Order) -> Option<FrameRun> {
        self.alloc_by(order, MAX_ORDER, Buddy::pick, 0)
    }

    /// Allocates the top of the highest free run of `order`, or else of the next larger order up to
    /// `most`.
    pub fn alloc_highest(&mut self, order: Order, most: Order) -> Option<FrameRun> {
        self.alloc_by(order, most, |buddy, from| buddy.free[from].highest(), 1)
    }

    fn alloc_by(
        &mut self,
        order: Order,
        most: Order,
        find: impl Fn(&mut Buddy, usize) -> Option<usize>,
        upper: usize,
    ) -> Option<FrameRun> {
        let (from, mut bit) = (order.index()..=most.index()).find_map(|from| Some((from, find(self, from)?)))?;
        self.free[from].clear(bit);
        for level in (order.index()..from).rev() {
            let half = bit * 2 + upper;
            self.set(level, half ^ 1);
            bit = half;
        }
        self.free_frames -= order.pages();
        Some(Self::run(bit, order))
    }

    /// Allocates exactly `run` if all of it is free. Returns whether it was.
    pub fn alloc_at(&mut self, run: FrameRun) -> bool {
        let Some(holder) = self.holder(run.head).filter(|holder| holder.order >= run.order) else { return false };
        self.free[holder.order.index()].clear(Self::bit(holder));
        for level in (run.order.index()..holder.order.index()).rev() {
            let on_path = (run.head.0 >> level) as usize;
            self.set(level, on_path ^ 1);
        }
        self.free_frames -= run.frames();
        true
    }

    /// Frees a run and merges it with its free buddies.
    #[inline]
    pub fn free(&mut self, run: FrameRun) {
        debug_assert!(run.head.0 + run.frames() <= self.frames, "{run:?} beyond {} frames", self.frames);
        debug_assert!(self.holder(run.head).is_none(), "{run:?} is free already");
        self.free_frames += run.frames();
        let (mut bit, mut order) = (Self::bit(run), run.order);
        while let Some(higher) = order.higher() {
            if !self.free[order.index()].get(bit ^ 1) {
                break;
            }
            self.free[order.index()].clear(bit ^ 1);
            (bit, order) = (bit / 2, higher);
        }
        self.set(order.index(), bit);
    }

    /// Iterates over the free runs within `run` that are smaller than it.
    fn parts_in(&self, run: FrameRun) -> impl Iterator<Item = FrameRun> + '_ {
        Order::all().filter(move |&order| order < run.order).flat_map(move |order| {
            let bits = (run.head.0 >> order.get()) as usize..((run.head.0 + run.frames()) >> order.get()) as usize;
            self.free[order.index()].ones_in(bits).map(move |bit| Self::run(bit, order))
        })
    }

    /// Returns the free frames of `run`.
    pub fn free_in(&self, run: FrameRun) -> FrameSet {
        let mut free = FrameSet::default();
        if self.holder(run.head).is_some_and(|holder| holder.order >= run.order) {
            free.insert(0, run.order);
        } else {
            self.parts_in(run).for_each(|part| free.insert(part.head.0 - run.head.0, part.order));
        }
        free
    }

    /// Allocates every free frame of `run` and returns them.
    pub fn take_in(&mut self, run: FrameRun) -> FrameSet {
        let taken = self.free_in(run);
        if !self.alloc_at(run) {
            let parts: Vec<FrameRun> = self.parts_in(run).collect();
            for part in parts {
                self.free[part.order.index()].clear(Self::bit(part));
                self.free_frames -= part.frames();
            }
        }
        taken
    }

    /// Returns the free run that contains `frame`.
    fn holder(&self, frame: Frame) -> Option<FrameRun> {
        Order::all()
            .find(|order| self.free[order.index()].get((frame.0 >> order.get()) as usize))
            .map(|order| Self::run((frame.0 >> order.get()) as usize, order))
    }

    /// Returns the number of free frames.
    pub fn free_frames(&self) -> u32 {
        self.free_frames
    }

    /// Returns the number of free runs of exactly `order`.
    pub fn free_runs(&self, order: Order) -> u32 {
        self.free[order.index()].ones
    }

    /// Returns the number of free frames in runs of at most `order`.
    pub fn free_frames_up_to(&self, order: Order) -> u32 {
        Order::all().filter(|&at| at <= order).map(|at| self.free_runs(at) * at.pages()).sum()
    }

    /// Returns whether `frame` is free.
    pub fn is_free(&self, frame: Frame) -> bool {
        self.holder(frame).is_some()
    }

    /// Returns whether a run of `order` can be allocated.
    pub fn can_alloc(&self, order: Order) -> bool {
        Order::all().any(|free| free >= order && self.free_runs(free) > 0)
    }

    /// Iterates over the free runs of exactly `order`, ascending.
    pub fn iter_free(&self, order: Order) -> impl Iterator<Item = FrameRun> + '_ {
        let tree = &self.free[order.index()];
        tree.iter().take(tree.ones as usize).map(move |bit| Self::run(bit, order))
    }

    /// Checks the whole structure: summaries, totals, that no frame is free at two orders, and that
    /// buddies are merged.
    pub fn check(&self) {
        let mut total = 0;
        for order in Order::all() {
            self.free[order.index()].check();
            total += self.free_runs(order) * order.pages();
            for run in self.iter_free(order) {
                assert!(run.head.0 + run.frames() <= self.frames, "{run:?} is beyond the last frame");
                let merged = order == MAX_ORDER || !self.free[order.index()].get(Self::bit(run) ^ 1);
                assert!(merged, "{run:?} and its buddy are both free");
                let above = Order::all().filter(|&higher| higher > order);
                for higher in above {
                    let held = self.free[higher.index()].get((run.head.0 >> higher.get()) as usize);
                    assert!(!held, "{run:?} is free at {higher:?}, too");
                }
            }
        }
        assert_eq!(total, self.free_frames);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u8),
        AllocHighest(u8, u8),
        AllocAt(u32, u8),
        TakeIn(u32, u8),
        Free(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u8..10).prop_map(Step::Alloc),
            1 => (0u8..10, 0u8..10).prop_map(|(order, most)| Step::AllocHighest(order, most)),
            2 => (0u32..3000, 0u8..10).prop_map(|(head, order)| Step::AllocAt(head, order)),
            1 => (0u32..3000, 0u8..10).prop_map(|(head, order)| Step::TakeIn(head, order)),
            4 => any::<prop::sample::Index>().prop_map(Step::Free),
        ]
    }

    fn frames_of(run: FrameRun) -> impl Iterator<Item = u32> {
        run.head.0..run.head.0 + run.frames()
    }

    /// Returns whether the model has a free naturally aligned run of `order` that is not part of a
    /// free run above `most`.
    fn model_has(free: &BTreeSet<u32>, frames: u32, order: Order, most: Order) -> bool {
        let is_free = |head: u32, order: Order| {
            let head = head & !(order.pages() - 1);
            head + order.pages() <= frames && (head..head + order.pages()).all(|frame| free.contains(&frame))
        };
        order <= most
            && free.iter().any(|&head| {
                head % order.pages() == 0
                    && is_free(head, order)
                    && most.higher().is_none_or(|larger| !is_free(head, larger))
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn allocations_match_a_set_of_frames(
            frames in 1u32..3000, is_stack in any::<bool>(), steps in prop::collection::vec(step(), 1..120)
        ) {
            let mut buddy = Buddy::with_pick(frames, if is_stack { Pick::LastFreed } else { Pick::Lowest });
            buddy.add_free(Frame(0), frames);
            let mut free: BTreeSet<u32> = (0..frames).collect();
            let mut held: Vec<FrameRun> = Vec::new();
            for step in steps {
                let got = match step {
                    Step::Alloc(order) => {
                        let order = Order::new(order).unwrap();
                        let got = buddy.alloc(order);
                        prop_assert_eq!(got.is_some(), model_has(&free, frames, order, MAX_ORDER));
                        got
                    }
                    Step::AllocHighest(order, most) => {
                        let [order, most] = [order, most].map(|order| Order::new(order).unwrap());
                        let got = buddy.alloc_highest(order, most);
                        prop_assert_eq!(got.is_some(), model_has(&free, frames, order, most));
                        got
                    }
                    Step::AllocAt(head, order) => {
                        let order = Order::new(order).unwrap();
                        let run = FrameRun::new(Frame(head & !(order.pages() - 1)), order);
                        let possible = frames_of(run).all(|frame| free.contains(&frame));
                        prop_assert_eq!(buddy.alloc_at(run), possible);
                        possible.then_some(run)
                    }
                    Step::TakeIn(head, order) => {
                        let order = Order::new(order).unwrap();
                        let run = FrameRun::new(Frame(head & !(order.pages() - 1)), order);
                        let mut taken = buddy.take_in(run);
                        prop_assert!(frames_of(run).all(|frame| taken.contains(frame - run.head.0) == free.remove(&frame)));
                        held.extend(std::iter::from_fn(|| taken.pop_first()).map(|index| run.part(index, Order::ZERO)));
                        None
                    }
                    Step::Free(index) => {
                        if !held.is_empty() {
                            let run = held.swap_remove(index.index(held.len()));
                            buddy.free(run);
                            free.extend(frames_of(run));
                        }
                        None
                    }
                };
                if let Some(run) = got {
                    for frame in frames_of(run) {
                        prop_assert!(free.remove(&frame), "{:?} was not free", run);
                    }
                    held.push(run);
                }
                buddy.check();
                prop_assert_eq!(buddy.free_frames() as usize, free.len());
            }
            for frame in 0..frames {
                prop_assert_eq!(buddy.is_free(Frame(frame)), free.contains(&frame));
            }
        }
    }

    #[test]
    fn pick_selects_the_last_freed_or_the_lowest_run() {
        for (pick, order) in [(Pick::LastFreed, [4, 8, 2]), (Pick::Lowest, [2, 4, 8])] {
            let mut buddy = Buddy::with_pick(16, pick);
            buddy.add_free(Frame(0), 16);
            while buddy.alloc(Order::ZERO).is_some() {}
            [2, 8, 4].into_iter().for_each(|frame| buddy.free(FrameRun::new(Frame(frame), Order::ZERO)));
            assert_eq!(order.map(Frame), [(); 3].map(|()| buddy.alloc(Order::ZERO).unwrap().head));
        }
    }

    #[test]
    fn stale_stack_entries_are_removed() {
        let mut buddy = Buddy::with_pick(64, Pick::LastFreed);
        buddy.add_free(Frame(0), 64);
        for _ in 0..100_000 {
            // An allocation from the top leaves its stack entry behind.
            let run = buddy.alloc_highest(Order::ZERO, MAX_ORDER).unwrap();
            buddy.free(run);
        }
        let entries = buddy.stacks.iter().flat_map(|stacks| stacks.iter()).map(Vec::len);
        assert!(entries.sum::<usize>() < 2 * ORDERS * SPARE_ENTRIES);
        buddy.check();
        assert_eq!(std::iter::from_fn(|| buddy.alloc(Order::ZERO)).count(), 64);
    }

    #[test]
    fn freeing_everything_merges_everything() {
        let mut buddy = Buddy::new(2048);
        buddy.add_free(Frame(0), 2048);
        let runs: Vec<FrameRun> = std::iter::from_fn(|| buddy.alloc(Order::ZERO)).collect();
        assert_eq!(runs.len(), 2048);
        runs.into_iter().rev().for_each(|run| buddy.free(run));
        assert_eq!(buddy.free_runs(MAX_ORDER), 4);
        buddy.check();
    }
}
