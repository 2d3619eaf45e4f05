//! A target of the fuzzer (`fuzz/`): it accepts any bytes, and must neither panic nor fail an
//! assertion.
//!
//! The tests of this module replay the kept corpus.

use crate::segment::Control;
use foliomem_types::settings::{Configuration, Limit};
use rustix::fd::OwnedFd;
use std::sync::OnceLock;

/// Overwrites a shared segment and uses it. The first two bytes of `data` give the offset, in units
/// of 16 bytes.
pub fn shared_segment(data: &[u8]) {
    static SEGMENT: OnceLock<(&Control, OwnedFd)> = OnceLock::new();
    let configuration = Configuration { reclaimers: 1, ..Configuration::plain(Limit::Bytes(1 << 30)) };
    let (control, fd) = SEGMENT.get_or_init(|| Control::create(&configuration).expect("a segment"));
    let &[low, high, ref noise @ ..] = data else { return };
    rustix::io::pwrite(fd, noise, u64::from(u16::from_le_bytes([low, high])) * 16).expect("room in the segment");
    let found = control.configuration();
    assert_eq!(found.codec.to_string().parse(), Ok(found.codec));
    control.failure();
    control.take_notices();
    control.compare_with_parents();
    control.follow_need();
    control.wanted_limit();
    control.processes_seen();
    control.awake_processes();
    control.sum();
    control.pids();
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
        replay("shared_segment", shared_segment);
    }
}
