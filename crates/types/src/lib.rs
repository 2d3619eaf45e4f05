//! Types that all crates of foliomem share: units, size policy, settings, trace events, counters.
//!
//! The crate has no algorithm, lock or system call. It is built once, so the agent's engine and the
//! lab's engine, which are two builds of the crate `core`, exchange its values as they are.
#![forbid(unsafe_code)]

pub mod codec;
pub mod counters;
pub mod discard;
pub mod settings;
pub mod size;
pub mod size_policy;
pub mod trace_event;
pub mod units;
