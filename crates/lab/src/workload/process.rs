//! One process that computes: memory that grows, of which some is looked at again, until it exits.
//!
//! Fitted to gcc 12's `cc1 -O2` on C files of zstd and ring, sampled every 0.1 s by `/proc/PID/smaps` and `clear_refs`
//! (docs/lab.md has the figures): how mappings grow, what is referenced again, how fast it goes.
//! - The heap grows by `brk` in steps of 33 pages, the rest by mappings of 2 MiB that merge. A folio must lie inside what is
//!   mapped when it is first touched, so that the steps leave single pages.
//! - Data of libraries, stacks and the like are single pages in small mappings.
//! - A tenth of what there will be is looked at all the time, what is youngest often, the rest now and then.

use crate::error::LabError;
use crate::lab::Lab;
use crate::random::Random;
use foliomem_core::units::PageNumber;
use std::ops::Range;

/// Pages in a MiB.
pub const MIB: u32 = 256;
/// A mapping of gcc's collector.
const CHUNK_PAGES: u32 = 512;
/// What `malloc` asks for beyond what it needs, and a page.
const BRK_PAGES: u32 = 33;
/// Small mappings are this large.
const SMALL_PAGES: u32 = 5;
/// What is looked at is a piece of so many pages, of which some are touched.
const PIECE_PAGES: u32 = 16;
const PIECE_TOUCHES: u32 = 4;
/// Pieces looked at in a slice: of what is always in use, of the youngest 2 MiB, of all.
const RECENT_PIECES: u32 = 3;
const ANY_PIECES: u32 = 3;
const RECENT_PAGES: u32 = 2 * MIB;
/// What is always in use, of what there will be, and in how many slices all of it is looked at.
const CORE_PERCENT: u32 = 10;
const CORE_SLICES: u32 = 10;
/// How long a slice is, without faults.
pub const SLICE_NS: u64 = 10_000_000;
/// Growth in a slice: 15 MiB a second.
const GROWTH_PAGES: u32 = 15 * MIB / 100;
/// While the first so many per cent are made, at four times the speed.
const EARLY_PERCENT: u32 = 30;

/// A mapping that grows upwards.
#[derive(Clone, Debug)]
struct Area {
    start: PageNumber,
    step_pages: u32,
    mapped_pages: u32,
    touched_pages: u32,
}

impl Area {
    fn mapping(&self) -> Range<PageNumber> {
        self.start..self.start.offset(self.mapped_pages)
    }

    fn grow(&mut self, lab: &mut Lab) -> Result<(), LabError> {
        if self.touched_pages == self.mapped_pages {
            self.mapped_pages += self.step_pages;
            lab.map(self.mapping());
        }
        lab.touch(self.start.offset(self.touched_pages), true)?;
        self.touched_pages += 1;
        Ok(())
    }

    /// Touches a piece around the page of that number.
    fn look_at(&self, lab: &mut Lab, page: u32, random: &mut Random) -> Result<(), LabError> {
        let first = page & !(PIECE_PAGES - 1);
        for _ in 0..PIECE_TOUCHES {
            let page = first + random.below(PIECE_PAGES.into()) as u32;
            if page < self.touched_pages {
                lab.touch(self.start.offset(page), random.below(3) == 0)?;
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
        let heap = kind.pages * kind.heap_percent / 100;
        2 * kind.small_pages + (kind.pages - heap) + heap + 2 * CHUNK_PAGES + 8 * PIECE_PAGES
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
        let heap_pages = kind.pages * kind.heap_percent / 100 + 2 * BRK_PAGES;
        let rest_start = heap_start.offset(heap_pages + random.below(16) as u32);
        let area = |start, step_pages| Area { start, step_pages, mapped_pages: 0, touched_pages: 0 };
        let areas = [area(heap_start, BRK_PAGES), area(rest_start, CHUNK_PAGES)];
        Ok(Process { kind, small, areas, core_at: 0, random })
    }

    /// Works for a slice; false when it has all it will have.
    pub fn work(&mut self, lab: &mut Lab) -> Result<bool, LabError> {
        lab.machine().spend(SLICE_NS);
        let grown: u32 = self.areas.iter().map(|area| area.touched_pages).sum();
        let early = grown < self.kind.pages * EARLY_PERCENT / 100;
        let growth = GROWTH_PAGES * if early { 4 } else { 1 };
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
