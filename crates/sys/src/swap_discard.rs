//! Discards free clusters of the swap file: holes in a file, TRIM on a block device. There is no
//! lock.

use crate::raw_ioctl;
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_BYTES, ClusterNumber, PAGE_BYTES, Slot};
use rustix::fd::AsFd;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::ioctl::Opcode;
use std::ops::Range;

/// The kind of a swap file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// A file of a file system.
    File,
    /// A block device.
    Device,
}

/// Returns how clusters of `file` can be discarded. It tries this with the first cluster, which
/// must not yet contain data.
pub fn probe(file: impl AsFd, backing: Backing) -> Discard {
    let wanted = match backing {
        Backing::File => Discard::ForRoom,
        Backing::Device => Discard::ForDevice,
    };
    if discard(file, wanted, ClusterNumber(0)).is_ok() { wanted } else { Discard::Never }
}

/// Discards a cluster in the way that [`probe`] has returned. Its content is unspecified
/// afterwards.
///
/// # Errors
/// Fails with `OPNOTSUPP` for [`Discard::Never`], or if the file system or the device refuses.
pub fn discard(file: impl AsFd, how: Discard, cluster: ClusterNumber) -> Result<(), Errno> {
    match how {
        Discard::Never => Err(Errno::OPNOTSUPP),
        Discard::ForRoom => discard_slots(file, cluster.slots().start.0..cluster.slots().end.0),
        Discard::ForDevice => {
            let mut range = [cluster.slots().start.offset_bytes(), CLUSTER_BYTES];
            // SAFETY: BLKDISCARD reads two words, start and length in bytes, and touches no other
            // memory.
            unsafe { raw_ioctl::call(file, linux_raw_sys::ioctl::BLKDISCARD as Opcode, &mut range) }.map(drop)
        }
    }
}

/// Punches a hole in the place of `slots` of a file.
///
/// # Errors
/// The system call fails.
pub fn discard_slots(file: impl AsFd, slots: Range<u32>) -> Result<(), Errno> {
    let (start, slots) = (Slot(slots.start).offset_bytes(), slots.end - slots.start);
    let len = u64::from(slots) * PAGE_BYTES as u64;
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{fstat, ftruncate};
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_discarded_cluster_takes_no_room_and_its_neighbours_stay() {
        let path = std::env::temp_dir().join(format!("foliomem-discard-{}", std::process::id()));
        let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let all = vec![7u8; 3 * CLUSTER_BYTES as usize];
        file.write_all_at(&all, 0).unwrap();
        file.sync_all().unwrap();
        let file = std::os::fd::OwnedFd::from(file);
        let before = fstat(&file).unwrap();
        assert!(discard(&file, Discard::Never, ClusterNumber(1)).is_err());
        assert!(discard(&file, Discard::ForDevice, ClusterNumber(1)).is_err(), "the file is not a device");
        discard(&file, Discard::ForRoom, ClusterNumber(1)).unwrap();
        let after = fstat(&file).unwrap();
        assert_eq!((after.st_size, before.st_blocks - after.st_blocks), (before.st_size, CLUSTER_BYTES as i64 / 512));
        let mut found = vec![1u8; all.len()];
        std::fs::File::from(file.try_clone().unwrap()).read_exact_at(&mut found, 0).unwrap();
        for (cluster, expected) in found.chunks(CLUSTER_BYTES as usize).zip([7, 0, 7]) {
            assert!(cluster.iter().all(|&byte| byte == expected));
        }
        // A file that cannot be written cannot be discarded.
        ftruncate(&file, 0).unwrap();
        let read_only = std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert_eq!(
            [probe(&file, Backing::File), probe(&read_only, Backing::File), probe(&file, Backing::Device)],
            [Discard::ForRoom, Discard::Never, Discard::Never]
        );
    }
}
