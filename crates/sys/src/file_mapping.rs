//! A file that is mapped read-only, for reading single bytes. There is no lock.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;

/// The mapping of a file. Unmapped on drop.
#[derive(Debug)]
pub struct FileMapping {
    start: usize,
    len: usize,
}

impl FileMapping {
    /// Maps the first `len` bytes of `file`.
    ///
    /// The caller ensures that nobody shortens the file: a read behind its end would raise SIGBUS.
    ///
    /// # Errors
    /// Fails with `INVAL` if the file is shorter than `len`, with `IO` if its length cannot be
    /// read, or if the kernel refuses the mapping.
    pub fn new(file: &File, len: usize) -> Result<FileMapping, Errno> {
        if file.metadata().map_err(|_| Errno::IO)?.len() < len as u64 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the kernel chooses the address of the new mapping, so nothing else is affected.
        let start = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0) }?;
        Ok(FileMapping { start: start.expose_provenance(), len })
    }

    /// Returns the byte at `offset`.
    ///
    /// # Panics
    /// If `offset` lies outside of the mapping.
    pub fn byte(&self, offset: usize) -> u8 {
        assert!(offset < self.len, "{offset} of {}", self.len);
        let byte: *const u8 = std::ptr::with_exposed_provenance(self.start + offset);
        // SAFETY: the address lies within the mapping, which lives as long as `self`. The read is
        // volatile because another process may change the file.
        unsafe { byte.read_volatile() }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and no pointer into it leaves this type.
        let unmapped = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.start), self.len) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_byte_comes_from_the_file() {
        let path = std::env::temp_dir().join(format!(".foliomem-mapping-{}", std::process::id()));
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(b"folio").unwrap();
        let mapping = FileMapping::new(&file, 5).unwrap();
        assert_eq!([mapping.byte(0), mapping.byte(4)], *b"fo");
        assert!(FileMapping::new(&file, 6).is_err(), "longer than the file");
    }
}
