//! Compaction: makes a free run of a wanted order by moving what lies in its way.
//!
//! Two scanners, as in `mm/compaction.c` of Linux. The *migrate scanner* goes over the arena from low frames, a block of the
//! wanted order at a time. Where all that is in a block can be moved, the block's free frames are captured and its
//! occupants moved one by one; what they leave is captured, too, so that nobody else gets it meanwhile. The *free scanner*
//! finds the places they go to: the highest free run of the order that is needed, of those that are free per order in the
//! buddy allocator. What variants of it there have been is in [`Variant`].
//!
//! Departures: nothing goes where a run of the wanted order is free: one would be made and another one lost, for ever. A block
//! with something that cannot be moved is left before anything in it was moved. The scanners need
//! not stop where they meet: what is captured is no place to go to either, and each block is looked at once.
//!
//! Free pages at home in the block are moved out of it like its occupants, so that what comes of it is a run of empty homes: what
//! allocation lacks when it fails though enough frames are free. (Of the arena's frames three quarters are empty: there is
//! always room to move to.)
//!
//! Lock rank 1: one lock, held while the compactor works. Whoever waits for it holds no other.

mod variant;

#[cfg(test)]
mod tests;

pub use variant::{UnknownVariant, Variant};

use crate::homes::Homes;
use crate::stats::VmCounters;
use crate::sync::{Mutex, ranks};
use crate::units::{Frame, FrameRun, MAX_ORDER, Order};

/// What is in frames that are not free, and can be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Occupant {
    /// A folio, resident or at home.
    Folio(FrameRun),
    /// Part of the store, which finds itself other frames.
    Store(FrameRun),
}

impl Occupant {
    fn run(self) -> FrameRun {
        match self {
            Occupant::Folio(run) | Occupant::Store(run) => run,
        }
    }
}

/// Who knows what is in frames, and how to move it.
pub trait Occupants {
    /// What is in `frame`, which is not free; `None` where it cannot be moved.
    fn occupant(&self, frame: Frame) -> Option<Occupant>;
    /// Moves the folio in `from` to `to`, a run without pages, and frees what it leaves. Where it cannot, `to` is free
    /// again, as far as the folio is not there.
    fn migrate(&self, from: FrameRun, to: FrameRun) -> bool;
    /// Splits the folio in `run` into folios of `to`.
    fn split(&self, run: FrameRun, to: Order) -> bool;
    /// Has the store leave the frames of one of its parts, whose first frame is `head`.
    fn evacuate(&self, head: Frame) -> bool;
    /// Moves the page at home in `from`, which is free, to `to`, which is empty.
    fn move_free_page(&self, from: Frame, to: Frame) -> bool;
}

/// Free runs of an order around which compaction looks before it goes over the whole arena.
const FAST_RUNS: usize = 64;

/// Failures after which compaction is tried for one in 2^this requests only, as `COMPACT_MAX_DEFER_SHIFT` of Linux.
const MAX_DEFER_SHIFT: u32 = 6;

/// Compaction that has failed is not tried again at once: what was in its way is still there.
#[derive(Debug)]
struct Deferral {
    /// Requests since the last failure.
    considered: u32,
    shift: u32,
    /// The lowest order that has failed.
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
    /// Where the migrate scanner goes on.
    migrate: Frame,
    deferral: Deferral,
}

/// See the module.
#[derive(Debug)]
pub struct Compactor {
    variant: Variant,
    scanners: Mutex<Scanners, ranks::Compaction>,
}

impl Compactor {
    /// One that works as `variant`.
    pub fn new(variant: Variant) -> Compactor {
        let deferral = Deferral { considered: 0, shift: 0, failed: None };
        Compactor { variant, scanners: Mutex::new(Scanners { migrate: Frame(0), deferral }) }
    }

    /// Whether a request is better not made: it has failed too often lately. To be asked once for each.
    pub fn defers(&self, order: Order) -> bool {
        self.scanners.lock().deferral.defers(order)
    }

    /// Makes a free run of `order` without pages. Called with no lock held.
    pub fn compact(&self, homes: &Homes, occupants: &impl Occupants, counters: &VmCounters, order: Order) -> bool {
        order.lower().is_some_and(|most| self.make(homes, occupants, counters, order, most))
    }

    /// The same at the expense of other runs, for tests: much is moved and nothing gained.
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

/// One request.
struct Compaction<'a, O> {
    homes: &'a Homes,
    occupants: &'a O,
    counters: &'a VmCounters,
    order: Order,
    /// The largest free runs that something may be moved to.
    largest_target: Order,
    variant: Variant,
}

impl<O: Occupants> Compaction<'_, O> {
    /// Looks at each block once, from `migrate` on; at some of those with the largest free runs before.
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

    /// Tries the blocks around free runs, the largest runs first: the larger they are, the less is left to move. As
    /// `fast_find_migrateblock` of Linux, it looks at a few of each order, because there may be millions.
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

    /// Frees `block`, if all that is in it can be moved.
    fn clear(&self, block: FrameRun) -> bool {
        let Some((sources, pages)) = self.isolate(block) else { return false };
        self.homes.capture(block);
        if self.variant.policy().has_targets(self.homes, &sources) {
            self.counters.compact_isolated.add(u64::from(pages));
            let _ = self.migrate(block, sources) && self.move_free_pages();
        }
        self.homes.release_captured()
    }

    /// What is to be moved out of `block`, and how many pages of that are in it; `None` if something in it cannot be, or there
    /// is nothing to gain.
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
            // As Linux counts: all pages of what was looked at.
            self.counters.compact_migrate_scanned.add(u64::from(pages - 1));
            to_move_pages += pages;
            index += pages;
        }
        if to_move_pages > self.homes.empty_frames_up_to(self.largest_target).saturating_sub(empty.len()) {
            return None;
        }
        Some((sources, to_move_pages - full.len()))
    }

    /// Moves all of `sources` out of `block`, if it can.
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

    /// Splits a source into others, of which those in `block` are to be moved next.
    fn split(&self, run: FrameRun, to: Order, block: FrameRun, sources: &mut Vec<Occupant>) -> bool {
        let parts = (0..run.frames()).step_by(to.pages() as usize).map(|index| run.part(index, to));
        sources.extend(parts.rev().filter(|part| block.contains(*part)).map(Occupant::Folio));
        self.occupants.split(run, to)
    }

    /// Moves the free pages out of the captured run.
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
