//! The copy-on-write throttle: writes to pages that a fork left shared wait for memory.
//!
//! After a fork, the kernel copies a shared page at the first write to it. The kernel charges the
//! copy to no budget, and makes no thread wait. Several processes can copy gigabytes in a second,
//! faster than the monitor notices and frees memory. So if the copies may not fit, the monitor
//! write-protects managed memory: in the parent before the fork, in the child before it runs, or
//! later, when room has become short and copying has begun. The first write to each block of
//! [`BLOCK_BYTES`] then faults, and waits until there is room for the copy. A program with room is
//! never throttled.
//!
//! A page that was swapped out is not shared: it is mapped in unprotected. Swapping out a page
//! removes its protection. In the child of a fork no page is protected.
//!
//! Control blocks of threads are never protected ([`foliomem_sys::thread_control_block`]). The
//! monitor protects; any handler serves the faults. There is no lock.

use crate::address_space::ranges::pages;
use crate::ports::LinuxPorts;
use crate::ports::address_space::AddressSpace;
use foliomem_core::engine::Engine;
use foliomem_session::budget::Budget;
use foliomem_sys::userfaultfd::{MoveError, Userfaultfd};
use foliomem_types::units::{PAGE_BYTES, PageNumber};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Memory that one write makes writable, in bytes: 64 KiB, the usual size of a folio.
const BLOCK_BYTES: usize = 64 << 10;
/// Minimum number of copied pages that shows that a side of the fork works on shared memory: 1 MiB.
const BEGUN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;

/// Whether managed memory is write-protected.
#[derive(Debug, Default)]
pub(crate) struct CowThrottle {
    is_active: AtomicBool,
}

impl CowThrottle {
    /// Protects the memory that is shared from now on if the copies may not fit. The program is
    /// about to fork, or it is the child of a fork and does not run yet. A later call would be too
    /// late: a program copies hundreds of MiB while the monitor waits for a CPU.
    ///
    /// The kernel writes to the pages `needed` of the forking thread, whose faults are not served.
    pub(crate) fn forks(&self, budget: &Budget, engine: &Engine<LinuxPorts>, needed: &[usize]) {
        self.is_active.store(may_not_fit(budget) && each(engine, needed, Userfaultfd::protect), Relaxed);
    }

    /// Protects shared memory if the copies may not fit, until no page is shared any more. The
    /// monitor calls this.
    pub(crate) fn update(&self, budget: &Budget, engine: &Engine<LinuxPorts>) {
        let is_active = self.is_active.load(Relaxed);
        if !budget.shares() {
            if is_active {
                each(engine, &[], Userfaultfd::unprotect);
                self.is_active.store(false, Relaxed);
            }
            return;
        }
        if !is_active && may_not_fit(budget) && budget.copied_pages() > BEGUN_PAGES {
            let done = each(engine, &[], Userfaultfd::protect);
            // After a pending mapping event, the next call protects the rest.
            self.is_active.store(done, Relaxed);
        }
    }
}

/// Returns whether there is no room for copies of all pages.
fn may_not_fit(budget: &Budget) -> bool {
    budget.room_pages() < budget.own_pages() + budget.shared_pages()
}

/// Calls `act` for all resident memory that may be protected, except the pages `but`. Returns
/// whether no pending mapping event prevented it. Swapped-out pages have marks that must stay
/// ([`crate::address_space::marks`]).
fn each(
    engine: &Engine<LinuxPorts>,
    but: &[usize],
    act: impl Fn(&Userfaultfd, usize, usize) -> Result<(), MoveError>,
) -> bool {
    let mut done = true;
    let space = &engine.ports().space;
    for range in space.protectable(but) {
        engine.for_each_resident(pages(&range), |_, run| {
            let (start, end) = (run.start.address() as usize, run.end.address() as usize);
            // If a range is not as the engine knows it, it is being unmapped.
            done &= act(&space.descriptors().program, start, end - start) != Err(MoveError::Again);
        });
    }
    done
}

/// Returns the block around `page`, limited to the page's range.
pub(crate) fn block(space: &AddressSpace, page: PageNumber) -> Range<usize> {
    let address = page.address() as usize;
    let start = address - address % BLOCK_BYTES;
    let around = space.ranges().containing(address).map_or(address..address + PAGE_BYTES, |known| known.range);
    start.max(around.start)..(start + BLOCK_BYTES).min(around.end)
}
