//! Compaction: makes a free run of a wanted order by moving its occupants elsewhere.
//!
//! There are two scanners, as in `mm/compaction.c` of Linux. The *migrate scanner* goes over the
//! arena from low frames, one block of the wanted order at a time. If all occupants of a block can
//! be moved, it captures the block's free frames and moves the occupants one by one; the frames
//! that they leave are captured, too, so that no other caller gets them. The *free scanner* finds
//! the targets: the highest free run of the needed order, from the free runs that the buddy
//! allocator keeps by order. [`Variant`] lists its historical variants.
//!
//! Departures from Linux: no occupant moves into a free run of the wanted order, because compaction
//! would then make one such run and use up another, forever. A block with an immovable occupant is
//! skipped before any of its occupants moves. The scanners need not stop where they meet: captured
//! frames are no targets, and each block is visited once.
//!
//! Free populated frames of the block are moved out of it like its occupants, so that the result is
//! an unpopulated run. An allocation that fails although enough frames are free lacks such a run.
//! (Three quarters of the arena's frames are unpopulated: there are always targets.)
//!
//! Lock rank 1: one lock, held while the compactor works. A thread that waits for it holds no other
//! lock.

mod variant;

#[cfg(test)]
mod tests;

pub use variant::{UnknownVariant, Variant};

use crate::homes::Homes;
use crate::sync::{Mutex, ranks};
use foliomem_types::counters::VmCounters;
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order};

/// A movable occupant of frames that are not free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Occupant {
    /// A folio, resident or staged.
    Folio(FrameRun),
    /// A part of the store, which finds other frames by itself.
    Store(FrameRun),
}

impl Occupant {
    fn run(self) -> FrameRun {
        match self {
            Occupant::Folio(run) | Occupant::Store(run) => run,
        }
    }
}

/// The owner of the occupants: it knows what is in a frame and how to move it.
pub trait Occupants {
    /// Returns the occupant of `frame`, which is not free, or `None` if it cannot be moved.
    fn occupant(&self, frame: Frame) -> Option<Occupant>;
    /// Moves the folio in `from` to `to`, an unpopulated run, and frees the frames that it leaves.
    /// On failure, the frames of `to` that the folio does not use are free again.
    fn migrate(&self, from: FrameRun, to: FrameRun) -> bool;
    /// Splits the folio in `run` into folios of order `to`.
    fn split(&self, run: FrameRun, to: Order) -> bool;
    /// Makes the store leave the frames of the part whose first frame is `head`.
    fn evacuate(&self, head: Frame) -> bool;
    /// Moves the page of `from`, a free populated frame, to `to`, an unpopulated frame.
    fn move_free_page(&self, from: Frame, to: Frame) -> bool;
}

/// Maximum number of free runs of each order whose blocks are tried before the whole arena.
const FAST_RUNS: usize = 64;

/// Maximum deferral as a shift: after failures, one request in 2^6 is tried, as
/// `COMPACT_MAX_DEFER_SHIFT` of Linux.
const MAX_DEFER_SHIFT: u32 = 6;

/// Deferral after failed compaction: an immediate retry would meet the same obstacles.
#[derive(Debug)]
struct Deferral {
    /// Number of requests since the last failure.
    considered: u32,
    shift: u32,
    /// The lowest order that failed.
    failed: Option<Order>,
}

impl Deferral {
    fn defers(&mut self, order: Order) -> bool {
        if self.failed.is_none_or(|failed| order < failed) {
            return false;
        }
        self.considered += 1;
        self.considered < 1 << self.shift
    }

    fn note(&mut self, order: Order, succeeded: bool) {
        if succeeded {
            if self.failed.is_some_and(|failed| order >= failed) {
                *self = Deferral { considered: 0, shift: 0, failed: order.higher() };
            }
        } else {
            self.considered = 0;
            self.shift = (self.shift + 1).min(MAX_DEFER_SHIFT);
            self.failed = Some(self.failed.map_or(order, |failed| failed.min(order)));
        }
    }
}

#[derive(Debug)]
struct Scanners {
    /// The frame at which the migrate scanner continues.
    migrate: Frame,
    deferral: Deferral,
}

/// The compactor of one arena.
#[derive(Debug)]
pub struct Compactor {
    variant: Variant,
    scanners: Mutex<Scanners, ranks::Compaction>,
}

impl Compactor {
    /// Makes a compactor that works as `variant`.
    pub fn new(variant: Variant) -> Compactor {
        let deferral = Deferral { considered: 0, shift: 0, failed: None };
        Compactor { variant, scanners: Mutex::new(Scanners { migrate: Frame(0), deferral }) }
    }

    /// Returns whether a request is deferred because compaction failed recently. Call it once for
    /// each request.
    pub fn defers(&self, order: Order) -> bool {
        self.scanners.lock().deferral.defers(order)
    }

    /// Makes a free unpopulated run of `order`. Called with no lock held.
    pub fn compact(&self, homes: &Homes, occupants: &impl Occupants, counters: &VmCounters, order: Order) -> bool {
        order.lower().is_some_and(|most| self.make(homes, occupants, counters, order, most))
    }

    /// Makes a free run at the expense of other runs, for tests: it moves much and gains nothing.
    pub fn churn(&self, homes: &Homes, occupants: &impl Occupants, counters: &VmCounters, order: Order) -> bool {
        self.make(homes, occupants, counters, order, MAX_ORDER)
    }

    fn make(
        &self,
        homes: &Homes,
        occupants: &impl Occupants,
        counters: &VmCounters,
        order: Order,
        largest_target: Order,
    ) -> bool {
        let mut scanners = self.scanners.lock();
        let run = Compaction { homes, occupants, counters, order, largest_target, variant: self.variant };
        let made = run.scan(&mut scanners.migrate);
        scanners.deferral.note(order, made);
        if made { &counters.compact_success } else { &counters.compact_fail }.inc();
        made
    }
}

/// One request for a run.
struct Compaction<'a, O> {
    homes: &'a Homes,
    occupants: &'a O,
    counters: &'a VmCounters,
    order: Order,
    /// The largest order of free runs that may become targets.
    largest_target: Order,
    variant: Variant,
}

impl<O: Occupants> Compaction<'_, O> {
    /// Tries each block once, starting at `migrate`; tries some blocks with the largest free runs
    /// first.
    fn scan(&self, migrate: &mut Frame) -> bool {
        if self.variant.policy().looks_where_most_is_free() && self.scan_free() {
            return true;
        }
        let blocks = self.homes.frames() >> self.order.get();
        let first = migrate.0 >> self.order.get();
        for step in 0..blocks {
            let index = (first + step) % blocks;
            let block = FrameRun::new(Frame(index << self.order.get()), self.order);
            if self.clear(block) {
                *migrate = block.head.offset(block.frames());
                return true;
            }
        }
        false
    }

    /// Tries the blocks around free runs, the largest runs first: the larger the run, the less is
    /// left to move. It tries only a few of each order, because there may be millions, as
    /// `fast_find_migrateblock` of Linux does.
    fn scan_free(&self) -> bool {
        let mut runs = [Frame(0); FAST_RUNS];
        let lower = Order::all().rev().filter(|&order| order < self.order);
        lower.into_iter().any(|order| {
            let found = self.homes.first_empty(order, &mut runs);
            let blocks = runs[..found].chunk_by(|a, b| a.0 >> self.order.get() == b.0 >> self.order.get());
            blocks.into_iter().any(|heads| {
                let head = heads[0].0 & !(self.order.pages() - 1);
                let is_whole = head + self.order.pages() <= self.homes.frames();
                is_whole && self.clear(FrameRun::new(Frame(head), self.order))
            })
        })
    }

    /// Frees `block` if all its occupants can be moved.
    fn clear(&self, block: FrameRun) -> bool {
        let Some((sources, pages)) = self.isolate(block) else { return false };
        self.homes.capture(block);
        if self.variant.policy().has_targets(self.homes, &sources) {
            self.counters.compact_isolated.add(u64::from(pages));
            let _ = self.migrate(block, sources) && self.move_free_pages();
        }
        self.homes.release_captured()
    }

    /// Returns the occupants to move out of `block` and the number of their pages in it. Returns
    /// `None` if one cannot be moved or there is nothing to gain.
    fn isolate(&self, block: FrameRun) -> Option<(Vec<Occupant>, u32)> {
        let policy = self.variant.policy();
        let (full, empty) = self.homes.free_in(block);
        if empty.covers(block) {
            return None;
        }
        let mut sources = Vec::new();
        let mut to_move_pages = full.len();
        let mut index = 0;
        while index < block.frames() {
            self.counters.compact_migrate_scanned.inc();
            if full.contains(index) || empty.contains(index) {
                index += 1;
                continue;
            }
            let occupant = self.occupants.occupant(block.head.offset(index))?;
            if !policy.isolates(occupant.run().order, self.order) {
                return None;
            }
            sources.push(occupant);
            let run = occupant.run();
            let end = (run.head.0 + run.frames()).min(block.head.0 + block.frames());
            let pages = end - (block.head.0 + index);
            // Counts all pages of the occupant, as Linux does.
            self.counters.compact_migrate_scanned.add(u64::from(pages - 1));
            to_move_pages += pages;
            index += pages;
        }
        if to_move_pages > self.homes.empty_frames_up_to(self.largest_target).saturating_sub(empty.len()) {
            return None;
        }
        Some((sources, to_move_pages - full.len()))
    }

    /// Moves all of `sources` out of `block`. Returns whether all could be moved.
    fn migrate(&self, block: FrameRun, mut sources: Vec<Occupant>) -> bool {
        let policy = self.variant.policy();
        policy.arrange(&mut sources);
        sources.reverse();
        while let Some(source) = sources.pop() {
            let pages = u64::from(source.run().frames());
            let moved = match source {
                Occupant::Store(run) => self.occupants.evacuate(run.head),
                Occupant::Folio(run) => {
                    if policy.splits_first() && run.order > Order::ZERO {
                        if !self.split(run, Order::ZERO, block, &mut sources) {
                            return false;
                        }
                        continue;
                    }
                    match policy.target(self.homes, run.order, self.largest_target) {
                        Some(target) => {
                            self.counters.compact_free_scanned.add(u64::from(target.frames()));
                            self.occupants.migrate(run, target)
                        }
                        None => match run.order.lower() {
                            Some(half) if policy.splits_for_want() && self.split(run, half, block, &mut sources) => {
                                continue;
                            }
                            _ => false,
                        },
                    }
                }
            };
            if !moved {
                self.counters.pgmigrate_fail.add(pages);
                return false;
            }
            self.counters.pgmigrate_success.add(pages);
        }
        true
    }

    /// Splits a source; its parts in `block` are moved next.
    fn split(&self, run: FrameRun, to: Order, block: FrameRun, sources: &mut Vec<Occupant>) -> bool {
        let parts = (0..run.frames()).step_by(to.pages() as usize).map(|index| run.part(index, to));
        sources.extend(parts.rev().filter(|part| block.contains(*part)).map(Occupant::Folio));
        self.occupants.split(run, to)
    }

    /// Moves the free populated frames out of the captured run.
    fn move_free_pages(&self) -> bool {
        while let Some(from) = self.homes.take_captured_page() {
            let Some(to) = self.homes.alloc_target(Order::ZERO, self.largest_target) else {
                self.homes.free_full(from);
                return false;
            };
            self.counters.compact_free_scanned.inc();
            if !self.occupants.move_free_page(from.head, to.head) {
                self.homes.free_full(from);
                self.homes.free_empty(to);
                return false;
            }
            self.counters.pgmigrate_success.inc();
            self.homes.free_moved(from, to);
        }
        true
    }
}
