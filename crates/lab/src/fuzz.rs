//! Targets of the fuzzer (`fuzz/`): each takes any bytes, and must not panic.
//!
//! The kept corpus is replayed by the tests of this module.

use crate::scenario::Scenario;
use crate::trace::{TraceReader, file_of_block};
use std::path::Path;

/// Traces: these bytes as a file, and as the content of a block of one.
pub fn trace(data: &[u8]) {
    for file in [data, &file_of_block(data)] {
        if let Ok(reader) = TraceReader::new(file, Path::new("fuzz")) {
            // An error ends it.
            reader.take_while(Result::is_ok).for_each(drop);
        }
    }
}

/// Scenarios.
pub fn scenario(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = Scenario::parse("fuzz", text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Target = fn(&[u8]);

    #[test]
    fn the_corpus_is_replayed() {
        let targets: [(&str, Target); 2] = [("trace", trace), ("scenario", scenario)];
        for (name, target) in targets {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/").to_owned() + name;
            let files: Vec<_> = std::fs::read_dir(&folder).expect("a corpus").collect();
            assert!(!files.is_empty(), "{folder}");
            for file in files {
                target(&std::fs::read(file.unwrap().path()).unwrap());
            }
        }
    }

    #[test]
    fn the_content_of_a_block_is_read() {
        // A process starts (tag 2), and then a tag that no event has.
        let file = file_of_block(&[2, 0, 77]);
        let mut records = TraceReader::new(&file[..], Path::new("fuzz")).unwrap();
        assert!(records.next().unwrap().is_ok());
        assert!(records.next().unwrap().is_err());
    }
}
