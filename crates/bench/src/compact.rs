//! `foliomem bench compact`: the cost of making a run of frames if none is free, by compaction
//! variant and order.
//!
//! An arena of 256 MiB is filled with folios of all orders; each order has about as many pages as
//! any other. Small folios (up to 32 KiB), chosen at random, are freed until a quarter is free.
//! Freeing and refilling then repeats, so that free frames are scattered. One page in a thousand, a
//! folio of its own, is pinned. Then runs are requested until half of the free frames are in use. A
//! request that a free run satisfies costs nothing and is not counted. A request that no compaction
//! could satisfy (`World::is_possible`) ends the measurement.
//!
//! The compactor is the engine's ([`foliomem_core::compaction`]). The frames exist only as notes:
//! moving one costs as much as noting its new frame, which is all that the engine does for a
//! resident folio. All variants use one seed.

use crate::Error;
use foliomem_core::compaction::{Compactor, Occupant, Occupants, Variant};
use foliomem_core::homes::Homes;
use foliomem_types::counters::Counters;
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The default orders to measure.
pub const ORDERS: [u8; 2] = [4, 9];
const FRAMES: u32 = 65536;
const FREE_FRAMES: u32 = FRAMES / 4;
/// Number of times that an eighth of the free frames is freed and refilled.
const CHURNS: u32 = 16;
const PINNED_PAGES: u32 = FRAMES / 1000;
/// Order of the largest folios that are freed.
const SMALL: Order = match Order::new(3) {
    Some(order) => order,
    None => unreachable!(),
};
/// Arenas of a row; each has its own seed.
const ROUNDS: u64 = 8;

/// One variant and order, measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The variant, as on the command line.
    pub variant: String,
    /// Order of the requested runs.
    pub order: u8,
    /// Share of the compactions that made a run. A run was possible in each.
    pub success_rate: f64,
    /// Pages moved by all compactions for each run made; `None` without a run.
    pub moved_pages_per_success: Option<f64>,
    /// Microseconds of all compactions for each run made; `None` without a run.
    pub us_per_success: Option<f64>,
    /// Pages of folios split by all compactions, for each run made; `None` without a run.
    pub split_pages_per_success: Option<f64>,
}

/// The combinations to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Variants.
    pub variants: Vec<Variant>,
    /// Orders.
    pub orders: Vec<Order>,
}

/// Measures and calls `progress` with each row.
///
/// # Errors
/// Fails if the frame counts are wrong afterwards.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    for &order in &options.orders {
        for &variant in &options.variants {
            let row = measure(variant, order)?;
            progress(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

/// A xorshift generator; its numbers are random enough here.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u32) -> u32 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u32
    }

    /// Returns an order of `most` or less. Each order is half as likely as the one below, so every
    /// order gets as many pages.
    fn order(&mut self, most: Order) -> Order {
        let drawn = Order::all().nth(self.next().trailing_zeros() as usize);
        drawn.filter(|&order| order <= most).unwrap_or(Order::ZERO)
    }
}

/// The content of a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Note {
    Free,
    Folio { run: FrameRun, pinned: bool },
}

/// The operations on the notes.
struct Notes {
    frames: Vec<Note>,
    split_pages: u64,
}

impl Notes {
    fn note(&mut self, run: FrameRun, note: Note) {
        self.frames[run.head.0 as usize..][..run.frames() as usize].fill(note);
    }
}

struct World {
    homes: Homes,
    notes: RefCell<Notes>,
    random: Random,
}

impl World {
    fn new(seed: u64) -> World {
        let notes = Notes { frames: vec![Note::Free; FRAMES as usize], split_pages: 0 };
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut world = World { homes: Homes::new(FRAMES), notes: RefCell::new(notes), random };
        world.fill_to(0, MAX_ORDER);
        world.free_to(FREE_FRAMES);
        for _ in 0..CHURNS {
            world.free_to(FREE_FRAMES + FREE_FRAMES / 8);
            world.fill_to(FREE_FRAMES, SMALL);
        }
        let mut pinned = 0;
        while pinned < PINNED_PAGES {
            let frame = world.random.below(FRAMES);
            let note = &mut world.notes.borrow_mut().frames[frame as usize];
            if let Note::Folio { run, pinned: was @ false } = note
                && run.order == Order::ZERO
            {
                *was = true;
                pinned += 1;
            }
        }
        world
    }

    /// Allocates a free run of `order` for a folio.
    fn take(&self, order: Order) -> bool {
        let Some(run) = self.homes.alloc_empty(order) else { return false };
        self.notes.borrow_mut().note(run, Note::Folio { run, pinned: false });
        true
    }

    /// Allocates folios of random orders up to `most` until at most `frames` frames are free.
    fn fill_to(&mut self, frames: u32, most: Order) {
        while self.homes.empty_frames() > frames {
            let wanted = self.random.order(most);
            Order::all().rev().filter(|&order| order <= wanted).any(|order| self.take(order));
        }
    }

    /// Frees folios until `frames` are free.
    fn free_to(&mut self, frames: u32) {
        while self.homes.empty_frames() < frames {
            let frame = self.random.below(FRAMES) as usize;
            let note = self.notes.borrow().frames[frame];
            if let Note::Folio { run, pinned: false } = note
                && run.order <= SMALL
            {
                self.notes.borrow_mut().note(run, Note::Free);
                self.homes.free_empty(run);
            }
        }
    }

    /// Returns whether compaction can make a run of `order`: a naturally aligned run has nothing
    /// pinned and no folio of `order` or above, and its folios fit elsewhere.
    fn is_possible(&self, order: Order) -> bool {
        let notes = self.notes.borrow();
        let free = self.homes.empty_frames();
        notes.frames.chunks_exact(order.pages() as usize).any(|block| {
            let movable = |note: &Note| match note {
                Note::Free => true,
                Note::Folio { run, pinned } => !pinned && run.order < order,
            };
            let free_here = block.iter().filter(|&&note| note == Note::Free).count() as u32;
            block.iter().all(movable) && order.pages() - free_here <= free - free_here
        })
    }

    fn check(&self) -> Result<(), Error> {
        self.homes.check();
        let notes = self.notes.borrow();
        let wrong =
            (0..).zip(&notes.frames).find(|&(frame, &note)| (note == Note::Free) != self.homes.is_free(Frame(frame)));
        wrong
            .map_or(Ok(()), |(frame, _)| Err(Error::WrongResult(format!("frame {frame} is free and used, or neither"))))
    }
}

impl Occupants for World {
    fn occupant(&self, frame: Frame) -> Option<Occupant> {
        match self.notes.borrow().frames[frame.0 as usize] {
            Note::Folio { run, pinned: false } => Some(Occupant::Folio(run)),
            _ => None,
        }
    }

    fn migrate(&self, from: FrameRun, to: FrameRun) -> bool {
        let mut notes = self.notes.borrow_mut();
        notes.note(from, Note::Free);
        notes.note(to, Note::Folio { run: to, pinned: false });
        self.homes.free_empty(from);
        true
    }

    fn split(&self, run: FrameRun, to: Order) -> bool {
        let mut notes = self.notes.borrow_mut();
        notes.split_pages += u64::from(run.frames());
        for index in (0..run.frames()).step_by(to.pages() as usize) {
            let run = run.part(index, to);
            notes.note(run, Note::Folio { run, pinned: false });
        }
        true
    }

    fn evacuate(&self, _head: Frame) -> bool {
        false
    }

    fn move_free_page(&self, _from: Frame, _to: Frame) -> bool {
        false
    }
}

fn measure(variant: Variant, order: Order) -> Result<Row, Error> {
    let counters = Counters::default();
    let (mut elapsed, mut split_pages) = (Duration::ZERO, 0);
    for seed in 1..=ROUNDS {
        let world = World::new(seed);
        let compactor = Compactor::new(variant);
        for _ in 0..FREE_FRAMES / 2 / order.pages() {
            if !world.take(order) {
                if !world.is_possible(order) {
                    break;
                }
                let started = Instant::now();
                let made = compactor.compact(&world.homes, &world, &counters.vm, order);
                elapsed += started.elapsed();
                if made && !world.take(order) {
                    return Err(Error::WrongResult(format!("{variant} made no run of order {order:?}")));
                }
            }
        }
        world.check()?;
        split_pages += world.notes.borrow().split_pages;
    }
    let vm = &counters.vm;
    let (made, failed) = (vm.compact_success.get(), vm.compact_fail.get());
    let per_success = |all: f64| (made > 0).then(|| all / made as f64);
    Ok(Row {
        variant: variant.to_string(),
        order: order.get(),
        success_rate: made as f64 / (made + failed).max(1) as f64,
        moved_pages_per_success: per_success(vm.pgmigrate_success.get() as f64),
        us_per_success: per_success(elapsed.as_secs_f64() * 1e6),
        split_pages_per_success: per_success(split_pages as f64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_variant_always_succeeds_and_moves_the_fewest_pages() {
        for order in ORDERS.map(|order| Order::new(order).unwrap()) {
            let rows: Vec<Row> = Variant::ALL.iter().map(|&variant| measure(variant, order).unwrap()).collect();
            let (full, older) = rows.split_last().unwrap();
            assert!((full.success_rate - 1.0).abs() < f64::EPSILON, "{full:?}");
            for row in older {
                let (moved, most) = (full.moved_pages_per_success, row.moved_pages_per_success);
                assert!(most.is_none() || moved < most, "{full:?} {row:?}");
            }
        }
    }
}
