//! What happens around a fork that the agent knows of.
//!
//! Before: the keeper closes the gate, so that the agent's threads are outside the engine, hears every
//! change of mappings that is under way, and allows the managed ranges to be copied
//! ([`Runtime::hold_still`]). In the parent afterwards: the reverse. In the child, before it may touch
//! anything: a slot of its own, and a keeper, which makes userfaultfds, registers everything anew, and
//! starts handlers. The engine, the arena and the store are the child's own consistent copies.
//!
//! Everything here runs on the agent's memory only.

use crate::clone_trap::ForkHooks;
use crate::region::Region;
use crate::runtime::Runtime;
use foliomem_core::units::PAGE_BYTES;

/// The hooks of a runtime.
pub struct RuntimeForkHooks(pub &'static Runtime);

impl RuntimeForkHooks {
    /// Locks those of `pages` in memory that are managed, or unlocks them.
    fn lock_managed(&self, pages: &[usize], lock: bool) {
        let Some(engaged) = self.0.engaged.get() else { return };
        let ranges = engaged.engine.machine().ranges();
        for &page in pages.iter().filter(|&&page| ranges.containing(page).is_some()) {
            let start = std::ptr::with_exposed_provenance_mut(page);
            // SAFETY: changes no content. Where locking is forbidden, the page is in all likelihood there:
            // its thread has just used it.
            let _ = unsafe {
                if lock { rustix::mm::mlock(start, PAGE_BYTES) } else { rustix::mm::munlock(start, PAGE_BYTES) }
            };
        }
    }
}

impl ForkHooks for RuntimeForkHooks {
    fn stack(&self) -> &Region {
        &self.0.fork_stack
    }

    fn before(&self, needed: &[usize]) {
        // Locked pages are fetched, and stay until `parent_after`. A child starts without locks.
        self.lock_managed(needed, true);
        self.0.still.request();
    }

    fn parent_after(&self, needed: &[usize], forked: bool) {
        self.0.still.release(forked);
        self.lock_managed(needed, false);
    }

    fn child_after(&self) {
        let runtime = self.0;
        let control = runtime.budget.control();
        let parent = runtime.budget.slot();
        // Where all slots are taken, it shares its parent's: it is managed all the same.
        let slot = control.claim_slot(rustix::process::getpid()).unwrap_or(parent);
        if slot != parent {
            control.process(slot).counters.inherit_gauges(&control.process(parent).counters);
        }
        runtime.set_keeper_slot(slot);
        runtime.gate.reset();
        runtime.still.reset();
        if let Err(error) = runtime.start_keeper() {
            runtime.fail(&error);
        }
        if let Some(engaged) = runtime.engaged.get() {
            engaged.engine.machine().allow_forks(false);
        }
    }
}
