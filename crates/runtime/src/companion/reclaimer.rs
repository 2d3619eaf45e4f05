//! Reclaimers: they compress memory from the low watermark up to the high one, so that faults
//! rarely have to.
//!
//! The idle ones compact, discard, and recompress. A reclaimer works inside the gate.
//!
//! Lock order: the gate, then the engine's locks. The lock of the page-out parts is a leaf.

use crate::address_space::mapping_events::GIVE_WAY;
use crate::address_space::ranges::pages;
use crate::companion::activated::Activated;
use crate::companion::context::Context;
use crate::companion::placement::{Place, Placement};
use crate::companion::workers::{MAX_HANDLERS, Workers};
use crate::fork::futex_gate::Gate;
use crate::ports::pieces::Worker;
use foliomem_core::engine::Attempt;
use foliomem_core::watermark;
use foliomem_sync::Mutex;
use foliomem_sys::clock::{self, timespec};
use foliomem_sys::cpus;
use foliomem_types::units::MAX_ORDER;
use rustix::thread::futex;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long reclaimers do not recompress after another thread wanted the CPU, or after they have
/// looked at all pieces.
const RECOMPRESS_PAUSE: Duration = Duration::from_millis(100);

/// What other threads want of the reclaimers.
pub(crate) struct ReclaimRequests {
    /// Bumped to wake the reclaimers. A futex word.
    pub(crate) kick: AtomicU32,
    /// A range that a thread waits to see swapped out.
    pub(crate) page_out_parts: Mutex<PageOutParts>,
    pub(crate) page_outs_wanted: AtomicU32,
    pub(crate) page_outs_done: AtomicU32,
}

impl Default for ReclaimRequests {
    fn default() -> ReclaimRequests {
        ReclaimRequests {
            kick: AtomicU32::new(0),
            page_out_parts: Mutex::new(PageOutParts { rest: 0..0, under_way: 0 }),
            page_outs_wanted: AtomicU32::new(0),
            page_outs_done: AtomicU32::new(0),
        }
    }
}

impl ReclaimRequests {
    /// Wakes the reclaimers.
    pub(crate) fn wake(&self) {
        self.kick.fetch_add(1, Ordering::Relaxed);
        let _ = futex::wake(&self.kick, futex::Flags::PRIVATE, MAX_HANDLERS as u32);
    }

    /// Has the reclaimers swap out the managed memory in `range`, and waits for it. One thread at a
    /// time may call.
    pub(crate) fn page_out(&self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        self.page_out_parts.lock().rest = range;
        self.page_outs_wanted.fetch_add(1, Ordering::Relaxed);
        self.wake();
        let wanted = self.page_outs_wanted.load(Ordering::Relaxed);
        loop {
            // Acquire pairs with the Release of the reclaimer that finishes the last part.
            let done = self.page_outs_done.load(Ordering::Acquire);
            if done == wanted {
                return;
            }
            let _ = futex::wait(&self.page_outs_done, futex::Flags::PRIVATE, done, None);
        }
    }
}

/// A range that reclaimers swap out part by part.
#[derive(Debug)]
pub(crate) struct PageOutParts {
    /// What no reclaimer has taken yet.
    rest: Range<usize>,
    /// Parts that are taken and not finished.
    under_way: u32,
}

impl PageOutParts {
    /// The next part. It ends where no folio lies across.
    fn take(&mut self) -> Option<Range<usize>> {
        if self.rest.is_empty() {
            return None;
        }
        let end = (self.rest.start + 1).next_multiple_of(MAX_ORDER.bytes()).min(self.rest.end);
        self.under_way += 1;
        Some(std::mem::replace(&mut self.rest.start, end)..end)
    }

    /// One part is done; whether that was the last.
    fn finish(&mut self) -> bool {
        self.under_way -= 1;
        self.rest.is_empty() && self.under_way == 0
    }
}

/// What a reclaimer is started with.
pub(crate) struct ReclaimerStart {
    pub(crate) context: &'static Context,
    pub(crate) activated: &'static Activated,
    pub(crate) gate: &'static Gate,
    pub(crate) placement: &'static Placement,
    pub(crate) workers: &'static Workers,
    pub(crate) requests: &'static ReclaimRequests,
}

/// One reclaimer.
struct Reclaimer {
    context: &'static Context,
    activated: &'static Activated,
    gate: &'static Gate,
    placement: &'static Placement,
    requests: &'static ReclaimRequests,
    worker: Worker,
}

/// The entry of a reclaimer's thread. `argument` is a leaked [`ReclaimerStart`].
pub(crate) extern "C" fn reclaimer_entry(argument: *mut u8) {
    // SAFETY: `start_workers` passes a leaked start.
    let start: &'static ReclaimerStart = unsafe { &*argument.cast::<ReclaimerStart>() };
    start.workers.take_program_priority();
    let ReclaimerStart { context, activated, gate, placement, requests, .. } = *start;
    let worker = activated.recompressing_worker(context, gate);
    Reclaimer { context, activated, gate, placement, requests, worker }.run()
}

impl Reclaimer {
    fn run(&mut self) -> ! {
        let engine = &self.activated.engine;
        let mut place = Place::here();
        loop {
            place.settle(self.placement);
            let kicked = self.requests.kick.load(Ordering::Relaxed);
            loop {
                let _inside = self.gate.enter();
                self.worker.train_if_due();
                let part = self.requests.page_out_parts.lock().take();
                if let Some(part) = part {
                    engine.page_out(&mut self.worker, pages(&part));
                    if self.requests.page_out_parts.lock().finish() {
                        // Release pairs with the Acquire in `page_out`.
                        self.requests.page_outs_done.fetch_add(1, Ordering::Release);
                        let _ = futex::wake(&self.requests.page_outs_done, futex::Flags::PRIVATE, 1);
                    }
                    continue;
                }
                if self.context.settings.torture {
                    engine.stage_oldest(watermark::BATCH_PAGES * 4);
                } else if self.context.budget.room_pages() + i64::from(engine.free_frames())
                    >= 2 * self.context.low_pages()
                {
                    break;
                }
                // What the store wastes is had for a copy.
                if engine.compact_wasteful_store() > 0 {
                    continue;
                }
                let freed = if self.context.settings.torture {
                    engine.reclaim(&mut self.worker, watermark::BATCH_PAGES)
                } else {
                    match engine.try_reclaim(&mut self.worker, watermark::BATCH_PAGES) {
                        Attempt::Freed(pages) => pages,
                        Attempt::Nothing | Attempt::Deferred => 0,
                    }
                };
                self.context.budget.counters().vm.pgsteal_kswapd.add(freed);
                if freed == 0 || self.context.settings.torture {
                    break;
                }
                self.give_way();
            }
            // Nobody needs memory.
            while self.requests.kick.load(Ordering::Relaxed) == kicked {
                let _inside = self.gate.enter();
                if !engine.discard_one() {
                    break;
                }
            }
            while self.requests.kick.load(Ordering::Relaxed) == kicked && self.compact() {}
            let pause = self.recompress(kicked);
            let _ = futex::wait(&self.requests.kick, futex::Flags::PRIVATE, kicked, pause.map(timespec).as_ref());
        }
    }

    /// Makes a free run of frames while there is nothing to reclaim; whether there may be more to
    /// do.
    fn compact(&self) -> bool {
        let _inside = self.gate.enter();
        let engine = &self.activated.engine;
        if self.context.settings.torture {
            engine.churn(MAX_ORDER);
            return false;
        }
        engine.compact_proactively()
    }

    /// Recompresses idle pieces as long as no thread needs memory or waits for a CPU; returns when
    /// to look again.
    fn recompress(&mut self, kicked: u32) -> Option<Duration> {
        let loadavg = self.context.files.as_ref()?.loadavg.as_ref()?;
        let engine = &self.activated.engine;
        loop {
            let _inside = self.gate.enter();
            let is_wanted = self.context.settings.torture || !cpus::is_contended(loadavg);
            if !is_wanted
                || !engine.recompress(&mut self.worker)
                || self.requests.kick.load(Ordering::Relaxed) != kicked
            {
                return Some(RECOMPRESS_PAUSE);
            }
        }
    }

    /// Lets a follower that a reclaimer keeps from its CPU serve the faults that wait.
    fn give_way(&self) {
        if self.placement.cpu().is_some() && self.activated.engine.machine().descriptors().program.has_message() {
            clock::sleep(GIVE_WAY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::units::PAGE_BYTES;

    #[test]
    fn a_page_out_is_done_when_its_last_part_is() {
        const BLOCK: usize = MAX_ORDER.bytes();
        let mut parts = PageOutParts { rest: BLOCK - PAGE_BYTES..3 * BLOCK + PAGE_BYTES, under_way: 0 };
        let taken: Vec<_> = std::iter::from_fn(|| parts.take()).collect();
        assert_eq!(
            taken,
            [BLOCK - PAGE_BYTES..BLOCK, BLOCK..2 * BLOCK, 2 * BLOCK..3 * BLOCK, 3 * BLOCK..3 * BLOCK + PAGE_BYTES]
        );
        assert_eq!([(); 4].map(|()| parts.finish()), [false, false, false, true]);
        parts.rest = 0..2 * BLOCK;
        assert!(parts.take().is_some() && !parts.finish(), "there is another part");
        assert!(parts.take().is_some() && parts.finish());
    }
}
