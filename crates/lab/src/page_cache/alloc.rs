//! Allocation of folios, as `__alloc_pages` does it for what can do with less (`__GFP_NORETRY`): free runs, then compaction and reclaim
//! once, then nothing.

use super::PageCache;
use super::per_cpu::{Keeps, MOST};
use crate::error::LabError;
use foliomem_core::units::{Frame, FrameRun, Order};

/// How much must be free.
#[derive(Clone, Copy, Debug)]
pub struct Watermarks {
    low_frames: u32,
    high_frames: u32,
}

/// Of a machine of 16 GiB with huge pages: `min_free_kbytes` is 67584 then (`set_recommended_min_free_kbytes` with three zones), low and high
/// are a quarter of that above it each. Smaller machines have as large a part.
const MACHINE_FRAMES: u64 = 4 << 20;
const LOW_FRAMES: u64 = 16_896 + 4_224;
const HIGH_FRAMES: u64 = 16_896 + 2 * 4_224;
/// `zone_batchsize` of it.
const BATCH_FRAMES: u32 = 63;
/// What direct reclaim frees at least: `SWAP_CLUSTER_MAX`.
const RECLAIM_FRAMES: u32 = 32;

/// What came of a request for compaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compacted {
    Made,
    Failed,
    /// It has failed too often lately.
    Deferred,
}

impl Watermarks {
    /// Those of a machine with so many frames.
    pub fn of(frames: u32) -> Watermarks {
        let part = |of: u64| (u64::from(frames) * of / MACHINE_FRAMES) as u32;
        Watermarks { low_frames: part(LOW_FRAMES), high_frames: part(HIGH_FRAMES) }
    }

    /// What CPUs keep for themselves, all of them together: the low watermark.
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

    /// What `kswapd` does: below the low watermark it reclaims until the high one.
    fn balance(&mut self) {
        let free = self.folios.homes.empty_frames();
        if free < self.watermarks.low_frames {
            self.reclaim(self.watermarks.high_frames - free);
        }
    }

    /// A run of `order` that is free.
    pub(super) fn alloc_free(&mut self, order: Order) -> Option<FrameRun> {
        self.balance();
        let run = self.take(order);
        self.counters.fallbacks[order.index()] += u64::from(run.is_none());
        run
    }

    /// A run of `order`; `None` where compaction and reclaim have not made one. A single page is always had, or memory is out.
    pub(super) fn alloc(&mut self, order: Order) -> Result<Option<FrameRun>, LabError> {
        self.balance();
        let run = self.take(order).or_else(|| self.alloc_slowly(order));
        if run.is_none() && order == Order::ZERO {
            return Err(self.out_of_memory());
        }
        self.counters.fallbacks[order.index()] += u64::from(run.is_none());
        Ok(run)
    }

    /// A single page, or memory is out.
    pub(super) fn alloc_page(&mut self) -> Result<FrameRun, LabError> {
        match self.alloc(Order::ZERO)? {
            Some(run) => Ok(run),
            None => unreachable!("a page was had, or an error"),
        }
    }

    /// What is costly is compacted for first, and given up at once while that is deferred.
    fn alloc_slowly(&mut self, order: Order) -> Option<FrameRun> {
        if order > MOST {
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

    /// A page for what cannot be moved. Such pages are kept together as Linux groups them by mobility: where none is left among
    /// them, the largest free run there is becomes theirs (`__rmqueue_fallback`).
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

    /// Direct reclaim. Where that has freed something and it still is not a run, CPUs give up what they keep.
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
