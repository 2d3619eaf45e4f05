//! A file that is mapped for reading. There is no lock.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;

/// See the module. Unmapped on drop.
#[derive(Debug)]
pub struct FileMapping {
    start: usize,
    len: usize,
}

impl FileMapping {
    /// Maps the first `len` bytes of `file`, which nobody else shortens meanwhile: what is read beyond its end ends the program.
    pub fn new(file: &File, len: usize) -> Result<FileMapping, Errno> {
        if file.metadata().map_err(|_| Errno::IO)?.len() < len as u64 {
            return Err(Errno::INVAL);
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0) }?;
        Ok(FileMapping { start: start.expose_provenance(), len })
    }

    /// The byte at `offset`.
    pub fn byte(&self, offset: usize) -> u8 {
        assert!(offset < self.len, "{offset} of {}", self.len);
        let byte: *const u8 = std::ptr::with_exposed_provenance(self.start + offset);
        // SAFETY: within the mapping, which lives as long as this does; volatile, because the file may change.
        unsafe { byte.read_volatile() }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made above; nobody has a pointer into it.
        let unmapped = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.start), self.len) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_byte_is_the_files() {
        let path = std::env::temp_dir().join(format!(".foliomem-mapping-{}", std::process::id()));
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(b"folio").unwrap();
        let mapping = FileMapping::new(&file, 5).unwrap();
        assert_eq!([mapping.byte(0), mapping.byte(4)], *b"fo");
        assert!(FileMapping::new(&file, 6).is_err(), "longer than the file");
    }
}
