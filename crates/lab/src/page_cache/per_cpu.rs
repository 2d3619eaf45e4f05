//! Free runs that a CPU keeps for itself, as Linux does for orders up to 3 (`PAGE_ALLOC_COSTLY_ORDER`): they do not merge with their
//! buddies, and compaction cannot move them.

use foliomem_core::homes::Homes;
use foliomem_core::units::{FrameRun, Order};
use std::collections::VecDeque;

/// Orders above this one are taken from the buddy allocator itself.
pub const MOST: Order = match Order::new(3) {
    Some(order) => order,
    None => unreachable!(),
};

/// Of one CPU.
#[derive(Clone, Debug, Default)]
pub struct PerCpu {
    runs: [VecDeque<FrameRun>; MOST.index() + 1],
    frames: u32,
}

/// How much a CPU keeps at most, and how much it takes or gives back at a time.
#[derive(Clone, Copy, Debug)]
pub struct Keeps {
    /// See the type.
    pub high_frames: u32,
    /// See the type.
    pub batch_frames: u32,
}

impl PerCpu {
    /// Free frames that are kept here.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// A run of `order`, from `homes` where none is kept.
    pub fn take(&mut self, homes: &Homes, order: Order, keeps: Keeps) -> Option<FrameRun> {
        if order > MOST {
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

    /// Takes `run` back; where too much is kept, the oldest goes on to `homes`.
    pub fn give(&mut self, homes: &Homes, run: FrameRun, keeps: Keeps) {
        if run.order > MOST {
            return homes.free_empty(run);
        }
        self.runs[run.order.index()].push_back(run);
        self.frames += run.frames();
        if self.frames > keeps.high_frames {
            self.drain(homes, keeps.high_frames.saturating_sub(keeps.batch_frames));
        }
    }

    /// Gives back what is kept beyond `frames`.
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
