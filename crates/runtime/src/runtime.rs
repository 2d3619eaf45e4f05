//! The agent inside one process: the state of the agent, and the functions that the program's hooks
//! call.
//!
//! Each part of the state has a module of its own. The threads of the companion
//! ([`crate::companion`]) and the fork protocol ([`crate::fork`]) work on it. There is no lock
//! here.

use crate::address_space::mapping_events::MappingEvents;
pub use crate::address_space::ranges::Madvice;
use crate::companion::activated::Activation;
use crate::companion::context::Context;
use crate::companion::dormancy::Dormancy;
use crate::companion::held_faults::HeldFaults;
use crate::companion::notices::Notices;
use crate::companion::placement::Placement;
use crate::companion::reclaimer::ReclaimRequests;
use crate::companion::shared_pages::SharedPages;
use crate::companion::workers::Workers;
use crate::fork::state::ForkState;
use foliomem_sys::companion_process::Companion;
use foliomem_sys::interception::fork_call;
use foliomem_sys::process_exit_notice::ProcessExitNotice;
use foliomem_types::units::PAGE_BYTES;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The agent inside one process. `fork::protocol` lists what a child does with each field.
pub struct Runtime {
    pub(crate) context: Context,
    pub(crate) companion: Companion,
    pub(crate) exit_notice: ProcessExitNotice,
    pub(crate) notices: Notices,
    pub(crate) activation: Activation,
    pub(crate) workers: Workers,
    pub(crate) reclaim: ReclaimRequests,
    pub(crate) placement: Placement,
    pub(crate) sharing: SharedPages,
    pub(crate) dormancy: Dormancy,
    pub(crate) held_faults: HeldFaults,
    pub(crate) fork: ForkState,
}

impl Runtime {
    /// Returns the receiver of mapping events, once the agent has activated.
    pub(crate) fn mapping_events(&'static self) -> Option<MappingEvents> {
        self.activation.get().map(|activated| MappingEvents {
            context: &self.context,
            activated,
            allocations: &self.notices.allocations,
            placement: &self.placement,
        })
    }

    /// Returns whether the process goes on without the agent.
    pub fn is_off(&self) -> bool {
        // Acquire pairs with the Release in `go_on_alone`: all memory is mapped in.
        self.fork.is_off.load(Ordering::Acquire)
    }

    /// Activates the agent now, however far the limit is, and returns when all memory is adopted.
    pub fn manage_now(&self) {
        self.activation.manage_now();
    }

    /// Lets the reclaimers swap out the managed memory in `range` (MADV_PAGEOUT), and waits for
    /// them. Only one thread at a time may call.
    pub fn page_out(&self, range: Range<usize>) {
        self.reclaim.page_out(range);
    }

    /// Notes that the kernel has accepted the program's advice about `range`. Any thread may call,
    /// in any state.
    pub fn note_advice(&self, range: Range<usize>, advice: Madvice) {
        if let Some(activated) = self.activation.get() {
            activated.engine.ports().space.advices().notify(range, advice);
        }
    }

    /// Notes that the program has allocated `range` and may touch it at once. If there may be no
    /// room for it and for earlier allocations, returns when it is managed. Any thread may call, in
    /// any state.
    pub fn notify_allocation(&self, range: Range<usize>) {
        self.notices.allocated(&self.context, self.activation.get(), &self.fork.quiesce, range);
    }

    /// Lets the monitor merge the parts of the mapping at `range`, because the kernel has refused a
    /// call that concerns the whole mapping. Afterwards the agent's reserves have their original
    /// protection, and the whole mapping is managed if a part was. Returns whether the monitor has
    /// done so.
    pub fn merge_mappings(&self, range: Range<usize>) -> bool {
        self.notices.join_mappings(&self.context, &self.fork.quiesce, range)
    }

    /// Notes that the calling thread starts. Returns when its control block stays resident, if
    /// memory may be swapped out.
    pub fn note_thread_start(&self) {
        if self.swaps() {
            self.notices.thread_starts(&self.fork.quiesce);
        }
    }

    /// Returns whether memory may be swapped out.
    pub(crate) fn swaps(&self) -> bool {
        self.activation.get().is_some() && self.context.budget.is_armed()
    }

    /// Returns whether [`Runtime::notify_allocation`] must be called for an allocation that ends at
    /// `end`, however small it is.
    #[inline]
    pub fn is_watched(&self, end: usize) -> bool {
        self.notices.allocations.is_watched(end)
    }

    /// Returns whether `bytes` exceed the limit.
    pub fn exceeds_limit(&self, bytes: usize) -> bool {
        bytes.div_ceil(PAGE_BYTES) as i64 > self.context.budget.limit_pages()
    }

    /// Returns whether there may soon be no room if the program takes `bytes`. Any thread may call,
    /// in any state.
    pub fn is_short_of_room(&self, bytes: usize) -> bool {
        self.context.budget.is_armed() && self.context.lacks_room(bytes)
    }

    /// Prepares for a filter that the program may install now: asks what the filter may forbid to
    /// ask later.
    pub fn expect_system_call_filter(&self) {
        self.fork.are_files_hidden(self.context.files.as_ref().is_some_and(|files| files.userfaultfd.is_ok()));
    }

    /// Notes that a filter decides which system calls the program's threads may make. From then on
    /// these threads make no system calls for the agent.
    pub fn note_system_call_filter(&self) {
        fork_call::note_filter();
    }

    /// Notes that the process has become a subreaper: the companions of the program's processes
    /// stay their children from now on.
    pub fn note_subreaper(&self) {
        self.context.budget.control().note_subreaper();
    }

    /// Notes that the program wants to lock all of its memory, which the agent prevents. Warns once
    /// in a process.
    pub fn note_mlockall(&self) {
        self.notices.note_mlockall(self.context.budget.control());
    }
}
