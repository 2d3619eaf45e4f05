//! The port to the clock and the CPUs.

use crate::sync::Shared;
use foliomem_types::units::CpuNumber;

/// The time, and the CPU of the caller.
pub trait Clock: Shared {
    /// Returns the time in nanoseconds. It never goes back.
    fn now_ns(&self) -> u64;
    /// Returns the CPU of the caller. This is a hint: the caller may have moved since.
    fn cpu(&self) -> CpuNumber;
    /// Sleeps for about the time in which other threads free a few folios. Called under no lock.
    fn pause(&self);
}
