//! CowThrottle of what a fork has left shared, and how they wait for memory.
//!
//! After a fork a write to a page that is still shared makes a copy, which the kernel does by itself: nobody charges it, and
//! nobody makes the program wait for room. Several processes copy gigabytes in a second, a keeper that sees it later
//! cannot make as much free. So where all that might be copied does not fit, and copying has begun, the keeper
//! write-protects what is managed. The first write to each block of [`BLOCK_BYTES`] faults then, and waits until
//! there is room for its copy. Short children that write little, and programs with room, never notice.
//!
//! A page that has been out is nobody else's: what comes in is not protected. A protected page that is moved out is not
//! protected any more. In the child of a fork nothing is protected.
//!
//! Control blocks of threads are never protected ([`crate::thread_control_block`]). The keeper protects; any handler serves. No locks.

use crate::budget::Budget;
use crate::machine::LinuxMachine;
use crate::ranges::pages;
use crate::uffd::{MoveError, Userfaultfd};
use foliomem_core::engine::Engine;
use foliomem_core::units::{PAGE_BYTES, PageNumber};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What one write makes writable: 64 KiB, as a folio of the usual size.
const BLOCK_BYTES: usize = 64 << 10;
/// CowThrottle that show that a side of the fork has work to do on what is shared: 1 MiB.
const BEGUN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct CowThrottle {
    are_watched: AtomicBool,
}

impl CowThrottle {
    /// There was a fork: what is shared is not protected, or not all of it.
    pub(crate) fn forked(&self) {
        self.are_watched.store(false, Relaxed);
    }

    /// The keeper: watches copies where they do not fit, until nothing is shared any more.
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
            // A change of mappings that was under way is over by the next look.
            self.are_watched.store(done, Relaxed);
        }
    }
}

/// Does something to all that is resident and may be protected; whether no change of mappings was in the way. What is swapped
/// out has marks that are to stay ([`crate::marks`]).
fn each(engine: &Engine<LinuxMachine>, act: impl Fn(&Userfaultfd, usize, usize) -> Result<(), MoveError>) -> bool {
    let mut done = true;
    for range in engine.machine().protectable() {
        engine.for_each_resident(pages(&range), |run| {
            let (start, end) = (run.start.address() as usize, run.end.address() as usize);
            // What is not as it is known to be is being unmapped.
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
