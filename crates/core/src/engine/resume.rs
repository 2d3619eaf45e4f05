//! Resuming: swapped-out memory returns ahead of use, because a control request asks for it.
//!
//! Blocks are read ahead one after the other, as a stream would be. Unlike a stream, resuming stops
//! before the room is so low that reclaim begins: it would swap out again what has just returned.
//!
//! Locks: as for readahead ([`super::read_ahead`]).

use super::Engine;
use crate::ports::Ports;
use foliomem_types::units::{BLOCK_PAGES, PageNumber};
use std::ops::Range;

/// Number of attempts to read a block ahead while there is room: the program may be changing its
/// mappings.
const TRIES: u32 = 16;

/// The result of an attempt to resume a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resumed {
    /// The block is resident, apart from what cannot return ahead of use.
    Block,
    /// There is no room for a block, or the program can discard pages unnoticed, so that a page may
    /// return only when it is touched. Resuming is over.
    NoRoom,
}

impl<P: Ports> Engine<P> {
    /// Returns the pages of the first block that has the page `from` or a later one.
    pub fn block_from(&self, from: PageNumber) -> Option<Range<PageNumber>> {
        let first = self.table.first_from(from)?;
        Some(first..first.offset(BLOCK_PAGES as u32))
    }

    /// Maps in the staged and swapped-out pages of `block`, the pages of one block, if there is
    /// room for all pages of a block.
    pub fn resume(&self, worker: &mut P::Worker, block: Range<PageNumber>) -> Resumed {
        for _ in 0..TRIES {
            let room = self.room();
            let is_roomy = room.pages >= room.watermarks.high_pages() + BLOCK_PAGES as i64;
            if !is_roomy || self.returns_alone() {
                return Resumed::NoRoom;
            }
            if self.read_ahead_all(worker, block.clone()) {
                break;
            }
            self.pause();
        }
        Resumed::Block
    }
}
