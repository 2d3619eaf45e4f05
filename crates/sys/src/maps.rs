//! The mappings of a process, from `/proc/self/maps` and the ioctl `PROCMAP_QUERY`. There is no
//! lock.

use crate::memory_advice::Forks;
use crate::raw_ioctl;
use foliomem_types::size_policy::Advice;
use linux_raw_sys::general as raw;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use std::ops::Range;

/// End of the addresses that a program can have, with 4-level page tables.
pub const ADDRESSES_END: usize = 1 << 47;
/// The ioctl that returns one mapping, since Linux 6.11.
const PROCMAP_QUERY: Opcode = opcode::read_write::<raw::procmap_query>(b'f', 17);

/// The kind of memory behind a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Anonymous memory. The program may name it (`PR_SET_VMA_ANON_NAME`), as run times do with
    /// heaps.
    Anonymous,
    /// `[heap]`.
    Heap,
    /// `[stack]`.
    Stack,
    /// A file.
    File,
    /// Other memory that the kernel names, such as `[vdso]`.
    Special,
}

/// A mapping, as a line of `/proc/self/maps` describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// First address.
    pub start: usize,
    /// Address after the last byte.
    pub end: usize,
    /// Whether the memory can be read.
    pub readable: bool,
    /// Whether the memory can be written.
    pub writable: bool,
    /// Whether the memory can be executed.
    pub executable: bool,
    /// Whether other processes see writes (`MAP_SHARED`).
    pub shared: bool,
    /// The kind of memory.
    pub kind: Kind,
}

/// Parses one line. Returns `None` if it does not describe a mapping.
pub fn parse_line(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let range = fields.next()?;
    let dash = range.iter().position(|&byte| byte == b'-')?;
    let (start, end) = (hex(&range[..dash])?, hex(&range[dash + 1..])?);
    let &[read, write, execute, share] = fields.next()? else { return None };
    let (_offset, _device, inode) = (fields.next()?, fields.next()?, fields.next()?);
    let name = fields.next().unwrap_or_default().trim_ascii();
    if start >= end {
        return None;
    }
    let kind = kind(name, inode != b"0");
    Some(Mapping {
        start,
        end,
        readable: read == b'r',
        writable: write == b'w',
        executable: execute == b'x',
        shared: share == b's',
        kind,
    })
}

/// Returns the kind of a mapping with this name.
fn kind(name: &[u8], has_inode: bool) -> Kind {
    match name {
        b"" if !has_inode => Kind::Anonymous,
        b"[heap]" => Kind::Heap,
        b"[stack]" => Kind::Stack,
        _ if name.starts_with(b"[anon:") => Kind::Anonymous,
        _ if name.starts_with(b"[") => Kind::Special,
        _ => Kind::File,
    }
}

/// Parses a hexadecimal address.
fn hex(digits: &[u8]) -> Option<usize> {
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0usize, |value, &byte| {
        let digit = (byte as char).to_digit(16)?;
        Some(value << 4 | digit as usize)
    })
}

/// Calls `found` with each mapping once, in ascending order. The file is not a snapshot: each
/// mapping is as it was when it was read.
pub fn for_each(maps: impl AsFd, found: &mut dyn FnMut(&Mapping)) {
    let mut reported = 0;
    for_each_line(maps, &mut |line| {
        if let Some(mapping) = parse_line(line).filter(|mapping| mapping.start >= reported) {
            reported = mapping.end;
            found(&mapping);
        }
    });
}

/// Calls `found` with each mapping in `/proc/self/smaps` about which the program has given advice:
/// about huge pages, or that forks do not copy it. This is slow, because the kernel walks all page
/// tables.
pub fn for_each_advised(smaps: impl AsFd, found: &mut dyn FnMut(Range<usize>, Advice, Forks)) {
    for_each_flagged(smaps, &mut |range, flags| {
        let (mut huge_pages, mut forks) = (Advice::None, Forks::Copy);
        flags.split(|&byte| byte == b' ').for_each(|flag| match flag {
            b"hg" => huge_pages = Advice::Huge,
            b"nh" => huge_pages = Advice::NoHuge,
            b"dc" => forks = Forks::LeaveOut,
            _ => {}
        });
        if huge_pages != Advice::None || forks == Forks::LeaveOut {
            found(range, huge_pages, forks);
        }
    });
}

/// Calls `found` with each mapping in `/proc/self/smaps` and its `VmFlags`: two letters each,
/// separated by spaces. This is slow, because the kernel walks all page tables.
pub fn for_each_flagged(smaps: impl AsFd, found: &mut dyn FnMut(Range<usize>, &[u8])) {
    let mut current = None;
    for_each_line(smaps, &mut |line| {
        if let Some(mapping) = parse_line(line) {
            current = Some(mapping.start..mapping.end);
        } else if let Some((range, flags)) = current.clone().zip(line.strip_prefix(b"VmFlags:")) {
            current = None;
            found(range, flags);
        }
    });
}

/// Calls `found` with each line of a file of /proc. Of a line that exceeds the buffer, which only
/// the name of a file can cause, it passes at most the end.
fn for_each_line(file: impl AsFd, found: &mut dyn FnMut(&[u8])) {
    let file = file.as_fd();
    let mut buffer = [0u8; 8192];
    let (mut filled, mut offset) = (0, 0u64);
    loop {
        let Ok(read @ 1..) = rustix::io::pread(file, &mut buffer[filled..], offset) else { return };
        offset += read as u64;
        filled += read;
        let mut start = 0;
        while let Some(len) = buffer[start..filled].iter().position(|&byte| byte == b'\n') {
            found(&buffer[start..start + len]);
            start += len + 1;
        }
        buffer.copy_within(start..filled, 0);
        filled -= start;
        if filled == buffer.len() {
            filled = 0;
        }
    }
}

/// Number of parts from which reading all mappings is faster than asking for those around each
/// part: a line takes half a microsecond, and a part up to six calls of that time each.
const MANY_PARTS: usize = 64;

/// Calls `found` with the mappings that overlap one of `parts`, and with the one below the first of
/// each part, in ascending order. `parts` ascend. If they are many, or the kernel is older than
/// Linux 6.11, this reads the whole file, and `found` gets all mappings.
pub fn for_each_around(maps: impl AsFd, parts: &[Range<usize>], found: &mut dyn FnMut(&Mapping)) {
    match parts.len() >= MANY_PARTS {
        true => for_each(maps, found),
        false => for_each_asked(maps, parts, Expected::Any, found),
    }
}

/// Calls `found` with the mappings that overlap one of `parts`, which ascend and were anonymous
/// memory a moment ago, in ascending order. Linux before 6.11 makes this read the whole file, and
/// `found` gets all mappings.
pub fn for_each_in(maps: impl AsFd, parts: &[Range<usize>], found: &mut dyn FnMut(&Mapping)) {
    for_each_asked(maps, parts, Expected::Anonymous, found);
}

/// Asks the kernel for the mappings of `parts` one by one, and for the one below each part if
/// `expected` may be any.
fn for_each_asked(maps: impl AsFd, parts: &[Range<usize>], expected: Expected, found: &mut dyn FnMut(&Mapping)) {
    let mut reported = 0;
    for part in parts {
        let mut at = part.start.max(reported);
        let mut asks_below = expected == Expected::Any;
        while at < part.end {
            match ask(&maps, at, expected) {
                Ok(mapping) if mapping.start >= part.end => break,
                Ok(mapping) if asks_below && mapping.start > reported => {
                    asks_below = false;
                    at = mapping.start - 1;
                }
                Ok(mapping) => {
                    (at, reported) = (mapping.end, mapping.end);
                    found(&mapping);
                }
                Err(Errno::NOENT) => return,
                // Linux before 6.11 has no such ioctl.
                Err(_) => return for_each(maps, found),
            }
        }
    }
}

/// Size of the buffer for a name, in bytes. Only names of files are longer.
const NAME_BYTES: usize = 128;

/// The mapping that a question expects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// Anonymous memory: its name is asked for at once.
    Anonymous,
    /// Any mapping. One with an inode counts as a file. Its name is not needed, and composing the
    /// path would cost the kernel more than the rest of the query, so the name of any other is
    /// asked for in a second query.
    Any,
}

/// Returns the mapping that contains `address`, or the next one above it.
///
/// # Errors
/// Fails with `NOENT` if there is no such mapping, and with another error if the kernel has no such
/// ioctl.
fn ask(maps: impl AsFd, address: usize, expected: Expected) -> Result<Mapping, Errno> {
    use raw::procmap_query_flags as flag;
    let name = [0u8; NAME_BYTES];
    let unnamed =
        raw::procmap_query { query_flags: flag::PROCMAP_QUERY_COVERING_OR_NEXT_VMA as u64, ..question(address) };
    let named = raw::procmap_query {
        vma_name_addr: name.as_ptr().expose_provenance() as u64,
        vma_name_size: NAME_BYTES as u32,
        ..unnamed
    };
    let call = |mut query: raw::procmap_query| {
        // SAFETY: PROCMAP_QUERY takes a `procmap_query`. It refers to no buffer, or to `name`,
        // which has the size that it gives.
        unsafe { raw_ioctl::call(&maps, PROCMAP_QUERY, &mut query) }.map(|_| query)
    };
    let seen = if expected == Expected::Any { Some(call(unnamed)?) } else { None };
    let (query, has_name) = match seen {
        Some(query) if query.inode != 0 => (query, false),
        _ => match call(named) {
            // Meanwhile a mapping of a file has replaced the mapping at this address.
            Err(Errno::NAMETOOLONG) => (call(unnamed)?, false),
            asked => (asked?, true),
        },
    };
    // The kernel wrote to `name`, whose address it got as a number: the compiler must not assume
    // zeros.
    let name = std::hint::black_box(&name);
    let name = &name[..name.iter().position(|&byte| byte == 0).unwrap_or(NAME_BYTES)];
    let has = |flag: flag| query.vma_flags & flag as u64 != 0;
    Ok(Mapping {
        start: query.vma_start as usize,
        end: query.vma_end as usize,
        readable: has(flag::PROCMAP_QUERY_VMA_READABLE),
        writable: has(flag::PROCMAP_QUERY_VMA_WRITABLE),
        executable: has(flag::PROCMAP_QUERY_VMA_EXECUTABLE),
        shared: has(flag::PROCMAP_QUERY_VMA_SHARED),
        kind: if has_name { kind(name, query.inode != 0) } else { Kind::File },
    })
}

/// Returns a query for `address`.
fn question(address: usize) -> raw::procmap_query {
    // SAFETY: the struct consists of integers, for which zero is valid.
    let mut query: raw::procmap_query = unsafe { std::mem::zeroed() };
    query.size = size_of::<raw::procmap_query>() as u64;
    query.query_addr = address as u64;
    query
}

/// Returns the addresses of the mapping that contains `address`, if there is one.
pub fn query(maps: impl AsFd, address: usize) -> Option<Range<usize>> {
    let mut query = question(address);
    // SAFETY: PROCMAP_QUERY takes a `procmap_query`, and this one refers to no buffers.
    match unsafe { raw_ioctl::call(&maps, PROCMAP_QUERY, &mut query) } {
        Ok(_) => Some(query.vma_start as usize..query.vma_end as usize),
        Err(Errno::NOENT) => None,
        // Linux before 6.11 has no such ioctl.
        Err(_) => {
            let mut holding = None;
            for_each(maps, &mut |mapping| {
                if mapping.start <= address && address < mapping.end {
                    holding = Some(mapping.start..mapping.end);
                }
            });
            holding
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_are_parsed() {
        let mapping = parse_line(b"7f1c0a000000-7f1c0a021000 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!((mapping.start, mapping.end), (0x7f1c_0a00_0000, 0x7f1c_0a02_1000));
        assert_eq!(mapping.kind, Kind::Anonymous);
        assert!(mapping.readable && mapping.writable && !mapping.executable && !mapping.shared);
        let kind = |line: &[u8]| parse_line(line).unwrap().kind;
        assert_eq!(kind(b"1000-2000 rw-p 00000000 00:00 0                    [heap]"), Kind::Heap);
        assert_eq!(kind(b"1000-2000 rw-p 00000000 00:00 0                    [anon: Go: heap]"), Kind::Anonymous);
        assert_eq!(kind(b"1000-2000 rw-s 00000000 00:01 7                    [anon_shmem:x]"), Kind::Special);
        assert_eq!(kind(b"1000-2000 r-xp 0001 fe:00 12 /usr/lib/libc.so.6"), Kind::File);
        assert_eq!(kind(b"1000-2000 rw-s 0001 00:05 12 /dev/zero (deleted)"), Kind::File);
        assert_eq!(kind(b"1000-2000 r-xp 0001 00:00 0 [vdso]"), Kind::Special);
    }

    proptest! {
        #[test]
        fn any_line_is_accepted_or_refused(line in prop::collection::vec(any::<u8>(), 0..200)) {
            parse_line(&line);
        }

        #[test]
        fn lines_of_the_kernel_are_parsed(mapping in any_mapping(), offset: u32, inode: u16) {
            prop_assert_eq!(parse_line(&written(&mapping, offset, inode)), Some(mapping));
        }

        #[test]
        fn damaged_lines_give_no_empty_mapping(
            mapping in any_mapping(),
            at in any::<prop::sample::Index>(),
            byte: u8,
            cut in any::<prop::sample::Index>(),
        ) {
            let mut line = written(&mapping, 0, 7);
            let len = line.len();
            line[at.index(len)] = byte;
            for line in [&line[..], &line[..cut.index(len)]] {
                prop_assert!(parse_line(line).is_none_or(|mapping| mapping.start < mapping.end));
            }
        }

        #[test]
        fn any_file_gives_ascending_mappings(
            parts in prop::collection::vec(
                prop_oneof![
                    any_mapping().prop_map(|mapping| [&written(&mapping, 0, 7)[..], b"\n"].concat()),
                    prop::collection::vec(any::<u8>(), 0..100),
                    Just(vec![b'x'; 9000]),
                ],
                0..60,
            )
        ) {
            let file = rustix::fs::memfd_create(c"maps", rustix::fs::MemfdFlags::empty()).unwrap();
            let text = parts.concat();
            let mut rest = &text[..];
            while !rest.is_empty() {
                rest = &rest[rustix::io::write(&file, rest).unwrap()..];
            }
            let mut last = 0;
            for_each(&file, &mut |mapping| {
                assert!(mapping.start >= last && mapping.end > mapping.start);
                last = mapping.end;
            });
            for_each_advised(&file, &mut |_, _, _| unreachable!("no line has flags"));
        }

        #[test]
        fn advice_in_smaps_is_found(
            parts in prop::collection::vec((any_mapping(), 0usize..6, prop::collection::vec(any::<u8>(), 0..60)), 0..20)
        ) {
            let file = rustix::fs::memfd_create(c"smaps", rustix::fs::MemfdFlags::empty()).unwrap();
            let mut expected = Vec::new();
            for (mapping, said, noise) in parts {
                let (flag, advice) = [
                    ("", None),
                    ("hg ", Some((Advice::Huge, Forks::Copy))),
                    ("nh ", Some((Advice::NoHuge, Forks::Copy))),
                    ("hgx", None),
                    ("dc ", Some((Advice::None, Forks::LeaveOut))),
                    ("dc hg ", Some((Advice::Huge, Forks::LeaveOut))),
                ][said];
                let noise: Vec<u8> = noise.into_iter().filter(|&byte| byte != b'\n').collect();
                let noise = [b"Noise: ", &noise[..]].concat();
                let lines = [&written(&mapping, 0, 7)[..], b"Rss:  4 kB", &noise, format!("VmFlags: rd wr {flag}ac").as_bytes(), b""].join(&b'\n');
                let mut rest = &lines[..];
                while !rest.is_empty() {
                    rest = &rest[rustix::io::write(&file, rest).unwrap()..];
                }
                expected.extend(advice.map(|(huge_pages, forks)| (mapping.start..mapping.end, huge_pages, forks)));
            }
            let mut found = Vec::new();
            for_each_advised(&file, &mut |range, huge_pages, forks| found.push((range, huge_pages, forks)));
            prop_assert_eq!(found, expected);
        }
    }

    /// Makes a mapping of any kind.
    fn any_mapping() -> impl Strategy<Value = Mapping> {
        let kinds = [Kind::Anonymous, Kind::Heap, Kind::Stack, Kind::Special, Kind::File];
        (any::<u32>(), 1u32.., any::<[bool; 4]>(), prop::sample::select(kinds.to_vec())).prop_map(
            |(start, pages, [readable, writable, executable, shared], kind)| {
                let start = (start as usize) << 12;
                let end = start + ((pages as usize) << 12);
                Mapping { start, end, readable, writable, executable, shared, kind }
            },
        )
    }

    /// Returns the line with which the kernel describes `mapping`.
    fn written(mapping: &Mapping, offset: u32, inode: u16) -> Vec<u8> {
        let flag = |on: bool, letter: char| if on { letter } else { '-' };
        let (inode, name) = match mapping.kind {
            Kind::Anonymous => (0, ""),
            Kind::Heap => (0, "[heap]"),
            Kind::Stack => (0, "[stack]"),
            Kind::Special => (0, "[vvar_vclock]"),
            Kind::File => (inode, "/tmp/a file (deleted)"),
        };
        let Mapping { start, end, readable, writable, executable, shared, .. } = *mapping;
        let access = [flag(readable, 'r'), flag(writable, 'w'), flag(executable, 'x'), if shared { 's' } else { 'p' }];
        let access: String = access.into_iter().collect();
        let line = format!("{start:x}-{end:x} {access} {offset:08x} fe:00 {inode}");
        format!("{line:<73}{name}").into_bytes()
    }

    #[test]
    fn parts_are_found_with_the_mapping_below() {
        let maps = std::fs::File::open("/proc/self/maps").unwrap();
        // Other threads of the test map and unmap memory, but mappings of files by the loader stay.
        let mut files = Vec::new();
        for_each(&maps, &mut |mapping| {
            if mapping.kind == Kind::File {
                files.push(mapping.start..mapping.end);
            }
        });
        for (index, file) in files.iter().enumerate().skip(1) {
            let mut found = Vec::new();
            let parts = [file.start + 1..file.start + 2, file.end - 1..file.end];
            for_each_around(&maps, &parts, &mut |mapping| found.push(mapping.start..mapping.end));
            assert!(found.contains(file) && found.len() <= 2, "{file:x?} in {found:x?}");
            let below = &files[index - 1];
            assert_eq!(found.contains(below), below.end == file.start || found.len() == 2 && found[0] == *below);
            let mut found = Vec::new();
            for_each_in(&maps, &parts, &mut |mapping| found.push(mapping.start..mapping.end));
            assert_eq!(found, std::slice::from_ref(file));
            let many: Vec<_> = (file.start..).step_by(8).map(|at| at..at + 8).take(MANY_PARTS).collect();
            let mut found = Vec::new();
            for_each_around(&maps, &many, &mut |mapping| found.push(mapping.start..mapping.end));
            assert!(found.contains(file) && found.contains(below));
        }
        let (mut found, everything) = (Vec::new(), 0..usize::MAX);
        for_each_around(&maps, &[everything], &mut |mapping| found.push(mapping.start..mapping.end));
        assert!(found.is_sorted_by(|a, b| a.end <= b.start) && files.iter().all(|file| found.contains(file)));
        let top = found.iter().rev().find(|range| range.end < ADDRESSES_END).unwrap().end;
        for_each_around(&maps, &[top..ADDRESSES_END, ADDRESSES_END..usize::MAX], &mut |mapping| {
            assert!(mapping.start >= top)
        });
    }

    #[test]
    fn mappings_of_this_process_are_found() {
        let maps = std::fs::File::open("/proc/self/maps").unwrap();
        let here = mappings_of_this_process_are_found as fn() as usize;
        assert!(query(&maps, here).unwrap().contains(&here));
        assert_eq!(query(&maps, usize::MAX / 4), None);
        let mut last = 0;
        for_each(&maps, &mut |mapping| {
            assert!(mapping.start >= last);
            last = mapping.end;
        });
        assert!(last > here);
    }
}
