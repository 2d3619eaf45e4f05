//! The kernel's swap allocator test (`tools/mm/thp_swap_allocator_test.c`), operation by operation.
//!
//! An area is written and paged out. Then, in each round, random pages or aligned pieces of it are
//! touched, pieces of it are discarded and written again, and everything is paged out. A second
//! area of small folios may take part. The random numbers are those of the C library, so the pieces
//! are those of every run of the test.

use super::{MIB, Round, Rounds};
use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::Access;
use crate::random::GlibcRand;
use crate::scenario::Within;
use crate::schedule::Took;
use foliomem_types::units::{CpuNumber, MAX_ORDER, Order, PageNumber};
use serde::Deserialize;
use std::ops::Range;

/// The order of the pieces that are discarded, or touched with `aligned`: 64 KiB.
const PIECE: Order = Order::new(4).unwrap();

/// The swap allocator test and its parameters.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapAllocator {
    /// Size of the area.
    area_mib: Within<1, 65536>,
    /// Amount touched, and amount discarded, in each round.
    round_mib: Within<1, 65536>,
    /// Size of an area of small folios, 0 for none; 1/4 of it is touched in each round (`-s`).
    small_area_mib: Within<0, 65536>,
    /// Whether to touch aligned pieces of 64 KiB instead of pages (`-a`).
    aligned: bool,
    rounds: Within<1, 100_000>,
}

impl SwapAllocator {
    /// Returns the pages of address space.
    pub fn pages(&self) -> u32 {
        self.small_area().end.0 as u32
    }

    fn area(&self) -> Range<PageNumber> {
        let start = PageNumber(MAX_ORDER.pages().into());
        start..start.offset(self.area_mib.get() * MIB)
    }

    fn small_area(&self) -> Range<PageNumber> {
        let start = self.area().end.offset(MAX_ORDER.pages()).head(MAX_ORDER);
        start..start.offset(self.small_area_mib.get() * MIB)
    }

    /// Runs the workload on one CPU.
    pub fn run(&self, lab: &mut Lab) -> Result<(Vec<Round>, Took), LabError> {
        let (area, small) = (self.area(), self.small_area());
        let mut rand = GlibcRand::default();
        let mut at_random = |area: &Range<PageNumber>, order: Order| {
            let pieces = (area.end.0 - area.start.0) as u32 / order.pages();
            area.start.offset(rand.draw() % pieces * order.pages()).folio(order)
        };
        lab.begin(CpuNumber(0), 0);
        lab.map(area.clone());
        // A mapping for each page has the effect of MADV_NOHUGEPAGE.
        (small.start.0..small.end.0).for_each(|page| lab.map(PageNumber(page).folio(Order::ZERO)));
        let all = [area.clone(), small.clone()];
        for area in &all {
            lab.touch_all(area.clone(), Access::Write)?;
        }
        all.iter().for_each(|area| lab.page_out(area.clone()));
        let mut rounds = Rounds::new(lab);
        for _ in 0..self.rounds.get() {
            let touched = if self.aligned { PIECE } else { Order::ZERO };
            for _ in 0..self.round_mib.get() * MIB / touched.pages() {
                lab.touch_all(at_random(&area, touched), Access::Write)?;
            }
            for _ in 0..self.round_mib.get() * MIB / PIECE.pages() {
                let piece = at_random(&area, PIECE);
                lab.discard(piece.clone());
                lab.touch_all(piece, Access::Write)?;
            }
            for _ in 0..self.small_area_mib.get() * MIB / 4 {
                lab.touch_all(at_random(&small, Order::ZERO), Access::Write)?;
            }
            all.iter().for_each(|area| lab.page_out(area.clone()));
            lab.note_swapped();
            rounds.end(lab);
        }
        let mut took = Took::default();
        took.add(0, lab.end(0));
        Ok((rounds.rounds, took))
    }
}
