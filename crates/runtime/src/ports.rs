//! The engine's ports on a real program.
//!
//! | module | role |
//! |---|---|
//! | [`clock`], [`budget`] | the system's clock; the process's part of the tree's limit |
//! | [`arena`] | frames: their memory, populated, moved and released |
//! | [`arena_memory`] | the arena's memory as slices |
//! | [`arena_size`] | the sizes of the arena and of the swap device |
//! | [`address_space`] | pages: moves between the program and the arena |
//! | [`pieces`] | compression: folios into pieces, and back |
//! | [`swap`] | the swap file: this process's part in it |
//! | [`encrypted_file`], [`swap_writer`] | reads and writes of the swap file |
//! | [`attachment`] | the descriptors by which all of them reach the program |
//!
//! One userfaultfd has the program's ranges and the arena registered. No page moves out of, or
//! into, a mapping that has replaced the one that the engine knows: the kernel refuses moves while
//! a change is pending, and the lock of the mappings covers the time until a received change is
//! applied. After a fork the child makes userfaultfds of its own ([`LinuxPorts::rearm`]).
//!
//! Lock order: the lock of the mappings comes before the engine's locks; all others are leaves.

pub mod address_space;
pub mod arena;
pub mod arena_memory;
pub mod arena_size;
pub mod attachment;
pub mod budget;
pub mod clock;
pub mod encrypted_file;
pub mod pieces;
pub mod swap;
pub mod swap_writer;

use crate::address_space::lent_pages::Lenders;
use crate::address_space::marks::Marks;
use crate::address_space::thread_control_block::ControlBlocks;
use crate::tracer::Tracer;
use address_space::AddressSpace;
use arena::Arena;
use arena_memory::ArenaMemory;
use attachment::{Attachment, Descriptors};
use budget::TreeBudget;
use clock::SystemClock;
use foliomem_core::ports::Ports;
use foliomem_session::budget::Budget;
use foliomem_sys::memory_advice;
use foliomem_sys::region::{HugePages, Region};
use foliomem_sys::userfaultfd::{Mode, UffdError};
use foliomem_types::counters::Counters;
use pieces::{PieceCodec, Worker};
use rustix::fd::{BorrowedFd, RawFd};
use std::ops::Range;
use swap::Swap;

/// The ports of the one engine of a process.
pub struct LinuxPorts {
    clock: SystemClock,
    budget: TreeBudget,
    attachment: &'static Attachment,
    /// The memory of the arena, which the ports share.
    memory: &'static ArenaMemory,
    pub(crate) arena: Arena,
    pub(crate) space: AddressSpace,
    pub(crate) codec: PieceCodec,
    pub(crate) swap: Option<Swap>,
}

impl LinuxPorts {
    /// Makes ports over `arena` and registers it. They live as long as the process. `lenders` tells
    /// whether the program hands pages to the kernel by reference.
    pub(crate) fn new(
        arena: Region,
        descriptors: Descriptors,
        budget: &'static Budget,
        lenders: &'static Lenders,
        control_blocks: &'static ControlBlocks,
        tracer: &'static Tracer,
    ) -> Result<LinuxPorts, UffdError> {
        // Huge pages are allowed only where they are charged: `populate_huge` does that.
        let _ = arena.set_huge_pages(0, arena.len(), HugePages::Forbidden);
        let marks = Marks::new(&arena);
        descriptors.program.register(arena.start(), arena.len(), Mode::Destination)?;
        let memory: &'static ArenaMemory = Box::leak(Box::new(ArenaMemory::new(arena)));
        let attachment: &'static Attachment = Box::leak(Box::new(Attachment::new(descriptors, memory)));
        Ok(LinuxPorts {
            clock: SystemClock,
            budget: TreeBudget(budget),
            attachment,
            memory,
            arena: Arena::new(memory, attachment, budget.control(), lenders, marks.can_guard()),
            space: AddressSpace::new(attachment, memory, budget, control_blocks, marks, tracer),
            codec: PieceCodec::new(memory, budget, tracer),
            swap: Swap::enter(attachment, memory, budget),
        })
    }

    /// Registers everything with the userfaultfd of this process, the child of a fork.
    ///
    /// # Safety
    /// No other thread of this process uses the ports.
    pub unsafe fn rearm(&self, descriptors: Descriptors) -> Result<(), UffdError> {
        descriptors.program.register(self.memory.start(), self.memory.len(), Mode::Destination)?;
        self.space.register_anew(&descriptors.program)?;
        // SAFETY: the contract of this function.
        unsafe { self.attachment.replace(descriptors) };
        Ok(())
    }

    /// Makes the calling thread copy pages to the program from now on, without a userfaultfd and
    /// without a limit. `swap_file` is the number of the swap file in this thread's descriptor
    /// table.
    ///
    /// # Safety
    /// The calling thread is the only one that uses the memory. No page moves out from now on. The
    /// swap file stays open until all pieces are read.
    pub unsafe fn detach(&self, swap_file: Option<RawFd>) {
        // SAFETY: the contract of this function.
        unsafe { self.attachment.detach(swap_file) };
        self.budget.0.detach();
    }

    /// Gives the arena and all managed memory back to the system, except control blocks of threads
    /// and the pages `kept`. Publishes the process's size repeatedly meanwhile: pages that it
    /// shared count more for their other sharers at once.
    ///
    /// # Safety
    /// No process accesses the rest of the memory any more. No thread of the agent reads or writes
    /// the arena from now on.
    pub unsafe fn discard_all(&self, kept: &[usize]) {
        let uffd = &self.attachment.descriptors().program;
        let give_back = |range: Range<usize>, step_bytes: usize| {
            // Memory that cannot be unregistered would raise a message that nobody reads.
            if uffd.unregister(range.start, range.len()).is_err() {
                return;
            }
            for start in range.clone().step_by(step_bytes) {
                // SAFETY: nobody uses the content, by the contract of this function.
                unsafe { memory_advice::discard(&(start..range.end.min(start + step_bytes))) };
                self.budget.0.sample();
            }
        };
        self.space.protectable(kept).into_iter().for_each(|range| give_back(range, PUBLISH_BYTES));
        // Most of the arena is address space only.
        let arena = self.arena.addresses();
        give_back(arena.clone(), arena.len());
    }

    /// Returns the swap file's descriptor in the table of the agent's threads.
    pub fn swap_file_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.swap.as_ref().and_then(Swap::descriptor)
    }
}

/// Memory that is given back between two samples, in bytes.
const PUBLISH_BYTES: usize = 8 << 20;

impl Ports for LinuxPorts {
    type Worker = Worker;
    type Clock = SystemClock;
    type Budget = TreeBudget;
    type Arena = Arena;
    type AddressSpace = AddressSpace;
    type Pieces = PieceCodec;
    type Recompressor = PieceCodec;
    type Marks = AddressSpace;
    type SharedPages = AddressSpace;
    type SwapDevice = Swap;
    type SharedStore = Swap;

    fn counters(&self) -> &Counters {
        self.budget.0.counters()
    }

    fn clock(&self) -> &SystemClock {
        &self.clock
    }

    fn budget(&self) -> &TreeBudget {
        &self.budget
    }

    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn address_space(&self) -> &AddressSpace {
        &self.space
    }

    fn pieces(&self) -> &PieceCodec {
        &self.codec
    }

    fn recompressor(&self) -> Option<&PieceCodec> {
        Some(&self.codec)
    }

    fn marks(&self) -> Option<&AddressSpace> {
        Some(&self.space)
    }

    fn shared_pages(&self) -> Option<&AddressSpace> {
        Some(&self.space)
    }

    fn swap_device(&self) -> Option<&Swap> {
        self.swap.as_ref()
    }

    fn shared_store(&self) -> Option<&Swap> {
        self.swap.as_ref().filter(|swap| swap.is_shared_store())
    }
}
