//! Writes of one thread to the swap file: while one is under way, the next is encrypted.
//!
//! They go through a ring ([`foliomem_sys::uring`]) if the system has one. A write that the ring
//! does not complete is repeated by pwrite(2), whose result counts. A ring that fails where
//! pwrite(2) succeeds is not used again. There is no lock: each thread has its own writer.

use crate::ports::encrypted_file::{BlockFile, FileError, SlotBuffer, SwapFile, write_all};
use foliomem_core::machine::MOST_WRITES;
use foliomem_core::store::Seal;
use foliomem_sys::uring::Ring;
use foliomem_types::units::{PAGE_BYTES, Slot};
use std::collections::VecDeque;
use std::ops::Range;

/// How writes go.
#[derive(PartialEq, Eq)]
enum Way {
    /// Nothing was written yet.
    Unknown,
    Ring,
    Calls,
}

/// A write that was begun.
enum Write {
    Ended(Result<(), FileError>),
    /// So many slots, from the first on, are on their way through the ring.
    UnderWay(Slot, u32),
}

/// See the module.
pub struct SwapWriter {
    way: Way,
    /// Stays as long as something may be under way there.
    ring: Option<Box<dyn Ring>>,
    /// Write `n` is made in buffer `n % MOST_WRITES`.
    buffers: [SlotBuffer; MOST_WRITES],
    begun: VecDeque<Write>,
    /// The number of the oldest in `begun`.
    oldest: usize,
}

impl Default for SwapWriter {
    fn default() -> SwapWriter {
        SwapWriter { way: Way::Unknown, ring: None, buffers: Default::default(), begun: VecDeque::new(), oldest: 0 }
    }
}

impl SwapWriter {
    /// Encrypts pieces, and begins to write them to `slots` slots from `first` on. Each call of `fill` puts one where it
    /// has to be in the buffer, and returns where that was; `None` after the last. Fewer than [`MOST_WRITES`] are
    /// under way.
    pub fn begin(
        &mut self,
        swap: &SwapFile,
        file: &impl BlockFile,
        (first, slots): (Slot, u32),
        fill: impl FnMut(&mut [u8]) -> Option<Range<usize>>,
        seals: &mut Vec<Seal>,
    ) {
        assert!(self.begun.len() < MOST_WRITES, "more writes than buffers");
        if self.way == Way::Unknown {
            self.ring = file.ring();
            self.way = if self.ring.is_some() { Way::Ring } else { Way::Calls };
        }
        let number = (self.oldest + self.begun.len()) % MOST_WRITES;
        let bytes = self.buffers[number].slots(slots);
        let write = match swap.seal_all(bytes, first, fill, seals) {
            Err(error) => Write::Ended(Err(error)),
            Ok(()) => {
                let ring = self.ring.as_mut().filter(|_| self.way == Way::Ring);
                // SAFETY: the buffer is neither touched nor freed before the write was waited for.
                match ring.map(|ring| unsafe { ring.submit(number, bytes, first.offset_bytes()) }) {
                    Some(Ok(())) => Write::UnderWay(first, slots),
                    _ => Write::Ended(write_all(file, bytes, first.offset_bytes())),
                }
            }
        };
        self.begun.push_back(write);
    }

    /// Waits for the oldest write that was begun and not finished; returns how many slots the ring has written of it.
    pub fn finish(&mut self, file: &impl BlockFile) -> Result<u32, FileError> {
        let Some(write) = self.begun.pop_front() else { unreachable!("a write was begun") };
        let number = self.oldest;
        self.oldest = (number + 1) % MOST_WRITES;
        let (first, slots) = match write {
            Write::Ended(result) => return result.map(|()| 0),
            Write::UnderWay(first, slots) => (first, slots),
        };
        let written = self.ring.as_mut().map_or(0, |ring| ring.wait(number).unwrap_or(0)) / PAGE_BYTES * PAGE_BYTES;
        let bytes = self.buffers[number].slots(slots);
        if written == bytes.len() {
            return Ok(slots);
        }
        write_all(file, &bytes[written..], first.offset_bytes() + written as u64)?;
        self.way = Way::Calls;
        Ok((written / PAGE_BYTES) as u32)
    }
}

impl Drop for SwapWriter {
    fn drop(&mut self) {
        for (number, write) in (self.oldest..).zip(&self.begun) {
            if let (Write::UnderWay(..), Some(ring)) = (write, &mut self.ring) {
                let _ = ring.wait(number % MOST_WRITES);
            }
        }
    }
}
