//! The arena's free frames: which are free, and which of them are populated.
//!
//! A frame is *populated* when a page of the budget lies at it in the arena, else *unpopulated*.
//! Free frames of the two kinds have one buddy allocator each, because they serve different needs:
//! zeroing and decompressing need populated frames, unmapping pages of the program needs
//! unpopulated ones. The arena has far more frames than the budget has pages, so unpopulated runs
//! of every order are practically always free. Populated runs may be scattered; then free pages are
//! *gathered*: moved, not copied, to an unpopulated run, in runs as large as there are. If no
//! unpopulated run is free, [`crate::compaction`] makes one. Frames of the run under compaction
//! that are free or become free are *captured*: no other caller gets them.
//!
//! Identity: every frame is free and populated, free and unpopulated, captured, reserved by a
//! resident folio, held by a staged folio, held by the store, or held by the worker that allocated
//! it.
//!
//! Lock: one leaf lock, never held during a call to a port.

use crate::buddy::{Buddy, Pick};
use crate::frame_set::FrameSet;
use crate::ports::{Arena, Budget, Ports};
use crate::run_tokens::UniqueRun;
use crate::sync::Mutex;
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order, OrderSet};

/// Populated frames reserved for reclaim, which needs some to free others: four runs of order 4,
/// the store's usual largest.
pub const RESERVE_FRAMES: u32 = 64;

/// The content of a newly allocated run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Arbitrary content.
    Dirty,
    /// Zeros.
    Zeroed,
}

/// The reason why no run could be allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoRun {
    /// The limit forbids it. Reclaim may help.
    OverLimit,
    /// The arena has no run of that order. Compaction may help.
    Exhausted,
}

/// The urgency of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// Stays within the limit and does not use the reserve.
    Normal,
    /// For reclaim itself and for allocations that must succeed: uses the reserve, then exceeds the
    /// limit.
    Reclaim,
}

/// The free frames of the run under compaction.
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
    /// Allocates a populated run if at least `kept_pages` free pages remain after that.
    #[inline]
    fn alloc_ready(&mut self, order: Order, kept_pages: u32) -> Option<FrameRun> {
        if self.full.free_frames() < order.pages() + kept_pages {
            return None;
        }
        self.full.alloc(order)
    }

    /// Frees a run whose frames are populated or not.
    fn put(&mut self, run: FrameRun, is_full: bool) {
        match &mut self.capture {
            Some(capture) if capture.run.contains(run) => {
                let set = if is_full { &mut capture.full } else { &mut capture.empty };
                set.insert(run.head.0 - capture.run.head.0, run.order);
            }
            Some(capture) if run.contains(capture.run) => {
                let Some(half) = run.order.lower() else { unreachable!("the run is larger than the captured one") };
                [0, half.pages()].into_iter().for_each(|index| self.put(run.part(index, half), is_full));
            }
            _ if is_full => self.full.free(run),
            _ => self.empty.free(run),
        }
    }
}

/// The allocator of the arena's frames.
pub struct Homes {
    free: Mutex<Free>,
    frames: u32,
}

impl Homes {
    /// Makes an arena of `frames` unpopulated frames.
    pub fn new(frames: u32) -> Homes {
        Homes::with_pick(frames, Pick::default())
    }

    /// Makes an arena that chooses among unpopulated runs as `pick` says.
    pub fn with_pick(frames: u32, pick: Pick) -> Homes {
        let (full, mut empty) = (Buddy::new(frames), Buddy::with_pick(frames, pick));
        empty.add_free(Frame(0), frames);
        Homes { free: Mutex::new(Free { full, empty, capture: None }), frames }
    }

    /// Creates an arena whose `frames` frames are all populated, for memory that is an array.
    pub fn populated(frames: u32) -> Homes {
        let (mut full, empty) = (Buddy::new(frames), Buddy::new(frames));
        full.add_free(Frame(0), frames);
        Homes { free: Mutex::new(Free { full, empty, capture: None }), frames }
    }

    /// Returns the number of frames in the arena.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Returns the number of free populated frames.
    pub fn full_frames(&self) -> u32 {
        self.free.lock().full.free_frames()
    }

    /// Returns the number of free unpopulated frames.
    pub fn empty_frames(&self) -> u32 {
        self.free.lock().empty.free_frames()
    }

    /// Returns the number of free unpopulated frames in runs of at most `order`.
    pub fn empty_frames_up_to(&self, order: Order) -> u32 {
        self.free.lock().empty.free_frames_up_to(order)
    }

    /// Returns the number of free unpopulated runs of exactly `order`.
    pub fn empty_runs(&self, order: Order) -> u32 {
        self.free.lock().empty.free_runs(order)
    }

    /// Allocates a populated run: a free one, one gathered from free pages, or a new one that is
    /// charged to the budget.
    pub fn alloc_full<P: Ports>(
        &self,
        ports: &P,
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
            if self.gather(ports, target) {
                return Ok((UniqueRun::mint(target), Content::Dirty));
            }
        }
        if !ports.budget().try_charge(order.pages()) {
            if urgency == Urgency::Normal {
                return Err(NoRun::OverLimit);
            }
            ports.budget().charge(order.pages());
        }
        let Some(run) = self.alloc_empty(order) else {
            ports.budget().uncharge(order.pages());
            return Err(NoRun::Exhausted);
        };
        let mut run = UniqueRun::mint(run);
        ports.arena().populate(run.as_mut());
        Ok((run, Content::Zeroed))
    }

    /// Allocates a populated run that is free now, for a caller that can use a smaller one instead.
    pub fn alloc_ready(&self, order: Order) -> Option<UniqueRun> {
        self.free.lock().alloc_ready(order, RESERVE_FRAMES).map(UniqueRun::mint)
    }

    /// Allocates an unpopulated run, the target of a move.
    pub fn alloc_empty(&self, order: Order) -> Option<FrameRun> {
        self.free.lock().empty.alloc(order)
    }

    /// Makes `target`, an unpopulated run, populated by moving scattered free pages to it. On
    /// failure all frames are free again. Even one move a page costs less than compressing anything
    /// to make room.
    fn gather<P: Ports>(&self, ports: &P, target: FrameRun) -> bool {
        let mut gathered = 0;
        while gathered < target.frames() {
            let most = Order::largest_at(gathered, target.frames() - gathered);
            let piece = {
                let mut free = self.free.lock();
                OrderSet::ALL.up_to(most).descending().find_map(|order| free.full.alloc(order))
            };
            let Some(piece) = piece else { break };
            let moved = ports.arena().regroup(piece.head, target.head.offset(gathered), piece.frames());
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

    /// Frees every frame of `run`. The first `pages` frames are populated if `are_full`, the others
    /// if not.
    fn free_each(&self, run: FrameRun, pages: u32, are_full: bool) {
        let mut free = self.free.lock();
        (0..run.frames()).for_each(|index| free.put(run.part(index, Order::ZERO), (index < pages) == are_full));
    }

    /// Frees a populated run.
    #[inline]
    pub fn free_full(&self, run: UniqueRun) {
        self.free.lock().put(run.into_run(), true);
    }

    /// Frees both runs after the pages of `from` were moved to `to`: `from` is unpopulated now and
    /// `to` is populated.
    pub fn free_moved(&self, from: UniqueRun, to: FrameRun) {
        let mut free = self.free.lock();
        free.put(from.into_run(), false);
        free.put(to, true);
    }

    /// Frees an unpopulated run.
    pub fn free_empty(&self, run: FrameRun) {
        self.free.lock().put(run, false);
    }

    /// Allocates an unpopulated run as a target for compaction: the highest of `order`, or else the
    /// top of one of the next larger order up to `most`.
    pub fn alloc_target(&self, order: Order, most: Order) -> Option<FrameRun> {
        self.free.lock().empty.alloc_highest(order, most)
    }

    /// Returns the free frames of `run`: the populated and the unpopulated ones.
    pub fn free_in(&self, run: FrameRun) -> (FrameSet, FrameSet) {
        let free = self.free.lock();
        (free.full.free_in(run), free.empty.free_in(run))
    }

    /// Fills `heads` with the first frames of the lowest free unpopulated runs of exactly `order`;
    /// returns their number.
    pub fn first_empty(&self, order: Order, heads: &mut [Frame]) -> usize {
        let free = self.free.lock();
        let found = free.empty.iter_free(order).zip(&mut *heads).map(|(run, head)| *head = run.head);
        found.count()
    }

    /// Captures the frames of `run` that are free or become free. One run at a time may be
    /// captured.
    pub fn capture(&self, run: FrameRun) {
        let mut free = self.free.lock();
        debug_assert!(free.capture.is_none(), "two compactions at a time");
        let (full, empty) = (free.full.take_in(run), free.empty.take_in(run));
        free.capture = Some(Capture { run, full, empty });
    }

    /// Removes a populated frame from the capture, so that the caller can move its page elsewhere.
    pub fn take_captured_page(&self) -> Option<UniqueRun> {
        let mut free = self.free.lock();
        let capture = free.capture.as_mut()?;
        capture.full.pop_first().map(|index| UniqueRun::mint(capture.run.part(index, Order::ZERO)))
    }

    /// Frees all captured frames. Returns whether they are the whole run, unpopulated.
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

    /// Returns the percentage of free unpopulated frames that lie in runs smaller than `order`.
    pub fn fragmentation_percent(&self, order: Order) -> u32 {
        let free = self.free.lock();
        let useless = order.lower().map_or(0, |below| free.empty.free_frames_up_to(below));
        (u64::from(useless) * 100 / u64::from(free.empty.free_frames().max(1))) as u32
    }

    /// Releases free pages to the system in runs of at least order `least`, until `keep_frames` are
    /// left or `most_frames` are released. Returns the number of released frames.
    pub fn shrink<P: Ports>(&self, ports: &P, keep_frames: u32, most_frames: u32, least: Order) -> u32 {
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
            ports.arena().release(run.as_mut());
            ports.budget().uncharge(run.frames());
            given += run.frames();
            self.free_empty(run.into_run());
        }
        given
    }

    /// Returns whether `frame` is free, populated or not; for the whole-engine check.
    pub fn is_free(&self, frame: Frame) -> bool {
        let free = self.free.lock();
        free.full.is_free(frame) || free.empty.is_free(frame)
    }

    /// Checks both allocators.
    pub fn check(&self) {
        let free = self.free.lock();
        free.full.check();
        free.empty.check();
        for order in Order::all() {
            for run in free.full.iter_free(order) {
                assert!(
                    (0..run.frames()).all(|index| !free.empty.is_free(run.head.offset(index))),
                    "{run:?} is free both populated and unpopulated"
                );
            }
        }
    }
}
