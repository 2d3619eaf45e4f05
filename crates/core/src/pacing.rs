//! Pacing: when reclaim, readahead, compaction and recompression run.
//!
//! The agent and the lab drive their engines by it. The agent's threads ask what there is to do,
//! and this module answers from the [`Room`] that is left and its [`Watermarks`]. Under torture
//! there is always something to do.

mod watermarks;

pub use watermarks::Watermarks;

use foliomem_types::counters::FaultKind;

/// Pages that background reclaim frees before it looks at the room again.
pub const BATCH_PAGES: u64 = 256;
/// Pages that background reclaim stages at a time under torture: far more than it writes back, so
/// that the program touches most of them while they are staged.
pub(crate) const TORTURE_STAGE_PAGES: u64 = 4 * BATCH_PAGES;
/// Minimum time in the store before a piece is recompressed: two seconds. To recompress a piece
/// that is touched again sooner does not pay.
const RECOMPRESS_IDLE_NS: u64 = 2_000_000_000;

/// How hard an engine works for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Pacing {
    /// The engine works as hard as the watermarks demand.
    #[default]
    Watermarks,
    /// Torture: as much as possible, all the time, so that everything moves.
    Torture,
}

impl Pacing {
    /// Returns whether to begin to manage a program's memory, with `room`.
    pub fn activates(self, room: &Room) -> bool {
        self == Pacing::Torture || room.pages < room.watermarks.activation_pages()
    }

    /// Returns the minimum time in the store before a piece is recompressed.
    pub fn recompress_idle_ns(self) -> u64 {
        match self {
            Pacing::Watermarks => RECOMPRESS_IDLE_NS,
            Pacing::Torture => 0,
        }
    }
}

/// The room at one moment: the pages that the program may still take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// The pages left below the limit plus the free populated frames; negative above the limit.
    pub pages: i64,
    /// The watermarks at that moment.
    pub watermarks: Watermarks,
}

impl Room {
    /// Returns whether background reclaim should start.
    #[inline]
    pub fn is_low(&self) -> bool {
        self.pages < self.watermarks.low_pages()
    }

    /// Returns whether background reclaim should stop.
    #[inline]
    pub fn is_high(&self) -> bool {
        self.pages >= self.watermarks.high_pages()
    }
}

/// The result of one step of background reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackgroundReclaim {
    /// Compaction of the store freed frames. There may be more to do.
    StoreCompacted,
    /// This many pages were freed. There is more to do.
    Freed(u64),
    /// There is enough room, or nothing more can be done now. This many pages were freed.
    Done(u64),
}

/// Whether reclaim leaves the protected minimum to the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// The protected minimum stays resident.
    Minimum,
    /// Reclaim may take everything: a control request asks for it.
    Off,
}

/// What the program has done lately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activity {
    /// The program has changed its size or faulted.
    Busy,
    /// The program has done nothing that the agent notices.
    Quiet,
}

/// Returns whether to read ahead after a fault of this kind: it may belong to a stream. (A staged
/// page says nothing about its neighbours.)
pub fn reads_ahead_after(kind: FaultKind) -> bool {
    matches!(kind, FaultKind::FirstTouch | FaultKind::SwapIn | FaultKind::Spurious)
}
