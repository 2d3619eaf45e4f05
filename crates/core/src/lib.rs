//! The foliomem memory manager: pure logic over small [`ports`].
//!
//! The crate knows no system call, pointer or thread. The crate `foliomem-runtime` runs it over the
//! memory of a real program; tests and the lab run it over a simulated one. The words are the
//! kernel's: a *page* is 4 KiB, a *folio* is a naturally aligned run of `2^order` pages, a *frame*
//! is a page of physical budget, a *swap entry* names a slot of 4 KiB on a swap device, a *cluster*
//! is 512 slots.
//!
//! # Lock order
//! Each lock has a rank, and a thread takes locks in ascending order. The table is in
//! `foliomem_sync::ranks`, and tests check the order.
#![forbid(unsafe_code)]

pub mod buddy;
pub mod cluster;
pub mod compaction;
pub mod discards;
pub mod engine;
pub mod frame_set;
pub mod gate;
pub mod homes;
pub mod locality;

pub mod pacing;
pub mod page_table;
pub mod ports;
pub mod queue;
pub mod readahead;
pub mod rmap;
pub mod run_tokens;
pub mod slot_map;
pub mod sparse;
pub mod store;
pub mod swap_cache;
pub mod sync;
pub mod workingset;
