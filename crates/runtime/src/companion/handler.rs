//! Handlers: threads that receive messages and serve the program's faults.
//!
//! There is one handler for each CPU, and at least two. A handler serves inside the gate. Each
//! message wakes all handlers that listen, and the one on the program's own CPU usually receives
//! it. A handler that finds no message parks: to wake it costs the faulting thread time, and lets
//! the scheduler move that thread to the handler's CPU. It listens again after a while, or when
//! threads fault faster than one handler serves.
//!
//! Lock order: the gate, then the lock of the mappings, then the engine's.

use crate::address_space::adopt::adopt_growth;
use crate::address_space::cow_throttle;
use crate::address_space::mapping_events::{Fault, MappingEvents, PendingFaults};
use crate::address_space::ranges::pages;
use crate::companion::placement::{PinnedHandler, SEPARATE_AFTER_STARVING_NS, Standby};
use crate::ports::pieces::Worker;
use crate::runtime::Runtime;
use foliomem_core::engine::Served;
use foliomem_core::pacing::reads_ahead_after;
use foliomem_core::ports::AddressSpace as _;
use foliomem_sys::clock::now_ns;
use foliomem_types::counters::FaultKind;
use foliomem_types::units::{Order, PAGE_BYTES, PageNumber};
use std::ops::Range;

/// The start argument of a handler.
pub(crate) struct HandlerStart {
    pub(crate) runtime: &'static Runtime,
    pub(crate) index: usize,
    pub(crate) cpu: usize,
}

/// A handler.
struct Handler {
    runtime: &'static Runtime,
    events: MappingEvents,
    worker: Worker,
}

/// The entry of a handler's thread. `argument` points to a [`HandlerStart`].
pub(crate) extern "C" fn handler_entry(argument: *mut u8) {
    // SAFETY: `start_worker` passes a `HandlerStart`, which nobody writes or frees.
    let start: &'static HandlerStart = unsafe { &*argument.cast::<HandlerStart>() };
    let runtime = start.runtime;
    runtime.workers.take_program_priority();
    runtime.workers.wait_until_released();
    let Some(events) = runtime.mapping_events() else { unreachable!("it has activated") };
    let worker = events.activated.worker(events.context, &runtime.fork.gate);
    Handler { runtime, events, worker }.run(start)
}

impl Handler {
    fn run(&mut self, start: &HandlerStart) -> ! {
        let uffd = &self.events.activated.engine.ports().space.descriptors().program;
        if self.events.placement.is_unknown()
            && let Some(page) = self.runtime.workers.measured.get()
        {
            match start.index {
                0 => self.events.placement.measure(page),
                1 => self.events.placement.be_busy(),
                _ => {}
            }
        }
        let is_pinned_handler = start.index == 0 && self.events.placement.pays();
        let mut pinned = is_pinned_handler.then(|| PinnedHandler::new(start.cpu as u32));
        let mut standby = Standby::default();
        loop {
            if pinned.is_none() && self.events.placement.cpu().is_some() {
                self.runtime.workers.park();
                if !standby.finds_starved(self.events.placement, now_ns(), || uffd.has_message()) {
                    continue;
                }
                self.events.placement.separate(SEPARATE_AFTER_STARVING_NS);
            }
            if uffd.wait(None).is_err() {
                continue;
            }
            let mut last_thread = None;
            {
                let _inside = self.runtime.fork.gate.enter();
                let mut pending = PendingFaults::default();
                while let Some(fault) = self.events.receive() {
                    if last_thread.replace(fault.thread).is_some_and(|last| last != fault.thread) {
                        // A thread has waited for another one's fault.
                        self.runtime.workers.unpark_one();
                    }
                    self.runtime.dormancy.note_fault(&self.runtime.fork.quiesce);
                    if let Some(pinned) = &mut pinned {
                        pinned.follow(self.events.placement);
                    }
                    self.serve(fault, &mut pending);
                    while let Some(fault) = pending.pop() {
                        self.serve(fault, &mut pending);
                    }
                    if let Some(pinned) = &pinned {
                        pinned.note_served(self.events.placement);
                    }
                }
            }
            if last_thread.is_none() {
                self.runtime.workers.park();
            }
        }
    }

    /// Maps in the folios that the program will touch next, until a message arrives. Returns their
    /// order; `None` if there are none.
    fn read_ahead(&mut self, page: PageNumber) -> Option<Order> {
        let uffd = &self.events.activated.engine.ports().space.descriptors().program;
        let (mut chunks, mut fetched) = (0, None);
        while let Some((ahead, order)) = self.events.activated.engine.claim_ahead(page) {
            // Recorded before the read, so that reads of several handlers appear in order.
            self.events.context.tracer.note_readahead(
                &self.events.context.budget,
                &ahead,
                (chunks == 0).then(|| page.head(order).folio(order)),
            );
            if !self.events.activated.engine.read_ahead(&mut self.worker, ahead, order) {
                break;
            }
            fetched = Some(order);
            if uffd.has_message() {
                break;
            }
            chunks += 1;
            if chunks == 1 && self.events.placement.cpu().is_none() {
                // Another handler must listen meanwhile.
                self.runtime.workers.unpark_one();
            }
        }
        fetched
    }

    /// Lets the change of mappings go on that is in the way of a fault: receives its event, or
    /// another fault, which is added to `pending`.
    fn wait_for_change(&self, pending: &mut PendingFaults) {
        match self.events.receive() {
            Some(other) => pending.push(other),
            None => foliomem_sync::back_off(),
        }
    }

    /// Serves a write to a page that a fork may have left shared: the program waits for room for
    /// the copy. Adds faults that it receives while it waits to `pending`.
    fn serve_copy(&mut self, page: PageNumber, pending: &mut PendingFaults) {
        let space = &self.events.activated.engine.ports().space;
        let started_ns = now_ns();
        let block = cow_throttle::block(space, page);
        self.events.activated.engine.charge_copies(&mut self.worker, (block.len() / PAGE_BYTES) as u32);
        while self.events.activated.engine.unprotect(pages(&block)).is_err() {
            self.wait_for_change(pending);
        }
        self.events.context.budget.counters().faults(FaultKind::Copy).record(now_ns() - started_ns);
        self.events.context.budget.counters().vm.pgfault.inc();
        space.wake(pages(&block));
    }

    /// Serves one fault. Adds faults that it receives while it waits to `pending`.
    fn serve(&mut self, fault: Fault, pending: &mut PendingFaults) {
        let Fault { page, is_protected, thread } = fault;
        let must_wait = || {
            let runtime = self.runtime;
            runtime.context.budget.own_slot().is_held(now_ns)
                && runtime.context.is_program_thread(runtime.companion.program_number(), thread)
        };
        if self.runtime.held_faults.leave(must_wait) {
            return;
        }
        if is_protected {
            return self.serve_copy(page, pending);
        }
        let started_ns = now_ns();
        let space = &self.events.activated.engine.ports().space;
        let mut waited_for = page..page;
        let kind = loop {
            let (served, pages) = self.events.activated.engine.fault_unwoken(&mut self.worker, page);
            waited_for = around(waited_for, pages);
            match served {
                Served::Done(kind) => break kind,
                // Nobody is woken before the end: a thread that finds the page absent raises the
                // fault again at once, and may keep the CPU from the one that changes a mapping.
                Served::Again => self.wait_for_change(pending),
            }
        };
        if kind == FaultKind::Spurious && space.ranges().containing(page.address() as usize).is_none() {
            adopt_growth(self.events, &mut self.worker, page);
        }
        let counters = self.events.context.budget.counters();
        let record_time = || counters.faults(kind).record(now_ns() - started_ns);
        counters.vm.pgfault.inc();
        let engine = &self.events.activated.engine;
        self.events.context.tracer.served(&self.events.context.budget, engine, page, &waited_for, kind);
        if kind == FaultKind::SwapIn {
            counters.vm.pgmajfault.inc();
        }
        let reads_ahead = reads_ahead_after(kind);
        // A co-located thread takes the handler's CPU when it is woken, so the handler wakes it
        // last. So it does where the thread would overtake what is read ahead for it.
        let is_last = self.events.placement.cpu().is_some() || reads_ahead && engine.reads_ahead_first(page);
        if !is_last {
            record_time();
            space.wake(waited_for.clone());
        }
        let room = engine.room();
        if engine.should_reclaim(&room) {
            self.runtime.reclaim.wake();
        }
        if reads_ahead {
            let fetched = self.read_ahead(page);
            if fetched.is_some() || kind != FaultKind::Spurious {
                // Reclaimers that compress to make room for readahead would need the other CPU.
                self.events.placement.note_readahead(fetched.filter(|_| room.is_high()));
            }
        }
        if is_last {
            self.events.placement.note_wake();
            // The thread has waited for the readahead, too.
            record_time();
            space.wake(waited_for);
        }
    }
}

/// Returns the range around both ranges, which are of one block; an empty range is nowhere.
fn around(one: Range<PageNumber>, other: Range<PageNumber>) -> Range<PageNumber> {
    match (one.is_empty(), other.is_empty()) {
        (true, _) => other,
        (_, true) => one,
        _ => one.start.min(other.start)..one.end.max(other.end),
    }
}
