//! One process that computes: memory that grows, of which some is looked at again, until it exits.
//!
//! Fitted to gcc 12's `cc1` on C files of Linux, sampled by `/proc/PID/smaps` and `clear_refs` every 50 ms of its CPU time
//! (docs/lab.md has the figures): how mappings grow, what is referenced again, how fast it goes.
//! - The heap grows by `brk` in steps of 33 pages. A folio must lie inside what is mapped when it is first touched, so that
//!   the steps leave single pages.
//! - The rest, gcc's collector, asks for 2 MiB at a time. Linux looks for room from the top down, and since 6.7 aligns
//!   anonymous mappings of whole 2 MiB to 2 MiB, so that each lies right below the one before and merges with it. Each is
//!   touched upwards.
//! - Data of libraries, stacks and the like are single pages in small mappings.
//! - A tenth of what there will be is looked at all the time, what is youngest often, the rest now and then.

use super::MIB;
use crate::error::LabError;
use crate::lab::Lab;
use crate::random::Random;
use foliomem_core::units::{MAX_ORDER, PageNumber};
use std::ops::Range;

/// What gcc's collector maps at a time.
const CHUNK_PAGES: u32 = MAX_ORDER.pages();
/// What `malloc` asks for beyond what it needs, and a page.
const BRK_PAGES: u32 = 33;
/// Small mappings are this large.
const SMALL_PAGES: u32 = 5;
/// What is looked at is a piece of so many pages, of which some are touched.
const PIECE_PAGES: u32 = 16;
const PIECE_TOUCHES: u32 = 12;
/// Pieces looked at in a slice: of what is always in use, of the youngest 2 MiB, of all.
const RECENT_PIECES: u32 = 3;
const ANY_PIECES: u32 = 3;
const RECENT_PAGES: u32 = 2 * MIB;
/// What is always in use, of what there will be, and in how many slices all of it is looked at.
const CORE_PERCENT: u32 = 10;
const CORE_SLICES: u32 = 10;
/// How long a slice is, without faults.
pub const SLICE_NS: u64 = 1_000_000;
/// Growth in a slice: 100 MiB a second.
const GROWTH_PAGES: u32 = 100 * MIB / 1000;
/// While the first so many per cent are made, at twice the speed.
const EARLY_PERCENT: u32 = 70;

/// A mapping that grows.
#[derive(Clone, Debug)]
struct Area {
    /// Where it began.
    edge: PageNumber,
    growth: Growth,
    mapped_pages: u32,
    touched_pages: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Growth {
    /// Upwards, by [`BRK_PAGES`].
    Brk,
    /// Downwards, by [`CHUNK_PAGES`] from where such a chunk may begin.
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

    /// The page that is touched as the one of that number.
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
        lab.touch(self.page(self.touched_pages), true)?;
        self.touched_pages += 1;
        Ok(())
    }

    /// Touches a piece around the page of that number.
    fn look_at(&self, lab: &mut Lab, page: u32, random: &mut Random) -> Result<(), LabError> {
        let first = page & !(PIECE_PAGES - 1);
        for _ in 0..PIECE_TOUCHES {
            let page = first + random.below(PIECE_PAGES.into()) as u32;
            if page < self.touched_pages {
                lab.touch(self.page(page), random.below(3) == 0)?;
            }
        }
        Ok(())
    }
}

/// What a process is like.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// What it comes to.
    pub pages: u32,
    /// Of that, the part that `brk` gives.
    pub heap_percent: u32,
    /// Pages in small mappings.
    pub small_pages: u32,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Process {
    kind: Kind,
    small: Range<PageNumber>,
    areas: [Area; 2],
    core_at: u32,
    random: Random,
}

impl Process {
    /// Address space it needs.
    pub fn address_pages(kind: Kind) -> u32 {
        // Beside what it comes to: what is mapped and not touched yet, and where a chunk may not begin.
        2 * kind.small_pages + kind.pages + 2 * CHUNK_PAGES + BRK_PAGES + 3 * PIECE_PAGES
    }

    /// A process in the address space from `base` on. It has nothing but its small mappings.
    pub fn start(lab: &mut Lab, base: PageNumber, kind: Kind, mut random: Random) -> Result<Process, LabError> {
        let small = base..base.offset(kind.small_pages / SMALL_PAGES * (SMALL_PAGES + 1));
        small_mappings(&small).try_for_each(|mapping| {
            lab.map(mapping.clone());
            lab.touch_all(mapping, true)
        })?;
        // Where the loader puts things is random by pages.
        let heap_start = small.end.offset(1 + random.below(16) as u32);
        let chunks_end = base.offset(Self::address_pages(kind)).head(MAX_ORDER);
        let areas = [Area::new(heap_start, Growth::Brk), Area::new(chunks_end, Growth::Chunks)];
        Ok(Process { kind, small, areas, core_at: 0, random })
    }

    /// Works for a slice; false when it has all it will have.
    pub fn work(&mut self, lab: &mut Lab) -> Result<bool, LabError> {
        lab.machine().compute(SLICE_NS);
        let grown: u32 = self.areas.iter().map(|area| area.touched_pages).sum();
        let early = grown < self.kind.pages * EARLY_PERCENT / 100;
        let growth = GROWTH_PAGES * if early { 2 } else { 1 };
        for _ in 0..growth.min(self.kind.pages.saturating_sub(grown)).div_ceil(PIECE_PAGES) {
            let area = self.any_area();
            (0..PIECE_PAGES).try_for_each(|_| self.areas[area].grow(lab))?;
        }
        let core_pages = self.kind.pages * CORE_PERCENT / 100;
        for _ in 0..core_pages.div_ceil(PIECE_PAGES * CORE_SLICES) {
            self.core_at = (self.core_at + PIECE_PAGES) % core_pages.max(1);
            let area = self.any_area();
            let share = if area == 0 { self.kind.heap_percent } else { 100 - self.kind.heap_percent };
            self.areas[area].look_at(lab, self.core_at * share / 100, &mut self.random)?;
        }
        for index in 0..RECENT_PIECES + ANY_PIECES {
            let area = self.any_area();
            let touched = self.areas[area].touched_pages;
            let among = if index < RECENT_PIECES { touched.min(RECENT_PAGES) } else { touched };
            if among > 0 {
                let page = touched - 1 - self.random.below(among.into()) as u32;
                self.areas[area].look_at(lab, page, &mut self.random)?;
            }
        }
        Ok(grown + growth < self.kind.pages)
    }

    fn any_area(&mut self) -> usize {
        usize::from(self.random.below(100) >= self.kind.heap_percent.into())
    }

    /// Touches the small mappings again: it goes on, or ends.
    pub fn wake_up(&mut self, lab: &mut Lab) -> Result<(), LabError> {
        small_mappings(&self.small).try_for_each(|mapping| lab.touch_all(mapping, false))
    }

    /// Touches the first `percent` of what has grown.
    pub fn go_through(&mut self, lab: &mut Lab, percent: u32) -> Result<(), LabError> {
        let Process { areas, random, .. } = self;
        areas.iter().try_for_each(|area| {
            let pages = area.touched_pages * percent / 100;
            (0..pages).try_for_each(|number| lab.touch(area.page(number), random.below(3) == 0))
        })
    }

    /// All it had is gone.
    pub fn exit(self, lab: &mut Lab) {
        small_mappings(&self.small).for_each(|mapping| lab.unmap(mapping));
        self.areas.iter().filter(|area| area.mapped_pages > 0).for_each(|area| lab.unmap(area.mapping()));
    }
}

/// Of each six pages five are mapped.
fn small_mappings(small: &Range<PageNumber>) -> impl Iterator<Item = Range<PageNumber>> + use<> {
    let starts = (small.start.0..small.end.0).step_by(SMALL_PAGES as usize + 1).map(PageNumber);
    starts.map(|start| start..start.offset(SMALL_PAGES))
}
