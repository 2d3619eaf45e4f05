//! `foliomem lab calibrate`: measures the costs of this machine, as a table for the lab.
//!
//! Each figure is the median of [`ROUNDS`] rounds. Each round measures everything once, in turns,
//! in CPU time. Memory exceeds the caches, as memory that is swapped out does. The codecs work on
//! the corpus of `bench swap`.

mod page_cache;

use crate::raw_codec::{self, RawCodec};
use crate::{Error, corpus, cpu_time, median};
use foliomem_core::cluster::{Strategy, SwapClusters, SwapDevice};
use foliomem_lab::costs::{CodecCosts, CostTable, Costs};
use foliomem_sys::codec::checksum;
use foliomem_sys::move_probe::{HandlerCpu, MoveProbe, MoveProbeError};
use foliomem_sys::region::{HugePages, Region};
use foliomem_types::codec::Codec;
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_SLOTS, CpuNumber, ORDERS, Order, PAGE_BYTES};
use page_cache::PageCache;
use std::hint::black_box;

const ROUNDS: usize = 11;
/// Bytes of the corpus for the codecs.
const CORPUS_BYTES: usize = 16 << 20;
/// Bytes that are touched, zeroed, hashed and copied.
const MEMORY_BYTES: usize = 64 << 20;
/// Bytes that are moved and faulted in.
const MOVED_BYTES: usize = 32 << 20;
/// The largest folio by default. Memory is mapped, zeroed, hashed, copied and moved in pieces of
/// this size.
const FOLIO: Order = Order::new(4).unwrap();
/// Full clusters that the measurement scans repeatedly.
const CLUSTERS: u32 = 1024;
const LOOKS: u32 = 50;

/// One figure of every round.
type Samples = Vec<f64>;

#[derive(Default)]
struct Measured {
    fault: Samples,
    touch: Samples,
    move_page: Samples,
    move_folio: Samples,
    populate: Samples,
    zero: Samples,
    hash: Samples,
    copy: Samples,
    cluster: Samples,
    lz4: CodecSamples,
    zstd: CodecSamples,
}

#[derive(Default)]
struct CodecSamples {
    compress: [Samples; ORDERS],
    decompress: [Samples; ORDERS],
    ratio: [Samples; ORDERS],
}

/// Measures and calls `progress` with the number of finished rounds and of all rounds.
///
/// # Errors
/// Fails without userfaultfd or without memory.
pub fn run(progress: &mut dyn FnMut(usize, usize)) -> Result<CostTable, Error> {
    let data = corpus::build(CORPUS_BYTES);
    let mut measured = Measured::default();
    let mut machine = Machine::new()?;
    let mut page_cache = PageCache::new();
    for round in 1..=ROUNDS {
        machine.measure(&mut measured)?;
        page_cache.measure()?;
        measured.lz4.measure(&data, Codec::Lz4);
        measured.zstd.measure(&data, zstd());
        progress(round, ROUNDS);
    }
    Ok(CostTable { measured_on: this_machine(), costs: measured.costs(&page_cache) })
}

/// Returns zstd at its default level.
fn zstd() -> Codec {
    match "zstd".parse() {
        Ok(codec) => codec,
        Err(error) => unreachable!("{error}"),
    }
}

/// Describes this machine in one line.
fn this_machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model =
        info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':')).map(|(_, name)| name.trim());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{}, {cpus} CPUs, Linux {}", model.unwrap_or("unknown CPU"), read("/proc/sys/kernel/osrelease").trim())
}

/// Returns the nanoseconds of each of `times` operations, all of which `act` performs.
fn ns_each(times: usize, act: impl FnOnce()) -> f64 {
    let started = cpu_time::process();
    act();
    (cpu_time::process() - started).as_nanos() as f64 / times as f64
}

/// The memory and files on which the costs of pages are measured.
struct Machine {
    trial: MoveProbe,
    memory: Region,
    other: Region,
}

fn failed(error: MoveProbeError) -> Error {
    Error::WrongResult(format!("calibrating: {error}"))
}

impl Machine {
    fn new() -> Result<Machine, Error> {
        let region = || {
            let region = Region::reserve(MEMORY_BYTES).map_err(|error| failed(MoveProbeError::Memory(error)))?;
            region
                .set_huge_pages(0, MEMORY_BYTES, HugePages::Forbidden)
                .map_err(|error| failed(MoveProbeError::Memory(error)))?;
            Ok::<_, Error>(region)
        };
        let (memory, mut other) = (region()?, region()?);
        other.as_mut_slice().fill(1);
        Ok(Machine { trial: MoveProbe::new(MOVED_BYTES).map_err(failed)?, memory, other })
    }

    fn measure(&mut self, measured: &mut Measured) -> Result<(), Error> {
        self.measure_memory(measured).map_err(failed)?;
        self.measure_moves(measured).map_err(failed)?;
        measured.cluster.push(cluster_ns()?);
        Ok(())
    }

    fn measure_memory(&mut self, measured: &mut Measured) -> Result<(), MoveProbeError> {
        const PAGES: usize = MEMORY_BYTES / PAGE_BYTES;
        self.memory.discard(0, MEMORY_BYTES).map_err(MoveProbeError::Memory)?;
        let mut populated = Ok(());
        measured.populate.push(ns_each(PAGES, || {
            populated =
                (0..MEMORY_BYTES).step_by(FOLIO.bytes()).try_for_each(|at| self.memory.populate(at, FOLIO.bytes()));
        }));
        populated.map_err(MoveProbeError::Memory)?;
        let (memory, other) = (self.memory.as_mut_slice(), self.other.as_mut_slice());
        measured.copy.push(ns_each(PAGES, || {
            let pairs = memory.chunks_exact_mut(FOLIO.bytes()).zip(other.chunks_exact(FOLIO.bytes()));
            pairs.for_each(|(to, from)| to.copy_from_slice(from));
        }));
        measured.hash.push(ns_each(PAGES, || {
            black_box(memory.chunks_exact(FOLIO.bytes()).fold(0, |all, folio| all ^ checksum(folio)));
        }));
        measured.zero.push(ns_each(PAGES, || memory.chunks_exact_mut(FOLIO.bytes()).for_each(|folio| folio.fill(0))));
        measured.touch.push(ns_each(PAGES, || memory.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte += 1)));
        black_box(memory);
        Ok(())
    }

    fn measure_moves(&mut self, measured: &mut Measured) -> Result<(), MoveProbeError> {
        const PAGES: usize = MOVED_BYTES / PAGE_BYTES;
        for (piece_bytes, samples) in [(PAGE_BYTES, &mut measured.move_page), (FOLIO.bytes(), &mut measured.move_folio)]
        {
            let mut moved = Ok(());
            let calls = 2 * MOVED_BYTES / piece_bytes;
            samples.push(ns_each(calls, || moved = self.trial.move_there_and_back(piece_bytes)));
            moved?;
        }
        let mut served = Ok(());
        measured.fault.push(ns_each(PAGES, || served = self.trial.fault_all(HandlerCpu::Same)));
        served
    }
}

/// Measures the scan of a cluster that has no room for a folio: in each aligned range of slots that
/// could hold one, one slot is in use.
fn cluster_ns() -> Result<f64, Error> {
    let device = SwapDevice { slots: CLUSTERS * CLUSTER_SLOTS, discard: Discard::Never };
    let (swap, cpu) = (SwapClusters::new(device, 1, Strategy::ClusterLists), CpuNumber(0));
    while let Ok(slot) = swap.alloc(cpu, FOLIO) {
        // One slot of each folio stays in use.
        swap.free(cpu, slot.offset(1), FOLIO.pages() - 1);
    }
    let before = swap.counters().clusters_scanned;
    let mut found = None;
    let ns = ns_each(1, || found = (0..LOOKS).find_map(|_| swap.alloc(cpu, FOLIO).ok()));
    match swap.counters().clusters_scanned - before {
        scanned @ 1.. if found.is_none() => Ok(ns / scanned as f64),
        scanned => Err(Error::WrongResult(format!("{scanned} clusters without room had {found:?}"))),
    }
}

impl CodecSamples {
    fn measure(&mut self, data: &[u8], codec: Codec) {
        for order in Order::all() {
            let at = order.index();
            let RawCodec { original_bytes, stored_bytes, compress, decompress } =
                raw_codec::measure(data, order, codec, cpu_time::thread);
            let pages = (original_bytes / PAGE_BYTES) as f64;
            self.compress[at].push(compress.as_nanos() as f64 / pages);
            self.decompress[at].push(decompress.as_nanos() as f64 / pages);
            self.ratio[at].push(original_bytes as f64 * 100.0 / stored_bytes as f64);
        }
    }

    fn costs(&self) -> CodecCosts {
        let by_order = |samples: &[Samples; ORDERS]| std::array::from_fn(|order| whole(median(&samples[order])));
        CodecCosts {
            compress_page_ns: by_order(&self.compress),
            decompress_page_ns: by_order(&self.decompress),
            ratio_percent: by_order(&self.ratio),
        }
    }
}

fn whole(figure: f64) -> u32 {
    figure.round() as u32
}

impl Measured {
    fn costs(&self, page_cache: &PageCache) -> Costs {
        let (page, folio) = (median(&self.move_page), median(&self.move_folio));
        let each = (folio - page).max(0.0) / f64::from(FOLIO.pages() - 1);
        Costs {
            // Serving the fault here moves one page in (`page`); the page moves back together with
            // all others (`each`).
            fault_ns: whole((median(&self.fault) - page - each).max(0.0)),
            touch_ns: whole(median(&self.touch)),
            move_ns: whole((page - each).max(0.0)),
            move_page_ns: whole(each),
            populate_page_ns: whole(median(&self.populate)),
            zero_page_ns: whole(median(&self.zero)),
            hash_page_ns: whole(median(&self.hash)),
            copy_page_ns: whole(median(&self.copy)),
            cluster_ns: whole(median(&self.cluster)),
            page_cache: page_cache.costs(median(&self.zero)),
            lz4: self.lz4.costs(),
            zstd: self.zstd.costs(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scanning_clusters_takes_time() {
        let ns = cluster_ns().unwrap();
        assert!((1.0..100_000.0).contains(&ns), "{ns}");
    }

    #[test]
    fn the_lab_reads_the_table_of_a_round() {
        let mut measured = Measured::default();
        match Machine::new() {
            Ok(mut machine) => machine.measure(&mut measured).unwrap(),
            // Without root, userfaultfd may be refused.
            Err(error) => return assert!(error.to_string().contains("userfaultfd"), "{error}"),
        }
        let mut page_cache = PageCache::new();
        page_cache.measure().unwrap();
        let data = corpus::build(4 << 20);
        measured.lz4.measure(&data, Codec::Lz4);
        measured.zstd.measure(&data, zstd());
        let table = CostTable { measured_on: this_machine(), costs: measured.costs(&page_cache) };
        let costs = &table.costs;
        // The other tests' threads disturb the measurement, so a figure that is a difference of two
        // others may be zero.
        assert!(costs.populate_page_ns > 0 && costs.copy_page_ns > 0 && costs.zero_page_ns > 0, "{costs:?}");
        for codec in [&costs.lz4, &costs.zstd] {
            assert!(codec.compress_page_ns.iter().chain(&codec.decompress_page_ns).all(|ns| *ns > 0), "{costs:?}");
        }
        assert!(
            costs.zstd.ratio_percent.iter().zip(costs.lz4.ratio_percent).all(|(zstd, lz4)| *zstd > lz4),
            "{costs:?}"
        );
        assert_eq!(CostTable::parse("c.toml", &table.to_toml()).unwrap(), table);
    }
}
