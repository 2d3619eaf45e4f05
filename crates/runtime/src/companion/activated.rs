//! The state of activation: whether memory is managed, and the engine that manages it.
//!
//! The monitor activates once in the life of a process ([`crate::companion::activate`]). The child
//! of a fork takes over its copy of the engine. The engine's locks come after the gate and the lock
//! of the mappings.

use crate::address_space::ranges::{Ranges, pages};
use crate::companion::context::Context;
use crate::fork::futex_gate::Gate;
use crate::ports::machine::LinuxMachine;
use crate::ports::pieces::Worker;
use foliomem_core::engine::Engine;
use foliomem_types::units::PAGE_BYTES;
use rustix::thread::futex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// What exists once the agent has activated.
pub(crate) struct Activated {
    pub(crate) engine: Engine<LinuxMachine>,
}

impl Activated {
    /// The contexts of a thread that compresses. They are made inside the gate: the child of a fork
    /// that copied a locked heap could not allocate.
    pub(crate) fn worker(&self, context: &Context, gate: &Gate) -> Worker {
        let _inside = gate.enter();
        self.engine.machine().worker(context.settings.codec, context.settings.recompress)
    }

    /// Maps in those of `kept`, pages of a thread's control block, that are managed, and keeps them where they are.
    /// (Handlers do the work. A page that is not managed by now is not swapped out before the agent
    /// goes on.)
    pub(crate) fn keep_resident(&self, kept: &[usize]) {
        kept.iter().for_each(|&page| self.engine.unprotect(pages(&(page..page + PAGE_BYTES))));
        self.engine.machine().hold_in_place(kept, true);
    }

    /// The contexts of a thread that also recompresses.
    pub(crate) fn recompressing_worker(&self, context: &Context, gate: &Gate) -> Worker {
        let mut worker = self.worker(context, gate);
        let _inside = gate.enter();
        if let Some(codec) = context.settings.recompress {
            self.engine.machine().let_recompress(&mut worker, codec);
        }
        worker
    }
}

/// Whether the agent has activated, and who waits for that.
#[derive(Default)]
pub(crate) struct Activation {
    pub(crate) activated: OnceLock<Activated>,
    pub(crate) manage_now: AtomicBool,
    /// 1 once everything that was there is adopted. A futex word.
    pub(crate) managing: AtomicU32,
    /// The code of the program that the monitor has looked at ([`crate::address_space::program_code`]).
    pub(crate) looked_at: Ranges,
}

impl Activation {
    /// What exists once the agent has activated.
    pub(crate) fn get(&self) -> Option<&Activated> {
        self.activated.get()
    }

    /// Has the monitor activate now, however far the limit is, and returns when it has adopted
    /// everything.
    pub(crate) fn manage_now(&self) {
        self.manage_now.store(true, Ordering::Relaxed);
        // Acquire pairs with the Release in `complete`: everything is adopted.
        while self.managing.load(Ordering::Acquire) == 0 {
            let _ = futex::wait(&self.managing, futex::Flags::PRIVATE, 0, None);
        }
    }

    /// Monitor: everything that was there is adopted.
    pub(crate) fn complete(&self) {
        // Release pairs with the Acquire in `manage_now`.
        self.managing.store(1, Ordering::Release);
        let _ = futex::wake(&self.managing, futex::Flags::PRIVATE, i32::MAX as u32);
    }
}
