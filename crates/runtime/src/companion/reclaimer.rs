//! Reclaimers: threads that compress memory from the low watermark up to the high one, so that
//! faults rarely have to.
//!
//! Idle reclaimers compact, discard, and recompress. A reclaimer works inside the gate.
//!
//! Lock order: the gate, then the engine's locks. The lock of the page-out parts is a leaf.

use crate::address_space::mapping_events::YIELD;
use crate::address_space::ranges::pages;
use crate::companion::activated::Activated;
use crate::companion::context::Context;
use crate::companion::placement::{Placement, ThreadPlacement};
use crate::companion::workers::MAX_HANDLERS;
use crate::fork::futex_gate::Gate;
use crate::ports::pieces::Worker;
use crate::runtime::Runtime;
use foliomem_core::pacing::{self, BackgroundReclaim};
use foliomem_session::reclaim_request::Pending;
use foliomem_sync::Mutex;
use foliomem_sys::clock::{self, now_ns, timespec};
use foliomem_sys::cpus;
use foliomem_types::units::{MAX_ORDER, PAGE_BYTES};
use rustix::thread::futex;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Memory that the agent of a child takes at once, as a shift of the limit (1/2^5), and its
/// maximum.
const CHILD_ROOM_SHIFT: u32 = 5;
const CHILD_ROOM_MAX_PAGES: i64 = (16 << 20) / PAGE_BYTES as i64;
/// Maximum time in nanoseconds for which a fork waits for that room, and the time between checks.
const MAX_CHILD_WAIT_NS: u64 = 100_000_000;
const CHILD_PAUSE: Duration = Duration::from_micros(500);
/// Pause of recompression after another thread wanted the CPU, or after the reclaimers have gone
/// over all pieces.
const RECOMPRESS_PAUSE: Duration = Duration::from_millis(100);

/// Number of batches in a row that free nothing after which a request counts as served: the rest is
/// pinned, in use, or does not compress.
const MAX_FRUITLESS_BATCHES: u32 = 8;

/// Requests of other threads to the reclaimers.
pub(crate) struct ReclaimRequests {
    /// Incremented to wake the reclaimers. A futex word.
    pub(crate) kick: AtomicU32,
    /// The range that a thread waits to see swapped out.
    pub(crate) page_out_parts: Mutex<PageOutParts>,
    pub(crate) page_outs_wanted: AtomicU32,
    pub(crate) page_outs_done: AtomicU32,
    /// The request of `ctl` that the reclaimers serve.
    pub(crate) asked: Mutex<Option<Asked>>,
}

/// A request of `ctl` that the reclaimers serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Asked {
    /// The number of the request in the process's slot.
    number: u32,
    /// Pages that are still wanted.
    left_pages: u64,
    /// Number of batches in a row that freed nothing.
    fruitless: u32,
}

impl Asked {
    /// Notes what a batch has freed. Returns whether the request is served, or nothing more can be
    /// freed.
    fn note(&mut self, freed_pages: u64) -> bool {
        self.left_pages = self.left_pages.saturating_sub(freed_pages);
        self.fruitless = if freed_pages > 0 { 0 } else { self.fruitless + 1 };
        self.left_pages == 0 || self.fruitless >= MAX_FRUITLESS_BATCHES
    }
}

impl Default for ReclaimRequests {
    fn default() -> ReclaimRequests {
        ReclaimRequests {
            kick: AtomicU32::new(0),
            page_out_parts: Mutex::new(PageOutParts { rest: 0..0, unfinished: 0 }),
            page_outs_wanted: AtomicU32::new(0),
            page_outs_done: AtomicU32::new(0),
            asked: Mutex::new(None),
        }
    }
}

impl ReclaimRequests {
    /// Has the reclaimers make room for what the agent of a child takes at once, and waits for it,
    /// if not for long. The monitor calls this while a thread waits to fork. (That thread itself
    /// may take no lock of the engine: woken to take one, it may first need a page from a handler
    /// that waits for the same lock.)
    pub(crate) fn make_room_for_child(&self, context: &Context, activated: &Activated) {
        if context.settings.torture {
            // There is never any room.
            return;
        }
        let engine = &activated.engine;
        let wanted = (context.budget.limit_pages() >> CHILD_ROOM_SHIFT).min(CHILD_ROOM_MAX_PAGES);
        let until_ns = now_ns() + MAX_CHILD_WAIT_NS;
        let lacks_room = || context.budget.room_pages() + i64::from(engine.free_frames()) < wanted;
        while lacks_room() && !engine.reclaim_is_futile() && now_ns() < until_ns {
            self.wake();
            let pause = timespec(CHILD_PAUSE);
            let _ = futex::wait(&AtomicU32::new(0), futex::Flags::PRIVATE, 0, Some(&pause));
            context.budget.sample();
        }
    }

    /// Wakes the reclaimers.
    pub(crate) fn wake(&self) {
        self.kick.fetch_add(1, Ordering::Relaxed);
        let _ = futex::wake(&self.kick, futex::Flags::PRIVATE, MAX_HANDLERS as u32);
    }

    /// Makes the reclaimers serve a request of `ctl`, unless they do already.
    pub(crate) fn serve(&self, request: Pending) {
        let mut asked = self.asked.lock();
        if asked.is_none_or(|asked| asked.number != request.number) {
            *asked = Some(Asked { number: request.number, left_pages: request.pages, fruitless: 0 });
            drop(asked);
            self.wake();
        }
    }

    /// Makes the reclaimers swap out the managed memory in `range`, and waits for them. Only one
    /// thread at a time may call.
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
    /// The part that no reclaimer has taken yet.
    rest: Range<usize>,
    /// Number of parts that are taken and not finished.
    unfinished: u32,
}

impl PageOutParts {
    /// Takes the next part. It ends at a border that no folio crosses.
    fn take(&mut self) -> Option<Range<usize>> {
        if self.rest.is_empty() {
            return None;
        }
        let end = (self.rest.start + 1).next_multiple_of(MAX_ORDER.bytes()).min(self.rest.end);
        self.unfinished += 1;
        Some(std::mem::replace(&mut self.rest.start, end)..end)
    }

    /// Notes that a part is finished. Returns whether it was the last one.
    fn finish(&mut self) -> bool {
        self.unfinished -= 1;
        self.rest.is_empty() && self.unfinished == 0
    }
}

/// The start argument of a reclaimer.
pub(crate) struct ReclaimerStart {
    pub(crate) runtime: &'static Runtime,
}

/// A reclaimer.
struct Reclaimer {
    context: &'static Context,
    activated: &'static Activated,
    gate: &'static Gate,
    placement: &'static Placement,
    requests: &'static ReclaimRequests,
    worker: Worker,
}

/// The entry of a reclaimer's thread. `argument` points to a [`ReclaimerStart`].
pub(crate) extern "C" fn reclaimer_entry(argument: *mut u8) {
    // SAFETY: `start_worker` passes a `ReclaimerStart`, which nobody writes or frees.
    let start: &'static ReclaimerStart = unsafe { &*argument.cast::<ReclaimerStart>() };
    let Runtime { context, activation, workers, reclaim: requests, placement, fork, .. } = start.runtime;
    workers.take_program_priority();
    workers.wait_until_released();
    let Some(activated) = activation.get() else { unreachable!("it has activated") };
    let gate = &fork.gate;
    let worker = activated.recompressing_worker(context, gate);
    Reclaimer { context, activated, gate, placement, requests, worker }.run()
}

impl Reclaimer {
    fn run(&mut self) -> ! {
        let engine = &self.activated.engine;
        let mut place = ThreadPlacement::here();
        loop {
            place.update(self.placement);
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
                if self.serve_request() {
                    continue;
                }
                match engine.reclaim_in_background(&mut self.worker) {
                    BackgroundReclaim::StoreCompacted => {}
                    BackgroundReclaim::Freed(pages) => {
                        self.context.budget.counters().vm.pgsteal_kswapd.add(pages);
                        self.yield_to_handler();
                    }
                    BackgroundReclaim::Done(pages) => {
                        self.context.budget.counters().vm.pgsteal_kswapd.add(pages);
                        break;
                    }
                }
            }
            // No thread needs memory: do background work.
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

    /// Serves a part of the request of `ctl`, and gives the freed memory back to the system.
    /// Returns whether there may be more to do.
    fn serve_request(&mut self) -> bool {
        let Some(number) = self.requests.asked.lock().map(|asked| asked.number) else { return false };
        let engine = &self.activated.engine;
        let freed = engine.reclaim(&mut self.worker, pacing::BATCH_PAGES);
        let mut asked = self.requests.asked.lock();
        let is_served = asked.as_mut().filter(|asked| asked.number == number).is_some_and(|asked| asked.note(freed));
        if is_served {
            *asked = None;
        }
        drop(asked);
        let low_pages = engine.room().watermarks.low_pages() as u32;
        engine.shrink(if is_served { 0 } else { low_pages }, u32::MAX);
        if is_served {
            self.context.budget.sample();
            self.context.budget.control().process(self.context.budget.slot()).reclaim.finish(number);
        }
        true
    }

    /// Makes a free run of frames while there is nothing to reclaim. Returns whether there may be
    /// more to do.
    fn compact(&self) -> bool {
        let _inside = self.gate.enter();
        self.activated.engine.compact_in_background()
    }

    /// Recompresses idle pieces as long as no thread needs memory or waits for a CPU. Returns how
    /// long to pause.
    fn recompress(&mut self, kicked: u32) -> Option<Duration> {
        let loadavg = self.context.files.as_ref()?.loadavg.as_ref()?;
        let engine = &self.activated.engine;
        loop {
            let _inside = self.gate.enter();
            if !engine.recompress_in_background(&mut self.worker, || cpus::is_contended(loadavg))
                || self.requests.kick.load(Ordering::Relaxed) != kicked
            {
                return Some(RECOMPRESS_PAUSE);
            }
        }
    }

    /// Lets the pinned handler, which a reclaimer may keep from its CPU, serve waiting faults.
    fn yield_to_handler(&self) {
        if self.placement.cpu().is_some() && self.activated.engine.ports().space.descriptors().program.has_message() {
            clock::sleep(YIELD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_out_is_done_when_its_last_part_is() {
        const BLOCK: usize = MAX_ORDER.bytes();
        let mut parts = PageOutParts { rest: BLOCK - PAGE_BYTES..3 * BLOCK + PAGE_BYTES, unfinished: 0 };
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

    #[test]
    fn a_request_is_served_when_enough_is_freed_or_nothing_more_can_be() {
        let mut asked = Asked { number: 1, left_pages: 300, fruitless: 0 };
        assert!(!asked.note(256));
        assert!((1..MAX_FRUITLESS_BATCHES).all(|_| !asked.note(0)), "a batch may fail by chance");
        assert!(!asked.note(1));
        assert!((1..MAX_FRUITLESS_BATCHES).all(|_| !asked.note(0)) && asked.note(0));
        let mut asked = Asked { number: 1, left_pages: 300, fruitless: 0 };
        assert!(!asked.note(256) && asked.note(44));
    }
}
