//! A target of the fuzzer (`fuzz/`): it takes any bytes, and must not panic.
//!
//! The kept corpus is replayed by the test of this module.

use crate::scenario::Scenario;

/// Scenarios.
pub fn scenario(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = Scenario::parse("fuzz", text);
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
        replay("scenario", scenario);
    }
}
