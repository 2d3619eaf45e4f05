//! `foliomem bench swap`: measures swap-out speed, swap-in speed and compression ratio for folios
//! of one size, by codec, granule and number of threads.
//!
//! The benchmark measures the runtime as it works in a program. A process ([`crate::swap_child`])
//! maps memory, fills it with the corpus, lets a runtime manage it, and times
//! - *out*: the runtime's reclaimers stage and compress all of it (`Runtime::page_out`), as
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
use crate::rounds::Rounds;
use crate::{Error, median};
use foliomem_types::codec::Codec;
use foliomem_types::units::Order;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the corpus.
pub(crate) const CORPUS_BYTES: usize = 192 << 20;
/// Measured rounds; the median counts.
const ROUNDS: usize = 7;
/// The default sizes to measure, in KiB.
pub const SIZES_KIB: [u32; 5] = [4, 16, 64, 256, 2048];

/// One size, measured: medians over rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
pub(crate) struct Round {
    pub(crate) out_mb_s: f64,
    pub(crate) in_mb_s: f64,
    pub(crate) ratio: f64,
    pub(crate) memory_ratio: f64,
    pub(crate) waste: f64,
    pub(crate) raw_out_mb_s: f64,
    pub(crate) raw_in_mb_s: f64,
}

/// The combinations to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `foliomem-bench-swap` executable, which is measured.
    pub child: PathBuf,
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
            let mut ours = case.start(&options.child)?;
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
pub(crate) struct Case {
    pub(crate) size: Order,
    pub(crate) granule: Order,
    pub(crate) codec: Codec,
    pub(crate) threads: u32,
}

impl Case {
    fn start(&self, child: &Path) -> Result<Rounds, Error> {
        let Case { size, granule, codec, threads } = *self;
        let arguments = [size.get().to_string(), granule.get().to_string(), codec.to_string(), threads.to_string()];
        Rounds::start(Command::new(child).args(arguments))
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

    /// Returns the case of the arguments that [`Case::start`] passes.
    pub(crate) fn from_arguments(mut arguments: impl Iterator<Item = String>) -> Option<Case> {
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
