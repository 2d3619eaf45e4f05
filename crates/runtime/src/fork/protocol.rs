//! The fork protocol: the steps of each thread in their order, and what a child resets.
//!
//! | # | actor | step |
//! |---|---|---|
//! | 1 | forking thread | makes a call that is patched or trapped (`sys::interception`) |
//! | 2 | forking thread | may ask for descriptors, requests the fork, waits (`Quiesce::request`) |
//! | 3 | monitor | keeps that thread's control block resident, and closes the gate ([`quiesce`]) |
//! | 4 | monitor | receives all pending mapping events, and lends the swap file's slots |
//! | 5 | monitor | lends descriptors, lets the thread fork, waits (`Quiesce::wait_for_fork`) |
//! | 6 | forking thread | copies descriptors that a child cannot open ([`take_descriptors`]) |
//! | 7 | kernel | copies program, arena, engine and store in one state (`ForkCall::make`) |
//! | 8 | parent's thread | closes copied descriptors, reports the fork (`parent_after`) |
//! | 9 | parent's monitor | takes the slots back, opens the gate, accepts the next fork |
//! | 10 | child's thread | claims a slot, and resets the agent ([`reset_in_child`]) |
//! | 11 | child's thread | starts a companion, and waits for it ([`start_childs_companion`]) |
//! | 12 | child's companion | opens its files and descriptors (`prepare_monitor`) |
//! | 13 | child's companion | takes over the engine, starts workers (`take_over_engine`) |
//! | 14 | child's companion | answers |
//! | 15 | child's thread | closes copied descriptors, returns to the program |
//!
//! From step 1 on, the forking thread runs on the agent's stack with all signals blocked. Without a
//! companion, the child's thread maps in all its memory, and goes on without the agent
//! ([`go_on_alone`]).
//!
//! Steps 8 and 9 run in parallel with 10 to 15. From step 3 to 8, and in the child to 14, no code
//! may touch the program's memory: its faults are not served.
//!
//! Lock order: the monitor holds the closed gate, then takes the lock of the mappings and the
//! engine's locks. The forking thread takes no lock that another thread may hold.

use crate::address_space::adopt::adopt_mappings;
use crate::address_space::mapping_events::PendingFaults;
use crate::companion::activated::Activation;
use crate::companion::context::Context;
use crate::companion::end::{fail_in_program, is_used};
use crate::companion::error::RuntimeError;
use crate::companion::farewell;
use crate::companion::memory_users::User;
use crate::companion::notices::Notices;
use crate::companion::placement::SEPARATE_WHILE_GROWING_NS;
use crate::companion::reclaimer::ReclaimRequests;
use crate::fork::child::{go_on_alone, start_childs_companion};
use crate::fork::quiesce::Peer;
use crate::fork::state::ForkState;
use crate::ports::LinuxPorts;
use crate::ports::swap::Swap;
use crate::runtime::Runtime;
use foliomem_session::process_table::SlotIndex;
use foliomem_sys::identity;
use foliomem_sys::interception::fork_call::{ForkHooks, ForkOutcome};
use foliomem_sys::region::Region;
use foliomem_sys::thread_control_block::BLOCK_PAGES;
use rustix::fd::{AsFd, AsRawFd};
use rustix::process::Pid;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl ForkHooks for Runtime {
    fn stack(&self) -> &Region {
        &self.fork.stack
    }

    fn before(&'static self, needed: [usize; BLOCK_PAGES]) {
        if self.is_off() {
            return;
        }
        ask_for_descriptors(self);
        let monitor = || if self.companion.process().is_some() { Peer::Present } else { Peer::Gone };
        match self.fork.quiesce.request(needed, monitor) {
            Peer::Present => take_descriptors(self),
            // The companion has turned itself off: the program has no swapped-out memory.
            Peer::Gone if self.is_off() => {}
            // The child would have no limit, and might lack swapped-out memory.
            Peer::Gone => fail_in_program(self, &RuntimeError::CompanionLost(self.companion.program())),
        }
    }

    fn parent_after(&'static self, outcome: ForkOutcome) {
        self.fork.finish_descriptors();
        if self.is_off() {
            return;
        }
        self.fork.quiesce.release(outcome);
    }

    fn child_after(&'static self, own: Pid) {
        if self.is_off() {
            return;
        }
        let control = self.context.budget.control();
        let parent = self.context.budget.slot();
        // If all slots are taken, the child uses its parent's, and is managed all the same.
        identity::note_fork(own);
        let slot = control.claim_slot(own).unwrap_or(parent);
        if slot != parent {
            control.note_fork(slot, parent);
        }
        reset_in_child(self, slot);
        if let Err(error) = start_childs_companion(self, own) {
            go_on_alone(self, own, &error);
        }
        self.fork.finish_descriptors();
    }

    fn thread_starts(&'static self, words: Range<usize>) {
        if !self.is_off() && self.swaps() {
            self.notices.keep_resident(&self.fork.quiesce, rustix::process::getpid(), words);
        }
    }

    fn exiting(&'static self) {
        farewell::take_leave(self);
    }

    fn objects_changed(&'static self) {
        if !self.is_off() {
            self.notices.objects_changed(&self.fork.quiesce);
        }
    }
}

/// Resets the state of the agent in the child of a fork. The child's only thread calls this.
///
/// The pattern names every field, so a new field does not compile until its author has decided what
/// a child does with it:
/// - *reset*: this function resets it;
/// - *companion*: the child's companion creates it again before it answers (step 14);
/// - *start*: each start of a companion resets it;
/// - *kept*: the parent's value is right in the child.
fn reset_in_child(runtime: &Runtime, slot: SlotIndex) {
    let Runtime {
        context:
            Context {
                settings: _,     // Kept: constant in a run.
                budget: _,       // Companion: `Budget::arm`.
                agent_memory: _, // Kept: the child has the same memory.
                tracer: _,       // Companion: `Tracer::started`.
                files: _,        // Companion: `prepare_monitor` opens the child's own.
            },
        companion: _,   // Start: `Companion::start`, which lists its own fields.
        exit_notice: _, // Companion: `prepare_monitor`.
        notices:
            Notices {
                allocations,              // Reset: waiting threads are not in the child.
                lenders: _,               // Companion: `Lenders::arm`.
                control_blocks: _,        // Companion: `ControlBlocks::forked`.
                has_reported_unlocked: _, // Kept: once for a process and its children.
            },
        activation:
            Activation {
                activated: _,     // Companion: `take_over_engine`.
                manage_now: _,    // Kept.
                retry_ns: _,      // Kept: the child may be as short of threads.
                managing: _,      // Kept: memory managed in the parent is managed in the child.
                searched_code: _, // Kept: the child has the same code.
            },
        workers: _, // Start: `Workers::reset`, which lists its own fields.
        reclaim:
            ReclaimRequests {
                kick: _,             // Kept: a counter.
                page_out_parts: _,   // Kept: the child's reclaimers finish the rest.
                page_outs_wanted: _, // Kept: goes with `page_outs_done`.
                page_outs_done: _,   // Kept: a counter.
                request,             // Reset: it is the parent's.
                urgent_until_ns: _,  // Kept: soon over.
            },
        placement: _, // Companion: `Placement::begin`.
        sharing: _,   // Companion: `SharedPages::forked`, which lists its own fields.
        dormancy,     // Reset: the child runs.
        held_faults,  // Reset: the threads that wait are not in the child.
        fork:
            ForkState {
                quiesce,              // Reset: the child is not forking.
                gate,                 // Reset: open, with no thread inside.
                swap_file: _,         // Kept for the companion; then `child_after` resets it.
                proc: _,              // Kept for the companion; then `child_after` resets it.
                device: _,            // Kept for the companion; then `child_after` resets it.
                lending: _,           // Kept: `take_descriptors` has reset it before the fork.
                were_files_hidden: _, // Kept: the child sees the same files.
                stack: _,             // Kept: the child's thread runs on it.
                huge_pages: _,        // Companion: `take_over_engine` restores it.
                slot: own,            // Reset: the child's own.
                is_child,             // Reset: this process is one.
                is_off: _,            // Kept: the hooks of a process without the agent do nothing.
            },
    } = runtime;
    is_child.store(true, Ordering::Relaxed);
    own.store(slot.get(), Ordering::Relaxed);
    gate.reset();
    quiesce.reset();
    allocations.reset();
    *request.lock() = None;
    dormancy.end();
    held_faults.reset();
}

/// Stops the agent's other threads while a thread of the program forks. The monitor calls this. A
/// fork must copy a consistent state, so all pending mapping events are received first. `user` uses
/// the memory: if it has ended, no thread forks any more.
pub(crate) fn quiesce(runtime: &'static Runtime, user: &User) {
    let needed = runtime.fork.quiesce.needed();
    // A starved pinned handler would keep the gate from closing.
    runtime.placement.separate(SEPARATE_WHILE_GROWING_NS);
    if let Some(activated) = runtime.activation.activated.get() {
        activated.keep_resident(&needed);
        runtime.reclaim.make_room_for_child(&runtime.context, activated);
    }
    runtime.fork.gate.close();
    // The child may keep descriptors open that the parent closes.
    runtime.notices.lenders.check();
    let mut faults = PendingFaults::default();
    if let Some(events) = runtime.mapping_events() {
        let activated = events.activated;
        // A mapping that grew and was then unmapped in part is found like a new one.
        adopt_mappings(events);
        // The forking thread could not wait for a handler. Other threads may change mappings again.
        loop {
            drop(events.receive_changes(&mut faults));
            if activated.unprotect(&needed).is_ok() {
                break;
            }
        }
        activated.engine.drop_all_lost();
        // The child would share free frames, and neither side could give them back alone.
        activated.engine.shrink(0, u32::MAX);
        runtime.context.budget.sample();
        activated.engine.ports().space.allow_forks();
        activated.engine.lend_file();
        activated.engine.ports().swap.iter().for_each(Swap::share);
        runtime.sharing.throttle.forks(&runtime.context.budget, &activated.engine, &needed);
        runtime.fork.disable_huge_pages();
    }
    lend_descriptors(runtime);
    let program = || if is_used(runtime, user) { Peer::Present } else { Peer::Gone };
    let outcome = runtime.fork.quiesce.wait_for_fork(program);
    if let Some(activated) = runtime.activation.activated.get() {
        let LinuxPorts { space, swap, .. } = activated.engine.ports();
        runtime.fork.restore_huge_pages();
        if outcome == ForkOutcome::Failed {
            activated.engine.leave_file();
        }
        swap.iter().for_each(|swap| swap.finish_sharing(outcome));
        space.forbid_forks();
        faults.raise_again(space);
        space.unlock_pages(&needed);
    }
    if outcome == ForkOutcome::Forked {
        runtime.sharing.forked(&runtime.context);
    }
    runtime.fork.gate.open();
    runtime.fork.quiesce.finish();
}

/// Asks the companion to lend the descriptors that the child could not open and that this thread
/// cannot take by pidfd_getfd(2). The forking thread calls this before the agent is quiesced.
fn ask_for_descriptors(runtime: &'static Runtime) {
    let (Some(companion), Some(files)) = (runtime.companion.process(), &*runtime.context.files) else { return };
    let is_hidden = runtime.fork.are_files_hidden(files.userfaultfd.is_ok());
    if !is_hidden && runtime.context.budget.control().swap().clusters() == 0 {
        return;
    }
    runtime.fork.proc.take(companion, files.proc.as_raw_fd());
    if runtime.fork.proc.descriptor().is_none() {
        runtime.fork.lending.ask();
    } else if !is_hidden {
        runtime.fork.proc.finish();
    } else if let Ok(device) = &files.userfaultfd {
        runtime.fork.device.take(companion, device.as_raw_fd());
    }
}

/// Lends descriptors to the forking thread, if it has asked. The monitor calls this before the
/// fork.
fn lend_descriptors(runtime: &'static Runtime) {
    let Some(files) = &*runtime.context.files else { return };
    let ports = runtime.activation.activated.get().map(|activated| activated.engine.ports());
    let swap_file = ports.and_then(LinuxPorts::swap_file_descriptor);
    let device = files.userfaultfd.as_ref().ok().map(AsFd::as_fd);
    runtime.fork.lending.lend(runtime.companion.program(), [Some(files.proc.as_fd()), device, swap_file]);
}

/// Takes the descriptors that the child could not open. The forking thread calls this while the
/// agent is quiesced.
fn take_descriptors(runtime: &'static Runtime) {
    runtime.fork.lending.take(runtime.fork.handed_over());
    let is_taken = runtime.fork.swap_file.descriptor().is_some();
    let Some(companion) = runtime.companion.process().filter(|_| !is_taken) else { return };
    let ports = runtime.activation.activated.get().map(|activated| activated.engine.ports());
    if let Some(file) = ports.and_then(LinuxPorts::swap_file_descriptor) {
        runtime.fork.swap_file.take(companion, file.as_raw_fd());
    }
}
