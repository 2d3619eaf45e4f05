//! The child of [`crate::kernel_peer`]: a mapping that the kernel swaps out and in while a clock
//! runs.
//!
//! It is a process of its own, so that only this memory gets the folio size under test and no
//! memory outlives a round. This is the one module of the crate with `unsafe`: it maps, fills,
//! advises and reads raw memory.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::kernel::{MmStat, read, read_number};
use crate::rounds::serve;
use crate::tree::status_bytes;

/// First argument that makes a binary this child.
pub const CHILD_ARG: &str = "__kernel-child";

/// Alignment of the mapping in bytes. Folios are naturally aligned and at most this large, so the
/// mapping can hold any of them.
const ALIGN: usize = 2 << 20;
/// Bytes of a page, the unit of a touch.
const PAGE: usize = 4096;

/// The result of one round.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Round {
    /// Bytes in swap after `MADV_PAGEOUT`.
    pub out_bytes: u64,
    /// Seconds of `MADV_PAGEOUT`.
    pub out_seconds: f64,
    /// Seconds of the sequential touch.
    pub in_seconds: f64,
    /// Bytes swapped out in whole folios of the size.
    pub whole_out_bytes: u64,
    /// Bytes swapped in as whole folios of the size.
    pub whole_in_bytes: u64,
    /// zram's uncompressed bytes while all memory was swapped out.
    pub orig_data_size: u64,
    /// zram's compressed bytes while all memory was swapped out.
    pub compr_data_size: u64,
    /// zram's memory in bytes while all memory was swapped out.
    pub mem_used_total: u64,
}

/// Call this first in `main`: if this process was started as the child, it does the child's work
/// and exits.
pub fn enter_if_asked() {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some(CHILD_ARG) {
        let args: Vec<String> = args.collect();
        std::process::exit(i32::from(kernel_child(&args) != ExitCode::SUCCESS));
    }
}

/// Does the child's work: `args` are those of [`arguments`]; each answer is a [`Round`].
#[must_use]
pub fn kernel_child(args: &[String]) -> ExitCode {
    let work = |(size_kib, [corpus, mthp, mm_stat]): (u64, [PathBuf; 3])| {
        let corpus = std::fs::read(&corpus).map_err(Error::at(&corpus))?;
        serve(|| round(size_kib, &corpus, (size_kib > 4).then_some(&mthp), &mm_stat))
    };
    match parse(args).and_then(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the arguments that start the child: [`CHILD_ARG`], folio size in KiB, the corpus as a
/// file, the directory of the size's controls (unused for 4K) and zram's `mm_stat`.
#[must_use]
pub fn arguments(size_kib: u64, corpus: &Path, mthp: &Path, mm_stat: &Path) -> Vec<std::ffi::OsString> {
    vec![CHILD_ARG.into(), size_kib.to_string().into(), corpus.into(), mthp.into(), mm_stat.into()]
}

fn parse(args: &[String]) -> Result<(u64, [PathBuf; 3]), Error> {
    let bad = || Error::parse(CHILD_ARG, &args.join(" "));
    let [size, corpus, mthp, mm_stat] = args else { return Err(bad()) };
    Ok((size.parse().map_err(|_| bad())?, [corpus, mthp, mm_stat].map(PathBuf::from)))
}

fn round(size_kib: u64, corpus: &[u8], mthp: Option<&PathBuf>, mm_stat: &Path) -> Result<Round, Error> {
    let mapping = Mapping::new(corpus.len())?;
    mapping.fill(corpus);
    let before = Counters::read(mthp)?;

    let clock = Instant::now();
    mapping.page_out()?;
    let out_seconds = clock.elapsed().as_secs_f64();
    let between = Counters::read(mthp)?;
    let stat = MmStat::read(mm_stat)?;

    let clock = Instant::now();
    let sum = mapping.touch();
    let in_seconds = clock.elapsed().as_secs_f64();
    let after = Counters::read(mthp)?;

    if sum != first_bytes(corpus) || !mapping.equals(corpus) {
        return Err(Error::WrongResult("the kernel gave back other data than was swapped out".into()));
    }
    let folio = size_kib * 1024;
    Ok(Round {
        out_bytes: between.swapped.saturating_sub(before.swapped),
        out_seconds,
        in_seconds,
        whole_out_bytes: (between.swpout - before.swpout) * folio,
        whole_in_bytes: (after.swpin - between.swpin) * folio,
        orig_data_size: stat.orig_data_size,
        compr_data_size: stat.compr_data_size,
        mem_used_total: stat.mem_used_total,
    })
}

/// The kernel's counters of swap-out and swap-in.
struct Counters {
    swpout: u64,
    swpin: u64,
    /// Bytes of this process in swap.
    swapped: u64,
}

impl Counters {
    fn read(mthp: Option<&PathBuf>) -> Result<Self, Error> {
        let count = |name: &str| mthp.map_or(Ok(0), |dir| read_number(&dir.join("stats").join(name)));
        let path = Path::new("/proc/self/status");
        let status = read(path)?;
        let swapped =
            status_bytes(&status, "VmSwap:").ok_or_else(|| Error::parse("VmSwap of /proc/self/status", &status))?;
        Ok(Self { swpout: count("swpout")?, swpin: count("swpin")?, swapped })
    }
}

/// Returns the result of [`Mapping::touch`] for a mapping filled with `corpus`.
fn first_bytes(corpus: &[u8]) -> u64 {
    corpus.iter().step_by(PAGE).map(|b| u64::from(*b)).sum()
}

/// An anonymous mapping whose data begins at a multiple of [`ALIGN`].
struct Mapping {
    base: *mut u8,
    mapped: usize,
    data: *mut u8,
    bytes: usize,
}

impl Mapping {
    fn new(bytes: usize) -> Result<Self, Error> {
        let mapped = bytes + ALIGN;
        // SAFETY: no address is requested, so the mapping replaces no other mapping.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = base.map_err(|e| Error::doing("mmap")(e.into()))?.cast::<u8>();
        let data = base.wrapping_add(base.align_offset(ALIGN));
        let mapping = Self { base, mapped, data, bytes };
        // SAFETY: the range lies in our own mapping; the advice changes no contents.
        let advised = unsafe { madvise(data.cast(), bytes, Advice::LinuxHugepage) };
        advised.map_err(|e| Error::doing("MADV_HUGEPAGE")(e.into()))?;
        Ok(mapping)
    }

    fn fill(&self, corpus: &[u8]) {
        assert_eq!(corpus.len(), self.bytes);
        // SAFETY: `data..data + bytes` lies in the mapping, which has ALIGN bytes more for the
        // alignment. The mapping is writable, belongs to this value alone, and overlaps no other
        // allocation.
        unsafe { std::ptr::copy_nonoverlapping(corpus.as_ptr(), self.data, self.bytes) }
    }

    fn page_out(&self) -> Result<(), Error> {
        // SAFETY: the range lies in our own mapping; paging out changes no contents.
        let done = unsafe { madvise(self.data.cast(), self.bytes, Advice::LinuxPageOut) };
        done.map_err(|e| Error::doing("MADV_PAGEOUT")(e.into()))
    }

    /// Reads one byte of each page in order and returns their sum.
    fn touch(&self) -> u64 {
        let mut sum = 0;
        for offset in (0..self.bytes).step_by(PAGE) {
            // SAFETY: `offset < bytes` is inside the mapping, which `fill` initialised. The read is
            // volatile because it must happen.
            sum += u64::from(unsafe { self.data.add(offset).read_volatile() });
        }
        sum
    }

    fn equals(&self, corpus: &[u8]) -> bool {
        // SAFETY: the range lies in the mapping, `fill` initialised it, and no thread writes to it.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) == corpus }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapping of `new`; no reference into it outlives `self`. A
        // failure would only leave it mapped in a process that exits soon.
        let _ = unsafe { munmap(self.base.cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_aligned_and_keeps_its_content() {
        let corpus: Vec<u8> = (0..(3 << 20)).map(|i: u32| (i / 4096) as u8).collect();
        let mapping = Mapping::new(corpus.len()).unwrap();
        assert_eq!(mapping.data as usize % ALIGN, 0);
        mapping.fill(&corpus);
        assert!(mapping.equals(&corpus));
        assert_eq!(mapping.touch(), first_bytes(&corpus));
    }

    #[test]
    fn arguments_parse_back() {
        let [a, b, c] = ["/a", "/b c", "/d"].map(Path::new);
        let args: Vec<String> = arguments(64, a, b, c).into_iter().skip(1).map(|s| s.into_string().unwrap()).collect();
        assert_eq!(parse(&args).unwrap(), (64, [a, b, c].map(Path::to_owned)));
        assert!(parse(&args[1..]).is_err());
    }
}
