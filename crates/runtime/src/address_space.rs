//! The program's address space: its mappings, and how they become managed.
//!
//! | module | part |
//! |---|---|
//! | [`ranges`] | sets of address ranges, with the program's advice |
//! | [`adopt`] | finds the program's mappings, registers them, and adopts their pages |
//! | [`mapping_events`] | receives the kernel's messages about faults and mappings |
//! | [`mapping_changes`] | the order in which reported changes are applied |
//! | [`advice`] | the program's advice about huge pages |
//! | [`allocation_notice`] | notices of allocating threads about new memory |
//! | [`cow_throttle`] | makes writes to shared memory wait for room after a fork |
//! | [`marks`] | marks in page tables that reveal discarded pages |
//! | [`thread_control_block`] | pages that must stay resident for the kernel |
//! | [`program_code`] | whether the program's code can make unseen system calls |
//! | [`lent_pages`] | whether externally referenced pages may exist |
//!
//! Lock order: the lock of the mappings, then waiting advice, then the ranges.

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
