//! The ports: everything that the engine needs from outside, one small trait for each part.
//!
//! | port | gives the engine |
//! |---|---|
//! | [`Clock`] | the time, the caller's CPU, a short sleep |
//! | [`Budget`] | charges against the limit |
//! | [`Arena`] | the memory of frames: populate, release, zero, copy, regroup, hash |
//! | [`AddressSpace`] | the program's mappings and pages: move in and out, wake, poison |
//! | [`Pieces`] | the codec: compress, write, copy, read |
//! | [`Recompressor`] | a slower codec for idle pieces; optional |
//! | [`Marks`] | discards that the program does not announce; optional |
//! | [`SharedPages`] | pages that a fork left shared; optional |
//! | [`SwapDevice`] | the swap file behind the store; optional |
//! | [`SharedStore`] | equal pieces of other processes, if the swap file lies in memory; optional |
//!
//! On Linux the ports are a real program's memory through userfaultfd; in tests and in the lab they
//! are arrays. [`Ports`] bundles them, and the engine is generic over the bundle, so each call is
//! dispatched statically. Where an optional port does not exist, its type is [`Absent`].
//!
//! A [`PageNumber`](foliomem_types::units::PageNumber) addresses a page of the *program*, a
//! [`Frame`](foliomem_types::units::Frame) a page of the *arena*. The page of a frame either lies
//! in the arena at its home frame, or it is mapped into the program; its home frame is then
//! *unpopulated*.
//!
//! A method reads or writes memory only for a token: [`RunRef`](crate::run_tokens::RunRef) and
//! [`RunMut`](crate::run_tokens::RunMut) stand for staged pages, [`Piece`](crate::store::Piece) and
//! [`PlaceMut`](crate::store::PlaceMut) for stored bytes. Safe code cannot hold two tokens for the
//! same bytes if one of them allows writing, so a port may turn tokens into slices.
//!
//! Locks: the engine never holds a leaf lock while it calls a port, except as [`SwapDevice`] says.
//! A method that takes [`Entries`](crate::page_table::Entries) is called under the lock of their
//! block and waits for nothing but the kernel. A method that may wait for the program is called
//! under no lock, which [`assert_unlocked`] checks in tests.

mod absent;
mod address_space;
mod arena;
mod budget;
mod clock;
mod marks;
mod pieces;
mod recompressor;
mod shared_pages;
mod shared_store;
mod swap_device;

pub use absent::Absent;
pub use address_space::{AddressSpace, Mapping, MoveError, Stopped};
pub use arena::Arena;
pub use budget::Budget;
pub use clock::Clock;
pub use marks::Marks;
pub use pieces::{Compressed, Corrupted, Pieces};
pub use recompressor::{Recompressed, Recompressor};
pub use shared_pages::SharedPages;
pub use shared_store::{Offer, SharedStore};
pub use swap_device::{MAX_WRITES, NotWritten, SwapDevice};

use crate::sync::{Shared, ranks};
use foliomem_types::counters::Counters;

/// The ports of one engine.
pub trait Ports: Shared {
    /// Per-thread state of a compressing thread: codec contexts and scratch memory.
    type Worker;
    /// The clock.
    type Clock: Clock;
    /// The budget.
    type Budget: Budget;
    /// The arena.
    type Arena: Arena;
    /// The program's address space.
    type AddressSpace: AddressSpace;
    /// The codec.
    type Pieces: Pieces<Self::Worker>;
    /// The slower codec.
    type Recompressor: Recompressor<Self::Worker>;
    /// The marks of pages that are not mapped.
    type Marks: Marks;
    /// The pages that a fork left shared.
    type SharedPages: SharedPages;
    /// The swap file.
    type SwapDevice: SwapDevice<Self::Worker>;
    /// The shared store.
    type SharedStore: SharedStore<Self::Worker>;

    /// Returns the counters of the managed program.
    fn counters(&self) -> &Counters;
    /// Returns the clock.
    fn clock(&self) -> &Self::Clock;
    /// Returns the budget.
    fn budget(&self) -> &Self::Budget;
    /// Returns the arena.
    fn arena(&self) -> &Self::Arena;
    /// Returns the program's address space.
    fn address_space(&self) -> &Self::AddressSpace;
    /// Returns the codec.
    fn pieces(&self) -> &Self::Pieces;
    /// Returns the slower codec, if there is one.
    fn recompressor(&self) -> Option<&Self::Recompressor>;
    /// Returns the marks, if the program can discard pages without a message.
    fn marks(&self) -> Option<&Self::Marks>;
    /// Returns the pages that a fork left shared, if the program can fork.
    fn shared_pages(&self) -> Option<&Self::SharedPages>;
    /// Returns the swap file, if there is one.
    fn swap_device(&self) -> Option<&Self::SwapDevice>;
    /// Returns the shared store, if the swap file is one.
    fn shared_store(&self) -> Option<&Self::SharedStore>;
}

/// The guard of [`AddressSpace::steady`] in the address space of these ports.
pub type Steady<'a, P> = <<P as Ports>::AddressSpace as AddressSpace>::Steady<'a>;

/// Panics if the calling thread holds the lock of the mappings or one behind it in the lock order.
/// Only builds that track ranks check: see [`ranks`].
#[inline]
pub fn assert_unlocked() {
    ranks::assert_none_held_from::<ranks::Mappings>();
}
