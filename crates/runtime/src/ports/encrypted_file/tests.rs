//! Tests of pieces in a file that can fail in every way.

use super::*;
use crate::ports::swap_writer::SwapWriter;
use foliomem_core::ports::MAX_WRITES;
use foliomem_session::swap_file::{IoMode, create, identity_of, reopen};
use proptest::prelude::*;
use rustix::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// A failure of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Errno(Errno),
    /// The call transfers only this number of bytes.
    Short(usize),
}

/// A file in memory, with future failures; the last one comes first.
#[derive(Clone, Default)]
struct Faulty {
    bytes: Arc<Mutex<Vec<u8>>>,
    read: Arc<Mutex<Vec<Fault>>>,
    write: Arc<Mutex<Vec<Fault>>>,
    reads: Arc<Mutex<usize>>,
    /// Whether the file has rings, and the failures of their writes.
    has_ring: bool,
    submit: Arc<Mutex<Vec<Errno>>>,
    ring_write: Arc<Mutex<Vec<Fault>>>,
}

/// A write under way: its bytes in memory, their content at submission, and their offset in the
/// file.
type UnderWay = (*const [u8], Vec<u8>, u64);

/// A ring that writes when a write is waited for. Until then nobody may change the bytes.
struct FaultyRing {
    file: Faulty,
    under_way: [Option<UnderWay>; MAX_WRITES],
}

impl Ring for FaultyRing {
    unsafe fn submit(&mut self, number: usize, bytes: &[u8], offset: u64) -> Result<(), Errno> {
        if let Some(errno) = self.file.submit.lock().unwrap().pop() {
            return Err(errno);
        }
        assert!(self.under_way[number].replace((bytes, bytes.to_vec(), offset)).is_none(), "{number} is under way");
        Ok(())
    }

    fn wait(&mut self, number: usize) -> Result<usize, Errno> {
        let (place, bytes, offset) = self.under_way[number].take().unwrap();
        // SAFETY: the submitter keeps the bytes until this function returns.
        assert!(unsafe { &*place } == bytes, "the bytes were changed before they were written");
        self.file.store(&bytes, offset, self.file.ring_write.lock().unwrap().pop())
    }
}

impl BlockFile for Faulty {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
        *self.reads.lock().unwrap() += 1;
        let most = match self.read.lock().unwrap().pop() {
            Some(Fault::Errno(errno)) => return Err(errno),
            Some(Fault::Short(most)) => most,
            None => usize::MAX,
        };
        let file = self.bytes.lock().unwrap();
        let there = file.get(offset as usize..).unwrap_or_default();
        let len = there.len().min(bytes.len()).min(most);
        bytes[..len].copy_from_slice(&there[..len]);
        Ok(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize, Errno> {
        self.store(bytes, offset, self.write.lock().unwrap().pop())
    }

    fn ring(&self) -> Option<Box<dyn Ring>> {
        self.has_ring
            .then(|| Box::new(FaultyRing { file: self.clone(), under_way: Default::default() }) as Box<dyn Ring>)
    }
}

impl Faulty {
    fn store(&self, bytes: &[u8], offset: u64, fault: Option<Fault>) -> Result<usize, Errno> {
        let most = match fault {
            Some(Fault::Errno(errno)) => return Err(errno),
            Some(Fault::Short(most)) => most,
            None => usize::MAX,
        };
        let (len, offset) = (bytes.len().min(most), offset as usize);
        let mut file = self.bytes.lock().unwrap();
        let end = file.len().max(offset + len);
        file.resize(end, 0);
        file[offset..offset + len].copy_from_slice(&bytes[..len]);
        Ok(len)
    }
}

struct Bench {
    swap: SwapFile,
    file: Faulty,
    writer: SwapWriter,
    buffer: ReadBuffer,
}

/// A write that was begun: its first slot, the ranges of its pieces, and their seals.
type Begun = (u32, Vec<std::ops::Range<usize>>, Vec<Seal>);

impl Bench {
    fn new() -> Bench {
        Bench::of(Faulty::default())
    }

    fn with_ring() -> Bench {
        Bench::of(Faulty { has_ring: true, ..Faulty::default() })
    }

    fn of(file: Faulty) -> Bench {
        let swap = SwapFile::new(&[3; KEY_BYTES], Box::leak(Box::new(AtomicU64::new(7))));
        Bench { swap, file, writer: SwapWriter::default(), buffer: ReadBuffer::default() }
    }

    /// Begins to write `pieces` in a row, 32 bytes apart, from `first` on.
    fn begin(&mut self, first: u32, pieces: &[Vec<u8>]) -> Begun {
        let mut ranges = Vec::new();
        let mut end = 0usize;
        for piece in pieces {
            let start = end.next_multiple_of(32);
            end = start + piece.len();
            ranges.push(start..end);
        }
        let mut todo = pieces.iter().zip(ranges.clone());
        let fill = |bytes: &mut [u8]| {
            let (piece, range) = todo.next()?;
            bytes[range.clone()].copy_from_slice(piece);
            Some(range)
        };
        let mut seals = Vec::new();
        let slots = end.div_ceil(PAGE_BYTES) as u32;
        self.writer.begin(&self.swap, &self.file, (Slot(first), slots), fill, &mut seals);
        (first, ranges, seals)
    }

    /// Finishes the oldest write, which was this one.
    fn finish(&mut self, (first, ranges, seals): Begun) -> Result<Vec<FilePlace>, FileError> {
        self.writer.finish(&self.file)?;
        let place = |(range, seal): (std::ops::Range<usize>, Seal)| FilePlace {
            first: Slot(first + (range.start / PAGE_BYTES) as u32),
            offset_bytes: (range.start % PAGE_BYTES) as u32,
            len_bytes: range.len() as u32,
            seal,
        };
        Ok(ranges.into_iter().zip(seals).map(place).collect())
    }

    fn write(&mut self, first: u32, pieces: &[Vec<u8>]) -> Result<Vec<FilePlace>, FileError> {
        let begun = self.begin(first, pieces);
        self.finish(begun)
    }

    fn read(&mut self, place: &FilePlace) -> Result<Vec<u8>, FileError> {
        self.swap.read(&self.file, &mut self.buffer, place).map(<[u8]>::to_vec)
    }

    /// Drops the slots that were read ahead.
    fn forget(&mut self) {
        self.buffer = ReadBuffer::default();
    }
}

fn pieces(lens: &[usize]) -> Vec<Vec<u8>> {
    lens.iter().enumerate().map(|(n, &len)| (0..len).map(|at| (n * 31 + at * 7 + at / 251) as u8).collect()).collect()
}

#[test]
fn written_pieces_are_read_and_the_file_shows_no_content() {
    let mut bench = Bench::new();
    let pieces = pieces(&[5000, 65536, 40, 1, 16384, 100_000]);
    let places = bench.write(5, &pieces).unwrap();
    for (place, piece) in places.iter().zip(&pieces).rev() {
        assert_eq!(&bench.read(place).unwrap(), piece);
    }
    let file = bench.file.bytes.lock().unwrap();
    for piece in pieces.iter().filter(|piece| piece.len() >= 40) {
        assert!(!file.windows(16).any(|window| window == &piece[..16]), "{} bytes are there as they are", piece.len());
    }
}

#[test]
fn neighbours_are_read_at_once() {
    let mut bench = Bench::new();
    let pieces = pieces(&[16384; 32]);
    let places = bench.write(0, &pieces).unwrap();
    for (place, piece) in places.iter().zip(&pieces) {
        assert_eq!(&bench.read(place).unwrap(), piece);
    }
    let reads = *bench.file.reads.lock().unwrap();
    assert!(reads <= 4, "{reads} reads of 32 neighbours");
    // Slots that were written after they were read ahead are read again.
    bench.forget();
    let _ = (bench.read(&places[0]), bench.read(&places[1]));
    let others = vec![vec![9u8; 16384]];
    let newer = bench.write(places[2].first.0, &others).unwrap();
    assert!(bench.read(&newer[0]).unwrap() == others[0]);
    assert!(bench.read(&places[2]) == Err(FileError::Tampered));
}

#[test]
fn a_full_disk_an_error_and_a_short_write_are_reported() {
    for fault in [Fault::Errno(Errno::NOSPC), Fault::Errno(Errno::IO), Fault::Short(0), Fault::Short(5000)] {
        let mut bench = Bench::new();
        bench.file.write.lock().unwrap().push(fault);
        let error = bench.write(0, &pieces(&[9000, 20_000])).unwrap_err();
        assert_eq!(error, if let Fault::Errno(errno) = fault { FileError::System(errno) } else { FileError::Short });
        // The failed write does not affect the next one.
        let places = bench.write(0, &pieces(&[9000])).unwrap();
        assert_eq!(bench.read(&places[0]).unwrap(), pieces(&[9000])[0]);
    }
    // Whole slots, or none because of a signal: the write continues.
    for fault in [Fault::Errno(Errno::INTR), Fault::Short(8192)] {
        let mut bench = Bench::new();
        bench.file.write.lock().unwrap().push(fault);
        let places = bench.write(0, &pieces(&[20_000])).unwrap();
        assert_eq!(bench.read(&places[0]).unwrap(), pieces(&[20_000])[0]);
    }
}

#[test]
fn a_write_that_a_ring_fails_is_repeated_by_a_call() {
    use Fault::{Errno as Fails, Short};
    let content = pieces(&[9000, 20_000]);
    for (by_ring, by_call) in [
        (Fails(Errno::IO), None),
        (Fails(Errno::IO), Some(Fails(Errno::IO))),
        (Fails(Errno::OPNOTSUPP), None),
        (Short(0), Some(Fails(Errno::NOSPC))),
        (Short(5000), Some(Short(0))),
        (Short(8192), None),
    ] {
        let mut bench = Bench::with_ring();
        bench.file.ring_write.lock().unwrap().push(by_ring);
        bench.file.write.lock().unwrap().extend(by_call);
        let (begun, other) = (bench.begin(0, &content), bench.begin(100, &content));
        match (bench.finish(begun), by_call) {
            (Ok(places), None) => assert_eq!(bench.read(&places[1]).unwrap(), content[1]),
            (Err(FileError::System(errno)), Some(Fails(expected))) => assert_eq!(errno, expected),
            (Err(FileError::Short), Some(Short(_))) => {}
            (outcome, _) => panic!("{outcome:?} after {by_ring:?}, {by_call:?}"),
        }
        // The failure affects neither the write begun before nor the next one.
        let places = bench.finish(other).unwrap();
        assert_eq!(bench.read(&places[0]).unwrap(), content[0]);
        let places = bench.write(200, &content).unwrap();
        assert_eq!(bench.read(&places[1]).unwrap(), content[1]);
    }
    // A ring that accepts no write.
    for by_call in [None, Some(Fails(Errno::IO))] {
        let mut bench = Bench::with_ring();
        bench.file.submit.lock().unwrap().push(Errno::PERM);
        bench.file.write.lock().unwrap().extend(by_call);
        let outcome = bench.write(0, &content);
        assert_eq!(outcome.err(), by_call.map(|_| FileError::System(Errno::IO)));
    }
}

#[test]
fn two_writes_are_under_way_and_end_in_order() {
    let mut bench = Bench::with_ring();
    let content = pieces(&[9000, 20_000]);
    let mut begun = std::collections::VecDeque::from([bench.begin(0, &content)]);
    for turn in 1..10 {
        begun.push_back(bench.begin(turn * 10, &content));
        let oldest = begun.pop_front().unwrap();
        let places = bench.finish(oldest).unwrap();
        assert_eq!(bench.read(&places[1]).unwrap(), content[1]);
    }
    // A write under way keeps its bytes (the double checks that), even if nobody waits for it.
    bench.writer = SwapWriter::default();
    assert!(bench.file.bytes.lock().unwrap().len() > 90 * PAGE_BYTES);
}

#[test]
fn an_error_and_the_end_of_the_file_are_reported_and_a_short_read_goes_on() {
    let mut bench = Bench::new();
    let pieces = pieces(&[20_000, 3000]);
    let places = bench.write(0, &pieces).unwrap();
    bench.file.read.lock().unwrap().push(Fault::Errno(Errno::IO));
    assert_eq!(bench.read(&places[0]), Err(FileError::System(Errno::IO)));
    bench.file.read.lock().unwrap().extend([Fault::Short(100), Fault::Errno(Errno::INTR), Fault::Short(5000)]);
    assert_eq!(bench.read(&places[0]).unwrap(), pieces[0]);
    bench.forget();
    bench.file.bytes.lock().unwrap().truncate(21_000);
    assert_eq!(bench.read(&places[1]), Err(FileError::Short));
    bench.file.bytes.lock().unwrap().truncate(0);
    assert_eq!(bench.read(&places[0]), Err(FileError::Short));
}

#[test]
fn moved_or_outdated_bytes_are_refused() {
    let mut bench = Bench::new();
    let content = pieces(&[4096, 4096]);
    let before = bench.write(0, &content).unwrap();
    let old = bench.file.bytes.lock().unwrap().clone();
    // Two slots change places.
    bench.file.bytes.lock().unwrap().rotate_left(4096);
    assert_eq!(bench.read(&before[0]), Err(FileError::Tampered));
    assert_eq!(bench.read(&FilePlace { first: Slot(1), ..before[0] }), Err(FileError::Tampered));
    // Equal content is written again; then the old bytes are put back.
    let after = bench.write(0, &content).unwrap();
    assert_eq!(bench.read(&after[0]).unwrap(), content[0]);
    bench.forget();
    *bench.file.bytes.lock().unwrap() = old;
    assert_eq!(bench.read(&after[0]), Err(FileError::Tampered));
    assert_eq!(bench.read(&before[0]).unwrap(), content[0]);
}

#[test]
fn no_nonce_is_used_twice() {
    let mut bench = Bench::new();
    let mut nonces: Vec<u64> = Vec::new();
    for round in 0..20 {
        let places = bench.write(round, &pieces(&[100, 5000, 32])).unwrap();
        nonces.extend(places.iter().map(|place| place.seal.nonce));
        // A failed write has used its nonces, too.
        bench.file.write.lock().unwrap().push(Fault::Errno(Errno::IO));
        assert!(bench.write(round, &pieces(&[100])).is_err());
    }
    nonces.sort_unstable();
    nonces.dedup();
    assert_eq!(nonces.len(), 60);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn any_changed_bit_is_found(lens in prop::collection::vec(1usize..9000, 1..8), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bench = Bench::new();
        let content = pieces(&lens);
        let places = bench.write(3, &content).unwrap();
        let changed = {
            let mut file = bench.file.bytes.lock().unwrap();
            let at = 3 * PAGE_BYTES + at.index(file.len() - 3 * PAGE_BYTES);
            file[at] ^= 1 << bit;
            at
        };
        for (place, piece) in places.iter().zip(&content) {
            let start = place.first.0 as usize * PAGE_BYTES + place.offset_bytes as usize;
            let expected = if (start..start + piece.len()).contains(&changed) { Err(FileError::Tampered) } else { Ok(piece.clone()) };
            prop_assert_eq!(bench.read(place), expected);
        }
    }

    #[test]
    fn bytes_that_were_not_written_are_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..20_000),
        slot in 0u32..4,
        grain in 0u32..128,
        len_bytes in 1u32..9000,
        nonce in any::<u64>(),
        tag in any::<[u64; 2]>(),
    ) {
        let mut bench = Bench::new();
        *bench.file.bytes.lock().unwrap() = bytes;
        let place = FilePlace { first: Slot(slot), offset_bytes: grain * 32, len_bytes, seal: Seal { nonce, tag } };
        prop_assert!(matches!(bench.read(&place), Err(FileError::Tampered | FileError::Short)));
    }

    #[test]
    fn successful_reads_return_the_written_bytes_despite_failures(
        lens in prop::collection::vec(1usize..20_000, 1..8),
        has_ring in any::<bool>(),
        writes in prop::collection::vec(fault(), 0..4),
        ring_writes in prop::collection::vec(fault(), 0..4),
        reads in prop::collection::vec(fault(), 0..6),
        order in prop::collection::vec(any::<prop::sample::Index>(), 1..20),
    ) {
        let mut bench = Bench::of(Faulty { has_ring, ..Faulty::default() });
        let content = pieces(&lens);
        *bench.file.write.lock().unwrap() = writes;
        *bench.file.ring_write.lock().unwrap() = ring_writes;
        let mut written = Vec::new();
        for turn in 0..3 {
            let begun = [bench.begin(turn * 100, &content), bench.begin(turn * 100 + 50, &content)];
            written.extend(begun.into_iter().filter_map(|begun| bench.finish(begun).ok()));
        }
        *bench.file.read.lock().unwrap() = reads;
        for index in order {
            let index = index.index(content.len());
            for places in &written {
                if let Ok(bytes) = bench.read(&places[index]) {
                    prop_assert_eq!(&bytes, &content[index]);
                }
            }
        }
        // From here on no call fails.
        bench.file.read.lock().unwrap().clear();
        bench.forget();
        for (places, index) in written.iter().flat_map(|places| (0..content.len()).map(move |index| (places, index))) {
            prop_assert_eq!(bench.read(&places[index]), Ok(content[index].clone()));
        }
    }
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![Just(Fault::Errno(Errno::IO)), Just(Fault::Errno(Errno::INTR)), (0usize..20_000).prop_map(Fault::Short),]
}

// ---- files of the system ----

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("foliomem-swap-{}-{name}", std::process::id()))
}

#[test]
fn a_new_file_has_no_name_and_the_requested_size() {
    let path = scratch("new");
    let created = create(&path, Some(5 << 20), 1).unwrap();
    assert!(!path.exists());
    assert_eq!(created.bytes, 4 << 20);
    let stat = fs::fstat(created.file.as_fd()).unwrap();
    assert_eq!((stat.st_mode & 0o7777, stat.st_nlink, stat.st_size), (0o600, 0, 4 << 20));
    // Another process opens the file by its descriptor, and reads the written bytes.
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&created.file.as_fd()) as u32;
    let identity = identity_of(created.file.as_fd()).unwrap();
    let again = reopen(std::process::id(), descriptor, created.io_mode, identity).unwrap();
    let nonces = Box::leak(Box::new(AtomicU64::new(0)));
    let swap = SwapFile::new(&[1; KEY_BYTES], nonces);
    let (mut writer, mut seals) = (SwapWriter::default(), Vec::new());
    let mut todo = Some(64..6000);
    let fill = |bytes: &mut [u8]| {
        let range: std::ops::Range<usize> = todo.take()?;
        bytes[range.clone()].fill(77);
        Some(range)
    };
    writer.begin(&swap, &created.file.as_fd(), (Slot(512), 2), fill, &mut seals);
    assert_eq!(writer.finish(&created.file.as_fd()), Ok(0), "a file is written by calls");
    let place = FilePlace { first: Slot(512), offset_bytes: 64, len_bytes: 5936, seal: seals[0] };
    assert_eq!(swap.read(&again.as_fd(), &mut ReadBuffer::default(), &place).unwrap(), [77; 5936]);
    assert_eq!(
        reopen(std::process::id(), descriptor, IoMode::Buffered, (identity.0, identity.1 + 1)).err(),
        Some(Errno::STALE)
    );
}

#[test]
fn a_ring_of_the_system_writes() {
    let file = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    // If io_uring is forbidden, there is nothing to test.
    let Ok(mut ring) = Uring::<MAX_WRITES>::new(file.as_fd()) else { return };
    let bytes: [Vec<u8>; MAX_WRITES] = [vec![1; 70_000], vec![2; 5000]];
    for turn in 0..20 {
        for (number, bytes) in bytes.iter().enumerate() {
            // SAFETY: the bytes outlive the writes.
            unsafe { ring.submit(number, bytes, (turn * 2 + number as u64) * 100_000) }.unwrap();
        }
        // Wait in any order.
        for number in if turn % 2 == 0 { [0, 1] } else { [1, 0] } {
            assert_eq!(ring.wait(number), Ok(bytes[number].len()));
        }
    }
    let mut found = vec![0; 70_000];
    assert_eq!(rustix::io::pread(&file, &mut found, 38 * 100_000), Ok(70_000));
    assert!(found == bytes[0]);
    // An error of the ring is that of a system call.
    let closed = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let mut ring = Uring::<MAX_WRITES>::new(closed.as_fd()).unwrap();
    // SAFETY: the bytes outlive the write.
    unsafe { ring.submit(0, &bytes[0], 0) }.unwrap();
    assert_eq!(ring.wait(0), Err(Errno::BADF));
}
