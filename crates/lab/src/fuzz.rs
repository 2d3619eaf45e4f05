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
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/scenario");
        let files: Vec<_> = std::fs::read_dir(folder).expect("a corpus").collect();
        assert!(!files.is_empty(), "{folder}");
        for file in files {
            scenario(&std::fs::read(file.unwrap().path()).unwrap());
        }
    }
}
