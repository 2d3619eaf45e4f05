//! The port to the arena: the memory of the frames.

use super::Stopped;
use crate::run_tokens::{RunMut, RunRef};
use crate::sync::Shared;
use foliomem_types::units::Frame;

/// The memory of the frames. A frame is populated if its page lies in the arena.
pub trait Arena: Shared {
    /// Populates the home frames of `run` with pages of zeros; a run of the highest order becomes
    /// one huge page if the system has one. The frames must be unpopulated and charged.
    fn populate(&self, run: RunMut<'_>);
    /// Releases the pages of `run` to the system; their home frames become unpopulated.
    fn release(&self, run: RunMut<'_>);
    /// Fills the staged pages of `run` with zeros. Pages of the highest order that are no huge page
    /// are replaced by one if the system has one.
    fn zero(&self, run: RunMut<'_>);
    /// Copies the pages of `from` over those of `to`. Both have the same order.
    fn copy(&self, from: RunRef<'_>, to: RunMut<'_>);
    /// Moves the pages of `from` to the unpopulated frames from `to` on.
    fn regroup(&self, from: Frame, to: Frame, pages: u32) -> Result<(), Stopped>;
    /// Returns a hash of the staged content of `run`. Equal contents have equal hashes; two
    /// different contents collide with probability 2^-64.
    fn hash(&self, run: RunRef<'_>) -> u64;
    /// Returns whether anything outside the program may still read frames that it owned (a pipe, a
    /// zero-copy socket). If so, a frame must go back to the system before it is used again.
    fn frames_escape(&self) -> bool;
    /// Records that the arena is full and that nothing in it can be freed: new pages stay
    /// unmanaged. Does not block.
    fn note_full(&self);
}
