//! Guards of `madvise(2)`, for which the kernel discards content without a userfaultfd message.
//!
//! After the program's call has installed guards, this module discards the range again with
//! MADV_DONTNEED, for which the agent receives a message. MADV_DONTNEED does not remove guards.
//! There is no lock.

use crate::interception::entry::system_call;
use crate::interception::fork_call::read_memory;
use crate::interception::patches::GUARD_INSTALL;
use linux_raw_sys::general as raw;
use std::ops::Range;

/// Maximum number of vectors in a call (`UIO_MAXIOV`); the kernel refuses more.
const MAX_VECTORS: usize = 1024;
/// Number of vectors that are read at once.
const VECTORS: usize = 64;

/// Makes the call if it installs guards, and returns its result. Returns `None` for any other call.
pub fn install(number: u32, arguments: [usize; 6]) -> Option<isize> {
    let [first, second, third, fourth, ..] = arguments;
    let advice = match number {
        raw::__NR_madvise => third,
        raw::__NR_process_madvise => fourth,
        _ => return None,
    };
    if advice as u32 != u32::from(GUARD_INSTALL) {
        return None;
    }
    // SAFETY: the program makes this call itself, with these arguments.
    let result = unsafe { system_call(number, arguments) };
    match (number, usize::try_from(result)) {
        (raw::__NR_madvise, Ok(_)) => discard(first..first.saturating_add(second)),
        // The result of process_madvise(2) is the number of bytes that have guards.
        (_, Ok(bytes)) => for_each_vector(second, third, bytes, &mut discard),
        (_, Err(_)) => {}
    }
    Some(result)
}

/// Calls `act` with the first `bytes` bytes of the ranges of `vectors` vectors at `address`.
fn for_each_vector(address: usize, vectors: usize, mut bytes: usize, act: &mut dyn FnMut(Range<usize>)) {
    const VECTOR_BYTES: usize = size_of::<[usize; 2]>();
    let mut done = 0;
    while bytes > 0 && done < vectors.min(MAX_VECTORS) {
        let len = (vectors - done).min(VECTORS) * VECTOR_BYTES;
        let mut buffer = [0u8; VECTORS * VECTOR_BYTES];
        if read_memory(address + done * VECTOR_BYTES, &mut buffer[..len]).is_err() {
            return;
        }
        for vector in buffer[..len].as_chunks::<VECTOR_BYTES>().0 {
            let (words, _) = vector.as_chunks::<8>();
            let [start, len] = [words[0], words[1]].map(usize::from_ne_bytes);
            let part = start..start.saturating_add(len.min(bytes));
            bytes -= part.len();
            act(part);
        }
        done += VECTORS;
    }
}

/// Discards `range` again, so that the agent receives a message.
fn discard(range: Range<usize>) {
    let arguments = [range.start, range.len(), libc::MADV_DONTNEED as usize, 0, 0, 0];
    // SAFETY: the kernel has already discarded the content of the range.
    unsafe { system_call(raw::__NR_madvise, arguments) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_advice_is_left_to_the_program() {
        assert_eq!(install(raw::__NR_madvise, [0, 0, libc::MADV_DONTNEED as usize, 0, 0, 0]), None);
        assert_eq!(install(raw::__NR_process_madvise, [0, 0, GUARD_INSTALL.into(), 0, 0, 0]), None);
        assert_eq!(install(raw::__NR_getpid, [0, 0, GUARD_INSTALL.into(), GUARD_INSTALL.into(), 0, 0]), None);
    }

    #[test]
    fn only_the_ranges_that_have_guards_are_discarded() {
        let vectors: Vec<[usize; 2]> = (0..200).map(|index| [0x1000 * index, 0x1000]).collect();
        let address = vectors.as_ptr().expose_provenance();
        for bytes in [0, 0x1000, 0x64_000, 0xc8_000] {
            let mut found = Vec::new();
            for_each_vector(address, vectors.len(), bytes, &mut |range| found.push(range));
            let expected: Vec<_> = (0..bytes).step_by(0x1000).map(|start| start..start + 0x1000).collect();
            found.retain(|range| !range.is_empty());
            assert_eq!(found, expected);
        }
    }
}
