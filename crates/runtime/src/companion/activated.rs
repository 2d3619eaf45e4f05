//! The state of activation: whether memory is managed, and the engine that manages it.
//!
//! The monitor activates once in the life of a process ([`crate::companion::activate`]). The child
//! of a fork takes over its copy of the engine. The engine's locks come after the gate and the lock
//! of the mappings.

use crate::address_space::ranges::{Ranges, pages};
use crate::companion::context::Context;
use crate::fork::futex_gate::Gate;
use crate::ports::LinuxPorts;
use crate::ports::pieces::Worker;
use foliomem_core::engine::Engine;
use foliomem_core::ports::MoveError;
use foliomem_sys::clock::now_ns;
use foliomem_types::units::PAGE_BYTES;
use rustix::thread::futex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Time in nanoseconds between two tries to activate while the system has no room for threads.
const RETRY_NS: u64 = 100_000_000;

/// The state that exists once the agent has activated.
pub(crate) struct Activated {
    pub(crate) engine: Engine<LinuxPorts>,
}

impl Activated {
    /// Creates the contexts of a thread that compresses. It does so inside the gate: the child of a
    /// fork that copied a locked heap could not allocate.
    pub(crate) fn worker(&self, context: &Context, gate: &Gate) -> Worker {
        let _inside = gate.enter();
        self.engine.ports().codec.worker(context.settings.codec, context.settings.recompress)
    }

    /// Maps in the managed pages of `kept`, pages of a thread's control block, and locks them in
    /// memory. (Handlers map them in. A page that is not managed yet is not swapped out before the
    /// agent goes on.)
    pub(crate) fn keep_resident(&self, kept: &[usize]) {
        // A write waits for a handler where this fails.
        let _ = self.unprotect(kept);
        self.engine.ports().space.lock_pages(kept);
    }

    /// Lets the program write to `kept`. Fails with [`MoveError::Changing`] if some are still
    /// protected because it is changing its mappings.
    pub(crate) fn unprotect(&self, kept: &[usize]) -> Result<(), MoveError> {
        let unprotected = kept.iter().map(|&page| self.engine.unprotect(pages(&(page..page + PAGE_BYTES))));
        unprotected.fold(Ok(()), Result::and)
    }

    /// Creates the contexts of a thread that also recompresses.
    pub(crate) fn recompressing_worker(&self, context: &Context, gate: &Gate) -> Worker {
        let mut worker = self.worker(context, gate);
        let _inside = gate.enter();
        if let Some(codec) = context.settings.recompress {
            self.engine.ports().codec.add_recompressor(&mut worker, codec);
        }
        worker
    }
}

/// Whether the agent has activated, and the word to wait for that.
#[derive(Default)]
pub(crate) struct Activation {
    pub(crate) activated: OnceLock<Activated>,
    pub(crate) manage_now: AtomicBool,
    /// Time of the next try in nanoseconds, after the system had no room for the agent's threads; 0
    /// before the first try.
    pub(crate) retry_ns: AtomicU64,
    /// 1 once all existing memory is adopted. A futex word.
    pub(crate) managing: AtomicU32,
    /// The program's code that the monitor has searched ([`crate::address_space::program_code`]).
    pub(crate) searched_code: Ranges,
}

impl Activation {
    /// Returns the engine, once the agent has activated.
    pub(crate) fn get(&self) -> Option<&Activated> {
        self.activated.get()
    }

    /// Makes the monitor activate now, however far the limit is, and returns when it has adopted
    /// all memory.
    pub(crate) fn manage_now(&self) {
        self.manage_now.store(true, Ordering::Relaxed);
        // Acquire pairs with the Release in `complete`: all memory is adopted.
        while self.managing.load(Ordering::Acquire) == 0 {
            let _ = futex::wait(&self.managing, futex::Flags::PRIVATE, 0, None);
        }
    }

    /// Returns whether the monitor may try to activate.
    pub(crate) fn may_try(&self) -> bool {
        now_ns() >= self.retry_ns.load(Ordering::Relaxed)
    }

    /// Puts activation off. Returns whether that is the first time. The monitor calls this.
    pub(crate) fn put_off(&self) -> bool {
        self.retry_ns.swap(now_ns() + RETRY_NS, Ordering::Relaxed) == 0
    }

    /// Notes that all existing memory is adopted. The monitor calls this.
    pub(crate) fn complete(&self) {
        // Release pairs with the Acquire in `manage_now`.
        self.managing.store(1, Ordering::Release);
        let _ = futex::wake(&self.managing, futex::Flags::PRIVATE, i32::MAX as u32);
    }
}
