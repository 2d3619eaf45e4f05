//! The pages of a process: `/proc/self/pagemap`, `statm`, `stat` and `smaps_rollup`. There is no
//! lock.

use crate::raw_ioctl;
use crate::thread::syscall3;
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::fd::AsFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use std::ops::Range;

const PAGEMAP_SCAN: Opcode = opcode::read_write::<raw::pm_scan_arg>(b'f', 16);
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_HUGE: u64 = 1 << 6;
/// Since Linux 6.15.
const PAGE_IS_GUARD: u64 = 1 << 8;
/// Ranges fetched by one call.
const BATCH: usize = 64;

/// What a page table entry holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// Nothing.
    Empty,
    /// A page, or an entry of the kernel's own swap.
    Content,
    /// A write-protection marker and nothing else; or a write-protected entry of the kernel's own swap.
    Marked,
    /// A guard (`MADV_GUARD_INSTALL`). Linux before 6.15 shows content instead.
    Guard,
}

impl Entry {
    /// From the file's entry: bit 63 is set where there is a page, 62 where there is an entry of the kernel's own, 58 where
    /// that is a guard, 57 where it is write-protected with userfaultfd.
    fn of(bits: u64) -> Entry {
        let is_set = |bit: u32| bits >> bit & 1 == 1;
        match () {
            () if is_set(63) => Entry::Content,
            () if is_set(58) => Entry::Guard,
            () if !is_set(62) => Entry::Empty,
            () if is_set(57) => Entry::Marked,
            () => Entry::Content,
        }
    }
}

/// Calls `found` with every maximal run of pages between `start` and `end` (page aligned) that has
/// content: a page, or an entry of the kernel's own swap. Markers and guards are none. In ascending order.
pub fn present(pagemap: impl AsFd, start: usize, end: usize, found: &mut dyn FnMut(Range<usize>)) {
    let fd = pagemap.as_fd();
    let mut from = start;
    while from < end {
        let mut regions = [raw::page_region { start: 0, end: 0, categories: 0 }; BATCH];
        let mut scan = raw::pm_scan_arg {
            size: size_of::<raw::pm_scan_arg>() as u64,
            flags: 0,
            start: from as u64,
            end: end as u64,
            walk_end: 0,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: BATCH as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_WRITTEN | PAGE_IS_GUARD,
        };
        // SAFETY: takes a pm_scan_arg and fills at most `vec_len` regions, which live through the call.
        let Ok(count) = (unsafe { raw_ioctl::call(fd, PAGEMAP_SCAN, &mut scan) }) else {
            // Linux before 6.15 knows no guards, or there is no memory for its answer.
            return present_by_entries(fd, from, end, found);
        };
        let mut joined: Option<Range<usize>> = None;
        let has_content = |region: &&raw::page_region| {
            let is = |category| region.categories & category != 0;
            is(PAGE_IS_PRESENT) || is(PAGE_IS_WRITTEN) && !is(PAGE_IS_GUARD)
        };
        for region in regions[..count as usize].iter().filter(has_content) {
            // Present and swapped neighbours come apart: they are one run here.
            match &mut joined {
                Some(run) if run.end == region.start as usize => run.end = region.end as usize,
                _ => {
                    if let Some(run) = joined.replace(region.start as usize..region.end as usize) {
                        found(run);
                    }
                }
            }
        }
        joined.into_iter().for_each(&mut *found);
        if scan.walk_end as usize <= from {
            return;
        }
        from = scan.walk_end as usize;
    }
}

/// Whether a huge page is mapped at `address` as one.
pub fn is_huge(pagemap: impl AsFd, address: usize) -> bool {
    let mut region = raw::page_region { start: 0, end: 0, categories: 0 };
    let mut scan = raw::pm_scan_arg {
        size: size_of::<raw::pm_scan_arg>() as u64,
        flags: 0,
        start: address as u64,
        end: (address + PAGE_BYTES) as u64,
        walk_end: 0,
        vec: (&raw mut region).expose_provenance() as u64,
        vec_len: 1,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_PRESENT | PAGE_IS_HUGE,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_HUGE,
    };
    // SAFETY: takes a pm_scan_arg and fills at most one region, which lives through the call.
    let regions = unsafe { raw_ioctl::call(pagemap.as_fd(), PAGEMAP_SCAN, &mut scan) };
    regions == Ok(1)
}

/// How much of the beginning of `len` bytes has gone from `from` to `to`: pages that are there and not here. Before, each
/// page was in one place.
pub fn moved_bytes(pagemap: impl AsFd, to: usize, from: usize, len: usize) -> usize {
    let is_there = |page: usize| {
        let mut found = false;
        present(&pagemap, page, page + PAGE_BYTES, &mut |_| found = true);
        found
    };
    let has_moved = |offset: &usize| is_there(to + offset) && !is_there(from + offset);
    (0..len).step_by(PAGE_BYTES).take_while(has_moved).count() * PAGE_BYTES
}

/// The same as [`present`] from the file's entries.
fn present_by_entries(fd: impl AsFd, start: usize, end: usize, found: &mut dyn FnMut(Range<usize>)) {
    each_run(fd, start..end, &mut |run, entry| {
        if entry == Entry::Content {
            found(run);
        }
    });
}

/// Calls `found` with every maximal run of alike entries in `range`, in ascending order.
pub fn each_run(pagemap: impl AsFd, range: Range<usize>, found: &mut dyn FnMut(Range<usize>, Entry)) {
    const ENTRIES: usize = 512;
    let fd = pagemap.as_fd();
    let mut run: Option<(Range<usize>, Entry)> = None;
    let mut page = range.start;
    while page < range.end {
        let mut bytes = [0u8; ENTRIES * 8];
        let wanted = ((range.end - page) / PAGE_BYTES).min(ENTRIES) * 8;
        let Ok(read) = rustix::io::pread(fd, &mut bytes[..wanted], (page / PAGE_BYTES * 8) as u64) else { break };
        if read < 8 {
            break;
        }
        for bits in bytes[..read].as_chunks::<8>().0 {
            let entry = Entry::of(u64::from_ne_bytes(*bits));
            match &mut run {
                Some((run, alike)) if *alike == entry => run.end = page + PAGE_BYTES,
                other => {
                    let before = other.replace((page..page + PAGE_BYTES, entry));
                    before.into_iter().for_each(|(run, entry)| found(run, entry));
                }
            }
            page += PAGE_BYTES;
        }
    }
    run.into_iter().for_each(|(run, entry)| found(run, entry));
}

/// Anonymous resident pages of the process whose `statm` this is: resident less shared.
pub fn anon_resident_pages(statm: impl AsFd) -> u64 {
    let mut text = [0u8; 128];
    let read = rustix::io::pread(statm, &mut text, 0).unwrap_or(0);
    anon_resident(&text[..read])
}

fn anon_resident(statm: &[u8]) -> u64 {
    let mut numbers = statm.split(|&byte| byte == b' ').map(number);
    let (_size, resident, shared) = (numbers.next(), numbers.next(), numbers.next());
    resident.unwrap_or(0).saturating_sub(shared.unwrap_or(0))
}

/// Minor faults of the process whose `stat` this is, of all its threads.
pub fn minor_faults(stat: impl AsFd) -> Option<i64> {
    field_of(stat, 10)
}

/// The status, as of `wait(2)`, of the ended process whose `stat` this is, as long as nobody has waited for it.
pub fn exit_status(stat: impl AsFd) -> Option<i32> {
    field_of(stat, 52)
}

/// Threads of the process whose `stat` this is.
pub fn threads(stat: impl AsFd) -> Option<u32> {
    field_of(stat, 20)
}

/// Minor faults of the calling process: of the companion, which makes pages the program's own, too.
pub fn own_minor_faults() -> i64 {
    // SAFETY: a struct of integers, filled by the call.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let address = (&raw mut usage).expose_provenance();
        syscall3(raw::__NR_getrusage as usize, libc::RUSAGE_SELF as usize, address, 0);
        usage.ru_minflt
    }
}

/// Field number `field`, from 3 on, of the process's `/proc/PID/stat`; `None` where there is no such process.
pub fn process_field<T: std::str::FromStr>(pid: u32, field: usize) -> Option<T> {
    field_of(
        rustix::fs::open(format!("/proc/{pid}/stat"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?,
        field,
    )
}

/// Field number `field`, from 3 on, of the process whose `stat` this is.
fn field_of<T: std::str::FromStr>(stat: impl AsFd, field: usize) -> Option<T> {
    let mut text = [0u8; 1024];
    let read = rustix::io::pread(stat, &mut text, 0).ok()?;
    stat_field(&text[..read], field)
}

/// Field number `field`, from 3 on, of `/proc/PID/stat`. The second, in brackets, may hold anything.
pub fn stat_field<T: std::str::FromStr>(stat: &[u8], field: usize) -> Option<T> {
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    let text = stat[end + 1..].split(|&byte| byte == b' ').nth(field - 2)?;
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// Of the anonymous resident pages, how many are other processes' in proportion: `Anonymous` less
/// `Pss_Anon` of `smaps_rollup`. The kernel walks the whole address space for it.
pub fn shared_anon_pages(smaps_rollup: impl AsFd) -> Result<i64, Errno> {
    let mut text = [0u8; 2048];
    let read = rustix::io::pread(smaps_rollup, &mut text, 0)?;
    Ok(shared_anon(&text[..read]))
}

fn shared_anon(smaps_rollup: &[u8]) -> i64 {
    let kib = |name: &[u8]| {
        let line = smaps_rollup.split(|&byte| byte == b'\n').find(|line| line.starts_with(name))?;
        let digits = line[name.len()..].trim_ascii().split(|&byte| byte == b' ').next()?;
        Some(number(digits))
    };
    let (Some(all), Some(own)) = (kib(b"Anonymous:"), kib(b"Pss_Anon:")) else { return 0 };
    (all.saturating_sub(own) / (PAGE_BYTES as u64 / 1024)) as i64
}

/// The number that `digits` begins with: 0 where there is none, the largest where it is larger still.
fn number(digits: &[u8]) -> u64 {
    digits
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .fold(0, |value, byte| value.saturating_mul(10).saturating_add(u64::from(byte - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Region;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_the_kernel_writes_is_read(
            size: u32,
            resident: u32,
            shared: u32,
            all_kib in 0u64..1 << 50,
            own_kib in 0u64..1 << 50,
        ) {
            let statm = format!("{size} {resident} {shared} 1 0 9 0\n");
            prop_assert_eq!(anon_resident(statm.as_bytes()), u64::from(resident.saturating_sub(shared)));
            let rollup = format!("7f00-7fff ---p 00000000 00:00 0    [rollup]\nRss:     9 kB\nPss_Anon:  {own_kib:>8} kB\nAnonymous: {all_kib:>8} kB\n");
            prop_assert_eq!(shared_anon(rollup.as_bytes()), (all_kib.saturating_sub(own_kib) / 4) as i64);
        }

        #[test]
        fn nothing_is_too_strange(noise in prop::collection::vec(any::<u8>(), 0..200), digits in "[0-9]{0,40}") {
            let rollup = |own: &str, all: &[u8]| [b"Pss_Anon: ", own.as_bytes(), b" kB\nAnonymous:", all].concat();
            for text in [&noise[..], digits.as_bytes(), format!("1 {digits} {digits}").as_bytes()] {
                anon_resident(text);
                prop_assert!(shared_anon(text) == 0);
                prop_assert!(shared_anon(&rollup(&digits, text)) >= 0);
                prop_assert!(shared_anon(&rollup("0", digits.as_bytes())) >= 0);
            }
        }
    }

    #[test]
    fn what_has_moved_is_there_and_not_here() {
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let (to, from) = (Region::reserve(8 * PAGE_BYTES).unwrap(), Region::reserve(8 * PAGE_BYTES).unwrap());
        let moved = || moved_bytes(&pagemap, to.start(), from.start(), 8 * PAGE_BYTES) / PAGE_BYTES;
        from.populate(3 * PAGE_BYTES, 5 * PAGE_BYTES).unwrap();
        assert_eq!(moved(), 0, "what is nowhere has not moved");
        to.populate(0, 2 * PAGE_BYTES).unwrap();
        assert_eq!(moved(), 2);
        to.populate(2 * PAGE_BYTES, 4 * PAGE_BYTES).unwrap();
        assert_eq!(moved(), 3, "what is in both places has not moved");
    }

    #[test]
    fn a_guard_is_no_content() {
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let region = Region::reserve(4 * PAGE_BYTES).unwrap();
        region.populate(0, 3 * PAGE_BYTES).unwrap();
        if region.guard(PAGE_BYTES, PAGE_BYTES).is_err() {
            return;
        }
        let page = |index: usize| region.start() + index * PAGE_BYTES;
        let (mut found, mut entries) = (Vec::new(), Vec::new());
        present(&pagemap, page(0), page(4), &mut |run| found.push(run));
        assert_eq!(found, [page(0)..page(1), page(2)..page(3)]);
        each_run(&pagemap, page(0)..page(4), &mut |run, entry| entries.push((run, entry)));
        let runs = [Entry::Content, Entry::Guard, Entry::Content, Entry::Empty];
        assert_eq!(entries, (0..4).map(|index| (page(index)..page(index + 1), runs[index])).collect::<Vec<_>>());
    }
}
