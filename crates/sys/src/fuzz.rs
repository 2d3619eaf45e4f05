//! Targets of the fuzzer (`fuzz/`). Each takes any bytes, and must neither panic nor fail an
//! assertion.
//!
//! The tests of this module replay the kept corpus.

use crate::interception::fork_call::{CallKind, ForkCall};
use crate::{maps, userfaultfd};
use linux_raw_sys::general as raw;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, memfd_create};

/// Makes a file in memory with `content`.
fn file(content: &[u8]) -> OwnedFd {
    let fd = memfd_create(c"fuzz", MemfdFlags::CLOEXEC).expect("a file in memory");
    rustix::io::pwrite(&fd, content, 0).expect("room for it");
    fd
}

/// Parses `data` as `/proc/self/maps`.
pub fn maps(data: &[u8]) {
    maps::for_each(file(data), &mut |mapping| assert!(mapping.start < mapping.end));
}

/// Parses `data` as `/proc/self/smaps`.
pub fn smaps(data: &[u8]) {
    let fd = file(data);
    maps::for_each_advised(&fd, &mut |range, _, _| assert!(range.start < range.end));
    maps::for_each_flagged(&fd, &mut |_, flags| assert!(!flags.contains(&b'\n')));
}

/// Decodes `data` as userfaultfd messages.
pub fn userfaultfd_messages(data: &[u8]) {
    for bytes in data.chunks(size_of::<raw::uffd_msg>()) {
        let mut message = [0; size_of::<raw::uffd_msg>()];
        message[..bytes.len()].copy_from_slice(bytes);
        userfaultfd::decode(message);
    }
}

/// Reads `data` as the arguments of fork, clone or clone3. The first byte selects the call; the
/// rest is the `struct clone_args` or the six arguments.
pub fn fork_arguments(data: &[u8]) {
    let Some((&which, rest)) = data.split_first() else { return };
    let words: [usize; 6] = std::array::from_fn(|index| {
        let mut word = [0; 8];
        let bytes = rest.chunks(8).nth(index).unwrap_or_default();
        word[..bytes.len()].copy_from_slice(bytes);
        usize::from_ne_bytes(word)
    });
    let call = match which % 4 {
        0 => ForkCall::read(raw::__NR_fork, words),
        1 => ForkCall::read(raw::__NR_clone, words),
        2 => ForkCall::read(raw::__NR_clone3, words),
        _ => ForkCall::read(raw::__NR_clone3, [rest.as_ptr().expose_provenance(), rest.len(), 0, 0, 0, 0]),
    };
    if let CallKind::Fork(call) = call {
        assert_eq!(call.result(), 0);
        call.child_stack();
    }
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::*;
    use replay::replay;

    #[test]
    fn the_corpus_is_replayed() {
        replay("maps", maps);
        replay("smaps", smaps);
        replay("userfaultfd_messages", userfaultfd_messages);
        replay("fork_arguments", fork_arguments);
    }
}
