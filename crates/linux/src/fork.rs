//! What happens around a fork that the agent knows of.
//!
//! Before: the agent's threads are stopped outside the engine (the gate), and the managed ranges are
//! allowed to be copied. In the parent afterwards: the reverse. In the child, before it may touch
//! anything: a slot of its own, and a keeper, which makes userfaultfds, registers everything anew, and
//! starts handlers. The engine, the arena and the store are the child's own consistent copies.
//!
//! Everything here runs on the agent's memory only.

use crate::clone_trap::ForkHooks;
use crate::runtime::Runtime;

/// The hooks of a runtime.
pub struct RuntimeForkHooks(pub &'static Runtime);

impl ForkHooks for RuntimeForkHooks {
    fn before(&self) {
        let runtime = self.0;
        runtime.gate.close();
        if let Some(engaged) = runtime.engaged.get() {
            engaged.engine.machine().allow_forks(true);
        }
    }

    fn parent_after(&self, _child: i32) {
        let runtime = self.0;
        if let Some(engaged) = runtime.engaged.get() {
            engaged.engine.machine().allow_forks(false);
        }
        runtime.budget.forked();
        runtime.gate.open();
    }

    fn child_after(&self) {
        let runtime = self.0;
        let control = runtime.budget.control();
        let parent = runtime.budget.counters();
        let slot = control.claim_slot(rustix::process::getpid());
        control.process(slot).counters.inherit_gauges(parent);
        runtime.set_keeper_slot(slot);
        runtime.budget.forked();
        runtime.gate.reset();
        if let Err(error) = runtime.start_keeper() {
            runtime.fail(&error);
        }
        if let Some(engaged) = runtime.engaged.get() {
            engaged.engine.machine().allow_forks(false);
        }
    }
}
