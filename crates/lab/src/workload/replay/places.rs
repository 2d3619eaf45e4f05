//! Places: where the used blocks of a recorded run lie in the one address space of the replay.

use foliomem_types::units::{BLOCK_PAGES, PageNumber};
use std::ops::Range;

/// A block of a process: the process's number and the block's.
pub type Block = (u32, u64);

/// The place of each used block. Blocks are adjacent here exactly if they were adjacent in the run.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Sorted by process and block.
    runs: Vec<BlockRun>,
}

/// Adjacent blocks of a process.
#[derive(Clone, Debug)]
struct BlockRun {
    process: u32,
    blocks: Range<u64>,
    /// The place of the first block.
    place: Place,
}

/// The place of a block: its number in the address space of the replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place(u32);

impl Place {
    /// Returns the place that contains a page of the address space.
    pub fn of(page: PageNumber) -> Place {
        Place((page.0 / BLOCK_PAGES as u64) as u32)
    }

    /// Returns the page with this index in the block.
    pub fn page(self, index: usize) -> PageNumber {
        PageNumber(u64::from(self.0) * BLOCK_PAGES as u64 + index as u64)
    }

    /// Returns these pages of the block.
    pub fn pages(self, part: Range<usize>) -> Range<PageNumber> {
        self.page(part.start)..self.page(part.end)
    }

    /// Returns the place's number.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl Places {
    /// Assigns places to `blocks`, in their order.
    pub fn of(blocks: impl IntoIterator<Item = Block>) -> Places {
        let mut runs: Vec<BlockRun> = Vec::new();
        for (process, block) in blocks {
            match runs.last_mut() {
                Some(last) if (last.process, last.blocks.end) == (process, block) => last.blocks.end += 1,
                last => {
                    let place = Place(last.map_or(1, |last| last.end().0 + 1));
                    runs.push(BlockRun { process, blocks: block..block + 1, place });
                }
            }
        }
        Places { runs }
    }

    /// Returns the place after the last one.
    pub fn end(&self) -> Place {
        self.runs.last().map_or(Place(0), BlockRun::end)
    }

    /// Returns the place of a used block.
    pub fn find(&self, process: u32, block: u64) -> Option<Place> {
        let run = self.runs.get(self.runs.partition_point(|run| run.ends_before(process, block)))?;
        (run.process == process).then(|| run.place_of(block)).flatten()
    }

    /// Iterates over the places of the used blocks in a range, each with its part of the range.
    pub fn parts(
        &self,
        process: u32,
        pages: &Range<PageNumber>,
    ) -> impl Iterator<Item = (Place, Range<usize>)> + use<'_> {
        let (blocks, pages) = (blocks(pages), pages.clone());
        let first = self.runs.partition_point(|run| run.ends_before(process, blocks.start));
        let Range { start, end } = blocks;
        let runs = self.runs[first..].iter().take_while(move |run| (run.process, run.blocks.start) < (process, end));
        runs.flat_map(move |run| {
            let here = run.blocks.start.max(start)..run.blocks.end.min(end);
            let pages = pages.clone();
            here.filter_map(move |block| Some((run.place_of(block)?, part(&pages, block))))
        })
    }
}

impl BlockRun {
    fn end(&self) -> Place {
        Place(self.place.0 + (self.blocks.end - self.blocks.start) as u32)
    }

    /// Returns whether the run ends before that block.
    fn ends_before(&self, process: u32, block: u64) -> bool {
        (self.process, self.blocks.end) <= (process, block)
    }

    fn place_of(&self, block: u64) -> Option<Place> {
        self.blocks.contains(&block).then(|| Place(self.place.0 + (block - self.blocks.start) as u32))
    }
}

/// Returns the blocks that a range overlaps.
pub fn blocks(pages: &Range<PageNumber>) -> Range<u64> {
    pages.start.0 / BLOCK_PAGES as u64..pages.end.0.div_ceil(BLOCK_PAGES as u64)
}

/// Returns the part of a block that a range covers.
pub fn part(pages: &Range<PageNumber>, block: u64) -> Range<usize> {
    let within = |page: PageNumber| page.0.saturating_sub(block * BLOCK_PAGES as u64).min(BLOCK_PAGES as u64) as usize;
    within(pages.start)..within(pages.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_blocks_stay_adjacent() {
        let blocks = [(0, 7), (0, 8), (0, 20), (3, 21), (3, 22)];
        let places = Places::of(blocks);
        let found = blocks.map(|(process, block)| places.find(process, block).map(Place::index));
        assert_eq!(found, [1, 2, 4, 6, 7].map(Some));
        assert_eq!(places.end(), Place(8));
        for (process, block) in [(0, 6), (0, 9), (0, 21), (1, 7), (3, 20), (3, 23), (4, 21)] {
            assert_eq!(places.find(process, block), None);
        }
        let page = |block: u64, index: u64| PageNumber(block * BLOCK_PAGES as u64 + index);
        let parts = |process, from, to| {
            places.parts(process, &(from..to)).map(|(place, part)| (place.index(), part)).collect::<Vec<_>>()
        };
        assert_eq!(parts(0, page(8, 5), page(20, 3)), [(2, 5..BLOCK_PAGES), (4, 0..3)]);
        assert_eq!(parts(3, page(0, 0), PageNumber(u64::MAX)), [(6, 0..BLOCK_PAGES), (7, 0..BLOCK_PAGES)]);
        assert_eq!(parts(1, page(7, 0), page(30, 0)), []);
    }
}
