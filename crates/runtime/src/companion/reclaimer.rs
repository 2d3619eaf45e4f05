//! Reclaimers: threads that compress memory from the low watermark up to the high one, so that
//! faults rarely have to.
//!
//! Idle reclaimers compact, discard, recompress, and share. A reclaimer works inside the gate.
//!
//! Lock order: the gate, then the engine's locks. The lock of the page-out parts is a leaf.

use crate::address_space::mapping_events::YIELD;
use crate::address_space::ranges::pages;
use crate::companion::activated::Activated;
use crate::companion::context::Context;
use crate::companion::placement::{ThreadPlacement, own_thread};
use crate::companion::request_progress::{ColdResult, ColdStep, Progress, RequestProgress, Step};
use crate::companion::workers::MAX_HANDLERS;
use crate::ports::pieces::Worker;
use crate::runtime::Runtime;
use foliomem_core::engine::{ColdWriteBack, Recompression, Resumed, Sharing};
use foliomem_core::pacing::{self, Activity, BackgroundReclaim};
use foliomem_core::ports::Ports;
use foliomem_session::memory_request::{COLD_ROUNDS, Pending};
use foliomem_sync::Mutex;
use foliomem_sys::clock::{self, now_ns, timespec};
use foliomem_sys::cpus::{self, Urgency, set_urgency};
use foliomem_sys::identity;
use foliomem_types::units::{MAX_ORDER, PAGE_BYTES};
use rustix::thread::futex;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Memory that the agent of a child takes at once, as a shift of the limit (1/2^5), its minimum and
/// its maximum.
const CHILD_ROOM_SHIFT: u32 = 5;
const CHILD_ROOM_MIN_PAGES: i64 = (2 << 20) / PAGE_BYTES as i64;
const CHILD_ROOM_MAX_PAGES: i64 = (16 << 20) / PAGE_BYTES as i64;
/// Maximum time in nanoseconds for which a fork waits for that room, and the time between checks.
const MAX_CHILD_WAIT_NS: u64 = 100_000_000;
const CHILD_PAUSE: Duration = Duration::from_micros(500);
/// Pause of recompression after another thread wanted the CPU: doubled each time, up to the pause
/// after the reclaimers have gone over all pieces.
const RECOMPRESS_PAUSE: Duration = Duration::from_millis(100);
const RECOMPRESS_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Pause after the reclaimers have shared all that they can share for now.
const SHARE_PAUSE: Duration = Duration::from_secs(1);

/// Time for which the reclaimers are urgent, in nanoseconds.
const URGENT_NS: u64 = 5_000_000;

/// Requests of other threads to the reclaimers.
pub(crate) struct ReclaimRequests {
    /// Incremented to wake the reclaimers. A futex word.
    pub(crate) kick: AtomicU32,
    /// The range that a thread waits to see swapped out.
    pub(crate) page_out_parts: Mutex<PageOutParts>,
    pub(crate) page_outs_wanted: AtomicU32,
    pub(crate) page_outs_done: AtomicU32,
    /// The request of `ctl` or the supervisor that the reclaimers serve.
    pub(crate) request: Mutex<Option<RequestProgress>>,
    /// Time until which the reclaimers run before all other threads.
    pub(crate) urgent_until_ns: AtomicU64,
}

impl Default for ReclaimRequests {
    fn default() -> ReclaimRequests {
        ReclaimRequests {
            kick: AtomicU32::new(0),
            page_out_parts: Mutex::new(PageOutParts { rest: 0..0, unfinished: 0 }),
            page_outs_wanted: AtomicU32::new(0),
            page_outs_done: AtomicU32::new(0),
            request: Mutex::new(None),
            urgent_until_ns: AtomicU64::new(0),
        }
    }
}

impl ReclaimRequests {
    /// Makes the reclaimers free the memory that the agent of a child takes at once, and waits for
    /// that up to [`MAX_CHILD_WAIT_NS`]. The monitor calls this while a thread waits to fork. (The
    /// forking thread itself may take no lock of the engine: when it wakes up to take one, it may
    /// first fault, and the handler of this fault may wait for the same lock.)
    pub(crate) fn make_room_for_child(&self, context: &Context, activated: &Activated) {
        if context.settings.torture {
            // There is never any room.
            return;
        }
        let engine = &activated.engine;
        let wanted =
            (context.budget.limit_pages() >> CHILD_ROOM_SHIFT).clamp(CHILD_ROOM_MIN_PAGES, CHILD_ROOM_MAX_PAGES);
        let until_ns = now_ns() + MAX_CHILD_WAIT_NS;
        let lacks_room = || context.budget.room_pages() + i64::from(engine.free_frames()) < wanted;
        while lacks_room() && !engine.reclaim_is_futile() && now_ns() < until_ns {
            self.wake();
            let pause = timespec(CHILD_PAUSE);
            let _ = futex::wait(&AtomicU32::new(0), futex::Flags::PRIVATE, 0, Some(&pause));
            context.budget.sample();
            // Freed frames give other processes no room before the arena releases them.
            engine.release_surplus(Activity::Busy);
        }
    }

    /// Wakes the reclaimers, and lets them run before all other threads for a while: the program
    /// grows and cannot be made to wait.
    pub(crate) fn wake_urgently(&self) {
        self.urgent_until_ns.store(now_ns() + URGENT_NS, Ordering::Relaxed);
        self.wake();
    }

    /// Wakes the reclaimers.
    pub(crate) fn wake(&self) {
        self.kick.fetch_add(1, Ordering::Relaxed);
        let _ = futex::wake(&self.kick, futex::Flags::PRIVATE, MAX_HANDLERS as u32);
    }

    /// Makes the reclaimers serve `request`, unless they do already.
    pub(crate) fn serve(&self, request: Pending) {
        let mut served = self.request.lock();
        if served.is_none_or(|served| served.number() != request.number) {
            *served = Some(RequestProgress::new(request));
            drop(served);
            self.wake();
        }
    }

    /// Notes with `note` that a step of request `number` is done, unless a newer one has replaced
    /// it. A served request is removed.
    fn note(&self, number: u32, note: impl FnOnce(&mut RequestProgress) -> Progress) -> Progress {
        let mut request = self.request.lock();
        let progress = match request.as_mut().filter(|request| request.number() == number) {
            Some(request) => note(request),
            None => return Progress::Unfinished,
        };
        if progress == Progress::Served {
            *request = None;
        }
        progress
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
    runtime: &'static Runtime,
    activated: &'static Activated,
    worker: Worker,
    urgency: Urgency,
    recompress_pause: Duration,
}

/// The entry of a reclaimer's thread. `argument` points to a [`ReclaimerStart`].
pub(crate) extern "C" fn reclaimer_entry(argument: *mut u8) {
    // SAFETY: `start_worker` passes a `ReclaimerStart`, which nobody writes or frees.
    let start: &'static ReclaimerStart = unsafe { &*argument.cast::<ReclaimerStart>() };
    let runtime = start.runtime;
    runtime.workers.take_program_priority();
    runtime.workers.wait_until_released();
    let Some(activated) = runtime.activation.get() else { unreachable!("it has activated") };
    let worker = activated.recompressing_worker(&runtime.context, &runtime.fork.gate);
    Reclaimer { runtime, activated, worker, urgency: Urgency::Normal, recompress_pause: RECOMPRESS_PAUSE }.run()
}

impl Reclaimer {
    fn run(&mut self) -> ! {
        let engine = &self.activated.engine;
        let mut place = ThreadPlacement::here();
        loop {
            place.update(&self.runtime.placement);
            let kicked = self.runtime.reclaim.kick.load(Ordering::Relaxed);
            loop {
                self.follow_urgency();
                let _inside = self.runtime.fork.gate.enter();
                self.worker.train_if_due();
                let part = self.runtime.reclaim.page_out_parts.lock().take();
                if let Some(part) = part {
                    engine.page_out(&mut self.worker, pages(&part));
                    if self.runtime.reclaim.page_out_parts.lock().finish() {
                        // Release pairs with the Acquire in `page_out`.
                        self.runtime.reclaim.page_outs_done.fetch_add(1, Ordering::Release);
                        let _ = futex::wake(&self.runtime.reclaim.page_outs_done, futex::Flags::PRIVATE, 1);
                    }
                    continue;
                }
                if self.serve_request() {
                    continue;
                }
                match engine.reclaim_in_background(&mut self.worker) {
                    BackgroundReclaim::StoreCompacted => {}
                    BackgroundReclaim::Freed(pages) => {
                        self.runtime.context.budget.counters().vm.pgsteal_kswapd.add(pages);
                        self.yield_to_handler();
                    }
                    BackgroundReclaim::Done(pages) => {
                        self.runtime.context.budget.counters().vm.pgsteal_kswapd.add(pages);
                        break;
                    }
                }
            }
            // No thread needs memory: do background work.
            while self.runtime.reclaim.kick.load(Ordering::Relaxed) == kicked {
                let _inside = self.runtime.fork.gate.enter();
                if !engine.discard_one() {
                    break;
                }
            }
            while self.runtime.reclaim.kick.load(Ordering::Relaxed) == kicked && self.compact() {}
            let pauses = [self.recompress(kicked), self.share(kicked)];
            let pause = pauses.into_iter().flatten().min();
            let _ =
                futex::wait(&self.runtime.reclaim.kick, futex::Flags::PRIVATE, kicked, pause.map(timespec).as_ref());
        }
    }

    /// Changes the thread's scheduling class if the monitor wants another one.
    fn follow_urgency(&mut self) {
        let is_urgent = now_ns() < self.runtime.reclaim.urgent_until_ns.load(Ordering::Relaxed);
        let wanted = if is_urgent { Urgency::RealTime } else { Urgency::Normal };
        if std::mem::replace(&mut self.urgency, wanted) != wanted {
            set_urgency(own_thread(), wanted);
        }
    }

    /// Serves a part of the request of `ctl` or the supervisor. Returns whether there may be more
    /// to do.
    fn serve_request(&mut self) -> bool {
        let engine = &self.activated.engine;
        let taken = {
            let mut request = self.runtime.reclaim.request.lock();
            request.as_mut().and_then(|request| Some((request.number(), request.take(|from| engine.block_from(from))?)))
        };
        let Some((number, step)) = taken else { return false };
        match step {
            Step::Reclaim => {
                let freed_pages = engine.reclaim(&mut self.worker, pacing::BATCH_PAGES);
                let progress = self.runtime.reclaim.note(number, |request| request.note_freed(freed_pages));
                // The freed memory goes back to the system.
                let low_pages = engine.room().watermarks.low_pages() as u32;
                engine.shrink(if progress == Progress::Served { 0 } else { low_pages }, u32::MAX);
                self.finish_if(progress, number);
            }
            Step::Resume(block) => {
                let resumed = block.map_or(Resumed::NoRoom, |block| engine.resume(&mut self.worker, block));
                let progress = self.runtime.reclaim.note(number, |request| request.note_resumed(resumed));
                self.finish_if(progress, number);
            }
            Step::FindCold { step, pages } => {
                let result = self.find_cold(step, pages);
                let progress = self.runtime.reclaim.note(number, |request| request.note_cold(result));
                self.finish_if(progress, number);
            }
        }
        true
    }

    /// Does a step of the search for cold memory, with `pages` still to be staged.
    fn find_cold(&mut self, step: ColdStep, pages: u64) -> ColdResult {
        let engine = &self.activated.engine;
        match step {
            ColdStep::Begin => engine.begin_cold_round(),
            ColdStep::WriteBack => match engine.write_back_cold(&mut self.worker, COLD_ROUNDS.into()) {
                ColdWriteBack::Some => return ColdResult::More,
                ColdWriteBack::Done => {}
            },
            ColdStep::Stage => match engine.stage_oldest(pages.min(pacing::BATCH_PAGES)) {
                0 => {}
                pages => return ColdResult::Staged(pages),
            },
        }
        ColdResult::Over
    }

    /// Publishes that request `number` is served, if it is.
    fn finish_if(&self, progress: Progress, number: u32) {
        if progress == Progress::Served {
            self.runtime.context.budget.sample();
            self.runtime.context.budget.own_slot().request.finish(number);
        }
    }

    /// Makes a free run of frames while there is nothing to reclaim. Returns whether there may be
    /// more to do.
    fn compact(&self) -> bool {
        let _inside = self.runtime.fork.gate.enter();
        self.activated.engine.compact_in_background()
    }

    /// Recompresses idle pieces as long as no thread needs memory or waits for a CPU. Returns how
    /// long to pause then.
    fn recompress(&mut self, kicked: u32) -> Option<Duration> {
        let loadavg = self.runtime.context.files.as_ref()?.loadavg.as_ref()?;
        let engine = &self.activated.engine;
        loop {
            let _inside = self.runtime.fork.gate.enter();
            let result = engine.recompress_in_background(&mut self.worker, || cpus::is_contended(loadavg));
            self.recompress_pause = match result {
                Recompression::More => RECOMPRESS_PAUSE,
                Recompression::Contended => (self.recompress_pause * 2).min(RECOMPRESS_PAUSE_MAX),
                Recompression::PassOver => RECOMPRESS_PAUSE_MAX,
            };
            if result != Recompression::More || self.runtime.reclaim.kick.load(Ordering::Relaxed) != kicked {
                return Some(self.recompress_pause);
            }
        }
    }

    /// Moves pieces to the shared store while the process is idle and has relatives, whose equal
    /// pieces it may join. Returns how long to pause then.
    fn share(&mut self, kicked: u32) -> Option<Duration> {
        let Context { budget, settings, .. } = &self.runtime.context;
        let (control, slot) = (budget.control(), budget.slot());
        let engine = &self.activated.engine;
        engine.ports().shared_store()?;
        let own = identity::of(rustix::process::getpid());
        while self.runtime.reclaim.kick.load(Ordering::Relaxed) == kicked
            && (settings.torture || control.process(slot).is_idle())
            && control.has_relatives(slot)
        {
            let _inside = self.runtime.fork.gate.enter();
            let turn = control.swap().shared.take_turn(own);
            if turn.is_none() || engine.share(&mut self.worker) == Sharing::Done {
                break;
            }
        }
        Some(SHARE_PAUSE)
    }

    /// Lets the pinned handler, which a reclaimer may keep from its CPU, serve waiting faults.
    fn yield_to_handler(&self) {
        if self.runtime.placement.cpu().is_some()
            && self.activated.engine.ports().space.descriptors().program.has_message()
        {
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
}
