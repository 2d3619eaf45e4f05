//! Ranges of the program's address space, sorted by address, each with the program's advice.
//!
//! The ranges are disjoint. Adjacent ranges stay apart as they were inserted: no folio may lie
//! across two mappings of different kinds, even if they touch. A mapping that grows stays one
//! range. Advice splits a range as it splits the kernel's mapping; equal advice on both sides
//! merges them again. The lock is a leaf.

use foliomem_sync::Mutex;
use foliomem_sys::memory_advice::Forks;
use foliomem_types::size_policy::Advice;
use foliomem_types::units::PageNumber;
use std::ops::Range;

/// Returns the page that contains an address.
pub(crate) fn page(address: usize) -> PageNumber {
    PageNumber::containing(address as u64)
}

/// Returns the pages of a range of addresses.
pub(crate) fn pages(range: &Range<usize>) -> Range<PageNumber> {
    page(range.start)..page(range.end)
}

/// What the program has advised about a range (madvise(2)).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RangeAdvice {
    /// Advice about huge pages.
    pub huge_pages: Advice,
    /// Whether forks copy the range.
    pub forks: Forks,
}

/// One call of madvise(2) that changes the advice about a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Madvice {
    /// `MADV_HUGEPAGE` or `MADV_NOHUGEPAGE`.
    HugePages(Advice),
    /// `MADV_DOFORK` or `MADV_DONTFORK`.
    Forks(Forks),
}

impl RangeAdvice {
    /// Returns the advice after `call`.
    pub fn after(self, call: Madvice) -> RangeAdvice {
        match call {
            Madvice::HugePages(huge_pages) => RangeAdvice { huge_pages, ..self },
            Madvice::Forks(forks) => RangeAdvice { forks, ..self },
        }
    }
}

/// A range and its advice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Advised {
    /// The addresses of the range.
    pub range: Range<usize>,
    /// The program's advice about the range.
    pub advice: RangeAdvice,
    /// Whether only advice separates the range from the one before it.
    continues: bool,
}

impl Advised {
    fn cut(&self, to: &Range<usize>) -> Advised {
        let range = self.range.start.max(to.start)..self.range.end.min(to.end);
        let continues = self.continues && range.start == self.range.start;
        Advised { range, continues, ..*self }
    }
}

/// A set of address ranges with advice.
#[derive(Debug, Default)]
pub struct Ranges(Mutex<Vec<Advised>>);

/// Returns the indices of the ranges that overlap `range`.
fn overlapping(ranges: &[Advised], range: &Range<usize>) -> Range<usize> {
    let first = ranges.partition_point(|other| other.range.end <= range.start);
    let last = ranges.partition_point(|other| other.range.start < range.end);
    first..last.max(first)
}

impl Ranges {
    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Returns the range that contains `address`.
    pub fn containing(&self, address: usize) -> Option<Advised> {
        let ranges = self.0.lock();
        let after = ranges.partition_point(|other| other.range.start <= address);
        ranges[..after].last().filter(|other| address < other.range.end).cloned()
    }

    /// Adds the missing parts of `range`, without advice.
    pub fn insert(&self, range: Range<usize>) {
        self.insert_advised(range, RangeAdvice::default());
    }

    /// Adds the missing parts of `range`, with the program's advice.
    pub fn insert_advised(&self, range: Range<usize>, advice: RangeAdvice) {
        self.put(range, advice, |_| false);
    }

    /// Adds the missing parts of `range`. A part continues the range right below it if both lie in
    /// `mapping`, which the kernel shows as one mapping.
    pub fn insert_in(&self, mapping: &Range<usize>, range: Range<usize>, advice: RangeAdvice) {
        self.put(range, advice, |start| mapping.start < start);
    }

    /// Adds the missing parts of `range`. A part becomes one with the range right below it if
    /// `continues` says so for its start.
    fn put(&self, range: Range<usize>, advice: RangeAdvice, continues: impl Fn(usize) -> bool) {
        let missing = self.missing(range);
        let mut ranges = self.0.lock();
        for part in missing {
            let at = ranges.partition_point(|other| other.range.start < part.start);
            let is_above = at > 0 && ranges[at - 1].range.end == part.start;
            let continues = is_above && continues(part.start);
            ranges.insert(at, Advised { range: part, advice, continues });
            join(&mut ranges, at..at + 1);
        }
    }

    /// Adds the missing parts of the ranges of `others`.
    pub fn insert_all(&self, others: &Ranges) {
        others.snapshot().into_iter().for_each(|range| self.insert(range));
    }

    /// Applies the call to the parts of `range` that are in the set.
    pub fn advise(&self, range: Range<usize>, call: Madvice) {
        let mut ranges = self.0.lock();
        let touched = overlapping(&ranges, &range);
        let (Some(first), Some(last)) = (touched.clone().next(), touched.clone().next_back()) else { return };
        let (before, after) = (ranges[first].range.start..range.start, range.end..ranges[last].range.end);
        let mut parts = Vec::new();
        if !before.is_empty() {
            parts.push(ranges[first].cut(&before));
        }
        for other in &ranges[touched.clone()] {
            let part = other.cut(&range);
            let continues = part.continues || part.range.start > other.range.start;
            parts.push(Advised { advice: part.advice.after(call), continues, ..part });
        }
        if !after.is_empty() {
            parts.push(Advised { continues: true, ..ranges[last].cut(&after) });
        }
        let len = parts.len();
        ranges.splice(touched, parts);
        join(&mut ranges, first..first + len);
    }

    /// Returns the parts of `range` that are in the set.
    pub fn within(&self, range: Range<usize>) -> Vec<Range<usize>> {
        self.advised_within(range).into_iter().map(|part| part.range).collect()
    }

    /// Returns the parts of `range` that are in the set, with the advice of each.
    pub fn advised_within(&self, range: Range<usize>) -> Vec<Advised> {
        let ranges = self.0.lock();
        let touched = overlapping(&ranges, &range);
        ranges[touched].iter().map(|other| other.cut(&range)).collect()
    }

    /// Returns the parts of `range` that are not in the set.
    pub fn missing(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let ranges = self.0.lock();
        let mut missing = Vec::new();
        let mut start = range.start;
        for other in &ranges[overlapping(&ranges, &range)] {
            if start < other.range.start {
                missing.push(start..other.range.start);
            }
            start = other.range.end;
        }
        if start < range.end {
            missing.push(start..range.end);
        }
        missing
    }

    /// Removes `range` from the set.
    pub fn remove(&self, range: Range<usize>) {
        let mut ranges = self.0.lock();
        let touched = overlapping(&ranges, &range);
        let (Some(first), Some(last)) = (touched.clone().next(), touched.clone().next_back()) else { return };
        let (before, after) = (ranges[first].range.start..range.start, range.end..ranges[last].range.end);
        let rest: Vec<Advised> = [(first, before), (last, after)]
            .into_iter()
            .filter(|(_, part)| !part.is_empty())
            .map(|(index, part)| ranges[index].cut(&part))
            .collect();
        let next = first + rest.len();
        ranges.splice(touched, rest);
        // Memory that is inserted there later belongs to another mapping.
        if let Some(next) = ranges.get_mut(next).filter(|next| next.range.start == range.end) {
            next.continues = false;
        }
    }

    /// Moves `from` to `to` as the program has done: the target is in the set as a whole, with the
    /// advice of the source.
    pub fn relocate(&self, from: Range<usize>, to: usize) {
        let moved = self.advised_within(from.clone());
        let target = to..to + from.len();
        self.remove(from.clone());
        self.remove(target.clone());
        for Advised { range, advice, .. } in moved {
            self.insert_advised(range.start - from.start + to..range.end - from.start + to, advice);
        }
        self.insert(target);
    }

    /// Calls `act` with each range, inside the lock, and returns whether it could: not if a thread
    /// holds the lock, perhaps one that was killed meanwhile. Does not allocate.
    pub fn try_for_each(&self, act: impl FnMut(&Range<usize>)) -> bool {
        let Some(ranges) = self.0.try_lock() else { return false };
        ranges.iter().map(|part| &part.range).for_each(act);
        true
    }

    /// Returns all ranges.
    pub fn snapshot(&self) -> Vec<Range<usize>> {
        self.within(0..usize::MAX)
    }
}

/// Merges the ranges around `changed` that only advice had separated.
fn join(ranges: &mut Vec<Advised>, changed: Range<usize>) {
    for index in (changed.start.max(1)..(changed.end + 1).min(ranges.len())).rev() {
        let (before, this) = (&ranges[index - 1], &ranges[index]);
        if this.continues && before.range.end == this.range.start && before.advice == this.advice {
            ranges[index - 1].range.end = ranges[index].range.end;
            ranges.remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const PAGES: usize = 100;

    /// For each page: its advice, and the number of the insertion that added it.
    type Model = BTreeMap<usize, (RangeAdvice, usize)>;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(Range<usize>, RangeAdvice),
        Grow(Range<usize>, RangeAdvice),
        Remove(Range<usize>),
        Advise(Range<usize>, Madvice),
        Relocate(Range<usize>, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let range = || (0usize..60, 1usize..20).prop_map(|(start, len)| start..start + len);
        let huge_pages = || prop::sample::select(vec![Advice::None, Advice::Huge, Advice::NoHuge]);
        let forks = || prop::sample::select(vec![Forks::Copy, Forks::LeaveOut]);
        let advice = || (huge_pages(), forks()).prop_map(|(huge_pages, forks)| RangeAdvice { huge_pages, forks });
        let call = || prop_oneof![huge_pages().prop_map(Madvice::HugePages), forks().prop_map(Madvice::Forks)];
        prop_oneof![
            3 => (range(), advice()).prop_map(|(range, advice)| Step::Insert(range, advice)),
            2 => (range(), advice()).prop_map(|(range, advice)| Step::Grow(range, advice)),
            2 => range().prop_map(Step::Remove),
            4 => (range(), call()).prop_map(|(range, call)| Step::Advise(range, call)),
            1 => (range(), 0usize..60).prop_map(|(range, to)| Step::Relocate(range, to)),
        ]
    }

    /// Returns the model's pages as ranges: adjacent pages of one insertion with equal advice are
    /// one range.
    fn ranges(model: &Model) -> Vec<(Range<usize>, RangeAdvice)> {
        let pages: Vec<_> = model.iter().collect();
        let runs = pages.chunk_by(|(page, this), (next, that)| *page + 1 == **next && this == that);
        runs.map(|run| (*run[0].0..*run[run.len() - 1].0 + 1, run[0].1.0)).collect()
    }

    #[test]
    fn a_held_lock_is_not_waited_for() {
        let ranges = Ranges::default();
        ranges.insert(1..3);
        ranges.insert(5..6);
        let mut seen = Vec::new();
        let held = ranges.0.lock();
        assert!(!ranges.try_for_each(|range| seen.push(range.clone())) && seen.is_empty());
        drop(held);
        assert!(ranges.try_for_each(|range| seen.push(range.clone())));
        assert_eq!(seen, [1..3, 5..6]);
    }

    proptest! {
        #[test]
        fn the_set_agrees_with_a_map_of_pages(steps in prop::collection::vec(step(), 1..40)) {
            let (all, mut model) = (Ranges::default(), Model::new());
            // The insertion stands for a page's mapping: the two sides of a filled gap stay
            // distinct.
            let mut inserted = 0;
            let insert = |model: &mut Model, inserted: &mut usize, range: Range<usize>, advice| {
                for page in range {
                    if !model.contains_key(&page) {
                        if page == 0 || model.get(&(page - 1)).is_none_or(|(_, id)| *id != *inserted) {
                            *inserted += 1;
                        }
                        model.insert(page, (advice, *inserted));
                    }
                }
                *inserted += 1;
            };
            for step in steps {
                match step {
                    Step::Insert(range, advice) => {
                        all.insert_advised(range.clone(), advice);
                        insert(&mut model, &mut inserted, range, advice);
                    }
                    Step::Grow(range, advice) => {
                        let known = all.advised_within(range.clone()).len();
                        all.insert_in(&range, range.clone(), advice);
                        insert(&mut model, &mut inserted, range.clone(), advice);
                        prop_assert!(all.advised_within(range).len() <= 2 * known + 1);
                    }
                    Step::Remove(range) => {
                        all.remove(range.clone());
                        model.retain(|page, _| !range.contains(page));
                    }
                    Step::Advise(range, call) => {
                        all.advise(range.clone(), call);
                        model.range_mut(range).for_each(|(_, (now, _))| *now = now.after(call));
                    }
                    Step::Relocate(from, to) => {
                        if from.start < to + from.len() && to < from.end {
                            continue;
                        }
                        all.relocate(from.clone(), to);
                        let moved: Vec<_> = from.clone().map(|page| model.remove(&page)).collect();
                        model.retain(|page, _| !(to..to + from.len()).contains(page));
                        let before = inserted;
                        for run in all.advised_within(to..to + from.len()) {
                            let moved_advice = moved[run.range.start - to];
                            let advice = moved_advice.map_or(RangeAdvice::default(), |(advice, _)| advice);
                            inserted += 1;
                            run.range.for_each(|page| {
                                model.insert(page, (advice, inserted));
                            });
                        }
                        prop_assert!(inserted > before);
                    }
                }
                let now = all.advised_within(0..PAGES);
                let now: Vec<_> = now.into_iter().map(|Advised { range, advice, .. }| (range, advice)).collect();
                prop_assert!(now.windows(2).all(|pair| pair[0].0.end <= pair[1].0.start));
                let by_page = |all: &[(Range<usize>, RangeAdvice)]| {
                    all.iter().flat_map(|(range, advice)| range.clone().map(|page| (page, *advice))).collect::<BTreeMap<_, _>>()
                };
                prop_assert_eq!(by_page(&now), by_page(&ranges(&model)));
                for page in 0..PAGES {
                    prop_assert_eq!(all.containing(page).map(|found| found.advice), model.get(&page).map(|(advice, _)| *advice));
                }
                let missing: Vec<usize> = all.missing(10..70).into_iter().flatten().collect();
                prop_assert_eq!(missing, (10..70).filter(|page| !model.contains_key(page)).collect::<Vec<_>>());
            }
        }

        #[test]
        fn a_mapping_that_grows_stays_one(steps in prop::collection::vec((1usize..9, any::<bool>()), 1..20)) {
            let all = Ranges::default();
            all.insert(0..10);
            let huge = RangeAdvice { huge_pages: Advice::Huge, ..RangeAdvice::default() };
            all.insert_advised(10..11, huge);
            let mut end = 11;
            for (pages, is_advised) in steps {
                let (from, to) = (end, end + pages);
                all.insert_in(&(10..to), 10..to, huge);
                if is_advised {
                    all.advise(from..to, Madvice::Forks(Forks::LeaveOut));
                    all.advise(from..to, Madvice::Forks(Forks::Copy));
                }
                prop_assert_eq!(all.snapshot(), [0..10, 10..to]);
                end = to;
            }
            // Another mapping right above it.
            all.insert_in(&(end..end + 1), end..end + 1, huge);
            prop_assert_eq!(all.snapshot(), [0..10, 10..end, end..end + 1]);
        }

        #[test]
        fn advice_taken_back_leaves_the_mappings_as_they_were(
            borders in prop::collection::btree_set(0usize..60, 2..8),
            advised in prop::collection::vec((0usize..60, 1usize..20), 1..8),
        ) {
            let all = Ranges::default();
            let borders: Vec<usize> = borders.into_iter().collect();
            borders.windows(2).for_each(|pair| all.insert(pair[0]..pair[1]));
            let before = all.snapshot();
            for (start, len) in advised {
                all.advise(start..start + len, Madvice::HugePages(Advice::Huge));
            }
            all.advise(0..PAGES, Madvice::HugePages(Advice::None));
            prop_assert_eq!(all.snapshot(), before);
        }
    }
}
