//! Memory of the agent itself, which is never managed: its heap, image, arena and stacks.
//!
//! A small list that only grows. The agent's heap reports its range through a function, because it
//! is reserved at the first allocation.

use foliomem_core::sync::Mutex;
use std::ops::Range;

/// See the module.
pub struct OwnMemory {
    heap: fn() -> Range<usize>,
    ranges: Mutex<Vec<Range<usize>>>,
}

impl OwnMemory {
    /// The agent's memory so far: what `heap` reports.
    pub fn new(heap: fn() -> Range<usize>) -> OwnMemory {
        OwnMemory { heap, ranges: Mutex::new(Vec::new()) }
    }

    /// Adds a range.
    pub fn add(&self, range: Range<usize>) {
        self.ranges.lock().push(range);
    }

    /// The parts of `range` that are not the agent's.
    pub fn outside(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut rest = vec![range];
        let ranges = self.ranges.lock();
        for own in ranges.iter().cloned().chain([(self.heap)()]) {
            rest = rest.into_iter().flat_map(|part| cut(part, &own)).collect();
        }
        rest
    }
}

/// What is left of `part` without `own`.
fn cut(part: Range<usize>, own: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (before, after) = if own.start >= own.end || own.end <= part.start || part.end <= own.start {
        (part.clone(), part.end..part.end)
    } else {
        (part.start..own.start.max(part.start), own.end.min(part.end)..part.end)
    };
    [before, after].into_iter().filter(|rest| rest.start < rest.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "lists of ranges are what is compared")]
    fn own_memory_is_cut_out() {
        let own = OwnMemory::new(|| 100..200);
        own.add(300..400);
        assert_eq!(own.outside(0..50), [0..50]);
        assert_eq!(own.outside(0..500), [0..100, 200..300, 400..500]);
        assert_eq!(own.outside(150..350), [200..300]);
        assert_eq!(own.outside(300..400), []);
        assert_eq!(own.outside(390..410), [400..410]);
    }
}
