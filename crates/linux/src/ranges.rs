//! The ranges of the program's address space that are managed, by address.
//!
//! Disjoint and sorted. Neighbours are kept apart as they were found: between two mappings of different
//! kind no folio may lie across, even where they touch. One leaf lock.

use foliomem_core::sync::Mutex;
use std::ops::Range;

/// See the module.
#[derive(Debug, Default)]
pub struct Ranges(Mutex<Vec<Range<usize>>>);

impl Ranges {
    /// The range around `address`.
    pub fn containing(&self, address: usize) -> Option<Range<usize>> {
        let ranges = self.0.lock();
        let after = ranges.partition_point(|range| range.start <= address);
        ranges[..after].last().filter(|range| address < range.end).cloned()
    }

    /// Adds what of `range` is not there yet.
    pub fn insert(&self, range: Range<usize>) {
        let missing = self.missing(range);
        let mut ranges = self.0.lock();
        for part in missing {
            let at = ranges.partition_point(|other| other.start < part.start);
            ranges.insert(at, part);
        }
    }

    /// Adds what of `others` is not there yet.
    pub fn insert_all(&self, others: &Ranges) {
        others.snapshot().into_iter().for_each(|range| self.insert(range));
    }

    /// The parts of `range` that are managed.
    pub fn within(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let ranges = self.0.lock();
        let first = ranges.partition_point(|other| other.end <= range.start);
        let overlapping = ranges[first..].iter().take_while(|other| other.start < range.end);
        overlapping.map(|other| other.start.max(range.start)..other.end.min(range.end)).collect()
    }

    /// The parts of `range` that are not managed.
    pub fn missing(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let ranges = self.0.lock();
        let mut missing = Vec::new();
        let mut start = range.start;
        let first = ranges.partition_point(|other| other.end <= range.start);
        for other in ranges[first..].iter().take_while(|other| other.start < range.end) {
            if start < other.start {
                missing.push(start..other.start);
            }
            start = other.end;
        }
        if start < range.end {
            missing.push(start..range.end);
        }
        missing
    }

    /// Takes `range` out.
    pub fn remove(&self, range: Range<usize>) {
        let mut ranges = self.0.lock();
        let first = ranges.partition_point(|other| other.end <= range.start);
        let last = ranges.partition_point(|other| other.start < range.end);
        if first >= last {
            return;
        }
        let (before, after) = (ranges[first].start..range.start, range.end..ranges[last - 1].end);
        let rest = [before, after].into_iter().filter(|part| part.start < part.end);
        ranges.splice(first..last, rest);
    }

    /// All of them.
    pub fn snapshot(&self) -> Vec<Range<usize>> {
        self.0.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn pages(ranges: &[Range<usize>]) -> BTreeSet<usize> {
        ranges.iter().flat_map(Clone::clone).collect()
    }

    proptest::proptest! {
        #[test]
        fn it_holds_what_a_set_of_pages_holds(
            steps in proptest::collection::vec((0usize..60, 1usize..20, proptest::bool::ANY), 1..40)
        ) {
            let ranges = Ranges::default();
            let mut model = BTreeSet::new();
            for (start, len, add) in steps {
                let range = start..start + len;
                let missing: BTreeSet<usize> = range.clone().filter(|page| !model.contains(page)).collect();
                proptest::prop_assert_eq!(pages(&ranges.missing(range.clone())), missing);
                if add {
                    ranges.insert(range.clone());
                    model.extend(range);
                } else {
                    ranges.remove(range.clone());
                    model.retain(|page| !range.contains(page));
                }
                let now = ranges.snapshot();
                proptest::prop_assert!(now.windows(2).all(|pair| pair[0].end <= pair[1].start));
                proptest::prop_assert_eq!(&pages(&now), &model);
                for page in 0..80 {
                    proptest::prop_assert_eq!(ranges.containing(page).is_some(), model.contains(&page));
                }
            }
        }
    }
}
