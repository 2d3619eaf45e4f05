//! The arena's free frames: which homes are free, and whether a page lies there.
//!
//! A frame is *full* when a page of the budget lies at its home and *empty* when none does. Free frames
//! of the two kinds are kept in a buddy allocator each, because they serve different needs: zeroing and
//! decompressing want full frames, moving pages out of the program wants empty ones. The arena has far
//! more frames than the budget has pages, so empty runs of every order are practically always there;
//! full runs may be scattered, and are then *gathered*: free pages are moved, not copied, to an empty run.
//!
//! Identity: every frame is free full, free empty, reserved by a resident folio, held by a folio at
//! home, held by the store, or held by the worker that allocated it.
//!
//! Lock: one leaf lock, never held while the machine is called.

use crate::buddy::Buddy;
use crate::machine::Machine;
use crate::sync::Mutex;
use crate::units::{Frame, FrameRun, Order};

/// Full frames kept back for reclaim, which needs some to free others: four runs of the store's usual
/// largest order (4).
pub const RESERVE_FRAMES: u32 = 64;

/// What lies in a run that was just allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Anything.
    Dirty,
    /// Zeros.
    Zeroed,
}

/// Why a run could not be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoRun {
    /// The limit forbids it: reclaim may help.
    OverLimit,
    /// No frames of that order are left in the arena.
    Exhausted,
}

/// How badly a run is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// Stays within the limit and leaves the reserve alone.
    Normal,
    /// For reclaim itself and for what cannot be refused: takes the reserve, then exceeds the limit.
    Reclaim,
}

struct Free {
    full: Buddy,
    empty: Buddy,
}

/// The free frames of the arena.
pub struct Homes {
    free: Mutex<Free>,
    frames: u32,
}

impl Homes {
    /// An arena of `frames` empty frames.
    pub fn new(frames: u32) -> Homes {
        let (full, mut empty) = (Buddy::new(frames), Buddy::new(frames));
        empty.add_free(Frame(0), frames);
        Homes { free: Mutex::new(Free { full, empty }), frames }
    }

    /// Frames in the arena.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Free frames with a page at home.
    pub fn full_frames(&self) -> u32 {
        self.free.lock().full.free_frames()
    }

    /// Free frames without one.
    pub fn empty_frames(&self) -> u32 {
        self.free.lock().empty.free_frames()
    }

    /// A run with pages at home.
    pub fn alloc_full<M: Machine>(
        &self,
        machine: &M,
        order: Order,
        urgency: Urgency,
    ) -> Result<(FrameRun, Content), NoRun> {
        let kept = if urgency == Urgency::Normal { RESERVE_FRAMES } else { 0 };
        let enough = {
            let mut free = self.free.lock();
            let enough = free.full.free_frames() >= order.pages() + kept;
            if enough && let Some(run) = free.full.alloc(order) {
                return Ok((run, Content::Dirty));
            }
            enough
        };
        if enough && let Some(run) = self.gather(machine, order) {
            return Ok((run, Content::Dirty));
        }
        if !machine.try_charge(order.pages()) {
            if urgency == Urgency::Normal {
                return Err(NoRun::OverLimit);
            }
            machine.charge(order.pages());
        }
        let Some(run) = self.alloc_empty(order) else {
            machine.uncharge(order.pages());
            return Err(NoRun::Exhausted);
        };
        machine.populate(run);
        Ok((run, Content::Zeroed))
    }

    /// A run without pages at home, to move pages into.
    pub fn alloc_empty(&self, order: Order) -> Option<FrameRun> {
        self.free.lock().empty.alloc(order)
    }

    /// Makes a full run of scattered free pages by moving them together. Costs one move per page, which
    /// is less than compressing anything to make room.
    fn gather<M: Machine>(&self, machine: &M, order: Order) -> Option<FrameRun> {
        let target = self.alloc_empty(order)?;
        for index in 0..order.pages() {
            let to = target.head.offset(index);
            let page = self.free.lock().full.alloc(Order::ZERO);
            let moved = page.is_some_and(|page| match machine.regroup(page.head, to) {
                Ok(()) => {
                    self.free_empty(page);
                    true
                }
                Err(_) => {
                    self.free_full(page);
                    false
                }
            });
            if !moved {
                (0..index).for_each(|done| self.free_full(target.part(done, Order::ZERO)));
                (index..order.pages()).for_each(|rest| self.free_empty(target.part(rest, Order::ZERO)));
                return None;
            }
        }
        Some(target)
    }

    /// Takes back a run with pages at home.
    pub fn free_full(&self, run: FrameRun) {
        self.free.lock().full.free(run);
    }

    /// Takes back a run without pages at home.
    pub fn free_empty(&self, run: FrameRun) {
        self.free.lock().empty.free(run);
    }

    /// Gives free pages back to the system until at most `keep_frames` are left or `most_frames` are
    /// given; returns how many were.
    pub fn shrink<M: Machine>(&self, machine: &M, keep_frames: u32, most_frames: u32) -> u32 {
        let mut given = 0;
        while given < most_frames {
            let run = {
                let mut free = self.free.lock();
                let spare = free.full.free_frames().saturating_sub(keep_frames);
                let largest = Order::all().rev().filter(|order| order.pages() <= spare);
                largest.into_iter().find_map(|order| free.full.alloc_highest(order))
            };
            let Some(run) = run else { break };
            machine.release(run);
            machine.uncharge(run.frames());
            self.free_empty(run);
            given += run.frames();
        }
        given
    }

    /// Whether `frame` is free, of either kind; for the whole-engine check.
    pub fn is_free(&self, frame: Frame) -> bool {
        let free = self.free.lock();
        free.full.is_free(frame) || free.empty.is_free(frame)
    }

    /// Walks both allocators.
    pub fn check(&self) {
        let free = self.free.lock();
        free.full.check();
        free.empty.check();
        for order in Order::all() {
            for run in free.full.iter_free(order) {
                assert!(
                    (0..run.frames()).all(|index| !free.empty.is_free(run.head.offset(index))),
                    "{run:?} is free both full and empty"
                );
            }
        }
    }
}
