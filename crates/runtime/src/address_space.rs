//! The program's address space: what is known of its mappings, and how they become managed.
//!
//! | module | part |
//! |---|---|
//! | [`ranges`] | sets of address ranges, with the program's advice |
//! | [`adopt`] | finds the program's mappings, registers them, and adopts their pages |
//! | [`mapping_events`] | receives what the kernel reports about mappings |
//! | [`mapping_changes`] | the order in which reported changes are applied |
//! | [`advice`] | what the program says about huge pages |
//! | [`allocation_notice`] | what allocating threads report before they touch new memory |
//! | [`cow_throttle`] | how fast a child may copy what a fork shares |
//! | [`marks`] | marks in page tables, by which discarded pages are found |
//! | [`thread_control_block`] | pages that stay resident for the kernel |
//! | [`program_code`] | whether the program's code can make unseen calls |
//! | [`lent_pages`] | whether others may hold references to the program's pages |
//!
//! Lock order: the lock of the mappings, then advice that waits, then the ranges.

pub mod adopt;
pub mod advice;
pub mod allocation_notice;
pub mod cow_throttle;
pub mod lent_pages;
pub mod mapping_changes;
pub mod mapping_events;
pub mod marks;
pub mod program_code;
pub mod ranges;
pub mod thread_control_block;
