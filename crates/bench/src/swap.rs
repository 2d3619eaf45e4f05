//! `foliomem bench swap`: measures swap-out speed, swap-in speed and compression ratio for folios
//! of one size, by codec, granule and number of threads.
//!
//! The benchmark measures the runtime as it works in a program. This process maps memory, fills it
//! with the corpus, lets a [`Runtime`] manage it, and times
//! - *out*: the runtime's reclaimers stage and compress all of it ([`Runtime::page_out`]), as
//!   `MADV_PAGEOUT` does in the kernel;
//! - *in*: each thread reads a byte of every page of its part, in order; every fault goes the whole
//!   way through userfaultfd.
//!
//! With N threads there are N reclaimers and N reading threads. There is always one handler for
//! each CPU, and handlers read ahead. The kernel is measured with one thread, and its figures stand
//! in the rows of one thread.
//!
//! Every round changes every page first, so that no swap-cache entry is still valid and saves work.
//! Each case is measured in a process of its own, in turns: a round of the codec alone on the
//! corpus in pieces of the granule, one of the runtime, one of the kernel. The first round of each
//! is a warm-up.

use crate::corpus::{self, CorpusFile};
use crate::kernel_peer::{KernelFigures, KernelPeer};
use crate::raw_codec;
use crate::rounds::{Rounds, serve};
use crate::{Error, median};
use foliomem_runtime::companion;
use foliomem_session::segment::Control;
use foliomem_sys::agent_memory::AgentMemory;
use foliomem_sys::heap;
use foliomem_sys::region::Region;
use foliomem_types::codec::Codec;
use foliomem_types::settings::{Configuration, Limit};
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::{MAX_ORDER, Order, OrderSet, PAGE_BYTES};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// First argument of the process that measures one size.
const CHILD_ARG: &str = "--foliomem-swap-child";
/// Bytes of the corpus.
const CORPUS_BYTES: usize = 192 << 20;
/// Measured rounds; the median counts.
const ROUNDS: usize = 7;
/// Limit of the run in bytes. It is so high that only the benchmark reclaims memory.
const LIMIT_BYTES: u64 = 8 << 30;
/// The default sizes to measure, in KiB.
pub const SIZES_KIB: [u32; 5] = [4, 16, 64, 256, 2048];

/// One size, measured: medians over rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Folio size in KiB.
    pub size_kib: u32,
    /// Codec, as on the command line.
    pub codec: String,
    /// Size in KiB of the largest piece that is compressed as one.
    pub granule_kib: u32,
    /// Number of compressing threads, and of touching threads.
    pub threads: u32,
    /// Swap-out rate, in 10^6 bytes of content a second.
    pub out_mb_s: f64,
    /// Swap-in rate, in 10^6 bytes of content a second.
    pub in_mb_s: f64,
    /// Content bytes divided by compressed bytes.
    pub ratio: f64,
    /// Content bytes divided by the store's memory, which includes waste and metadata.
    pub memory_ratio: f64,
    /// The store's memory, with waste and metadata, divided by compressed bytes: 1.05 wastes 5%.
    pub waste: f64,
    /// Compression rate of the codec alone, in 10^6 bytes a second.
    pub raw_out_mb_s: f64,
    /// Decompression rate of the codec alone, in 10^6 bytes a second.
    pub raw_in_mb_s: f64,
    /// Swap-out rate of the kernel's zram swap with folios of this size; `None` if unmeasured.
    pub kernel_out_mb_s: Option<f64>,
    /// Swap-in rate of the kernel's zram swap; `None` if unmeasured.
    pub kernel_in_mb_s: Option<f64>,
    /// Compression ratio of the kernel's zram swap; `None` if unmeasured.
    pub kernel_ratio: Option<f64>,
    /// Content bytes divided by zram's memory; `None` if unmeasured.
    pub kernel_memory_ratio: Option<f64>,
}

/// The result of one round; [`Row`] explains the fields.
#[derive(Debug, Serialize, Deserialize)]
struct Round {
    out_mb_s: f64,
    in_mb_s: f64,
    ratio: f64,
    memory_ratio: f64,
    waste: f64,
    raw_out_mb_s: f64,
    raw_in_mb_s: f64,
}

/// The combinations to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folio sizes to measure.
    pub sizes: Vec<Order>,
    /// Codecs to measure.
    pub codecs: Vec<Codec>,
    /// Granules to measure, for folios that are larger.
    pub granules: Vec<Order>,
    /// Numbers of threads to measure.
    pub threads: Vec<u32>,
    /// Whether to measure the kernel, too.
    pub kernel: bool,
}

/// Measures and calls `progress` with each row. Returns the rows, and a line for each figure that
/// could not be measured.
///
/// # Errors
/// Fails if a step fails or if the machine's settings cannot be restored.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<(Vec<Row>, Vec<String>), Error> {
    let own = std::env::current_exe().map_err(Error::doing("the path of this program"))?;
    let corpus = options.kernel.then(|| CorpusFile::new(&corpus::build(CORPUS_BYTES))).transpose()?;
    let (mut rows, mut skipped) = (Vec::new(), Vec::new());
    for &size in &options.sizes {
        let mut kernel = match &corpus {
            Some(corpus) => KernelPeer::start(corpus, u64::from(size.kib()))?,
            None => None,
        };
        if options.kernel && kernel.is_none() {
            skipped.push(format!("the kernel cannot be measured with folios of {}K", size.kib()));
        }
        for case in options.cases(size) {
            let mut peer = kernel.as_mut().filter(|_| case.threads == 1);
            let mut ours = case.start(&own)?;
            let mut rounds = Vec::new();
            for _ in 0..=ROUNDS {
                rounds.push(ours.next()?);
                peer.as_mut().map_or(Ok(()), |peer| peer.round())?;
            }
            let mut row = case.row(&rounds[1..]);
            match peer.map(KernelPeer::figures) {
                Some(Ok(figures)) => row.add_kernel(&figures),
                Some(Err(why)) => skipped.push(why.to_string()),
                None => {}
            }
            progress(&row);
            rows.push(row);
        }
        kernel.map_or(Ok(()), KernelPeer::restore)?;
    }
    Ok((rows, skipped))
}

impl Options {
    /// Returns the cases for folios of `size`, in an order that puts comparable cases next to each
    /// other.
    fn cases(&self, size: Order) -> Vec<Case> {
        let mut cases = Vec::new();
        for &codec in &self.codecs {
            for &threads in &self.threads {
                for granule in self.granules.iter().map(|&granule| granule.min(size)) {
                    let case = Case { size, granule, codec, threads };
                    if !cases.contains(&case) {
                        cases.push(case);
                    }
                }
            }
        }
        cases
    }
}

/// The combination that one row measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    size: Order,
    granule: Order,
    codec: Codec,
    threads: u32,
}

impl Case {
    fn start(&self, own: &Path) -> Result<Rounds, Error> {
        let Case { size, granule, codec, threads } = *self;
        let arguments = [size.get().to_string(), granule.get().to_string(), codec.to_string(), threads.to_string()];
        Rounds::start(Command::new(own).arg(CHILD_ARG).args(arguments))
    }

    /// Returns the row with the medians of `rounds`.
    fn row(&self, rounds: &[Round]) -> Row {
        let over = |figure: fn(&Round) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
        Row {
            size_kib: self.size.kib(),
            codec: self.codec.to_string(),
            granule_kib: self.granule.kib(),
            threads: self.threads,
            out_mb_s: over(|round| round.out_mb_s),
            in_mb_s: over(|round| round.in_mb_s),
            ratio: over(|round| round.ratio),
            memory_ratio: over(|round| round.memory_ratio),
            waste: over(|round| round.waste),
            raw_out_mb_s: over(|round| round.raw_out_mb_s),
            raw_in_mb_s: over(|round| round.raw_in_mb_s),
            kernel_out_mb_s: None,
            kernel_in_mb_s: None,
            kernel_ratio: None,
            kernel_memory_ratio: None,
        }
    }

    fn from_arguments(mut arguments: impl Iterator<Item = String>) -> Option<Case> {
        let mut order = || Order::new(arguments.next()?.parse().ok()?);
        let (size, granule) = (order()?, order()?);
        Some(Case { size, granule, codec: arguments.next()?.parse().ok()?, threads: arguments.next()?.parse().ok()? })
    }
}

impl Row {
    fn add_kernel(&mut self, figures: &KernelFigures) {
        self.kernel_out_mb_s = Some(figures.out_mb_s);
        self.kernel_in_mb_s = Some(figures.in_mb_s);
        self.kernel_ratio = Some(figures.ratio);
        self.kernel_memory_ratio = Some(figures.memory_ratio);
    }
}

/// Call this first in `main`: if this process was started to measure one size, it measures and
/// exits.
pub fn enter_if_asked() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(CHILD_ARG) {
        return;
    }
    let served = match Case::from_arguments(arguments) {
        Some(case) => measure(case),
        None => Err(Error::parse("the arguments of the measuring process", "")),
    };
    if let Err(error) = &served {
        eprintln!("{error}");
    }
    std::process::exit(i32::from(served.is_err()));
}

fn measure(case: Case) -> Result<(), Error> {
    let Case { size, granule, codec, threads } = case;
    let mut data = corpus::build(CORPUS_BYTES);
    let mut memory = Region::reserve(CORPUS_BYTES).map_err(|e| Error::doing("map memory")(e.into()))?;
    let range = memory.start()..memory.start() + memory.len();
    let sizes = if size == Order::ZERO { OrderSet::EMPTY } else { OrderSet::EMPTY.with(size) };
    let configuration = Configuration {
        limit: Limit::Bytes(LIMIT_BYTES),
        sizes: SizePolicy::always(sizes),
        codec,
        recompress: None,
        granule,
        reclaimers: threads,
        torture: false,
        hard: false,
        records: false,
    };
    let failed = |what: &str, why: String| Error::WrongResult(format!("{what}: {why}"));
    let (control, _segment) = Control::create(&configuration).map_err(|e| failed("control segment", e.to_string()))?;
    let slot = control.claim_slot(rustix::process::getpid()).map_err(|e| failed("control segment", e.to_string()))?;
    let own = AgentMemory::new(heap::ranges);
    // The runtime must not manage any other memory.
    own.add(0..range.start);
    own.add(range.end..usize::MAX);
    let runtime = companion::start(control, slot, own, None).map_err(|e| failed("runtime", e.to_string()))?;
    runtime.manage_now();
    let content = memory.as_mut_slice();
    content.copy_from_slice(&data);
    let mut rounds = 0;
    serve(|| {
        let (raw_out_mb_s, raw_in_mb_s) = raw_speeds(&data, granule, codec);
        rounds += 1;
        change_every_page(content, rounds);
        let started = Instant::now();
        runtime.page_out(range.clone());
        let out_time = started.elapsed();
        let store = &control.process(slot).counters.store;
        let original = store.orig_data_size.get();
        if original < (CORPUS_BYTES as u64) * 95 / 100 {
            return Err(failed("swap-out", format!("only {} MiB are out", original >> 20)));
        }
        let (compressed, memory) = (store.compr_data_size.get() as f64, store.mem_used_total.get() as f64);
        let started = Instant::now();
        touch_every_page(content, threads);
        let in_time = started.elapsed();
        change_every_page(&mut data, rounds);
        if content != data {
            return Err(failed("swap-in", "the content is not what it was".to_owned()));
        }
        Ok(Round {
            out_mb_s: mb_s(CORPUS_BYTES, out_time),
            in_mb_s: mb_s(CORPUS_BYTES, in_time),
            ratio: original as f64 / compressed,
            memory_ratio: original as f64 / memory,
            waste: memory / compressed,
            raw_out_mb_s,
            raw_in_mb_s,
        })
    })
}

/// Reads a byte of every page, in `threads` parts at once.
fn touch_every_page(content: &[u8], threads: u32) {
    let part_bytes = (content.len() / threads as usize).next_multiple_of(MAX_ORDER.bytes());
    std::thread::scope(|scope| {
        for part in content.chunks(part_bytes) {
            scope.spawn(move || {
                let sum = part.iter().step_by(PAGE_BYTES).fold(0u64, |sum, &byte| sum + u64::from(byte));
                std::hint::black_box(sum)
            });
        }
    });
}

/// Changes a byte of every page, so that no swap-cache entry of it stays valid.
fn change_every_page(content: &mut [u8], value: u8) {
    content.iter_mut().skip(PAGE_BYTES / 2).step_by(PAGE_BYTES).for_each(|byte| *byte = value);
}

fn mb_s(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64()
}

/// Returns the speeds of the codec alone, on a part of `data` in pieces of the granule.
fn raw_speeds(data: &[u8], granule: Order, codec: Codec) -> (f64, f64) {
    /// Divisor of the corpus: a quarter of it gives as good a figure.
    const SHARE: usize = 4;
    let started = Instant::now();
    let raw = raw_codec::measure(&data[..data.len() / SHARE], granule, codec, || started.elapsed());
    (mb_s(raw.original_bytes, raw.compress), mb_s(raw.original_bytes, raw.decompress))
}
