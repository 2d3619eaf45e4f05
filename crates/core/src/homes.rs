//! The arena's free frames: which homes are free, and whether a page lies there.
//!
//! A frame is *full* when a page of the budget lies at its home and *empty* when none does. Free frames
//! of the two kinds are kept in a buddy allocator each, because they serve different needs: zeroing and
//! decompressing want full frames, moving pages out of the program wants empty ones. The arena has far
//! more frames than the budget has pages, so empty runs of every order are practically always there;
//! full runs may be scattered, and are then *gathered*: free pages are moved, not copied, to an empty run, in runs as large
//! as there are.
//! Where there is none, [`crate::compaction`] makes one. What is free or becomes free in the run that it works on
//! is *captured*: nobody else gets it.
//!
//! Identity: every frame is free full, free empty, captured, reserved by a resident folio, held by a folio at
//! home, held by the store, or held by the worker that allocated it.
//!
//! Lock: one leaf lock, never held while the machine is called.

use crate::buddy::{Buddy, Pick};
use crate::frame_set::FrameSet;
use crate::machine::Machine;
use crate::run_tokens::UniqueRun;
use crate::sync::Mutex;
use crate::units::{Frame, FrameRun, MAX_ORDER, Order, OrderSet};

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
    /// No run of that order is left in the arena: compaction may help.
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

/// The free frames of a run that is being compacted.
#[derive(Clone, Copy, Debug)]
struct Capture {
    run: FrameRun,
    full: FrameSet,
    empty: FrameSet,
}

struct Free {
    full: Buddy,
    empty: Buddy,
    capture: Option<Capture>,
}

impl Free {
    /// A full run, if so many pages are left afterwards.
    #[inline]
    fn alloc_ready(&mut self, order: Order, kept_pages: u32) -> Option<FrameRun> {
        if self.full.free_frames() < order.pages() + kept_pages {
            return None;
        }
        self.full.alloc(order)
    }

    /// Frees a run whose pages are at home, or not.
    fn put(&mut self, run: FrameRun, is_full: bool) {
        match &mut self.capture {
            Some(capture) if capture.run.contains(run) => {
                let set = if is_full { &mut capture.full } else { &mut capture.empty };
                set.insert(run.head.0 - capture.run.head.0, run.order);
            }
            Some(capture) if run.contains(capture.run) => {
                let Some(half) = run.order.lower() else { unreachable!("it is larger than another") };
                [0, half.pages()].into_iter().for_each(|index| self.put(run.part(index, half), is_full));
            }
            _ if is_full => self.full.free(run),
            _ => self.empty.free(run),
        }
    }
}

/// The free frames of the arena.
pub struct Homes {
    free: Mutex<Free>,
    frames: u32,
}

impl Homes {
    /// An arena of `frames` empty frames.
    pub fn new(frames: u32) -> Homes {
        Homes::with_pick(frames, Pick::default())
    }

    /// The same, of whose empty runs the one is given out first that `pick` says.
    pub fn with_pick(frames: u32, pick: Pick) -> Homes {
        let (full, mut empty) = (Buddy::new(frames), Buddy::with_pick(frames, pick));
        empty.add_free(Frame(0), frames);
        Homes { free: Mutex::new(Free { full, empty, capture: None }), frames }
    }

    /// An arena whose `frames` frames all have a page from the start, where memory is an ordinary
    /// array.
    pub fn populated(frames: u32) -> Homes {
        let (mut full, empty) = (Buddy::new(frames), Buddy::new(frames));
        full.add_free(Frame(0), frames);
        Homes { free: Mutex::new(Free { full, empty, capture: None }), frames }
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

    /// Those of them in runs of `order` at most.
    pub fn empty_frames_up_to(&self, order: Order) -> u32 {
        self.free.lock().empty.free_frames_up_to(order)
    }

    /// Free runs of exactly `order` without pages.
    pub fn empty_runs(&self, order: Order) -> u32 {
        self.free.lock().empty.free_runs(order)
    }

    /// A run with pages at home.
    pub fn alloc_full<M: Machine>(
        &self,
        machine: &M,
        order: Order,
        urgency: Urgency,
    ) -> Result<(UniqueRun, Content), NoRun> {
        let kept = if urgency == Urgency::Normal { RESERVE_FRAMES } else { 0 };
        let enough = {
            let mut free = self.free.lock();
            if let Some(run) = free.alloc_ready(order, kept) {
                return Ok((UniqueRun::mint(run), Content::Dirty));
            }
            free.full.free_frames() >= order.pages() + kept
        };
        if enough {
            let target = self.alloc_empty(order).ok_or(NoRun::Exhausted)?;
            if self.gather(machine, target) {
                return Ok((UniqueRun::mint(target), Content::Dirty));
            }
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
        let mut run = UniqueRun::mint(run);
        machine.populate(run.as_mut());
        Ok((run, Content::Zeroed))
    }

    /// A run with pages at home that lies ready, for who can do with a smaller one.
    pub fn alloc_ready(&self, order: Order) -> Option<UniqueRun> {
        self.free.lock().alloc_ready(order, RESERVE_FRAMES).map(UniqueRun::mint)
    }

    /// A run without pages at home, to move pages into.
    pub fn alloc_empty(&self, order: Order) -> Option<FrameRun> {
        self.free.lock().empty.alloc(order)
    }

    /// Makes a full run of scattered free pages by moving them together to `target`, an empty one; on failure all of it is
    /// free again. One move per page at worst costs less than compressing anything to make room.
    fn gather<M: Machine>(&self, machine: &M, target: FrameRun) -> bool {
        let mut gathered = 0;
        while gathered < target.frames() {
            let most = Order::largest_at(gathered, target.frames() - gathered);
            let piece = {
                let mut free = self.free.lock();
                OrderSet::ALL.up_to(most).descending().find_map(|order| free.full.alloc(order))
            };
            let Some(piece) = piece else { break };
            let moved = machine.regroup(piece.head, target.head.offset(gathered), piece.frames());
            let moved_pages = moved.map_or_else(|stopped| stopped.moved_pages, |()| piece.frames());
            gathered += moved_pages;
            if moved_pages < piece.frames() {
                self.free_each(piece, moved_pages, false);
                break;
            }
            self.free_empty(piece);
        }
        if gathered < target.frames() {
            self.free_each(target, gathered, true);
        }
        gathered == target.frames()
    }

    /// Takes back the first `pages` frames of `run`, which are full or not, and the others, which are the opposite.
    fn free_each(&self, run: FrameRun, pages: u32, are_full: bool) {
        let mut free = self.free.lock();
        (0..run.frames()).for_each(|index| free.put(run.part(index, Order::ZERO), (index < pages) == are_full));
    }

    /// Takes back a run with pages at home.
    #[inline]
    pub fn free_full(&self, run: UniqueRun) {
        self.free.lock().put(run.into_run(), true);
    }

    /// The page of `from`, which is free, was moved to `to`: the one is without a page now, the
    /// other with one.
    pub fn free_moved(&self, from: UniqueRun, to: FrameRun) {
        let mut free = self.free.lock();
        free.put(from.into_run(), false);
        free.put(to, true);
    }

    /// Takes back a run without pages at home.
    pub fn free_empty(&self, run: FrameRun) {
        self.free.lock().put(run, false);
    }

    /// A run without pages at home for compaction to move something to: the highest one of `order`, or else the top of one of
    /// the next larger order there is up to `most`.
    pub fn alloc_target(&self, order: Order, most: Order) -> Option<FrameRun> {
        self.free.lock().empty.alloc_highest(order, most)
    }

    /// Which frames of `run` are free: those with a page at home, and those without.
    pub fn free_in(&self, run: FrameRun) -> (FrameSet, FrameSet) {
        let free = self.free.lock();
        (free.full.free_in(run), free.empty.free_in(run))
    }

    /// Fills `heads` with the first frames of the lowest free runs of exactly `order` without pages; returns how many there are.
    pub fn first_empty(&self, order: Order, heads: &mut [Frame]) -> usize {
        let free = self.free.lock();
        let found = free.empty.iter_free(order).zip(&mut *heads).map(|(run, head)| *head = run.head);
        found.count()
    }

    /// From now on nobody gets what is free or becomes free in `run`. One run at a time.
    pub fn capture(&self, run: FrameRun) {
        let mut free = self.free.lock();
        debug_assert!(free.capture.is_none(), "two compactions at a time");
        let (full, empty) = (free.full.take_in(run), free.empty.take_in(run));
        free.capture = Some(Capture { run, full, empty });
    }

    /// Takes a page out of the captured run, for moving it elsewhere.
    pub fn take_captured_page(&self) -> Option<UniqueRun> {
        let mut free = self.free.lock();
        let capture = free.capture.as_mut()?;
        capture.full.pop_first().map(|index| UniqueRun::mint(capture.run.part(index, Order::ZERO)))
    }

    /// Everybody may have what was captured. Whether that is the whole run, without pages at home.
    pub fn release_captured(&self) -> bool {
        let mut free = self.free.lock();
        let Some(mut capture) = free.capture.take() else { return false };
        if capture.empty.covers(capture.run) {
            free.empty.free(capture.run);
            return true;
        }
        while let Some(index) = capture.full.pop_first() {
            free.full.free(capture.run.part(index, Order::ZERO));
        }
        while let Some(index) = capture.empty.pop_first() {
            free.empty.free(capture.run.part(index, Order::ZERO));
        }
        false
    }

    /// How much of the free frames without pages is of no use for `order`, in percent.
    pub fn fragmentation_percent(&self, order: Order) -> u32 {
        let free = self.free.lock();
        let useless = order.lower().map_or(0, |below| free.empty.free_frames_up_to(below));
        (u64::from(useless) * 100 / u64::from(free.empty.free_frames().max(1))) as u32
    }

    /// Gives free pages back to the system, in runs of `least` or more, until at most `keep_frames` are left or
    /// `most_frames` are given; returns how many were.
    pub fn shrink<M: Machine>(&self, machine: &M, keep_frames: u32, most_frames: u32, least: Order) -> u32 {
        let mut given = 0;
        while given < most_frames {
            let run = {
                let mut free = self.free.lock();
                let spare = free.full.free_frames().saturating_sub(keep_frames);
                let largest = Order::all().rev().filter(|&order| order >= least && order.pages() <= spare);
                largest.into_iter().find_map(|order| free.full.alloc_highest(order, MAX_ORDER))
            };
            let Some(run) = run else { break };
            let mut run = UniqueRun::mint(run);
            machine.release(run.as_mut());
            machine.uncharge(run.frames());
            given += run.frames();
            self.free_empty(run.into_run());
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
