//! Ranges that the program discarded recently.
//!
//! The kernel reports a discard (MADV_DONTNEED, MADV_FREE) before it drops the pages. The agent
//! must not move those pages until the program's thread dropped them: they would return with their
//! old content. The kernel does not report when that is done, so the agent leaves a discarded range
//! alone for [`GRACE_NS`]. Pages that remain after that (MADV_FREE leaves pages until the kernel
//! wants them) may be managed again.
//!
//! The set holds disjoint intervals by their start, each with the time of its last discard. Lock:
//! one leaf lock.

use crate::sync::Mutex;
use foliomem_types::units::PageNumber;
use std::collections::BTreeMap;
use std::ops::Range;

/// Time in nanoseconds after which a program that reported a discard has dropped the pages.
pub const GRACE_NS: u64 = 2_000_000_000;

#[derive(Debug, Default)]
struct Intervals {
    by_start: BTreeMap<PageNumber, (PageNumber, u64)>,
    /// No interval is due before this time.
    next_due_ns: u64,
}

/// The set of recently discarded ranges.
#[derive(Debug, Default)]
pub struct Discards(Mutex<Intervals>);

impl Intervals {
    /// Returns the intervals that overlap `range`, by start.
    fn overlapping(&self, range: &Range<PageNumber>) -> Vec<(Range<PageNumber>, u64)> {
        let before = self.by_start.range(..range.start).next_back();
        let inside = self.by_start.range(range.clone());
        let all = before.into_iter().chain(inside).map(|(&start, &(end, since_ns))| (start..end, since_ns));
        all.filter(|(interval, _)| interval.end > range.start).collect()
    }
}

impl Discards {
    /// Records that the program discards `range` now.
    pub fn add(&self, range: Range<PageNumber>, now_ns: u64) {
        let mut intervals = self.0.lock();
        for (old, since_ns) in intervals.overlapping(&range) {
            intervals.by_start.remove(&old.start);
            for rest in [old.start..range.start, range.end..old.end].into_iter().filter(|rest| rest.start < rest.end) {
                intervals.by_start.insert(rest.start, (rest.end, since_ns));
            }
        }
        if intervals.by_start.is_empty() {
            intervals.next_due_ns = now_ns + GRACE_NS;
        }
        intervals.by_start.insert(range.start, (range.end, now_ns));
    }

    /// Returns the parts of `range` that were not discarded recently.
    pub fn outside(&self, range: Range<PageNumber>) -> Vec<Range<PageNumber>> {
        let mut parts = Vec::new();
        let mut start = range.start;
        for (gone, _) in self.0.lock().overlapping(&range) {
            if start < gone.start {
                parts.push(start..gone.start);
            }
            start = gone.end;
        }
        if start < range.end {
            parts.push(start..range.end);
        }
        parts
    }

    /// Removes and returns the ranges whose grace time is over.
    pub fn take_due(&self, now_ns: u64) -> Vec<Range<PageNumber>> {
        let mut intervals = self.0.lock();
        if now_ns < intervals.next_due_ns || intervals.by_start.is_empty() {
            return Vec::new();
        }
        let due = |since_ns: u64| now_ns.saturating_sub(since_ns) >= GRACE_NS;
        let all = std::mem::take(&mut intervals.by_start);
        let (taken, kept): (Vec<_>, Vec<_>) = all.into_iter().partition(|&(_, (_, since_ns))| due(since_ns));
        let oldest_ns = kept.iter().map(|&(_, (_, since_ns))| since_ns).min().unwrap_or(now_ns);
        intervals.by_start = kept.into_iter().collect();
        // A full search is expensive, so at least an eighth of the grace time lies between two.
        intervals.next_due_ns = (oldest_ns + GRACE_NS).max(now_ns + GRACE_NS / 8);
        taken.into_iter().map(|(start, (end, _))| start..end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn discards_match_a_map_of_pages(
            steps in prop::collection::vec((0u64..60, 1u64..20, 0u64..GRACE_NS), 1..40)
        ) {
            let (discards, mut model, mut now_ns) = (Discards::default(), BTreeMap::new(), 0);
            for (start, pages, passed_ns) in steps {
                now_ns += passed_ns;
                let range = PageNumber(start)..PageNumber(start + pages);
                let outside: Vec<u64> = discards.outside(range.clone()).into_iter().flat_map(|part| part.start.0..part.end.0).collect();
                let wanted: Vec<u64> = (start..start + pages).filter(|page| !model.contains_key(page)).collect();
                prop_assert_eq!(outside, wanted);
                discards.add(range, now_ns);
                model.extend((start..start + pages).map(|page| (page, now_ns)));
                for page in discards.take_due(now_ns).into_iter().flat_map(|part| part.start.0..part.end.0) {
                    let since_ns = model.remove(&page).expect("a discarded page");
                    prop_assert!(now_ns - since_ns >= GRACE_NS);
                }
            }
            let late_ns = now_ns + 3 * GRACE_NS;
            let rest: u64 = discards.take_due(late_ns).into_iter().map(|part| part.end.0 - part.start.0).sum();
            prop_assert_eq!(rest, model.len() as u64);
        }
    }
}
