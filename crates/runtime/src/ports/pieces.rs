//! Pieces: compresses the content of folios into the store, and restores it.
//!
//! Each compressing thread has its own [`Worker`], so there is no lock.

use crate::ports::arena_memory::ArenaMemory;
use crate::ports::encrypted_file::ReadBuffer;
use crate::ports::swap_writer::SwapWriter;
use crate::tracer::Tracer;
use foliomem_core::ports::{self, Compressed, Corrupted, Recompressed};
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{FragmentMut, FragmentRef, Piece, PlaceMut};
use foliomem_session::budget::Budget;
use foliomem_sys::codec::{Compressor, Decompressor, Dictionaries, checksum, fill_word};
use foliomem_types::codec::Codec;
use foliomem_types::units::{MAX_ORDER, PAGE_BYTES, PageNumber};
use std::sync::Arc;

/// The contexts and scratch memory of one compressing thread.
pub struct Worker {
    pub(super) compressor: Compressor,
    /// Only in threads that recompress: the contexts of a slow codec take megabytes.
    pub(super) recompressor: Option<Compressor>,
    pub(super) decompressors: Decompressors,
    /// Room for one piece. `compress` leaves `filled_bytes` here, unless the piece is raw.
    pub(super) scratch: Box<[u8]>,
    pub(super) filled_bytes: usize,
    /// Room for a piece's stored bytes if they lie in several fragments. `recompress` leaves
    /// `filled_bytes` here.
    pub(super) gathered: Box<[u8]>,
    /// Room for slots that are read from the swap file.
    pub(super) reading: ReadBuffer,
    pub(super) writer: SwapWriter,
}

/// The decompressors of the first codec and of the one for recompression.
pub(super) struct Decompressors {
    first: Decompressor,
    second: Option<Decompressor>,
}

impl Decompressors {
    fn of(&mut self, piece: &Piece<'_>) -> Result<&mut Decompressor, Corrupted> {
        if piece.recompressed { self.second.as_mut().ok_or(Corrupted) } else { Ok(&mut self.first) }
    }
}

impl Worker {
    fn new(codec: Codec, recompress: Option<Codec>, dictionaries: &Arc<Dictionaries>) -> Worker {
        let decompressor = |codec| Decompressor::new(codec, dictionaries);
        Worker {
            compressor: Compressor::new(codec, dictionaries),
            recompressor: None,
            decompressors: Decompressors { first: decompressor(codec), second: recompress.map(decompressor) },
            scratch: vec![0; MAX_ORDER.bytes()].into_boxed_slice(),
            filled_bytes: 0,
            gathered: vec![0; MAX_ORDER.bytes()].into_boxed_slice(),
            reading: ReadBuffer::default(),
            writer: SwapWriter::default(),
        }
    }

    /// Trains a dictionary on compressed samples, if there are enough. Only for threads on which no
    /// other waits.
    pub fn train_if_due(&mut self) {
        self.compressor.train_if_due();
    }
}

/// The codec of pieces.
pub struct PieceCodec {
    arena: &'static ArenaMemory,
    budget: &'static Budget,
    tracer: &'static Tracer,
    /// The dictionaries of all workers.
    dictionaries: Arc<Dictionaries>,
}

impl PieceCodec {
    /// Makes the codec of pieces in `arena`.
    pub(super) fn new(arena: &'static ArenaMemory, budget: &'static Budget, tracer: &'static Tracer) -> PieceCodec {
        PieceCodec { arena, budget, tracer, dictionaries: Arc::default() }
    }

    /// Creates the contexts of a thread that compresses with `codec`, and that reads pieces
    /// compressed with it or recompressed with `recompress`. Only this allocates.
    pub fn worker(&self, codec: Codec, recompress: Option<Codec>) -> Worker {
        Worker::new(codec, recompress, &self.dictionaries)
    }

    /// Adds the contexts to recompress with `codec`.
    pub fn add_recompressor(&self, worker: &mut Worker, codec: Codec) {
        worker.recompressor = Some(Compressor::thorough(codec, &self.dictionaries));
    }
}

impl ports::Pieces<Worker> for PieceCodec {
    fn compress(&self, worker: &mut Worker, head: PageNumber, run: RunRef<'_>) -> Compressed {
        let content = self.arena.bytes(run);
        let compressed = if let Some(word) = fill_word(content) {
            Compressed::Filled(word)
        } else if let Some(len) = worker.compressor.compress(content, &mut worker.scratch[..content.len()]) {
            worker.filled_bytes = len;
            Compressed::Bytes { len_bytes: len as u32, raw: false, checksum: checksum(&worker.scratch[..len]) }
        } else {
            worker.filled_bytes = 0;
            Compressed::Bytes { len_bytes: content.len() as u32, raw: true, checksum: checksum(content) }
        };
        self.tracer.compressed(self.budget, head.folio(run.order), compressed.len_bytes());
        compressed
    }

    fn write(&self, worker: &mut Worker, run: RunRef<'_>, place: PlaceMut<'_>) {
        let bytes =
            if worker.filled_bytes == 0 { self.arena.bytes(run) } else { &worker.scratch[..worker.filled_bytes] };
        self.arena.scatter(bytes, place);
    }

    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.arena.copy_stored(from, to);
    }

    fn read(&self, worker: &mut Worker, piece: &Piece<'_>, skip_pages: u32, into: RunMut<'_>) -> Result<(), Corrupted> {
        let target = self.arena.bytes_mut(into);
        if let Some(word) = piece.filled {
            target.as_chunks_mut::<8>().0.fill(word.to_ne_bytes());
            return Ok(());
        }
        let stored = self.arena.gather(&mut worker.gathered, piece);
        restore(&mut worker.decompressors, &mut worker.scratch, piece, stored, skip_pages, target)
    }
}

impl ports::Recompressor<Worker> for PieceCodec {
    fn recompress(&self, worker: &mut Worker, piece: &Piece<'_>) -> Option<Recompressed> {
        let content = &mut worker.scratch[..piece.granule.bytes()];
        let stored = self.arena.gather(&mut worker.gathered, piece);
        restore(&mut worker.decompressors, &mut [], piece, stored, 0, content).ok()?;
        let len = worker.recompressor.as_mut()?.compress(content, &mut worker.gathered)?;
        worker.filled_bytes = len;
        Some(Recompressed { len_bytes: len as u32, checksum: checksum(&worker.gathered[..len]) })
    }

    fn write(&self, worker: &mut Worker, place: PlaceMut<'_>) {
        self.arena.scatter(&worker.gathered[..worker.filled_bytes], place);
    }
}

/// Restores the content of a piece from its stored bytes, from page `skip_pages` on. Fails if they
/// are corrupted.
pub(super) fn restore(
    decompressors: &mut Decompressors,
    scratch: &mut [u8],
    piece: &Piece<'_>,
    stored: &[u8],
    skip_pages: u32,
    target: &mut [u8],
) -> Result<(), Corrupted> {
    if checksum(stored) != piece.checksum {
        return Err(Corrupted);
    }
    let skip = skip_pages as usize * PAGE_BYTES;
    if piece.raw {
        target.copy_from_slice(&stored[skip..skip + target.len()]);
        return Ok(());
    }
    let decompressor = decompressors.of(piece)?;
    if target.len() == piece.granule.bytes() {
        return decompressor.decompress(stored, target).map_err(|_| Corrupted);
    }
    let whole = &mut scratch[..piece.granule.bytes()];
    decompressor.decompress_start(stored, whole, skip + target.len()).map_err(|_| Corrupted)?;
    target.copy_from_slice(&whole[skip..skip + target.len()]);
    Ok(())
}
