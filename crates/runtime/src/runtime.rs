//! The agent inside one process: the owner of its state, and what the program's hooks call.
//!
//! Each part of the state has a module of its own. The roles of the companion
//! ([`crate::companion`]) and the fork protocol ([`crate::fork`]) work on it.

use crate::address_space::mapping_events::MappingEvents;
use crate::companion::activated::Activation;
use crate::companion::context::Context;
use crate::companion::notices::Notices;
use crate::companion::placement::Placement;
use crate::companion::reclaimer::ReclaimRequests;
use crate::companion::shared_pages::SharedPages;
use crate::companion::workers::Workers;
use crate::fork::state::ForkState;
use foliomem_sys::companion_process::Companion;
use foliomem_sys::process_exit_notice::ProcessExitNotice;
use foliomem_types::size_policy::Advice;
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
    pub(crate) fork: ForkState,
}

impl Runtime {
    /// The receiver of mapping events, once the agent has activated.
    pub(crate) fn mapping_events(&'static self) -> Option<MappingEvents> {
        self.activation.get().map(|activated| MappingEvents {
            context: &self.context,
            activated,
            allocations: &self.notices.allocations,
            placement: &self.placement,
        })
    }

    /// Whether the process goes on without the agent.
    pub fn is_off(&self) -> bool {
        // Acquire pairs with the Release in `go_on_alone`: all memory is mapped in.
        self.fork.is_off.load(Ordering::Acquire)
    }

    /// Starts to manage now, however far the limit is, and returns when everything is adopted.
    pub fn manage_now(&self) {
        self.activation.manage_now();
    }

    /// Has the reclaimers swap out the managed memory in `range` (MADV_PAGEOUT), and waits for it.
    /// One thread at a time may call.
    pub fn page_out(&self, range: Range<usize>) {
        self.reclaim.page_out(range);
    }

    /// The program has given advice about a mapping, and the kernel has taken it. For any thread,
    /// in any state.
    pub fn advised(&self, range: Range<usize>, advice: Advice) {
        if let Some(activated) = self.activation.get() {
            activated.engine.machine().advices().tell(range, advice);
        }
    }

    /// The program has allocated `range`, and may touch it at once. If there may be no room for it,
    /// together with what the program allocated before, returns when it is managed. For any thread,
    /// in any state.
    pub fn grows(&self, range: Range<usize>) {
        self.notices.allocated(&self.context, self.activation.get(), &self.fork.quiesce, range);
    }

    /// The kernel has refused something that concerns the mapping at `range` as a whole: returns
    /// when reserves there are as without the agent, and all of the mapping is managed if a part
    /// is. Whether the monitor has looked.
    pub fn is_made_whole(&self, range: Range<usize>) -> bool {
        self.notices.join_mappings(&self.context, &self.fork.quiesce, range)
    }

    /// The calling thread starts: returns when its control block stays resident, if anything may be
    /// swapped out.
    pub fn thread_begins(&self) {
        if self.activation.get().is_some() && self.context.budget.is_armed() {
            self.notices.thread_starts(&self.fork.quiesce);
        }
    }

    /// Whether [`grows`](Self::grows) must be called for an allocation that ends at `end`, however
    /// small it is.
    #[inline]
    pub fn is_watched(&self, end: usize) -> bool {
        self.notices.allocations.is_watched(end)
    }

    /// Whether `bytes` are more than the limit.
    pub fn exceeds_limit(&self, bytes: usize) -> bool {
        bytes.div_ceil(PAGE_BYTES) as i64 > self.context.budget.limit_pages()
    }

    /// Whether there may soon be no room if the program takes `bytes`. For any thread, in any
    /// state.
    pub fn is_short_of_room(&self, bytes: usize) -> bool {
        self.context.budget.is_armed() && self.context.lacks_room(bytes)
    }

    /// The program lets a filter decide which system calls its threads may make: they make none of
    /// the agent's any more.
    pub fn is_filtered(&self) {
        self.notices.is_filtered.store(true, Ordering::Relaxed);
    }

    /// The program wants all of its memory locked, which is not done: says so once in a process.
    pub fn wants_all_locked(&self) {
        self.notices.wants_all_locked(self.context.budget.control());
    }
}
