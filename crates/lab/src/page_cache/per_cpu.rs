//! Per-CPU lists of free runs, which Linux keeps for orders up to 3 (`PAGE_ALLOC_COSTLY_ORDER`).
//! Their runs do not merge with buddies, and compaction cannot move them.

use foliomem_core::homes::Homes;
use foliomem_types::units::{FrameRun, Order};
use std::collections::VecDeque;

/// Maximum order of per-CPU lists; higher orders come from the buddy allocator.
pub const MAX_CACHED_ORDER: Order = match Order::new(3) {
    Some(order) => order,
    None => unreachable!(),
};

/// The lists of one CPU.
#[derive(Clone, Debug, Default)]
pub struct PerCpu {
    runs: [VecDeque<FrameRun>; MAX_CACHED_ORDER.index() + 1],
    frames: u32,
}

/// Limits of a CPU's lists, in frames.
#[derive(Clone, Copy, Debug)]
pub struct Keeps {
    /// Maximum number of frames on the lists.
    pub high_frames: u32,
    /// Frames taken or returned at a time.
    pub batch_frames: u32,
}

impl PerCpu {
    /// Returns the number of free frames on the lists.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Takes a run of `order`, from `homes` if the list is empty.
    pub fn take(&mut self, homes: &Homes, order: Order, keeps: Keeps) -> Option<FrameRun> {
        if order > MAX_CACHED_ORDER {
            return homes.alloc_empty(order);
        }
        let runs = &mut self.runs[order.index()];
        if runs.is_empty() {
            for _ in 0..(keeps.batch_frames >> order.get()).max(1) {
                let Some(run) = homes.alloc_empty(order) else { break };
                runs.push_back(run);
                self.frames += run.frames();
            }
        }
        let run = runs.pop_back()?;
        self.frames -= run.frames();
        Some(run)
    }

    /// Returns `run` to the lists; if they hold too much, the oldest runs go to `homes`.
    pub fn give(&mut self, homes: &Homes, run: FrameRun, keeps: Keeps) {
        if run.order > MAX_CACHED_ORDER {
            return homes.free_empty(run);
        }
        self.runs[run.order.index()].push_back(run);
        self.frames += run.frames();
        if self.frames > keeps.high_frames {
            self.drain(homes, keeps.high_frames.saturating_sub(keeps.batch_frames));
        }
    }

    /// Returns runs to `homes` until at most `frames` are left.
    pub fn drain(&mut self, homes: &Homes, frames: u32) {
        while self.frames > frames {
            for runs in &mut self.runs {
                if let Some(run) = runs.pop_front() {
                    self.frames -= run.frames();
                    homes.free_empty(run);
                }
            }
        }
    }
}
