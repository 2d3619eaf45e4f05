//! Folio allocation as `__alloc_pages` does it for callers that can use less (`__GFP_NORETRY`):
//! free runs, then one try of compaction and reclaim, then failure.

use super::PageCache;
use super::per_cpu::{Keeps, MAX_CACHED_ORDER};
use crate::error::LabError;
use foliomem_types::units::{Frame, FrameRun, Order};

/// The free memory to keep, in frames.
#[derive(Clone, Copy, Debug)]
pub struct Watermarks {
    low_frames: u32,
    high_frames: u32,
}

/// Watermarks of a machine of 16 GiB with huge pages: `min_free_kbytes` is 67584 there
/// (`set_recommended_min_free_kbytes` with three zones), and low and high are each a quarter of
/// that further up. Smaller machines keep the proportion.
const MACHINE_FRAMES: u64 = 4 << 20;
const LOW_FRAMES: u64 = 16_896 + 4_224;
const HIGH_FRAMES: u64 = 16_896 + 2 * 4_224;
/// Frames that a per-CPU list takes or returns at a time: `zone_batchsize` of that machine.
const BATCH_FRAMES: u32 = 63;
/// Minimum frames that direct reclaim frees: `SWAP_CLUSTER_MAX`.
const RECLAIM_FRAMES: u32 = 32;

/// The result of a request for compaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compacted {
    Made,
    Failed,
    /// Deferred, because compaction failed recently.
    Deferred,
}

impl Watermarks {
    /// Returns the watermarks of a machine with `frames` frames.
    pub fn of(frames: u32) -> Watermarks {
        let part = |of: u64| (u64::from(frames) * of / MACHINE_FRAMES) as u32;
        Watermarks { low_frames: part(LOW_FRAMES), high_frames: part(HIGH_FRAMES) }
    }

    /// Returns the limits of per-CPU lists: all of them together hold the low watermark.
    pub fn keeps(&self, cpus: u16) -> Keeps {
        let high_frames = self.low_frames / u32::from(cpus);
        Keeps { high_frames, batch_frames: BATCH_FRAMES.min(high_frames / 4).max(1) }
    }
}

impl PageCache {
    pub(super) fn take(&mut self, order: Order) -> Option<FrameRun> {
        let run = self.per_cpu[self.cpu].take(&self.folios.homes, order, self.keeps)?;
        self.counters.allocated[order.index()] += 1;
        Some(run)
    }

    /// Does the work of `kswapd`: below the low watermark it reclaims up to the high one.
    fn balance(&mut self) {
        let free = self.folios.homes.empty_frames();
        if free < self.watermarks.low_frames {
            self.reclaim(self.watermarks.high_frames - free);
        }
    }

    /// Allocates a free run of `order`, without compaction.
    pub(super) fn alloc_free(&mut self, order: Order) -> Option<FrameRun> {
        self.balance();
        let run = self.take(order);
        self.counters.fallbacks[order.index()] += u64::from(run.is_none());
        run
    }

    /// Allocates a run of `order`; `None` if neither compaction nor reclaim makes one. Fails
    /// with [`LabError`] if not even a single page can be made.
    pub(super) fn alloc(&mut self, order: Order) -> Result<Option<FrameRun>, LabError> {
        self.balance();
        let run = self.take(order).or_else(|| self.alloc_slowly(order));
        if run.is_none() && order == Order::ZERO {
            return Err(self.out_of_memory());
        }
        self.counters.fallbacks[order.index()] += u64::from(run.is_none());
        Ok(run)
    }

    /// Allocates a single page. Fails if memory is exhausted.
    pub(super) fn alloc_page(&mut self) -> Result<FrameRun, LabError> {
        match self.alloc(Order::ZERO)? {
            Some(run) => Ok(run),
            None => unreachable!("alloc returns a page or an error"),
        }
    }

    /// Allocates with compaction and reclaim. Costly orders compact first and give up at once while
    /// compaction is deferred.
    fn alloc_slowly(&mut self, order: Order) -> Option<FrameRun> {
        if order > MAX_CACHED_ORDER {
            match self.compact(order) {
                Compacted::Made => return self.take(order),
                Compacted::Deferred => return None,
                Compacted::Failed => {}
            }
        }
        let run = self.reclaim_for(order);
        if run.is_none() && order > Order::ZERO && self.compact(order) == Compacted::Made {
            return self.take(order);
        }
        run
    }

    /// Allocates an immovable page. Linux groups such pages by mobility: if the group has none
    /// left, it takes the largest free run (`__rmqueue_fallback`).
    pub(super) fn alloc_unmovable(&mut self) -> Result<Frame, LabError> {
        self.balance();
        loop {
            if let Some(frame) = self.unmovable.pop() {
                return Ok(frame);
            }
            let run = Order::all().rev().find_map(|order| self.folios.homes.alloc_empty(order));
            match run.or_else(|| self.reclaim_for(Order::ZERO)) {
                Some(run) => self.unmovable.extend((0..run.frames()).rev().map(|index| run.head.offset(index))),
                None => return Err(self.out_of_memory()),
            }
        }
    }

    fn compact(&mut self, order: Order) -> Compacted {
        if self.compactor.defers(order) {
            return Compacted::Deferred;
        }
        self.engine.vm.compact_stall.inc();
        let made = self.compactor.compact(&self.folios.homes, &self.folios, &self.engine.vm, order);
        if made { Compacted::Made } else { Compacted::Failed }
    }

    fn out_of_memory(&self) -> LabError {
        let mib = |pages: u32| u64::from(pages) >> 8;
        LabError::NoReclaimableMemory { used_mib: mib(self.used_pages()), memory_mib: mib(self.folios.homes.frames()) }
    }

    /// Does direct reclaim. If that frees memory but no run of `order`, CPUs drain their lists.
    fn reclaim_for(&mut self, order: Order) -> Option<FrameRun> {
        let freed = self.reclaim(RECLAIM_FRAMES.max(order.pages()));
        self.take(order).or_else(|| {
            let kept: u32 = self.kept_frames();
            if freed == 0 && kept == 0 {
                return None;
            }
            self.spend(kept, self.cache_costs().free_page_ns);
            self.per_cpu.iter_mut().for_each(|cpu| cpu.drain(&self.folios.homes, 0));
            self.take(order)
        })
    }
}
