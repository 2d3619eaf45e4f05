//! Measures the kernel's page cache: a sparse file is read and mapped, in large folios as readahead
//! makes them and in single pages as random reads do. Two measurements give one figure for each
//! folio and one for each page, because the share of a page in a large folio of 32 pages or more is
//! negligible.
//!
//! An unprivileged process can neither make the kernel compact memory nor walk the reverse mapping
//! of a page, and a program's own use of a page is not the kernel's time: those figures come from
//! the reference table. All figures do if no file system has a page cache that can be dropped
//! (tmpfs is its own page cache). If the file system makes no large folios, the figures for each
//! folio come from the reference table.

use super::{Samples, ns_each, whole};
use crate::{Error, median};
use foliomem_lab::costs::{Costs, PageCacheCosts};
use foliomem_sys::file_mapping::FileMapping;
use foliomem_types::units::PAGE_BYTES;
use rustix::fs::{Advice, fadvise, fstatfs};
use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of the sparse file.
const FILE_BYTES: usize = 32 << 20;
const PAGES: usize = FILE_BYTES / PAGE_BYTES;
/// Pages that a fault maps at most of small folios: the default of `fault_around_bytes`.
const AROUND_PAGES: usize = 16;
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Samples for folios of one kind.
#[derive(Default)]
struct InFolios {
    miss: Samples,
    hit: Samples,
    free: Samples,
}

/// The measured file and its samples.
pub struct PageCache {
    /// The file; `None` if no file system is suitable.
    file: Option<File>,
    large: InFolios,
    small: InFolios,
    /// Faults that map one folio of a page, and faults that map the full fault-around window.
    faults: [Samples; 2],
}

impl PageCache {
    /// Creates the file in a temporary directory.
    pub fn new() -> PageCache {
        let directories = [std::env::temp_dir(), PathBuf::from("/var/tmp"), PathBuf::from(".")];
        let file = directories.iter().find_map(|directory| sparse_file(directory).ok().flatten());
        PageCache { file, large: InFolios::default(), small: InFolios::default(), faults: Default::default() }
    }

    /// Measures one round.
    pub fn measure(&mut self) -> Result<(), Error> {
        let Some(file) = &self.file else { return Ok(()) };
        self.large.measure(file, Advice::Normal)?;
        self.small.measure(file, Advice::Random)?;
        for (samples, step) in self.faults.iter_mut().zip([AROUND_PAGES, 1]) {
            read(file, step)?;
            let mapping = FileMapping::new(file, FILE_BYTES).map_err(|errno| failed(errno.into()))?;
            let touched = (0..FILE_BYTES).step_by(AROUND_PAGES * PAGE_BYTES);
            samples.push(ns_each(PAGES / AROUND_PAGES, || touched.for_each(|at| _ = black_box(mapping.byte(at)))));
        }
        Ok(())
    }

    /// Returns the cost table. `zero_page_ns` is the time to zero a page.
    pub fn costs(&self, zero_page_ns: f64) -> PageCacheCosts {
        let reference = Costs::reference().page_cache;
        if self.file.is_none() {
            return reference;
        }
        let figure = |of: fn(&InFolios) -> &Samples| [&self.large, &self.small].map(|folios| median(of(folios)));
        let (miss, hit, free) = (figure(|of| &of.miss), figure(|of| &of.hit), figure(|of| &of.free));
        let [one, around] = [0, 1].map(|at| median(&self.faults[at]));
        let map_folio = ((around - one) / (AROUND_PAGES - 1) as f64).max(0.0);
        PageCacheCosts {
            read_page_ns: whole(hit[0]),
            read_folio_ns: whole((hit[1] - hit[0]).max(0.0)),
            fault_ns: whole((one - map_folio).max(0.0)),
            map_folio_ns: whole(map_folio),
            insert_folio_ns: whole((miss[1] - hit[1] - zero_page_ns).max(0.0)),
            free_folio_ns: whole((free[1] - free[0]).max(0.0)),
            free_page_ns: whole(free[0]),
            ..reference
        }
    }
}

/// Creates a file without a name. Returns `None` on tmpfs, where the file is memory anyway.
fn sparse_file(directory: &Path) -> std::io::Result<Option<File>> {
    let path = directory.join(format!(".foliomem-calibrate-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(FILE_BYTES as u64)?;
    Ok((fstatfs(&file)?.f_type as i64 != TMPFS_MAGIC).then_some(file))
}

fn failed(error: std::io::Error) -> Error {
    Error::WrongResult(format!("calibrating, with a file: {error}"))
}

/// Reads the first of every `step` pages.
fn read(file: &File, step: usize) -> Result<(), Error> {
    let mut page = [0; PAGE_BYTES];
    let mut pages = (0..FILE_BYTES).step_by(step * PAGE_BYTES);
    pages.try_for_each(|at| file.read_exact_at(&mut page, at as u64)).map_err(failed)
}

impl InFolios {
    fn measure(&mut self, file: &File, advice: Advice) -> Result<(), Error> {
        let advise = |advice| fadvise(file, 0, None, advice).map_err(|errno| failed(errno.into()));
        advise(Advice::DontNeed)?;
        advise(advice)?;
        for samples in [&mut self.miss, &mut self.hit] {
            let mut done = Ok(());
            samples.push(ns_each(PAGES, || done = read(file, 1)));
            done?;
        }
        let mut dropped = Ok(());
        self.free.push(ns_each(PAGES, || dropped = advise(Advice::DontNeed)));
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmeasurable_costs_come_from_the_reference_table() {
        let reference = Costs::reference().page_cache;
        let mut cache = PageCache { file: None, ..PageCache::new() };
        cache.measure().unwrap();
        assert_eq!(cache.costs(90.0), reference);
        let mut cache = PageCache::new();
        cache.measure().unwrap();
        let costs =
            |of: PageCacheCosts| [of.rmap_page_ns, of.scan_ns, of.migrate_folio_ns, of.migrate_page_ns, of.use_page_ns];
        assert_eq!(costs(cache.costs(90.0)), costs(reference));
    }
}
