//! Encrypted reads and writes of the swap file.
//!
//! The file has no format: a piece's bytes lie at its place, encrypted with AES-256-GCM. Memory
//! keeps nonce and tag with the place. So bytes that are changed, truncated, of another place or of
//! an earlier write are refused. Invariant: nonces come from one counter for all processes of the
//! run, so none is used twice. (The crate `ring` encrypts without allocating and without calling
//! the C library.)
//!
//! Reads and writes are of whole slots in aligned memory, and bypass the page cache if the file
//! system allows it (`O_DIRECT`), because the page cache is memory, too. A read that continues the
//! last one reads further ahead: pieces that were written together lie together. There is no lock.

use foliomem_core::ports::MAX_WRITES;
use foliomem_core::store::{FilePlace, MAX_FILE_PIECE_ORDER, Seal};
use foliomem_session::swap_file::KEY_BYTES;
use foliomem_sync::atomic::{AtomicU64, Ordering};
use foliomem_sys::errno_text::ErrnoText;
use foliomem_sys::uring::{Ring, Uring};
use foliomem_types::units::{PAGE_BYTES, Slot};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{self, FileType};
use rustix::io::Errno;
use thiserror::Error;

/// Number of slots that a read takes at once if it continues the last one.
const AHEAD_SLOTS: u32 = 64;
/// Size of a buffer, in slots: the largest piece, at any offset in a slot.
const BUFFER_SLOTS: usize = MAX_FILE_PIECE_ORDER.pages() as usize + 1;

/// Why a piece could not be written or read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FileError {
    /// A system call failed.
    #[error("{}", ErrnoText(*.0))]
    System(Errno),
    /// The file ends too early.
    #[error("it is shorter than it was")]
    Short,
    /// The bytes are not those that were written.
    #[error("it has been changed, or belongs to another place or time")]
    Tampered,
}

/// The operations of a swap file, for real files and for failing ones of tests.
pub trait BlockFile {
    /// Returns a ring for asynchronous writes, if the system allows that and it pays. The file
    /// outlives it.
    fn ring(&self) -> Option<Box<dyn Ring>>;
    /// Reads bytes from `offset` on, as pread(2) does. Fails as it does.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<usize, Errno>;
    /// Writes bytes from `offset` on, as pwrite(2) does. Fails as it does.
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize, Errno>;
}

impl BlockFile for BorrowedFd<'_> {
    fn ring(&self) -> Option<Box<dyn Ring>> {
        // A write to a regular file mostly allocates blocks of the disk, so it must wait. io_uring
        // leaves such a write to a kernel thread, which first needs a CPU: on a busy machine this
        // takes longer than a direct write.
        let stat = fs::fstat(self).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice);
        Some(Box::new(stat.and_then(|_| Uring::<MAX_WRITES>::new(self.as_fd()).ok())?))
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
        rustix::io::pread(self, bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize, Errno> {
        rustix::io::pwrite(self, bytes, offset)
    }
}

/// Writes all `bytes` from `offset` on.
pub(crate) fn write_all(file: &impl BlockFile, mut bytes: &[u8], mut offset: u64) -> Result<(), FileError> {
    while !bytes.is_empty() {
        match file.write_at(bytes, offset) {
            // With O_DIRECT, a write that stopped in the middle of a slot cannot be continued: the
            // disk is full.
            Ok(written) if written < bytes.len() && written % PAGE_BYTES != 0 => return Err(FileError::Short),
            Ok(0) => return Err(FileError::Short),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(FileError::System(errno)),
        }
    }
    Ok(())
}

/// Reads until at least `min_bytes` are there. Returns the number of bytes read.
fn read_at_least(file: &impl BlockFile, bytes: &mut [u8], min_bytes: usize, offset: u64) -> Result<usize, FileError> {
    let mut filled = 0;
    while filled < min_bytes {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => return Err(FileError::Short),
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(FileError::System(errno)),
        }
    }
    Ok(filled)
}

/// Memory for some slots, aligned to slots. Unused memory takes no pages.
pub(crate) struct SlotBuffer {
    memory: Box<[u8]>,
    start: usize,
}

impl Default for SlotBuffer {
    fn default() -> SlotBuffer {
        let memory = vec![0; (BUFFER_SLOTS + 1) * PAGE_BYTES].into_boxed_slice();
        let start = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) - memory.as_ptr().addr();
        SlotBuffer { memory, start }
    }
}

impl SlotBuffer {
    /// Returns the first `slots` slots of the buffer.
    pub(crate) fn slots(&mut self, slots: u32) -> &mut [u8] {
        &mut self.memory[self.start..self.start + slots as usize * PAGE_BYTES]
    }
}

/// Memory for one thread's reads.
pub struct ReadBuffer {
    buffer: SlotBuffer,
    /// The slots of the file that the buffer holds, except for bytes that were decrypted in place.
    window: std::ops::Range<u32>,
    /// The end of the piece that was read last, as a slot.
    next: u32,
}

impl Default for ReadBuffer {
    fn default() -> ReadBuffer {
        ReadBuffer { buffer: SlotBuffer::default(), window: 0..0, next: u32::MAX }
    }
}

/// Encrypts and decrypts the pieces of a swap file.
pub struct SwapFile {
    key: LessSafeKey,
    nonces: &'static AtomicU64,
}

impl SwapFile {
    /// Creates the cipher with `key`. `nonces` is the counter of nonces that belongs to the key.
    pub fn new(key: &[u8; KEY_BYTES], nonces: &'static AtomicU64) -> SwapFile {
        let Ok(key) = UnboundKey::new(&AES_256_GCM, key) else { unreachable!("a key of {KEY_BYTES} bytes") };
        SwapFile { key: LessSafeKey::new(key), nonces }
    }

    fn seal(&self, bytes: &mut [u8], first: Slot, offset_bytes: u32) -> Result<Seal, FileError> {
        let number = self.nonces.fetch_add(1, Ordering::Relaxed);
        let place = Aad::from(place_bytes(first, offset_bytes, bytes.len() as u32));
        // Only content of more than 64 GiB is refused.
        let tag = self.key.seal_in_place_separate_tag(nonce(number), place, bytes).map_err(|_| FileError::Tampered)?;
        let mut words = [0; 2];
        for (word, bytes) in words.iter_mut().zip(tag.as_ref().as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Ok(Seal { nonce: number, tag: words })
    }

    /// Decrypts the bytes read at `place`. On failure, the bytes are useless.
    fn open(&self, bytes: &mut [u8], place: &FilePlace) -> Result<(), FileError> {
        let Seal { nonce: number, tag: words } = place.seal;
        let mut tag = [0; 16];
        for (bytes, word) in tag.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.to_ne_bytes();
        }
        let place = Aad::from(place_bytes(place.first, place.offset_bytes, place.len_bytes));
        let opened = self.key.open_in_place_separate_tag(nonce(number), place, Tag::from(tag), bytes, 0..);
        opened.map(|_| ()).map_err(|_| FileError::Tampered)
    }

    /// Fills `bytes`, slots from `first` on, with encrypted pieces. Each call of `fill` puts a
    /// piece at its offset, and returns its range; `None` after the last piece. Adds the seal of
    /// each piece to `seals`.
    pub(crate) fn seal_all(
        &self,
        bytes: &mut [u8],
        first: Slot,
        mut fill: impl FnMut(&mut [u8]) -> Option<std::ops::Range<usize>>,
        seals: &mut Vec<Seal>,
    ) -> Result<(), FileError> {
        let mut end = 0;
        while let Some(range) = fill(bytes) {
            bytes[end..range.start].fill(0);
            end = range.end;
            let slot = first.offset((range.start / PAGE_BYTES) as u32);
            seals.push(self.seal(&mut bytes[range.clone()], slot, (range.start % PAGE_BYTES) as u32)?);
        }
        // The old content of the buffer must not reach the file.
        bytes[end..].fill(0);
        Ok(())
    }

    /// Reads and decrypts the piece at `place`. Fails if a read fails or the bytes are not those
    /// that were written.
    pub fn read<'a>(
        &self,
        file: &impl BlockFile,
        reading: &'a mut ReadBuffer,
        place: &FilePlace,
    ) -> Result<&'a [u8], FileError> {
        let ReadBuffer { buffer, window, next } = reading;
        let slots = place.first.0..place.first.0 + place.slots();
        let goes_on = slots.start == *next || slots.start + 1 == *next;
        *next = slots.end;
        let in_window = |window: &std::ops::Range<u32>| {
            let start = (slots.start - window.start) as usize * PAGE_BYTES + place.offset_bytes as usize;
            start..start + place.len_bytes as usize
        };
        if window.start <= slots.start && slots.end <= window.end {
            let range = in_window(window);
            // The slots may have been written since they were read.
            if self.open(&mut buffer.slots(window.len() as u32)[range.clone()], place).is_ok() {
                return Ok(&buffer.slots(window.len() as u32)[range]);
            }
        }
        let ahead = if goes_on { AHEAD_SLOTS } else { 0 };
        let cluster_end = Slot(slots.start).cluster().slots().end.0;
        let wanted = ahead.min(cluster_end - slots.start).max(slots.end - slots.start);
        *window = 0..0;
        let bytes = buffer.slots(wanted);
        let filled = read_at_least(file, bytes, slots.len() * PAGE_BYTES, place.first.offset_bytes())?;
        let bytes = &mut bytes[in_window(&slots)];
        self.open(bytes, place)?;
        *window = slots.start..slots.start + (filled / PAGE_BYTES) as u32;
        Ok(bytes)
    }
}

/// Returns the nonce with this number.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Returns the authenticated data beside the content: the place.
fn place_bytes(first: Slot, offset_bytes: u32, len_bytes: u32) -> [u8; 12] {
    let mut bytes = [0; 12];
    for (chunk, number) in bytes.chunks_exact_mut(4).zip([first.0, offset_bytes, len_bytes]) {
        chunk.copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests;
