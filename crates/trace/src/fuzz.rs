//! A target of the fuzzer (`fuzz/`): it takes any bytes, and must not panic.
//!
//! The kept corpus is replayed by the test of this module.

use crate::{TraceReader, file_of_block};
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/trace");
        let files: Vec<_> = std::fs::read_dir(folder).expect("a corpus").collect();
        assert!(!files.is_empty(), "{folder}");
        for file in files {
            trace(&std::fs::read(file.unwrap().path()).unwrap());
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
