//! A computing process: its memory grows, and parts of it are touched again, until it exits.
//!
//! The model is fitted to gcc 12's `cc1` on C files of Linux, sampled by `/proc/PID/smaps` and
//! `clear_refs` every 50 ms of its CPU time (docs/lab/models.md has the figures): how mappings
//! grow, what is referenced again, how fast.
//! - The heap grows by `brk` in steps of 33 pages. A folio must lie inside the mapping when it is
//!   first touched, so the steps leave single pages.
//! - The rest, gcc's collector, maps 2 MiB at a time. Linux searches for room from the top down,
//!   and since 6.7 aligns anonymous mappings of whole 2 MiB to 2 MiB, so each lies right below the
//!   previous one and merges with it. Each is touched upwards.
//! - Data of libraries, stacks and the like are single pages in small mappings.
//! - Repeated touches were traced instruction by instruction (six compilers of 28 to 131 MiB). Of
//!   the blocks of 64 KiB whose last visit was g slices ago, 0.8/g are visited, whatever their age
//!   and the size of the compiler. Of the pages of a visited block whose last touch was n visits
//!   ago, 0.7/n are touched.

use super::MIB;
use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::Access;
use crate::random::Random;
use foliomem_types::units::{MAX_ORDER, PageNumber};
use std::ops::Range;

/// Pages that gcc's collector maps at a time.
const CHUNK_PAGES: u32 = MAX_ORDER.pages();
/// Pages that `malloc` requests beyond its need, and one more.
const BRK_PAGES: u32 = 33;
/// Pages of a small mapping.
const SMALL_PAGES: u32 = 5;
/// Pages of a block, the unit of repeated visits, of which some pages are touched.
const BLOCK_PAGES: u32 = 16;
/// Length of a slice in nanoseconds, without faults.
pub const SLICE_NS: u64 = 2_000_000;
/// Slices for each MiB of growth: 170 MiB a second on average. At half time a process has three
/// quarters of its memory.
const SLICES_PER_MIB: u32 = 3;
/// Percentage of blocks, and of pages of a visited block, touched again if the previous slice or
/// visit touched them.
const BLOCK_PERCENT: u32 = 80;
const PAGE_PERCENT: u32 = 70;
/// Percentage of touches that write.
const WRITE_PERCENT: u32 = 33;

fn random_access(random: &mut Random) -> Access {
    if random.has_chance(WRITE_PERCENT, 1) { Access::Write } else { Access::Read }
}

/// A growing mapping.
#[derive(Clone, Debug)]
struct Area {
    /// The start of the growth.
    edge: PageNumber,
    growth: Growth,
    mapped_pages: u32,
    touched_pages: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Growth {
    /// Upwards, by [`BRK_PAGES`].
    Brk,
    /// Downwards, by [`CHUNK_PAGES`], from an aligned address.
    Chunks,
}

impl Area {
    fn new(edge: PageNumber, growth: Growth) -> Area {
        Area { edge, growth, mapped_pages: 0, touched_pages: 0 }
    }

    fn mapping(&self) -> Range<PageNumber> {
        match self.growth {
            Growth::Brk => self.edge..self.edge.offset(self.mapped_pages),
            Growth::Chunks => PageNumber(self.edge.0 - u64::from(self.mapped_pages))..self.edge,
        }
    }

    /// Returns the page that is touched as number `number`.
    fn page(&self, number: u32) -> PageNumber {
        match self.growth {
            Growth::Brk => self.edge.offset(number),
            Growth::Chunks => {
                let chunks = u64::from(number / CHUNK_PAGES + 1) * u64::from(CHUNK_PAGES);
                PageNumber(self.edge.0 - chunks).offset(number % CHUNK_PAGES)
            }
        }
    }

    fn grow(&mut self, lab: &mut Lab) -> Result<(), LabError> {
        if self.touched_pages == self.mapped_pages {
            self.mapped_pages += if self.growth == Growth::Brk { BRK_PAGES } else { CHUNK_PAGES };
            lab.map(self.mapping());
        }
        lab.touch(self.page(self.touched_pages), Access::Write)?;
        self.touched_pages += 1;
        Ok(())
    }
}

/// A block of pages that were touched in a row, and the times of their touches.
#[derive(Clone, Debug)]
struct Block {
    area: usize,
    /// The number of the block's first page in the area.
    first: u32,
    /// The slice of the last visit, and the number of visits.
    slice: u32,
    looks: u32,
    /// The last visit that touched each page.
    page_looks: [u32; BLOCK_PAGES as usize],
}

impl Block {
    /// Returns whether the block is visited now; the chance falls with the time since the last
    /// visit.
    fn is_due(&self, slice: u32, random: &mut Random) -> bool {
        random.has_chance(BLOCK_PERCENT, slice - self.slice)
    }

    /// Visits the block: touches some of its pages.
    fn look_at(&mut self, lab: &mut Lab, area: &Area, slice: u32, random: &mut Random) -> Result<(), LabError> {
        (self.slice, self.looks) = (slice, self.looks + 1);
        for (number, look) in (self.first..area.touched_pages).zip(&mut self.page_looks) {
            if random.has_chance(PAGE_PERCENT, self.looks - *look) {
                *look = self.looks;
                lab.touch(area.page(number), random_access(random))?;
            }
        }
        Ok(())
    }
}

/// The parameters of a process.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Final number of pages.
    pub pages: u32,
    /// The percentage of them that comes from `brk`.
    pub heap_percent: u32,
    /// Number of pages in small mappings.
    pub small_pages: u32,
}

/// A simulated process.
#[derive(Clone, Debug)]
pub struct Process {
    kind: Kind,
    small: Range<PageNumber>,
    areas: [Area; 2],
    blocks: Vec<Block>,
    slice: u32,
    random: Random,
}

impl Process {
    /// Returns the pages of address space that a process needs.
    pub fn address_pages(kind: Kind) -> u32 {
        // The final pages, plus pages mapped but not yet touched, plus alignment.
        2 * kind.small_pages + kind.pages + 2 * CHUNK_PAGES + BRK_PAGES + 3 * BLOCK_PAGES
    }

    /// Starts a process in the address space from `base` on. It has only its small mappings.
    pub fn start(lab: &mut Lab, base: PageNumber, kind: Kind, mut random: Random) -> Result<Process, LabError> {
        let small = base..base.offset(kind.small_pages / SMALL_PAGES * (SMALL_PAGES + 1));
        small_mappings(&small).try_for_each(|mapping| {
            lab.map(mapping.clone());
            lab.touch_all(mapping, Access::Write)
        })?;
        // The loader's placement is random in pages.
        let heap_start = small.end.offset(1 + random.below(16) as u32);
        let chunks_end = base.offset(Self::address_pages(kind)).head(MAX_ORDER);
        let areas = [Area::new(heap_start, Growth::Brk), Area::new(chunks_end, Growth::Chunks)];
        Ok(Process { kind, small, areas, blocks: Vec::new(), slice: 0, random })
    }

    /// Works for a slice; returns false when the process has all its memory.
    pub fn work(&mut self, lab: &mut Lab) -> Result<bool, LabError> {
        lab.machine().compute(SLICE_NS);
        self.slice += 1;
        let Process { areas, blocks, slice, random, .. } = self;
        for block in blocks {
            if block.is_due(*slice, random) {
                block.look_at(lab, &areas[block.area], *slice, random)?;
            }
        }
        let slices = (self.kind.pages * SLICES_PER_MIB / MIB).max(1);
        let missing = u64::from(self.kind.pages) * u64::from(slices - self.slice).pow(2) / u64::from(slices).pow(2);
        let wanted = self.kind.pages - missing as u32;
        for _ in self.blocks.len() as u32..wanted.div_ceil(BLOCK_PAGES) {
            let area = usize::from(self.random.below(100) >= self.kind.heap_percent.into());
            let first = self.areas[area].touched_pages;
            (0..BLOCK_PAGES).try_for_each(|_| self.areas[area].grow(lab))?;
            self.blocks.push(Block { area, first, slice: self.slice, looks: 0, page_looks: [0; BLOCK_PAGES as usize] });
        }
        Ok(self.slice < slices)
    }

    /// Touches the small mappings again, because the process continues or ends.
    pub fn wake_up(&mut self, lab: &mut Lab) -> Result<(), LabError> {
        small_mappings(&self.small).try_for_each(|mapping| lab.touch_all(mapping, Access::Read))
    }

    /// Touches the first `percent` of the grown memory.
    pub fn go_through(&mut self, lab: &mut Lab, percent: u32) -> Result<(), LabError> {
        let Process { areas, random, .. } = self;
        areas.iter().try_for_each(|area| {
            let pages = area.touched_pages * percent / 100;
            (0..pages).try_for_each(|number| lab.touch(area.page(number), random_access(random)))
        })
    }

    /// Unmaps all memory of the process.
    pub fn exit(self, lab: &mut Lab) {
        small_mappings(&self.small).for_each(|mapping| lab.unmap(mapping));
        self.areas.iter().filter(|area| area.mapped_pages > 0).for_each(|area| lab.unmap(area.mapping()));
    }
}

/// Iterates over the small mappings: five of every six pages are mapped.
fn small_mappings(small: &Range<PageNumber>) -> impl Iterator<Item = Range<PageNumber>> + use<> {
    let starts = (small.start.0..small.end.0).step_by(SMALL_PAGES as usize + 1).map(PageNumber);
    starts.map(|start| start..start.offset(SMALL_PAGES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;
    use crate::shipped;

    /// Checks against `mm/mlock.c`, 62 MiB: at the end, a slice of 2 ms visits 15 to 24 MiB of
    /// blocks and touches 4 to 6 MiB of pages.
    #[test]
    fn a_compiler_visits_its_memory_like_traced_ones() {
        let text = shipped::find("kernel-build-roomy").unwrap().text;
        let mut lab = Scenario::parse_with("process", text, &[]).unwrap().lab(None);
        let kind = Kind { pages: 62 * MIB, heap_percent: 9, small_pages: 55 };
        let mut process = Process::start(&mut lab, PageNumber(0), kind, Random::new(1)).unwrap();
        let slices = 62 * SLICES_PER_MIB;
        (0..slices / 2).for_each(|_| assert!(process.work(&mut lab).unwrap()));
        let grown = process.blocks.len() as u32 * BLOCK_PAGES;
        assert!((74..77).contains(&(grown * 100 / kind.pages)), "{grown} pages half-way");
        while process.work(&mut lab).unwrap() {}
        assert_eq!(process.slice, slices);
        assert_eq!(process.blocks.len() as u32, kind.pages.div_ceil(BLOCK_PAGES));
        let looked_at = process.blocks.iter().filter(|block| block.slice == slices && block.looks > 0);
        let touched = |block: &Block| block.page_looks.iter().filter(|&&look| look == block.looks).count() as u32;
        let (blocks, pages) = looked_at.fold((0, 0), |(blocks, pages), block| (blocks + 1, pages + touched(block)));
        assert!((15 * MIB..24 * MIB).contains(&(blocks * BLOCK_PAGES)), "{blocks} blocks");
        assert!((4 * MIB..6 * MIB).contains(&pages), "{pages} pages");
    }
}
