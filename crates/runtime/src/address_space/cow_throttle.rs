//! The copy-on-write throttle: writes to pages that a fork left shared wait for memory.
//!
//! After a fork the kernel copies a shared page at the first write to it. It charges no budget and
//! makes no thread wait. Several processes copy gigabytes in a second, faster than a monitor that
//! sees it later can free memory. So where the copies may not fit, and copying has begun, the
//! monitor write-protects managed memory. The first write to each block of [`BLOCK_BYTES`] then
//! faults, and waits until there is room for the copy. A short child that writes little, and a
//! program with room, are never throttled.
//!
//! A page that was swapped out is not shared: it is mapped in unprotected. Swapping out a page
//! removes its protection. In the child of a fork no page is protected.
//!
//! Control blocks of threads are never protected ([`foliomem_sys::thread_control_block`]). The monitor
//! protects, and any handler serves the faults. There is no lock.

use crate::address_space::ranges::pages;
use crate::ports::machine::LinuxMachine;
use foliomem_core::engine::Engine;
use foliomem_session::budget::Budget;
use foliomem_sys::userfaultfd::{MoveError, Userfaultfd};
use foliomem_types::units::{PAGE_BYTES, PageNumber};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// One write makes this much memory writable: 64 KiB, the usual size of a folio.
const BLOCK_BYTES: usize = 64 << 10;
/// So many copied pages show that a side of the fork works on shared memory: 1 MiB.
const BEGUN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;

/// Whether managed memory is write-protected.
#[derive(Debug, Default)]
pub(crate) struct CowThrottle {
    are_watched: AtomicBool,
}

impl CowThrottle {
    /// There was a fork: not all shared pages are protected.
    pub(crate) fn forked(&self) {
        self.are_watched.store(false, Relaxed);
    }

    /// Monitor: protects shared memory where the copies may not fit, until no page is shared any
    /// more.
    pub(crate) fn look(&self, budget: &Budget, engine: &Engine<LinuxMachine>) {
        let are_watched = self.are_watched.load(Relaxed);
        if !budget.shares() {
            if are_watched {
                each(engine, Userfaultfd::unprotect);
                self.are_watched.store(false, Relaxed);
            }
            return;
        }
        let may_not_fit = budget.room_pages() < budget.own_pages() + budget.shared_pages();
        if !are_watched && may_not_fit && budget.copied_pages() > BEGUN_PAGES {
            let done = each(engine, Userfaultfd::protect);
            // A mapping event that was pending is over by the next look.
            self.are_watched.store(done, Relaxed);
        }
    }
}

/// Calls `act` for all resident memory that may be protected; whether no mapping event was in the
/// way. Swapped-out pages have marks that must stay ([`crate::address_space::marks`]).
fn each(engine: &Engine<LinuxMachine>, act: impl Fn(&Userfaultfd, usize, usize) -> Result<(), MoveError>) -> bool {
    let mut done = true;
    for range in engine.machine().protectable() {
        engine.for_each_resident(pages(&range), |run| {
            let (start, end) = (run.start.address() as usize, run.end.address() as usize);
            // A range that is not as the engine knows it is being unmapped.
            done &= act(&engine.machine().descriptors().program, start, end - start) != Err(MoveError::Again);
        });
    }
    done
}

/// The block around `page`, as far as it is of the same range.
pub(crate) fn block(machine: &LinuxMachine, page: PageNumber) -> Range<usize> {
    let address = page.address() as usize;
    let start = address - address % BLOCK_BYTES;
    let around = machine.ranges().containing(address).map_or(address..address + PAGE_BYTES, |known| known.range);
    start.max(around.start)..(start + BLOCK_BYTES).min(around.end)
}
