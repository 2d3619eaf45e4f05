//! Messages of the userfaultfd: faults, and mapping events in their order.
//!
//! Messages are read one at a time under the lock of the mappings
//! ([`LinuxMachine::hold_mappings`]), and a mapping event is applied before that lock is released.
//! So no fault that the program raises after an event is served before the event is applied. Faults
//! are served outside the lock.
//!
//! Lock order: the gate, then the lock of the mappings, then the engine's.

use crate::address_space::allocation_notice::AllocationNotices;
use crate::address_space::mapping_changes::Changes;
use crate::address_space::ranges::{page, pages};
use crate::companion::activated::Activated;
use crate::companion::context::Context;
use crate::companion::placement::Placement;
use crate::ports::machine::LinuxMachine;
use foliomem_core::machine::Machine;
use foliomem_sync::RwLockWriteGuard;
use foliomem_sync::ranks::Mappings;
use foliomem_sys::clock;
use foliomem_sys::userfaultfd::{Change, Message};
use foliomem_types::trace_event::Event as TraceEvent;
use foliomem_types::units::{PAGE_BYTES, PageNumber};
use std::time::Duration;

/// This many polls expect the lock of the mappings to be released within microseconds, as a holder
/// that has a CPU does.
const LOCK_LOOKS: u32 = 50;
/// The time of a few faults.
pub(crate) const GIVE_WAY: Duration = Duration::from_micros(50);
/// After this many polls that find a message being received, its receiver counts as preempted.
const RECEIVING_LOOKS: u32 = 4;

/// A thread of the program waits for a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) page: PageNumber,
    /// The page is resident, and write-protected.
    pub(crate) is_protected: bool,
}

/// Faults that were received while the agent waited for something else.
#[derive(Default)]
pub(crate) struct PendingFaults(Vec<Fault>);

impl PendingFaults {
    pub(crate) fn push(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(crate) fn pop(&mut self) -> Option<Fault> {
        self.0.pop()
    }
}

/// Receives and applies mapping events. Handlers, the monitor and adoption share it.
#[derive(Clone, Copy)]
pub(crate) struct MappingEvents {
    pub(crate) context: &'static Context,
    pub(crate) activated: &'static Activated,
    pub(crate) allocations: &'static AllocationNotices,
    pub(crate) placement: &'static Placement,
}

impl MappingEvents {
    /// Receives messages until one is a fault, and applies the mapping events before it. `None`
    /// when there is no message.
    pub(crate) fn receive(&self) -> Option<Fault> {
        let machine = self.activated.engine.machine();
        let uffd = &machine.descriptors().program;
        let mut changes = machine.hold_mappings();
        loop {
            let fault = match uffd.read_message() {
                Ok(Some(Message::Change(change))) => {
                    changes.hear(change, machine.registered(), |change| self.apply(change));
                    continue;
                }
                Ok(Some(Message::Fault { address, protected, thread })) => {
                    self.placement.heard(thread);
                    Some(Fault { page: page(address), is_protected: protected })
                }
                Ok(None) | Err(_) => None,
            };
            if (!changes.is_settled() || machine.has_unknown_growth()) && !uffd.mapping_is_changing() {
                changes.settle(|change| self.apply(change));
                machine.learn_growth();
            }
            return fault;
        }
    }

    /// Applies an event that was received while others were pending: it waits for the next message,
    /// and until then no page can be moved.
    pub(crate) fn settle(&self) {
        let machine = self.activated.engine.machine();
        if machine.steady().is_some() {
            return;
        }
        while let Some(fault) = self.receive() {
            machine.fault_again(fault.page);
        }
    }

    /// Receives all pending mapping events, and waits until none is pending. `pending` keeps the
    /// faults that came with them. No other thread receives messages while the returned guard
    /// exists.
    pub(crate) fn receive_changes(&self, pending: &mut PendingFaults) -> RwLockWriteGuard<'static, Changes, Mappings> {
        let (mut looks, mut _paused) = (0, None);
        loop {
            while let Some(fault) = self.receive() {
                pending.push(fault);
            }
            let hearing = self.activated.engine.machine().hold_mappings();
            if hearing.is_applied() && !self.activated.engine.machine().descriptors().program.mapping_is_changing() {
                return hearing;
            }
            drop(hearing);
            looks += 1;
            if looks < LOCK_LOOKS {
                foliomem_sync::back_off();
            } else {
                // One of many threads is always at it, or the one that is gets no CPU beside us.
                _paused = _paused.or_else(|| Some(self.allocations.pause()));
                clock::sleep(GIVE_WAY);
            }
        }
    }

    /// Applies a mapping event to what the agent knows of the mappings, under their lock.
    fn apply(&self, change: Change) {
        let (engine, ranges) = (&self.activated.engine, self.activated.engine.machine().ranges());
        // Advice from before the event is about the mappings before the event.
        engine.machine().advices().hear(ranges);
        self.context.tracer.tell(&self.context.budget, || match &change {
            Change::Discard(range) => TraceEvent::Discard(pages(range)),
            Change::Unmap(range) => TraceEvent::Unmap(pages(range)),
            Change::Remap { from, to } => TraceEvent::Remap(pages(from), page(*to)),
        });
        match change {
            Change::Discard(range) => {
                engine.machine().discarded(range.clone());
                engine.discarded(pages(&range));
            }
            Change::Unmap(range) => {
                self.allocations.unmapped(&range);
                engine.machine().unmapped(range.clone());
                engine.unmapped(pages(&range));
            }
            Change::Remap { from, to } => {
                let len = from.len();
                engine.machine().moved(from.clone(), to);
                engine.remapped(page(from.start), page(to), (len / PAGE_BYTES) as u32);
                // The message has the old length, whatever the new one is.
                engine.machine().may_have_grown(to);
            }
        }
    }
}

/// Whether a thread that receives a message has not got on for a while: it is kept from its CPU.
/// (The caller sleeps between looks: the scheduler puts no waking thread on a CPU that is in use,
/// however briefly.)
pub(crate) fn is_receiver_starved(machine: &LinuxMachine) -> bool {
    machine.is_being_heard()
        && (0..RECEIVING_LOOKS).all(|_| {
            clock::sleep(GIVE_WAY);
            machine.is_being_heard()
        })
}
