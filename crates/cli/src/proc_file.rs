//! Reads files of `/proc`.
//!
//! The kernel says that such a file is empty, and the standard library then begins to read with a
//! small buffer. Each call costs as much as the text does.

use std::fs::File;
use std::io::{Read, Result};
use std::path::Path;

/// Most files are shorter, in bytes.
const USUAL_BYTES: usize = 4096;

/// Returns the content of a file.
pub fn read(path: impl AsRef<Path>) -> Result<Vec<u8>> {
    let mut content = Vec::with_capacity(USUAL_BYTES);
    File::open(path)?.read_to_end(&mut content)?;
    Ok(content)
}

/// Returns the text of a file. What is not UTF-8, as names of processes may be, is replaced.
pub fn read_text(path: impl AsRef<Path>) -> Result<String> {
    read(path).map(|content| String::from_utf8_lossy(&content).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_whole() {
        let smaps = read_text("/proc/self/smaps").unwrap();
        assert!(smaps.len() > USUAL_BYTES && smaps.ends_with('\n'), "{smaps}");
        assert_eq!(read("/proc/self/comm").unwrap(), std::fs::read("/proc/self/comm").unwrap());
        assert!(read("/proc/self/missing").is_err());
    }
}
