//! The order in which reported changes of mappings are applied.
//!
//! The kernel changes a mapping first and queues the message afterwards, without a lock in between.
//! A move to a fixed address even waits until another message of its own is read. So a thread may
//! unmap a range, another thread may move pages to that place, and the second message may be read
//! first. If changes were applied in that order, the moved pages would be lost.
//!
//! A range can be moved only to free addresses. So if the agent knows memory at the target of a
//! move, the message about its removal is still to come, and the move *waits* for it. A message
//! about addresses that a waiting move leaves or fills waits behind the move, unless the move waits
//! for that message.
//!
//! A move has an *echo*: a message that its source is unmapped, queued when the move's message has
//! been read. Other memory may have been moved there by then. An echo says nothing new and is
//! dropped.
//!
//! Assumptions: the agent knows all mapped memory (the kernel does not report a mapping that grows
//! in place, so the caller asks). No thread changes addresses again while a message about their
//! earlier content is under way: if two threads do that, nothing shows which change was first.
//!
//! Used under the lock of the mappings; takes the lock of the ranges.

use crate::address_space::ranges::Ranges;
use foliomem_sys::userfaultfd::Change;
use std::ops::Range;

/// The waiting moves and the changes that wait behind them, in the order received; and the expected
/// echoes.
#[derive(Debug, Default)]
pub struct Changes {
    waiting: Vec<Change>,
    echoes: Vec<Range<usize>>,
}

impl Changes {
    /// Returns whether every received change has been applied.
    pub fn is_applied(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns whether every received change has been applied and no echo is expected.
    pub fn is_settled(&self) -> bool {
        self.waiting.is_empty() && self.echoes.is_empty()
    }

    /// Receives a change. Passes each change that can be applied now to `apply`, which must update
    /// `ranges`, the known mapped memory.
    pub fn receive(&mut self, change: Change, ranges: &Ranges, mut apply: impl FnMut(Change)) {
        match &change {
            Change::Discard(range) => {
                // This cannot discard pages that a waiting move brings: their discard, if any,
                // comes later. Memory that is still known at the target is about to be removed
                // anyway.
                let newer = self.newer(ranges);
                newer.left.missing(range.clone()).into_iter().for_each(|part| apply(Change::Discard(part)));
            }
            Change::Unmap(range) => {
                if let Some(echo) = self.echoes.iter().position(|echo| echo == range) {
                    self.echoes.swap_remove(echo);
                    return;
                }
            }
            Change::Remap { from, .. } => self.echoes.push(from.clone()),
        }
        let mut applied = self.apply_or_wait(change, ranges, &mut apply);
        while applied && !self.is_applied() {
            let waiting = std::mem::take(&mut self.waiting);
            let attempt = |applied, change| self.apply_or_wait(change, ranges, &mut apply) | applied;
            applied = waiting.into_iter().fold(false, attempt);
        }
    }

    /// Applies the waiting changes, when no change is under way. The memory at the target of a
    /// waiting move was removed without a message. A missing echo means that the source was left
    /// mapped (MREMAP_DONTUNMAP).
    pub fn settle(&mut self, apply: impl FnMut(Change)) {
        self.waiting.drain(..).for_each(apply);
        self.echoes.clear();
    }

    fn newer(&self, ranges: &Ranges) -> Newer {
        let newer = Newer::default();
        for change in &self.waiting {
            if let Change::Remap { from, to } = change {
                let target = *to..*to + from.len();
                newer.left.insert(from.clone());
                ranges.missing(target.clone()).into_iter().for_each(|part| newer.free.insert(part));
                newer.filled.insert(target);
            }
        }
        newer
    }

    /// Applies the parts of `change` that can be applied now, and queues the others. Returns
    /// whether a part was applied.
    fn apply_or_wait(&mut self, change: Change, ranges: &Ranges, apply: &mut impl FnMut(Change)) -> bool {
        let Newer { left, filled, free } = self.newer(ranges);
        let meets = |ranges: &Ranges, range: &Range<usize>| !ranges.within(range.clone()).is_empty();
        let split = |range: Range<usize>, newer: &Ranges, kind: fn(Range<usize>) -> Change| {
            left.insert_all(newer);
            let (now, later) = (left.missing(range.clone()), left.within(range));
            (now.into_iter().map(kind).collect::<Vec<_>>(), later.into_iter().map(kind).collect::<Vec<_>>())
        };
        let (now, later) = match change {
            Change::Unmap(range) => split(range, &free, Change::Unmap),
            Change::Discard(range) => split(range, &filled, Change::Discard),
            Change::Remap { ref from, to } => {
                let target = to..to + from.len();
                let waits =
                    meets(ranges, &target) || meets(&filled, &target) || meets(&left, from) || meets(&free, from);
                if waits { (Vec::new(), vec![change]) } else { (vec![change], Vec::new()) }
            }
        };
        self.waiting.extend(later);
        let applied = !now.is_empty();
        now.into_iter().for_each(apply);
        applied
    }
}

/// Addresses whose content is newer than the known ranges, because of waiting moves.
#[derive(Default)]
struct Newer {
    /// The sources of waiting moves.
    left: Ranges,
    /// The targets of waiting moves.
    filled: Ranges,
    /// The parts of the targets that are free already.
    free: Ranges,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    const PAGES: usize = 24;

    /// The content of each page, by page number: of the program, or as the agent knows it.
    type Space = BTreeMap<usize, u32>;

    fn change(space: &mut Space, change: &Change) {
        match change {
            Change::Discard(range) => range.clone().for_each(|page| {
                space.entry(page).and_modify(|content| *content = 0);
            }),
            Change::Unmap(range) => range.clone().for_each(|page| {
                space.remove(&page);
            }),
            Change::Remap { from, to } => {
                let moved: Vec<_> = from.clone().map(|page| space.remove(&page)).collect();
                for (page, content) in (*to..).zip(moved) {
                    space.remove(&page);
                    content.map(|content| space.insert(page, content));
                }
            }
        }
    }

    /// A program of several threads, the kernel's queue, and a receiver.
    struct World {
        truth: Space,
        known: Space,
        ranges: Ranges,
        changes: Changes,
        /// For each thread, the messages that it waits to have read, in order.
        under_way: Vec<VecDeque<Change>>,
        queue: VecDeque<usize>,
    }

    impl World {
        fn new(threads: usize) -> World {
            let space: Space = (0..PAGES / 2).map(|page| (page, page as u32 + 1)).collect();
            let ranges = Ranges::default();
            ranges.insert(0..PAGES / 2);
            World {
                truth: space.clone(),
                known: space,
                ranges,
                changes: Changes::default(),
                under_way: vec![VecDeque::new(); threads],
                queue: VecDeque::new(),
            }
        }

        fn make(&mut self, thread: usize, what: Change) {
            if !self.under_way[thread].is_empty() {
                return;
            }
            // No other thread can rely on addresses of a change that is under way. Until the agent
            // knows what became of their old content, the test leaves them alone.
            let taken = |page: &usize| {
                self.under_way.iter().filter_map(VecDeque::front).any(|other| match other {
                    Change::Discard(range) | Change::Unmap(range) => {
                        !self.changes.echoes.contains(range) && range.contains(page)
                    }
                    Change::Remap { from, to } => from.contains(page) || (*to..*to + from.len()).contains(page),
                })
            };
            let owned = |page: usize| self.truth.contains_key(&page) && !taken(&page);
            let possible = match &what {
                Change::Discard(range) | Change::Unmap(range) => range.end <= PAGES && range.clone().all(owned),
                Change::Remap { from, to } => {
                    let target = *to..*to + from.len();
                    target.end <= PAGES
                        && from.clone().all(owned)
                        && target.clone().all(|page| !self.truth.contains_key(&page))
                }
            };
            if possible {
                change(&mut self.truth, &what);
                let echo =
                    if let Change::Remap { from, .. } = &what { Some(Change::Unmap(from.clone())) } else { None };
                self.under_way[thread].push_back(what);
                self.under_way[thread].extend(echo);
            }
        }

        fn enqueue(&mut self, thread: usize) {
            if !self.under_way[thread].is_empty() && !self.queue.contains(&thread) {
                self.queue.push_back(thread);
            }
        }

        fn read(&mut self) {
            let Some(thread) = self.queue.pop_front() else { return };
            let Some(what) = self.under_way[thread].pop_front() else { unreachable!("queued") };
            let (known, ranges) = (&mut self.known, &self.ranges);
            let mut apply = |what: Change| {
                change(known, &what);
                match what {
                    Change::Discard(_) => {}
                    Change::Unmap(range) => ranges.remove(range),
                    Change::Remap { from, to } => {
                        ranges.remove(from.clone());
                        ranges.insert(to..to + from.len());
                    }
                }
            };
            self.changes.receive(what, ranges, &mut apply);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Make(usize, Change),
        Enqueue(usize),
        Read,
    }

    fn step() -> impl Strategy<Value = Step> {
        let range = || (0..PAGES, 1usize..6).prop_map(|(start, len)| start..start + len);
        let change = prop_oneof![
            1 => range().prop_map(Change::Discard),
            3 => range().prop_map(Change::Unmap),
            8 => (range(), 0..PAGES).prop_map(|(from, to)| Change::Remap { from, to }),
        ];
        prop_oneof![
            6 => (0usize..4, change).prop_map(|(thread, change)| Step::Make(thread, change)),
            2 => (0usize..4).prop_map(Step::Enqueue),
            1 => Just(Step::Read),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 5000, ..ProptestConfig::default() })]

        #[test]
        fn every_page_is_known_where_it_is_in_any_order_of_messages(
            steps in prop::collection::vec(step(), 1..200)
        ) {
            let mut world = World::new(4);
            for step in steps {
                match step {
                    Step::Make(thread, change) => world.make(thread, change),
                    Step::Enqueue(thread) => world.enqueue(thread),
                    Step::Read => world.read(),
                }
            }
            for _ in 0..2 {
                (0..4).for_each(|thread| world.enqueue(thread));
                (0..4).for_each(|_| world.read());
            }
            prop_assert!(world.changes.is_settled(), "{:?}", world.changes);
            prop_assert_eq!(world.known, world.truth);
        }
    }

    #[test]
    fn a_move_waits_for_the_removal_of_memory_at_its_target() {
        let ranges = Ranges::default();
        ranges.insert(0..2);
        ranges.insert(4..6);
        let mut changes = Changes::default();
        let mut applied = Vec::new();
        let (remap, unmap) = (Change::Remap { from: 0..2, to: 4 }, Change::Unmap(4..6));
        changes.receive(remap.clone(), &ranges, |change| applied.push(change));
        assert!(applied.is_empty() && !changes.is_applied());
        changes.receive(unmap.clone(), &ranges, |change| {
            ranges.remove(4..6);
            applied.push(change);
        });
        assert_eq!(applied, [unmap, remap]);
        assert!(changes.is_applied());
    }

    #[test]
    fn a_move_over_silently_removed_memory_is_applied_in_the_end() {
        let ranges = Ranges::default();
        ranges.insert(0..2);
        ranges.insert(4..6);
        let mut changes = Changes::default();
        let remap = Change::Remap { from: 0..2, to: 4 };
        changes.receive(remap.clone(), &ranges, |change| panic!("{change:?}"));
        let mut applied = Vec::new();
        changes.settle(|change| applied.push(change));
        assert_eq!(applied, [remap]);
        assert!(changes.is_settled());
    }
}
