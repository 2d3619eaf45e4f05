//! The state of a process's forks: shared by the forking thread and the monitor, and copied to the
//! child.
//!
//! Lock order: the gate comes before every lock.

use crate::fork::descriptor_hand_over::{self, DescriptorHandOver, Lending};
use crate::fork::futex_gate::Gate;
use crate::fork::quiesce::Quiesce;
use foliomem_session::process_table::SlotIndex;
use foliomem_sys::interception::fork_call;
use foliomem_sys::process_limits;
use foliomem_sys::region::Region;
use foliomem_sys::userfaultfd;
use foliomem_types::size_policy::Disabled;
use rustix::fs::{Access, access};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

/// The forks of one process.
pub(crate) struct ForkState {
    pub(crate) quiesce: Quiesce,
    /// Closed during a fork. First in the lock order.
    pub(crate) gate: Gate,
    /// Holds the descriptor of the swap file during a fork whose child cannot open the file.
    pub(crate) swap_file: DescriptorHandOver,
    /// Holds a descriptor of `/proc` during a fork whose child cannot find it.
    pub(crate) proc: DescriptorHandOver,
    /// Holds a descriptor of the userfaultfd device during a fork whose child cannot open it, and
    /// at the start of the first companion.
    pub(crate) device: DescriptorHandOver,
    /// The sockets by which the companion lends descriptors that cannot be taken.
    pub(crate) lending: Lending,
    /// Whether the child of a fork could not open `/proc` or the userfaultfd device, when this was
    /// last asked ([`ForkState::are_files_hidden`]).
    pub(crate) were_files_hidden: AtomicBool,
    /// The stack on which the hooks of a fork run.
    pub(crate) stack: Region,
    /// The program's own setting of huge pages, during a fork ([`ForkState::disable_huge_pages`]).
    pub(crate) huge_pages: AtomicU8,
    /// The slot of this process in the control segment, for its next companion.
    pub(crate) slot: AtomicU32,
    /// Whether this process is the child of a fork.
    pub(crate) is_child: AtomicBool,
    /// Whether this process goes on without the agent.
    pub(crate) is_off: AtomicBool,
}

impl ForkState {
    /// Creates the state before the first fork, for the process in `slot`.
    pub(crate) fn new(stack: Region, slot: SlotIndex) -> ForkState {
        ForkState {
            quiesce: Quiesce::default(),
            gate: Gate::default(),
            swap_file: DescriptorHandOver::default(),
            proc: DescriptorHandOver::default(),
            device: DescriptorHandOver::default(),
            lending: Lending::default(),
            were_files_hidden: AtomicBool::new(false),
            stack,
            huge_pages: AtomicU8::new(Disabled::No as u8),
            slot: AtomicU32::new(slot.get()),
            is_child: AtomicBool::new(false),
            is_off: AtomicBool::new(false),
        }
    }

    /// Returns whether the child of a fork could not open the files that its agent needs.
    /// `has_device` is false if the userfaultfd is made without its device. Looks for them, unless
    /// the program has installed a filter that may forbid it: then it is as it was before. A thread
    /// of the program calls this before a fork, and before it installs a filter.
    pub(crate) fn are_files_hidden(&self, has_device: bool) -> bool {
        if fork_call::has_filter() {
            return self.were_files_hidden.load(Ordering::Relaxed);
        }
        let are_hidden = access("/proc/self/statm", Access::EXISTS).is_err()
            || has_device && !descriptor_hand_over::can_open(userfaultfd::device());
        self.were_files_hidden.store(are_hidden, Ordering::Relaxed);
        are_hidden
    }

    /// Disables huge pages for this process and the child of the fork that follows: khugepaged
    /// would fill the child's swapped-out pages with zeros before they are registered. The monitor
    /// calls this.
    pub(crate) fn disable_huge_pages(&self) {
        self.huge_pages.store(process_limits::disable_huge_pages() as u8, Ordering::Relaxed);
    }

    /// Restores the program's own setting of huge pages, on each side of the fork.
    pub(crate) fn restore_huge_pages(&self) {
        process_limits::restore_huge_pages(Disabled::from_number(self.huge_pages.load(Ordering::Relaxed)));
    }

    /// Returns the descriptors that a fork hands over: `/proc`, the userfaultfd device, and the
    /// swap file.
    pub(crate) fn handed_over(&self) -> [&DescriptorHandOver; 3] {
        [&self.proc, &self.device, &self.swap_file]
    }

    /// Closes the copied descriptors. The forking thread calls this after the fork, on both sides.
    pub(crate) fn finish_descriptors(&self) {
        self.handed_over().into_iter().for_each(DescriptorHandOver::finish);
    }
}
