//! What happens around a fork that the agent knows of.
//!
//! Before: the keeper closes the gate, so that the agent's threads are outside the engine, hears every
//! change of mappings that is under way, and allows the managed ranges to be copied
//! ([`Runtime::hold_still`]). In the parent afterwards: the reverse. In the child, before it may touch
//! anything: a slot of its own, and a keeper, which makes userfaultfds, registers everything anew, and
//! starts handlers. The engine, the arena and the store are the child's own consistent copies.
//!
//! Everything here runs on the agent's memory only, and takes no lock that another thread may hold.

use crate::clone_trap::ForkHooks;
use crate::region::Region;
use crate::runtime::Runtime;
use crate::still::NEEDED_PAGES;

/// The hooks of a runtime.
pub struct RuntimeForkHooks(pub &'static Runtime);

impl ForkHooks for RuntimeForkHooks {
    fn stack(&self) -> &Region {
        &self.0.fork_stack
    }

    fn before(&self, needed: [usize; NEEDED_PAGES]) {
        self.0.still.request(needed);
        self.0.take_swap_file();
    }

    fn parent_after(&self, forked: bool) {
        self.0.hand_over.finish();
        self.0.still.release(forked);
    }

    fn child_after(&self) {
        let runtime = self.0;
        let control = runtime.budget.control();
        let parent = runtime.budget.slot();
        // Where all slots are taken, it shares its parent's: it is managed all the same.
        let slot = control.claim_slot(rustix::process::getpid()).unwrap_or(parent);
        if slot != parent {
            control.process(slot).inherit(control.process(parent));
        }
        runtime.set_keeper_slot(slot);
        runtime.gate.reset();
        runtime.still.reset();
        runtime.growth.reset();
        if let Err(error) = runtime.start_keeper() {
            runtime.fail(&error);
        }
        runtime.hand_over.finish();
    }
}
