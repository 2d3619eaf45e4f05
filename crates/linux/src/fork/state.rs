//! The state of forks: what the forking thread and the monitor share, and what a child finds.

use crate::control::SlotIndex;
use crate::fork::descriptor_hand_over::DescriptorHandOver;
use crate::fork::quiesce::Quiesce;
use crate::gate::Gate;
use crate::region::Region;
use std::sync::atomic::{AtomicBool, AtomicU32};

/// The forks of one process.
pub(crate) struct ForkState {
    pub(crate) quiesce: Quiesce,
    /// Closed during a fork. First in the lock order.
    pub(crate) gate: Gate,
    /// The swap file, during a fork.
    pub(crate) swap_file: DescriptorHandOver,
    /// `/proc`, during a fork, if the child cannot find it.
    pub(crate) proc: DescriptorHandOver,
    /// The hooks of a fork run on this stack.
    pub(crate) stack: Region,
    /// The slot of this process in the control segment, for its next companion.
    pub(crate) slot: AtomicU32,
    /// This process is the child of a fork.
    pub(crate) is_child: AtomicBool,
    /// This process goes on without the agent.
    pub(crate) is_off: AtomicBool,
}

impl ForkState {
    /// No fork yet, for the process in `slot`.
    pub(crate) fn new(stack: Region, slot: SlotIndex) -> ForkState {
        ForkState {
            quiesce: Quiesce::default(),
            gate: Gate::default(),
            swap_file: DescriptorHandOver::default(),
            proc: DescriptorHandOver::default(),
            stack,
            slot: AtomicU32::new(slot.get()),
            is_child: AtomicBool::new(false),
            is_off: AtomicBool::new(false),
        }
    }
}
