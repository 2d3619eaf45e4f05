//! The work of `foliomem-bench-swap`, the process that [`crate::swap`] measures.

use crate::rounds::serve;
use crate::swap::{CORPUS_BYTES, Case, Round};
use crate::{Error, corpus, raw_codec};
use foliomem_runtime::companion;
use foliomem_session::segment::Control;
use foliomem_sys::agent_memory::AgentMemory;
use foliomem_sys::heap;
use foliomem_sys::maps;
use foliomem_sys::region::Region;
use foliomem_sys::unseen_calls;
use foliomem_types::codec::Codec;
use foliomem_types::settings::{Configuration, Limit};
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::{MAX_ORDER, Order, OrderSet, PAGE_BYTES};
use rustix::fd::OwnedFd;
use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Limit of the run in bytes. It is so high that only the benchmark reclaims memory.
const LIMIT_BYTES: u64 = 8 << 30;

/// Measures the case of the arguments, a round on each request. The process must allocate from the
/// agent's heap.
#[must_use]
pub fn measure(arguments: impl Iterator<Item = String>) -> ExitCode {
    let served = match Case::from_arguments(arguments) {
        Some(case) => serve_case(case),
        None => Err(Error::parse("the arguments of the measuring process", "")),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn serve_case(case: Case) -> Result<(), Error> {
    let Case { size, granule, codec, threads } = case;
    let mut data = corpus::build(CORPUS_BYTES);
    let mut memory = Region::reserve(CORPUS_BYTES).map_err(|e| Error::doing("map memory")(e.into()))?;
    let range = memory.start()..memory.start() + memory.len();
    let sizes = if size == Order::ZERO { OrderSet::EMPTY } else { OrderSet::EMPTY.with(size) };
    let configuration = Configuration {
        sizes: SizePolicy::always(sizes),
        codec,
        granule,
        reclaimers: threads,
        ..Configuration::plain(Limit::Bytes(LIMIT_BYTES))
    };
    let failed = |what: &str, why: String| Error::WrongResult(format!("{what}: {why}"));
    let (control, _segment) = Control::create(&configuration).map_err(|e| failed("control segment", e.to_string()))?;
    let slot = control.claim_slot(rustix::process::getpid()).map_err(|e| failed("control segment", e.to_string()))?;
    let own = AgentMemory::new(heap::ranges);
    // The runtime must not manage any other memory.
    own.add(0..range.start);
    own.add(range.end..usize::MAX);
    note_own_code()?;
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
        let counters = &control.process(slot).counters;
        if counters.vm.unseen_callers.get() > 0 {
            return Err(failed("swap-out", "precautions against unseen calls are measured, too".to_owned()));
        }
        let store = &counters.store;
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

/// Notes that no code here makes system calls that the runtime must know of. It would otherwise
/// take precautions against them, which few programs need: all folios would return page by page.
fn note_own_code() -> Result<(), Error> {
    let path = Path::new("/proc/self/maps");
    let maps = OwnedFd::from(File::open(path).map_err(Error::at(path))?);
    maps::for_each(maps, &mut |mapping| {
        if mapping.executable {
            unseen_calls::note_seen_code(mapping.start);
        }
    });
    Ok(())
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
