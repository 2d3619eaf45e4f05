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
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::*;
    use replay::replay;

    #[test]
    fn the_corpus_is_replayed() {
        replay("trace", trace);
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
