//! What happens around a fork that the agent knows of.
//!
//! Before: the keeper closes the gate, so that the agent's threads are outside the engine, hears every
//! change of mappings that is under way, and allows the managed ranges to be copied
//! ([`Runtime::hold_still`]). In the parent afterwards: the reverse. In the child, before it may touch
//! anything: a slot of its own, and a keeper, which makes userfaultfds, registers everything anew, and
//! starts handlers. The engine, the arena and the store are the child's own consistent copies.
//!
//! Everything here runs on the agent's memory only, and takes no lock that another thread may hold.

use crate::control_block::BLOCK_PAGES;
use crate::fork_call::ForkHooks;
use crate::identity;
use crate::region::Region;
use crate::runtime::Runtime;

impl ForkHooks for Runtime {
    fn stack(&self) -> &Region {
        &self.fork_stack
    }

    fn before(&'static self, needed: [usize; BLOCK_PAGES]) {
        if self.is_off() {
            return;
        }
        self.ask_for_descriptors();
        self.still.request(needed);
        self.take_descriptors();
    }

    fn parent_after(&'static self, forked: bool) {
        if self.is_off() {
            return;
        }
        self.finish_descriptors();
        self.still.release(forked);
    }

    fn child_after(&'static self) {
        if self.is_off() {
            return;
        }
        let control = self.budget.control();
        let parent = self.budget.slot();
        // Where all slots are taken, it shares its parent's: it is managed all the same.
        let own = rustix::process::getpid();
        identity::forked(own);
        let slot = control.claim_slot(own).unwrap_or(parent);
        if slot != parent {
            control.process(slot).inherit(control.process(parent));
        }
        self.set_keeper_slot(slot);
        self.gate.reset();
        self.still.reset();
        self.growth.reset();
        if let Err(error) = self.start_childs_companion() {
            self.go_on_alone(&error);
        }
        self.finish_descriptors();
    }
}
