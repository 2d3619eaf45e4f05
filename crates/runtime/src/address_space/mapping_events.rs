//! Messages of the userfaultfd: faults, and mapping events in their order.
//!
//! Messages are read one at a time under the lock of the mappings
//! ([`AddressSpace::hold_mappings`]), and a mapping event is applied before that lock is released.
//! So no fault that the program raises after an event is served before the event is applied. Faults
//! are served outside the lock.
//!
//! Lock order: the gate, then the lock of the mappings, then the engine's.

use crate::address_space::allocation_notice::AllocationNotices;
use crate::address_space::mapping_changes::Changes;
use crate::address_space::ranges::{page, pages};
use crate::companion::activated::Activated;
use crate::companion::context::Context;
use crate::companion::end;
use crate::companion::placement::Placement;
use crate::ports::address_space::AddressSpace;
use foliomem_core::ports::AddressSpace as _;
use foliomem_sync::RwLockWriteGuard;
use foliomem_sync::ranks::Mappings;
use foliomem_sys::clock;
use foliomem_sys::userfaultfd::{Change, Message};
use foliomem_types::trace_event::Event as TraceEvent;
use foliomem_types::units::{PAGE_BYTES, PageNumber};
use std::time::Duration;

/// Number of polls of the lock of the mappings before sleeping: a running holder releases it within
/// microseconds.
const LOCK_POLLS: u32 = 50;
/// Pause that lets another thread make progress: the time of a few faults.
pub(crate) const YIELD: Duration = Duration::from_micros(50);
/// Number of polls that find a message being received after which its receiver counts as preempted.
const RECEIVING_POLLS: u32 = 4;

/// A fault: a thread waits for a page, one of the program or of a process that accesses its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault {
    pub(crate) page: PageNumber,
    /// The page is resident, and write-protected.
    pub(crate) is_protected: bool,
    /// The id of the thread that waits, in its own pid namespace.
    pub(crate) thread: u32,
}

/// Faults that were received while the agent waited for something else, each of them once: a thread
/// that is woken in between raises its fault again.
#[derive(Debug, Default)]
pub(crate) struct PendingFaults(Vec<Fault>);

impl PendingFaults {
    pub(crate) fn push(&mut self, fault: Fault) {
        // There are at most as many faults as the program has threads.
        if !self.0.contains(&fault) {
            self.0.push(fault);
        }
    }

    pub(crate) fn pop(&mut self) -> Option<Fault> {
        self.0.pop()
    }

    /// Makes the threads that wait for these faults raise them again, so that a handler receives
    /// them. No message may be received before all are woken: the same fault would come back at
    /// once, and again, while the thread that is changing a mapping gets no CPU.
    pub(crate) fn raise_again(self, space: &AddressSpace) {
        self.0.iter().for_each(|fault| space.fault_again(fault.page));
    }
}

/// Receives and applies mapping events. Handlers, the monitor and adoption use it.
#[derive(Clone, Copy)]
pub(crate) struct MappingEvents {
    pub(crate) context: &'static Context,
    pub(crate) activated: &'static Activated,
    pub(crate) allocations: &'static AllocationNotices,
    pub(crate) placement: &'static Placement,
}

impl MappingEvents {
    /// Receives messages until one is a fault, and applies the mapping events before it. Returns
    /// `None` if there are no more messages.
    pub(crate) fn receive(&self) -> Option<Fault> {
        let space = &self.activated.engine.ports().space;
        let uffd = &space.descriptors().program;
        let mut changes = space.hold_mappings();
        loop {
            let fault = match uffd.read_message() {
                Ok(Some(Message::Change(change))) => {
                    changes.receive(change, space.registered(), |change| self.apply(change));
                    continue;
                }
                Ok(Some(Message::Fault { address, protected, thread })) => {
                    self.placement.note_fault(thread);
                    Some(Fault { page: page(address), is_protected: protected, thread })
                }
                Ok(None) | Err(_) => None,
            };
            if (!changes.is_settled() || space.has_unknown_growth()) && !uffd.mapping_is_changing() {
                changes.settle(|change| self.apply(change));
                space.learn_growth();
            }
            return fault;
        }
    }

    /// Applies an event that was received while others were pending. The event waits for the next
    /// message; until then no page can be moved.
    pub(crate) fn settle(&self) {
        let space = &self.activated.engine.ports().space;
        if space.steady().is_some() {
            return;
        }
        let mut pending = PendingFaults::default();
        while let Some(fault) = self.receive() {
            pending.push(fault);
        }
        pending.raise_again(space);
    }

    /// Receives all pending mapping events, and waits until none is pending. Adds the faults that
    /// came with them to `pending`. No other thread receives messages while the returned guard
    /// exists.
    pub(crate) fn receive_changes(&self, pending: &mut PendingFaults) -> RwLockWriteGuard<'static, Changes, Mappings> {
        let (mut polls, mut _paused) = (0, None);
        loop {
            while let Some(fault) = self.receive() {
                pending.push(fault);
            }
            let received = self.activated.engine.ports().space.hold_mappings();
            if received.is_applied() && !self.activated.engine.ports().space.descriptors().program.mapping_is_changing()
            {
                return received;
            }
            drop(received);
            polls += 1;
            if polls < LOCK_POLLS {
                foliomem_sync::back_off();
            } else {
                // One of many threads always has a pending event, or the thread that has one gets
                // no CPU.
                _paused = _paused.or_else(|| Some(self.allocations.pause()));
                clock::sleep(YIELD);
            }
        }
    }

    /// Applies a mapping event to the agent's knowledge of the mappings, under their lock.
    fn apply(&self, change: Change) {
        let engine = &self.activated.engine;
        let (space, arena) = (&engine.ports().space, &engine.ports().arena);
        let (Change::Discard(range) | Change::Unmap(range) | Change::Remap { from: range, .. }) = &change;
        // The agent's own changes of the arena raise no events.
        if arena.overlaps(range) {
            end::crash();
        }
        // Advice given before the event concerns the mappings before the event.
        space.advices().receive(space.ranges());
        self.context.tracer.record(&self.context.budget, || match &change {
            Change::Discard(range) => TraceEvent::Discard(pages(range)),
            Change::Unmap(range) => TraceEvent::Unmap(pages(range)),
            Change::Remap { from, to } => TraceEvent::Remap(pages(from), page(*to)),
        });
        match change {
            Change::Discard(range) => {
                space.discarded(range.clone());
                engine.discarded(pages(&range));
            }
            Change::Unmap(range) => {
                self.allocations.unmapped(&range);
                space.unmapped(range.clone());
                engine.unmapped(pages(&range));
            }
            Change::Remap { from, to } => {
                let len = from.len();
                space.moved(from.clone(), to);
                engine.remapped(page(from.start), page(to), (len / PAGE_BYTES) as u32);
                // The message has the old length even if the new length differs.
                space.note_growth(to);
            }
        }
    }
}

/// Returns whether a thread that receives a message has made no progress for a while: it is kept
/// from its CPU. (The caller sleeps between polls, because the scheduler puts no waking thread on a
/// CPU that is in use, however briefly.)
pub(crate) fn is_receiver_starved(space: &AddressSpace) -> bool {
    space.is_receiving()
        && (0..RECEIVING_POLLS).all(|_| {
            clock::sleep(YIELD);
            space.is_receiving()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_is_raised_again_is_pending_once() {
        let fault = |page, is_protected| Fault { page: PageNumber(page), is_protected, thread: 1 };
        let mut pending = PendingFaults::default();
        for fault in [fault(1, false), fault(2, false), fault(1, false), fault(1, true), fault(2, false)] {
            pending.push(fault);
        }
        let all: Vec<_> = std::iter::from_fn(|| pending.pop()).collect();
        assert_eq!(all, [fault(1, true), fault(2, false), fault(1, false)]);
    }
}
