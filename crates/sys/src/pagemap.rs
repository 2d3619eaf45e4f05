//! The pages of a process, from `/proc/self/pagemap`, `statm`, `stat` and `smaps_rollup`. There is
//! no lock.

use crate::raw_ioctl;
use crate::thread::syscall3;
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::fd::AsFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use std::ops::Range;

/// The ioctl that returns runs of pages by category.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<raw::pm_scan_arg>(b'f', 16);
/// Category of pages that are not write-protected with userfaultfd.
const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// Category of pages that are in memory.
const PAGE_IS_PRESENT: u64 = 1 << 3;
/// Category of entries of the kernel's swap, of markers and of guards.
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// Category of places that have the kernel's page of zeros.
const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Category of pages that are mapped as a part of a huge page.
const PAGE_IS_HUGE: u64 = 1 << 6;
/// Category of guards, since Linux 6.15.
const PAGE_IS_GUARD: u64 = 1 << 8;
/// Maximum number of runs that one call returns.
const BATCH: usize = 64;

/// The content of a page table entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// The entry is empty.
    Empty,
    /// A page, or an entry of the kernel's swap.
    Content,
    /// Only a write-protection marker, or a write-protected entry of the kernel's swap.
    Marked,
    /// A guard (`MADV_GUARD_INSTALL`). Linux before 6.15 shows content instead.
    Guard,
}

impl Entry {
    /// Decodes an entry of the file. Bit 63 is set for a page, 62 for an entry of the kernel's
    /// swap, a marker or a guard, 58 for a guard, 57 for write protection with userfaultfd.
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

/// Calls `found` with each maximal run of pages with content between `start` and `end`, in
/// ascending order. Content is a page or an entry of the kernel's swap, but not a marker or a
/// guard. `start` and `end` are multiples of the page size.
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
        // SAFETY: PAGEMAP_SCAN takes a `pm_scan_arg` and writes at most `vec_len` elements of
        // `regions`, which outlives the call.
        let Ok(count) = (unsafe { raw_ioctl::call(fd, PAGEMAP_SCAN, &mut scan) }) else {
            // Linux before 6.15 does not know guards, or the kernel has no memory for the result.
            return present_by_entries(fd, from, end, found);
        };
        let mut joined: Option<Range<usize>> = None;
        let has_content = |region: &&raw::page_region| {
            let is = |category| region.categories & category != 0;
            is(PAGE_IS_PRESENT) || is(PAGE_IS_WRITTEN) && !is(PAGE_IS_GUARD)
        };
        for region in regions[..count as usize].iter().filter(has_content) {
            // The kernel returns a present and a swapped run separately, even if they are adjacent.
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

/// Returns whether `address` is mapped as a part of a huge page.
pub fn is_huge(pagemap: impl AsFd, address: usize) -> bool {
    is_present_as(pagemap, address, PAGE_IS_HUGE)
}

/// Returns whether the kernel's page of zeros is at `address`.
pub fn is_page_of_zeros(pagemap: impl AsFd, address: usize) -> bool {
    is_present_as(pagemap, address, PAGE_IS_PFNZERO)
}

/// Returns whether the page at `address` is present and of `category`.
fn is_present_as(pagemap: impl AsFd, address: usize, category: u64) -> bool {
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
        category_mask: PAGE_IS_PRESENT | category,
        category_anyof_mask: 0,
        return_mask: category,
    };
    // SAFETY: PAGEMAP_SCAN takes a `pm_scan_arg` and writes at most one element to `region`, which
    // outlives the call.
    let regions = unsafe { raw_ioctl::call(pagemap.as_fd(), PAGEMAP_SCAN, &mut scan) };
    regions == Ok(1)
}

/// Returns whether a page is at `address` that other processes map, too, or is the kernel's page of
/// zeros.
pub fn is_shared(pagemap: impl AsFd, address: usize) -> bool {
    let mut bits = [0u8; size_of::<u64>()];
    let read = rustix::io::pread(pagemap, &mut bits, (address / PAGE_BYTES * size_of::<u64>()) as u64);
    // Bit 63 is set for a page, bit 56 for one that only this process maps.
    read == Ok(size_of::<u64>()) && u64::from_ne_bytes(bits) >> 56 & 0x81 == 0x80
}

/// Returns the number of bytes from `start` on that have content without a gap, up to `end`.
pub fn leading_present_bytes(pagemap: impl AsFd, start: usize, end: usize) -> usize {
    let mut until = start;
    present(pagemap, start, end, &mut |run| {
        if run.start == until {
            until = run.end;
        }
    });
    until - start
}

/// Returns the number of bytes from `start` on before the first page with content, up to `end`.
pub fn leading_absent_bytes(pagemap: impl AsFd, start: usize, end: usize) -> usize {
    let mut first = end;
    present(pagemap, start, end, &mut |run| first = first.min(run.start));
    first - start
}

/// Does the work of [`present`] with the entries of the file.
fn present_by_entries(fd: impl AsFd, start: usize, end: usize, found: &mut dyn FnMut(Range<usize>)) {
    each_run(fd, start..end, &mut |run, entry| {
        if entry == Entry::Content {
            found(run);
        }
    });
}

/// Calls `found` with each maximal run of equal entries in `range`, in ascending order.
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

/// Returns the number of anonymous resident pages, from a process's `statm`: resident pages less
/// shared pages.
pub fn anon_resident_pages(statm: impl AsFd) -> u64 {
    with_statm(statm, anon_resident).unwrap_or(0)
}

/// Returns the number of mapped pages, from a process's `statm`. It is 0 for a thread without
/// memory.
pub fn mapped_pages(statm: impl AsFd) -> Option<u64> {
    with_statm(statm, |text| statm_field(text, 0))?
}

/// Returns the number of pages of a process's writable private mappings and stacks, from its
/// `statm`.
pub fn data_pages(statm: impl AsFd) -> u64 {
    with_statm(statm, |text| statm_field(text, 5)).flatten().unwrap_or(0)
}

/// Returns what `read` finds in the text of a `statm`; `None` if the kernel refuses it.
fn with_statm<R>(statm: impl AsFd, read: impl FnOnce(&[u8]) -> R) -> Option<R> {
    let mut text = [0u8; 128];
    let len = rustix::io::pread(statm, &mut text, 0).ok()?;
    Some(read(&text[..len]))
}

/// Returns field `field`, from 0 on, of the text of a `statm`.
fn statm_field(statm: &[u8], field: usize) -> Option<u64> {
    statm.split(|&byte| byte == b' ').nth(field).filter(|digits| !digits.is_empty()).map(number)
}

/// Returns the number of anonymous resident pages in the text of a `statm`.
fn anon_resident(statm: &[u8]) -> u64 {
    let mut numbers = statm.split(|&byte| byte == b' ').map(number);
    let (_size, resident, shared) = (numbers.next(), numbers.next(), numbers.next());
    resident.unwrap_or(0).saturating_sub(shared.unwrap_or(0))
}

/// Returns the number of minor faults of all threads of a process, from its `stat`.
pub fn minor_faults(stat: impl AsFd) -> Option<i64> {
    field_of(stat, 10)
}

/// Returns the exit status of a process that has ended and is not yet reaped, from its `stat`. The
/// status has the form of wait(2).
pub fn exit_status(stat: impl AsFd) -> Option<i32> {
    field_of(stat, 52)
}

/// Returns the number of threads of a process, from its `stat`.
pub fn threads(stat: impl AsFd) -> Option<u32> {
    field_of(stat, 20)
}

/// Returns the number of minor faults of the calling process, the companion. It faults while it
/// makes pages for the program.
pub fn own_minor_faults() -> i64 {
    // SAFETY: the struct consists of integers, for which zero is valid, and getrusage(2) fills it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let address = (&raw mut usage).expose_provenance();
        syscall3(raw::__NR_getrusage as usize, libc::RUSAGE_SELF as usize, address, 0);
        usage.ru_minflt
    }
}

/// Returns field `field`, from 3 on, of `/proc/PID/stat`. Returns `None` if the process does not
/// exist.
pub fn process_field<T: std::str::FromStr>(pid: u32, field: usize) -> Option<T> {
    field_of(
        rustix::fs::openat(
            rustix::fs::CWD,
            format!("/proc/{pid}/stat"),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .ok()?,
        field,
    )
}

/// Returns field `field`, from 3 on, of `stat`.
fn field_of<T: std::str::FromStr>(stat: impl AsFd, field: usize) -> Option<T> {
    let mut text = [0u8; 1024];
    let read = rustix::io::pread(stat, &mut text, 0).ok()?;
    stat_field(&text[..read], field)
}

/// Returns field `field`, from 3 on, of the text of a `stat`. The second field, in parentheses, may
/// contain any characters.
pub fn stat_field<T: std::str::FromStr>(stat: &[u8], field: usize) -> Option<T> {
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    let text = stat[end + 1..].split(|&byte| byte == b' ').nth(field - 2)?;
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// Returns the proportional part of the anonymous resident pages that belongs to other processes:
/// `Anonymous` less `Pss_Anon` of `smaps_rollup`. The kernel walks the whole address space for it.
///
/// # Errors
/// Fails if the file cannot be read.
pub fn shared_anon_pages(smaps_rollup: impl AsFd) -> Result<i64, Errno> {
    let mut text = [0u8; 2048];
    let read = rustix::io::pread(smaps_rollup, &mut text, 0)?;
    Ok(shared_anon(&text[..read]))
}

/// Returns the number of pages by the text of a `smaps_rollup`; 0 if a line is missing.
fn shared_anon(smaps_rollup: &[u8]) -> i64 {
    let kib = |name: &[u8]| {
        let line = smaps_rollup.split(|&byte| byte == b'\n').find(|line| line.starts_with(name))?;
        let digits = line[name.len()..].trim_ascii().split(|&byte| byte == b' ').next()?;
        Some(number(digits))
    };
    let (Some(all), Some(own)) = (kib(b"Anonymous:"), kib(b"Pss_Anon:")) else { return 0 };
    (all.saturating_sub(own) / (PAGE_BYTES as u64 / 1024)) as i64
}

/// Returns the number at the start of `digits`: 0 if there is none, the maximum if it is larger.
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
        fn texts_of_the_kernel_are_parsed(
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
        fn any_text_gives_a_number(noise in prop::collection::vec(any::<u8>(), 0..200), digits in "[0-9]{0,40}") {
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
    fn the_kernels_page_of_zeros_is_known() {
        let open = |name| std::fs::File::open(name).unwrap();
        let (memory, pagemap) = (open("/proc/self/mem"), open("/proc/self/pagemap"));
        let region = Region::reserve(2 * PAGE_BYTES).unwrap();
        let is_zeros = |index| is_page_of_zeros(&pagemap, region.start() + index * PAGE_BYTES);
        region.populate(0, PAGE_BYTES).unwrap();
        assert!(!is_zeros(0) && !is_zeros(1), "absent");
        rustix::io::pread(&memory, &mut [0u8; 2 * PAGE_BYTES], region.start() as u64).unwrap();
        assert!(!is_zeros(0), "a page of its own that has zeros");
        assert!(is_zeros(1));
    }

    #[test]
    fn leading_pages_are_counted() {
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        // More runs than one call of the kernel returns.
        let pages = 4 * BATCH;
        let region = Region::reserve(pages * PAGE_BYTES).unwrap();
        let page = |index: usize| region.start() + index * PAGE_BYTES;
        let counted = |from, to| {
            let (start, end) = (page(from), page(to));
            let bytes = (leading_present_bytes(&pagemap, start, end), leading_absent_bytes(&pagemap, start, end));
            (bytes.0 / PAGE_BYTES, bytes.1 / PAGE_BYTES)
        };
        assert_eq!(counted(0, pages), (0, pages));
        region.populate(3 * PAGE_BYTES, 5 * PAGE_BYTES).unwrap();
        assert_eq!(counted(0, pages), (0, 3));
        assert_eq!(counted(3, pages), (5, 0));
        assert_eq!(counted(3, 7), (4, 0), "pages behind the range do not count");
        assert_eq!(counted(1, 2), (0, 1));
        for index in (9..pages).step_by(2) {
            region.populate(index * PAGE_BYTES, PAGE_BYTES).unwrap();
        }
        assert_eq!(counted(3, pages), (5, 0));
        assert_eq!(counted(8, pages), (0, 1));
    }

    #[test]
    fn an_own_page_is_not_shared() {
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let region = Region::reserve(3 * PAGE_BYTES).unwrap();
        region.set_huge_pages(0, region.len(), crate::region::HugePages::Forbidden).unwrap();
        region.populate(0, PAGE_BYTES).unwrap();
        let page = |index: usize| region.start() + index * PAGE_BYTES;
        // SAFETY: the region is mapped, and nobody writes to it.
        std::hint::black_box(unsafe { region.slice(PAGE_BYTES, 1) }[0]);
        assert_eq!([0, 1, 2].map(|index| is_shared(&pagemap, page(index))), [false, true, false], "own, zeros, none");
    }

    #[test]
    fn a_guard_is_not_content() {
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
