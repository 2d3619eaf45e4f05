//! Trace files, which `foliomem record` writes and `foliomem lab replay` reads.
//!
//! A file is a header of 16 bytes (magic, version, page size), then blocks. The last block is
//! empty; a file without it was not written to its end. A block has the length of its content and
//! of the stored bytes (4 bytes each), a hash of these and the stored bytes (8 bytes, XXH3), and
//! the stored bytes: the content compressed with LZ4.
//!
//! The content is a list of records. A record is a byte (the event's tag, and whether the process
//! differs from the previous one), then varints: the process if it differs, microseconds since the
//! previous record, the event's numbers. A page number is stored as its difference to the previous
//! page number of any process. Each block starts with all previous values at zero. Numbers are
//! little endian.
//!
//! Reading any file gives records, or an error with the file, the offset and the reason.
#![forbid(unsafe_code)]

#[cfg(any(test, fuzzing))]
pub mod fuzz;

use foliomem_types::units::PAGE_SHIFT;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

/// The types of records come from the lab's build of the engine; those of `foliomem-runtime` are
/// distinct types.
pub use foliomem_types::{trace_event::Event, units::PageNumber};

const MAGIC: [u8; 8] = *b"foliotrc";
const VERSION: u16 = 7;
const HEADER_BYTES: usize = 16;
const BLOCK_HEADER_BYTES: usize = 16;
/// Content bytes at which a block is written.
const BLOCK_BYTES: usize = 64 << 10;
/// Maximum content bytes of a block that is read: a record has at most 60 bytes.
const MAX_BLOCK_BYTES: usize = BLOCK_BYTES + 64;
/// The bit of a record whose process differs from the previous one.
const OTHER_PROCESS: u8 = 0x80;
/// Upper bound of times: the trace ring stores them in 56 bits.
const MAX_TIME_US: u64 = 1 << 56;

/// The reason why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {0}: {1}")]
    Unreadable(PathBuf, std::io::Error),
    /// The file is no valid trace.
    #[error("{path}: at byte {offset}: {why}", path = .path.display())]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The offset of the error in bytes.
        offset: u64,
        /// The reason.
        why: String,
    },
}

/// One event of a process of the recorded run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The process's number in the trace: 0, 1, ... in the order of their starts.
    pub process: u32,
    /// The time of the event, by a clock with an arbitrary start.
    pub time_us: u64,
    /// The event.
    pub event: Event,
}

/// Returns the number of numbers of an event with this tag, and a bit for each that is a page
/// number.
fn shape(tag: u8) -> Option<(usize, u8)> {
    const NONE: u8 = 0;
    const FIRST: u8 = 1 << 0;
    const THIRD: u8 = 1 << 2;
    Some(match tag {
        2 => (0, NONE),
        1 | 10 | 11 | 12 => (1, NONE),
        14 => (1, FIRST),
        3 | 4 | 5 | 7 | 8 | 13 | 15 => (2, FIRST),
        9 => (3, FIRST),
        6 => (3, FIRST | THIRD),
        16..=20 => (3, NONE),
        21 => (1, NONE),
        _ => return None,
    })
}

fn header() -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..10].copy_from_slice(&VERSION.to_le_bytes());
    header[10] = PAGE_SHIFT as u8;
    header
}

/// The previous values, to which records are relative.
#[derive(Default)]
struct Before {
    process: u32,
    time_us: u64,
    page: u64,
}

fn push_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Maps a signed difference to an unsigned number; small differences of either sign become small
/// numbers.
fn fold(difference: i64) -> u64 {
    ((difference << 1) ^ (difference >> 63)) as u64
}

fn unfold(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}

impl Before {
    fn push(&mut self, bytes: &mut Vec<u8>, record: &Record) {
        let (tag, numbers) = record.event.encode();
        let Some((len, pages)) = shape(tag) else { unreachable!("every event has a shape") };
        let is_other = record.process != self.process;
        bytes.push(tag | if is_other { OTHER_PROCESS } else { 0 });
        if is_other {
            push_varint(bytes, record.process.into());
        }
        // Clocks of several processes may differ slightly.
        push_varint(bytes, fold(record.time_us.wrapping_sub(self.time_us) as i64));
        (self.process, self.time_us) = (record.process, record.time_us);
        for (place, number) in numbers.into_iter().take(len).enumerate() {
            if pages & 1 << place != 0 {
                push_varint(bytes, fold(number.wrapping_sub(self.page) as i64));
                self.page = number;
            } else {
                push_varint(bytes, number);
            }
        }
    }

    #[inline]
    fn take(&mut self, bytes: &mut &[u8]) -> Result<Record, &'static str> {
        let (&first, rest) = bytes.split_first().ok_or("a record is missing")?;
        *bytes = rest;
        let tag = first & !OTHER_PROCESS;
        let (len, pages) = shape(tag).ok_or("there is no such event")?;
        if first & OTHER_PROCESS != 0 {
            self.process = u32::try_from(take_varint(bytes)?).map_err(|_| "there is no such process")?;
        }
        self.time_us = self.time_us.wrapping_add(unfold(take_varint(bytes)?) as u64);
        if self.time_us >= MAX_TIME_US {
            return Err("there is no such time");
        }
        let mut numbers = [0; 3];
        for (place, number) in numbers.iter_mut().take(len).enumerate() {
            *number = take_varint(bytes)?;
            if pages & 1 << place != 0 {
                self.page = self.page.wrapping_add(unfold(*number) as u64);
                *number = self.page;
            }
        }
        let event = Event::decode(tag, numbers).ok_or("an event has numbers that it cannot have")?;
        Ok(Record { process: self.process, time_us: self.time_us, event })
    }
}

#[inline(always)]
fn take_varint(bytes: &mut &[u8]) -> Result<u64, &'static str> {
    let (mut number, mut shift) = (0, 0);
    while shift < u64::BITS {
        let (&byte, rest) = bytes.split_first().ok_or("a number is cut off")?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            break;
        }
        number |= bits << shift;
        if byte < 0x80 {
            return Ok(number);
        }
        shift += 7;
    }
    Err("a number is too large")
}

/// A writer of a trace file.
pub struct TraceWriter<W: Write = BufWriter<File>> {
    to: W,
    content: Vec<u8>,
    before: Before,
    stored_bytes: u64,
}

impl TraceWriter {
    /// Creates the file at `path`; replaces an existing one.
    pub fn create(path: &Path) -> std::io::Result<TraceWriter> {
        TraceWriter::to_file(File::create(path)?)
    }

    /// Writes to an empty file.
    pub fn to_file(file: File) -> std::io::Result<TraceWriter> {
        TraceWriter::new(BufWriter::new(file))
    }
}

impl<W: Write> TraceWriter<W> {
    fn new(mut to: W) -> std::io::Result<TraceWriter<W>> {
        to.write_all(&header())?;
        Ok(TraceWriter { to, content: Vec::new(), before: Before::default(), stored_bytes: HEADER_BYTES as u64 })
    }

    /// Writes a record.
    pub fn write(&mut self, record: &Record) -> std::io::Result<()> {
        self.before.push(&mut self.content, record);
        if self.content.len() < BLOCK_BYTES { Ok(()) } else { self.end_block() }
    }

    fn end_block(&mut self) -> std::io::Result<()> {
        let stored = lz4_flex::block::compress(&self.content);
        let lens = [self.content.len() as u32, stored.len() as u32].map(u32::to_le_bytes);
        let hash = xxh3_64(&[lens.as_flattened(), &stored].concat());
        self.to.write_all(lens.as_flattened())?;
        self.to.write_all(&hash.to_le_bytes())?;
        self.to.write_all(&stored)?;
        self.stored_bytes += (BLOCK_HEADER_BYTES + stored.len()) as u64;
        self.content.clear();
        self.before = Before::default();
        Ok(())
    }

    /// Finishes the file; returns its length.
    pub fn finish(mut self) -> std::io::Result<u64> {
        if !self.content.is_empty() {
            self.end_block()?;
        }
        self.end_block()?;
        self.to.flush()?;
        Ok(self.stored_bytes)
    }
}

/// Returns a whole file that has one block with this content, whatever that is.
#[cfg(any(test, fuzzing))]
pub(crate) fn file_of_block(content: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut writer = TraceWriter::new(&mut file).expect("a vector takes all");
    writer.content = content.to_vec();
    writer.finish().expect("a vector takes all");
    file
}

/// A reader of a trace file: it returns records in order, and an error as the last item if
/// something is wrong.
pub struct TraceReader<R: Read = BufReader<File>> {
    from: R,
    path: PathBuf,
    /// The offset of the current block, and of the next one.
    offset: u64,
    next_offset: u64,
    content: Vec<u8>,
    at: usize,
    before: Before,
    ended: bool,
}

impl TraceReader {
    /// Opens the file at `path`.
    pub fn open(path: &Path) -> Result<TraceReader, TraceError> {
        let file = File::open(path).map_err(|error| TraceError::Unreadable(path.to_owned(), error))?;
        TraceReader::new(BufReader::new(file), path)
    }
}

impl<R: Read> TraceReader<R> {
    fn new(from: R, path: &Path) -> Result<TraceReader<R>, TraceError> {
        let (path, before) = (path.to_owned(), Before::default());
        let mut reader =
            TraceReader { from, path, offset: 0, next_offset: 0, content: Vec::new(), at: 0, before, ended: false };
        let mut found = [0; HEADER_BYTES];
        reader.read(&mut found)?;
        let wanted = header();
        if found[..8] != MAGIC {
            return Err(reader.bad("this is no trace of `foliomem record`"));
        }
        if found != wanted {
            return Err(reader.bad("it is of another version of foliomem: record it again"));
        }
        reader.next_offset = HEADER_BYTES as u64;
        Ok(reader)
    }

    #[cold]
    fn bad(&self, why: &str) -> TraceError {
        TraceError::Damaged { path: self.path.clone(), offset: self.offset, why: why.to_owned() }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), TraceError> {
        self.from.read_exact(bytes).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                self.bad("it ends in the middle: it was not written to its end, or cut off")
            }
            _ => TraceError::Unreadable(self.path.clone(), error),
        })
    }

    /// Reads the next block; returns false at the end.
    fn next_block(&mut self) -> Result<bool, TraceError> {
        self.offset = self.next_offset;
        let mut head = [0; BLOCK_HEADER_BYTES];
        self.read(&mut head)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let (len, stored_len) = (word(0), word(4));
        if len > MAX_BLOCK_BYTES || stored_len > lz4_flex::block::get_maximum_output_size(len) {
            return Err(self.bad("a block is longer than it can be"));
        }
        let mut hashed = vec![0; 8 + stored_len];
        hashed[..8].copy_from_slice(&head[..8]);
        self.read(&mut hashed[8..])?;
        if xxh3_64(&hashed).to_le_bytes() != head[8..] {
            return Err(self.bad("a block is damaged"));
        }
        self.content = lz4_flex::block::decompress(&hashed[8..], len).map_err(|_| self.bad("a block is damaged"))?;
        if self.content.len() != len {
            return Err(self.bad("a block is damaged"));
        }
        (self.at, self.before) = (0, Before::default());
        self.next_offset = self.offset + (BLOCK_HEADER_BYTES + stored_len) as u64;
        if len > 0 {
            return Ok(true);
        }
        self.offset = self.next_offset;
        match self.from.read(&mut [0]) {
            Ok(0) => Ok(false),
            Ok(_) => Err(self.bad("there is something behind its end")),
            Err(error) => Err(TraceError::Unreadable(self.path.clone(), error)),
        }
    }

    /// Decodes the next record of the block.
    #[inline]
    fn next_record(&mut self) -> Result<Record, TraceError> {
        let mut rest = &self.content[self.at..];
        let record = self.before.take(&mut rest);
        self.at = self.content.len() - rest.len();
        record.map_err(|why| {
            self.ended = true;
            self.bad(why)
        })
    }
}

impl<R: Read> Iterator for TraceReader<R> {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        if self.at == self.content.len() {
            match self.next_block() {
                Ok(true) => {}
                at_end => {
                    self.ended = true;
                    return at_end.err().map(Err);
                }
            }
        }
        Some(self.next_record())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn records() -> impl Strategy<Value = Vec<Record>> {
        let record = (0u32..4, 0..MAX_TIME_US, 0u8..22, any::<[u64; 3]>(), 0u32..60).prop_filter_map(
            "an event",
            |(process, time_us, tag, numbers, shift)| {
                let event = Event::decode(tag, numbers.map(|number| number >> shift))?;
                Some(Record { process, time_us, event })
            },
        );
        prop::collection::vec(record, 0..300)
    }

    fn written(records: &[Record]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = TraceWriter::new(&mut bytes).unwrap();
        records.iter().for_each(|record| writer.write(record).unwrap());
        let len = writer.finish().unwrap();
        assert_eq!(len, bytes.len() as u64);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Vec<Record>, TraceError> {
        TraceReader::new(bytes, Path::new("x.mft"))?.collect()
    }

    /// Returns the offset of an error and checks that its message is one line.
    fn refused_at(result: Result<Vec<Record>, TraceError>) -> u64 {
        let error = result.unwrap_err();
        assert!(error.to_string().starts_with("x.mft: at byte ") && !error.to_string().contains('\n'), "{error}");
        let TraceError::Damaged { offset, .. } = error else { panic!("{error:?}") };
        offset
    }

    proptest! {
        #[test]
        fn written_records_are_read_back(records in records(), times in 1usize..40) {
            // Enough records for several blocks.
            let records: Vec<Record> = records.iter().cycle().take(records.len() * times).cloned().collect();
            prop_assert_eq!(read(&written(&records)).unwrap(), records);
        }

        #[test]
        fn a_truncated_changed_or_longer_file_is_refused(
            records in records(), at in any::<prop::sample::Index>(), change in 1u8.., noise in prop::collection::vec(any::<u8>(), 1..40)
        ) {
            let whole = written(&records);
            let at = at.index(whole.len());
            prop_assert!(refused_at(read(&whole[..at])) <= at as u64);
            let mut changed = whole.clone();
            changed[at] ^= change;
            prop_assert!(refused_at(read(&changed)) <= at as u64);
            prop_assert_eq!(refused_at(read(&[&whole[..], &noise].concat())), whole.len() as u64);
        }

        #[test]
        fn noise_is_refused(noise in prop::collection::vec(any::<u8>(), 0..400)) {
            refused_at(read(&noise));
            // A block with a valid hash is read to its end, or refused.
            let mut file = header().to_vec();
            let stored = lz4_flex::block::compress(&noise);
            let lens = [noise.len() as u32, stored.len() as u32].map(u32::to_le_bytes);
            file.extend_from_slice(lens.as_flattened());
            file.extend_from_slice(&xxh3_64(&[lens.as_flattened(), &stored].concat()).to_le_bytes());
            file.extend_from_slice(&stored);
            if !noise.is_empty() {
                refused_at(read(&file));
            }
        }
    }
}
