//! Writes of one thread to the swap file: while one is under way, the thread encrypts the next.
//!
//! They go through a ring ([`foliomem_sys::uring`]) if the system has one. A write that the ring
//! does not complete is repeated by pwrite(2), whose result counts. A ring that fails where
//! pwrite(2) succeeds is not used again. There is no lock: each thread has its own writer.

use crate::ports::encrypted_file::{BlockFile, FileError, SlotBuffer, SwapFile, write_all};
use foliomem_core::ports::MAX_WRITES;
use foliomem_core::store::Seal;
use foliomem_sys::uring::Ring;
use foliomem_types::units::{PAGE_BYTES, Slot};
use std::collections::VecDeque;
use std::ops::Range;

/// How a writer writes.
#[derive(PartialEq, Eq)]
enum Method {
    /// Not decided before the first write.
    Unknown,
    Ring,
    Calls,
}

/// A write that was begun.
enum Write {
    Ended(Result<(), FileError>),
    /// A number of slots, from the first on, is under way through the ring.
    UnderWay(Slot, u32),
}

/// The writes of one thread, and their buffers.
pub struct SwapWriter {
    method: Method,
    /// The ring, kept as long as a write may be under way in it.
    ring: Option<Box<dyn Ring>>,
    /// Write `n` uses buffer `n % MAX_WRITES`.
    buffers: [SlotBuffer; MAX_WRITES],
    begun: VecDeque<Write>,
    /// The number of the oldest write in `begun`.
    oldest: usize,
}

impl Default for SwapWriter {
    fn default() -> SwapWriter {
        SwapWriter {
            method: Method::Unknown,
            ring: None,
            buffers: Default::default(),
            begun: VecDeque::new(),
            oldest: 0,
        }
    }
}

impl SwapWriter {
    /// Encrypts pieces, and begins to write them to `slots` slots from `first` on. Each call of
    /// `fill` puts a piece at its offset in the buffer, and returns its range; `None` after the
    /// last piece. Fewer than [`MAX_WRITES`] writes may be under way.
    pub fn begin(
        &mut self,
        swap: &SwapFile,
        file: &impl BlockFile,
        (first, slots): (Slot, u32),
        fill: impl FnMut(&mut [u8]) -> Option<Range<usize>>,
        seals: &mut Vec<Seal>,
    ) {
        assert!(self.begun.len() < MAX_WRITES, "more writes than buffers");
        if self.method == Method::Unknown {
            self.ring = file.ring();
            self.method = if self.ring.is_some() { Method::Ring } else { Method::Calls };
        }
        let number = (self.oldest + self.begun.len()) % MAX_WRITES;
        let bytes = self.buffers[number].slots(slots);
        let write = match swap.seal_all(bytes, first, fill, seals) {
            Err(error) => Write::Ended(Err(error)),
            Ok(()) => {
                let ring = self.ring.as_mut().filter(|_| self.method == Method::Ring);
                // SAFETY: the buffer is neither changed nor freed before the write was waited for
                // (`finish`, `drop`).
                match ring.map(|ring| unsafe { ring.submit(number, bytes, first.offset_bytes()) }) {
                    Some(Ok(())) => Write::UnderWay(first, slots),
                    _ => Write::Ended(write_all(file, bytes, first.offset_bytes())),
                }
            }
        };
        self.begun.push_back(write);
    }

    /// Waits for the oldest write that was begun. Returns the number of slots that the ring has
    /// written of it. Fails if pwrite(2) fails.
    pub fn finish(&mut self, file: &impl BlockFile) -> Result<u32, FileError> {
        let Some(write) = self.begun.pop_front() else { unreachable!("a write was begun") };
        let number = self.oldest;
        self.oldest = (number + 1) % MAX_WRITES;
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
        self.method = Method::Calls;
        Ok((written / PAGE_BYTES) as u32)
    }
}

impl Drop for SwapWriter {
    fn drop(&mut self) {
        for (number, write) in (self.oldest..).zip(&self.begun) {
            if let (Write::UnderWay(..), Some(ring)) = (write, &mut self.ring) {
                let _ = ring.wait(number % MAX_WRITES);
            }
        }
    }
}
