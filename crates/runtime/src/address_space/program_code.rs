//! The program's code: whether it can make system calls that the agent does not see.
//!
//! Two kinds of calls change the content of memory without a message of the kernel: those that
//! discard swapped-out content (guards of `madvise(2)`), and those that lend pages to others by
//! reference (`vmsplice(2)`, io_uring, `SO_ZEROCOPY`). The precautions against them are expensive:
//! [`crate::address_space::marks`] and [`crate::address_space::lent_pages`]. The agent takes them
//! only if they are needed:
//!
//! - The agent sees calls of the C library, whose system calls are patched
//!   ([`foliomem_sys::interception::patches`]).
//! - Other code can make such a call only with a `syscall` instruction of its own. So the agent
//!   searches the code of the program at activation, and each library that is loaded later before
//!   any of its code runs. If there is a call whose number is one of the above, or unknown, the
//!   program *can make unseen calls* for the rest of its life ([`foliomem_sys::unseen_calls`]).
//!
//! The agent does not search code that is generated at run time (JIT compilers call the C library,
//! or functions of libraries), and files that a program maps for execution without the loader. Only
//! one thread at a time searches. There is no lock.

use crate::address_space::ranges::Ranges;
use crate::companion::context::Context;
use crate::companion::error::RuntimeError;
use foliomem_sys::machine_code::{self, WINDOW_BYTES, flow};
use foliomem_sys::maps::{self, Kind, Mapping};
use foliomem_sys::unseen_calls;
use linux_raw_sys::general as raw;
use rustix::fd::OwnedFd;
use std::ops::Range;

/// The calls that discard or lend memory.
const WATCHED: [u32; 7] = [
    raw::__NR_madvise,
    raw::__NR_process_madvise,
    raw::__NR_vmsplice,
    raw::__NR_io_uring_setup,
    raw::__NR_io_uring_enter,
    raw::__NR_io_uring_register,
    raw::__NR_setsockopt,
];
/// Size of the parts in which code is read, in bytes.
const PART_BYTES: usize = 256 << 10;

/// Searches the code that is new since the last call; `searched` has the code of that call. Only
/// one thread at a time may call. Fails if a file of the process in /proc cannot be opened.
pub(crate) fn search(context: &Context, searched: &Ranges) -> Result<(), RuntimeError> {
    unseen_calls::watch();
    if unseen_calls::can_be_made() {
        return Ok(());
    }
    let present = Ranges::default();
    maps::for_each(context.open("self/maps")?, &mut |mapping| {
        if is_code_of_program(mapping) {
            present.insert(mapping.start..mapping.end);
        }
    });
    for gone in searched.snapshot().into_iter().flat_map(|range| present.missing(range)) {
        searched.remove(gone);
    }
    let memory = context.open("self/mem")?;
    for new in present.snapshot().into_iter().flat_map(|range| searched.missing(range)) {
        if can_make_unseen(&memory, new.clone()) {
            unseen_calls::assume();
            return Ok(());
        }
        searched.insert(new);
    }
    Ok(())
}

fn is_code_of_program(mapping: &Mapping) -> bool {
    mapping.executable && mapping.kind == Kind::File && !unseen_calls::has_seen_code_in(&(mapping.start..mapping.end))
}

/// Returns whether the code in `range` can make a watched call. Unreadable code counts as yes.
fn can_make_unseen(memory: &OwnedFd, range: Range<usize>) -> bool {
    seems_to_make_unseen(memory, range.clone()) && !makes_only_others(memory, range)
}

/// Returns whether each system call of the code in `range` is a known one that is not watched, if
/// the numbers are followed through all of the code.
fn makes_only_others(memory: &OwnedFd, range: Range<usize>) -> bool {
    if range.len() > flow::MAX_BYTES {
        return false;
    }
    let mut code = vec![0; range.len()];
    let is_read =
        matches!(rustix::io::pread(memory, &mut code[..], range.start as u64), Ok(read) if read == range.len());
    is_read && flow::are_known_and_others(&code, machine_code::suspects(&code, 0, &WATCHED), &WATCHED)
}

/// Returns whether the code in `range` can make a watched call, judged by the instructions right
/// before each call. Unreadable code counts as yes.
fn seems_to_make_unseen(memory: &OwnedFd, range: Range<usize>) -> bool {
    let mut buffer = vec![0; WINDOW_BYTES + PART_BYTES];
    let (mut at, mut kept) = (range.start, 0);
    while at < range.end {
        let len = (range.end - at).min(PART_BYTES);
        let Ok(read @ 1..) = rustix::io::pread(memory, &mut buffer[kept..kept + len], at as u64) else { return true };
        let filled = kept + read;
        // The last byte of the previous part may be the first byte of a call.
        if machine_code::suspects(&buffer[..filled], kept.saturating_sub(1), &WATCHED).next().is_some() {
            return true;
        }
        at += read;
        kept = filled.min(WINDOW_BYTES);
        buffer.copy_within(filled - kept..filled, 0);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn memory() -> OwnedFd {
        OwnedFd::from(File::open("/proc/self/mem").unwrap())
    }

    fn code_of(name: &[u8]) -> Vec<Range<usize>> {
        let maps = std::fs::read("/proc/self/maps").unwrap();
        let lines = maps.split(|&byte| byte == b'\n');
        let of = lines.filter(|line| line.windows(name.len()).any(|part| part == name));
        let mappings = of.filter_map(maps::parse_line);
        mappings.filter(|mapping| mapping.executable).map(|mapping| mapping.start..mapping.end).collect()
    }

    #[test]
    fn the_c_library_can_make_all_calls_and_the_math_library_none() {
        // SAFETY: the library's constructors have no side effects.
        let library = unsafe { libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        let (libc, libm) = (code_of(b"/libc.so.6"), code_of(b"/libm.so.6"));
        assert!(!libc.is_empty() && libc.into_iter().any(|range| can_make_unseen(&memory(), range)));
        assert!(!libm.is_empty() && !libm.into_iter().any(|range| can_make_unseen(&memory(), range)));
    }

    #[test]
    fn a_call_across_two_parts_is_found() {
        let len = 2 * PART_BYTES;
        for offset in [PART_BYTES - 2, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1] {
            let mut code = vec![0x90u8; len];
            code[offset - 5..offset + 2].copy_from_slice(&[0xb8, 28, 0, 0, 0, 0x0f, 0x05]);
            let start = code.as_ptr().expose_provenance();
            assert!(can_make_unseen(&memory(), start..start + len), "at {offset}");
        }
    }

    #[test]
    fn unreadable_code_counts_as_yes() {
        assert!(can_make_unseen(&memory(), 0x1000..0x2000));
    }
}
