//! Samples of what a process with relatives has swapped out: the supervisor compares them
//! ([`foliomem_session::content_sample`]).
//!
//! Only the monitor takes samples, a part at a time: it must not be late. There is no lock.

use crate::companion::context::Context;
use crate::ports::LinuxPorts;
use foliomem_core::engine::Engine;
use foliomem_session::content_sample::Sample;
use foliomem_sys::clock::now_ns;
use foliomem_types::units::{PAGE_BYTES, PageNumber};

/// Minimum time between the end of a sample and the start of the next one, in nanoseconds.
const INTERVAL_NS: u64 = 250_000_000;
/// Number of blocks that are looked at in one step: 64 MiB of address space, in some tens of
/// microseconds.
const STEP_BLOCKS: u32 = 32;

/// A sample that is being taken, and the last one.
#[derive(Debug, Default)]
pub(crate) struct ContentSampling {
    sample: Sample,
    /// The page from which to go on, while a sample is being taken.
    next: Option<PageNumber>,
    /// When the next sample is due.
    due_ns: u64,
    /// The pages that went out and came in before the last sample, if there was one.
    moved: Option<(u64, u64)>,
}

impl ContentSampling {
    /// Takes a part of a sample if one is due. `crowd` is the factor by which the monitor samples
    /// more rarely because of other processes.
    pub fn step(&mut self, context: &Context, engine: &Engine<LinuxPorts>, crowd: u32) {
        let Some(from) = self.next.or_else(|| self.begin(context)) else { return };
        self.next = engine.for_each_stored(from, STEP_BLOCKS, |stored| {
            self.sample.add(stored.page, stored.pages, stored.content);
        });
        if self.next.is_none() {
            let budget = &context.budget;
            let swapped_out_bytes = engine.swapped_pages() * PAGE_BYTES as u64;
            budget.control().publish_sample(budget.slot(), &self.sample, swapped_out_bytes);
            self.due_ns = now_ns() + INTERVAL_NS * u64::from(crowd);
        }
    }

    /// Begins a sample if one is due: there are relatives, and pages have moved since the last one.
    /// Returns the first page.
    fn begin(&mut self, context: &Context) -> Option<PageNumber> {
        let (budget, now_ns) = (&context.budget, now_ns());
        if now_ns < self.due_ns || !budget.control().has_relatives(budget.slot()) {
            return None;
        }
        let vm = &budget.counters().vm;
        let moved = Some((vm.pswpout.get(), vm.pswpin.get()));
        if std::mem::replace(&mut self.moved, moved) == moved {
            self.due_ns = now_ns + INTERVAL_NS;
            return None;
        }
        self.sample.clear();
        Some(PageNumber(0))
    }
}
