//! The swap file of a run: the supervisor creates it, and each companion reopens it.
//!
//! A *shared store* is a swap file in memory (`memfd_create`): the processes of a run store equal
//! pieces there once. The supervisor counts its memory as the run's.
//!
//! Otherwise the file has no name (`O_TMPFILE`), or loses it at once, so a run leaves nothing
//! behind however it ends. Its content is encrypted with a key that only the memory of the run's
//! processes holds ([`crate::cluster_ownership`]). There is no lock.

use crate::cluster_ownership::SwapSpace;
use crate::shared_pieces;
use foliomem_sys::errno_text::ErrnoText;
use foliomem_sys::swap_discard::{self, Backing};
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_BYTES, PAGE_BYTES};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Length of the encryption key, in bytes.
pub const KEY_BYTES: usize = 32;

/// Where the content of a swap file lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Medium {
    /// On a disk, outside of the limit.
    Disk = 0,
    /// In memory, as a part of the limit: the file is a shared store.
    Memory = 1,
}

impl Medium {
    /// Decodes the word in which the segment keeps the medium.
    pub(crate) fn from_word(word: u32) -> Medium {
        if word == Medium::Memory as u32 { Medium::Memory } else { Medium::Disk }
    }

    /// Returns what messages call a file on this medium.
    pub fn file_name(self) -> &'static str {
        match self {
            Medium::Disk => "swap file",
            Medium::Memory => "shared store",
        }
    }
}

/// How a swap file is read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoMode {
    /// Through the page cache.
    Buffered = 0,
    /// Past the page cache (`O_DIRECT`).
    Direct = 1,
}

impl IoMode {
    fn new(is_direct: bool) -> IoMode {
        if is_direct { IoMode::Direct } else { IoMode::Buffered }
    }

    /// Decodes the word in which the segment keeps the mode.
    pub(crate) fn from_word(word: u32) -> IoMode {
        IoMode::new(word != 0)
    }

    fn flags(self) -> OFlags {
        match self {
            IoMode::Buffered => OFlags::empty(),
            IoMode::Direct => OFlags::DIRECT,
        }
    }
}

/// Why the swap file cannot be created.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum CreateError {
    /// A system call failed.
    #[error("cannot {1} the swap file {0}: {why}", why = ErrnoText(*.2))]
    System(PathBuf, &'static str, Errno),
    /// The path names an existing file.
    #[error("{0} exists, and is not overwritten: name a file that does not, or a block device")]
    Exists(PathBuf),
    /// The path names neither a file nor a block device.
    #[error("{0} is neither a file nor a block device")]
    Kind(PathBuf),
    /// The device is mounted, a swap device of the kernel, or part of another device.
    #[error("the block device {0} is in use")]
    InUse(PathBuf),
    /// The size is below one cluster.
    #[error("the swap file {path} would have {kib} KiB, {missing_kib} KiB less than the smallest of {least_mib} MiB: {remedy}", path = .path.display())]
    TooSmall {
        /// The path of the file.
        path: PathBuf,
        /// Its size in KiB.
        kib: u64,
        /// The missing part, in KiB.
        missing_kib: u64,
        /// The minimum size, in MiB.
        least_mib: u64,
        /// The remedy for the user.
        remedy: &'static str,
    },
    /// The requested size exceeds the size of the device.
    #[error("the block device {path} has only {mib} MiB, {missing_mib} MiB less than asked for", path = .path.display())]
    Device {
        /// The device.
        path: PathBuf,
        /// Its size, in MiB.
        mib: u64,
        /// The missing part, in MiB.
        missing_mib: u64,
    },
}

/// An open swap file.
#[derive(Debug)]
pub struct Created {
    /// The file; closing the last descriptor removes it.
    pub file: OwnedFd,
    /// The usable size, in bytes: whole clusters.
    pub bytes: u64,
    /// Whether reads and writes bypass the page cache.
    pub io_mode: IoMode,
    /// How free clusters are discarded.
    pub discard: Discard,
    /// Whether a file that an earlier run had left behind was removed.
    pub was_stale: bool,
    /// Whether the file lies on a file system in memory.
    pub in_memory: bool,
    /// Where its content lies: [`Medium::Disk`] also for a file that the user has put into memory.
    pub medium: Medium,
}

/// The name of a shared store, as `/proc/PID/fd` of its supervisor shows it.
pub const SHARED_STORE_NAME: &str = "foliomem-shared-store";

/// Creates a shared store of `bytes`: at least one cluster, and at most
/// [`shared_pieces::MAX_BYTES`]. Fails if a system call fails.
pub fn create_shared(bytes: u64) -> Result<Created, Errno> {
    let bytes = bytes.clamp(CLUSTER_BYTES, shared_pieces::MAX_BYTES) / CLUSTER_BYTES * CLUSTER_BYTES;
    let file = fs::memfd_create(SHARED_STORE_NAME, fs::MemfdFlags::CLOEXEC)?;
    fs::ftruncate(&file, bytes)?;
    let discard = swap_discard::probe(&file, Backing::File);
    let (io_mode, medium) = (IoMode::Buffered, Medium::Memory);
    Ok(Created { file, bytes, io_mode, discard, was_stale: false, in_memory: true, medium })
}

/// Returns the memory that a shared store takes, in bytes.
pub fn taken_bytes(file: &OwnedFd) -> Result<u64, Errno> {
    Ok(fs::fstat(file)?.st_blocks as u64 * 512)
}

/// Creates the swap file of a run: an unnamed file in the directory of `path`, or the block device
/// `path`. The size is `bytes`, else `default_bytes`, but at most half of the file system's free
/// room. Fails if the path is in use or the size is too small, or if a system call fails.
pub fn create(path: &Path, bytes: Option<u64>, default_bytes: u64) -> Result<Created, CreateError> {
    let failed = |what| move |errno| CreateError::System(path.to_owned(), what, errno);
    let kind = match fs::stat(path) {
        Ok(stat) => Some((FileType::from_raw_mode(stat.st_mode), stat)),
        Err(Errno::NOENT) => None,
        Err(errno) => return Err(failed("look at")(errno)),
    };
    let mut was_stale = false;
    match kind {
        Some((FileType::BlockDevice, _)) => return open_device(path, bytes),
        Some((FileType::RegularFile, stat)) => {
            let own = stat.st_size == 0
                && stat.st_mode & 0o777 == 0o600
                && stat.st_uid == rustix::process::geteuid().as_raw();
            if !own {
                return Err(CreateError::Exists(path.to_owned()));
            }
            // An earlier run was killed between creating the file and removing its name.
            fs::unlink(path).map_err(failed("remove the stale one of"))?;
            was_stale = true;
        }
        Some(_) => return Err(CreateError::Kind(path.to_owned())),
        None => {}
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    let owner_only = Mode::RUSR | Mode::WUSR;
    let file = match fs::openat(fs::CWD, directory, flags | OFlags::TMPFILE, owner_only) {
        Ok(file) => file,
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
            let flags = flags | OFlags::CREATE | OFlags::NOFOLLOW;
            let file = fs::openat(fs::CWD, path, flags, owner_only).map_err(failed("create"))?;
            fs::unlink(path).map_err(failed("take the name from"))?;
            file
        }
        Err(errno) => return Err(failed("create")(errno)),
    };
    let system = fs::fstatfs(&file).map_err(failed("look at"))?;
    const TMPFS_MAGIC: u32 = 0x0102_1994;
    let free_bytes = system.f_bavail.saturating_mul(system.f_bsize as u64);
    let remedy = match bytes {
        Some(_) => "name a larger size after the colon",
        None => "the file system has too little room for one, of which half is used",
    };
    let bytes = whole_clusters(path, bytes.unwrap_or(default_bytes.min(free_bytes / 2)), remedy)?;
    fs::ftruncate(&file, bytes).map_err(failed("size"))?;
    let (file, io_mode) = go_direct(file);
    let (discard, in_memory) = (swap_discard::probe(&file, Backing::File), system.f_type as u32 == TMPFS_MAGIC);
    Ok(Created { file, bytes, io_mode, discard, was_stale, in_memory, medium: Medium::Disk })
}

/// Returns the part of `bytes` that can be used: whole clusters, up to the maximum size.
fn whole_clusters(path: &Path, bytes: u64, remedy: &'static str) -> Result<u64, CreateError> {
    if bytes < CLUSTER_BYTES {
        let (kib, missing_kib, least_mib) = (bytes >> 10, (CLUSTER_BYTES - bytes).div_ceil(1024), CLUSTER_BYTES >> 20);
        return Err(CreateError::TooSmall { path: path.to_owned(), kib, missing_kib, least_mib, remedy });
    }
    Ok(bytes.min(SwapSpace::MAX_BYTES) / CLUSTER_BYTES * CLUSTER_BYTES)
}

fn open_device(path: &Path, bytes: Option<u64>) -> Result<Created, CreateError> {
    let failed = |what| move |errno| CreateError::System(path.to_owned(), what, errno);
    // O_EXCL fails while the device is mounted or in use otherwise, and keeps others from using it.
    let file = match fs::openat(fs::CWD, path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::BUSY) => return Err(CreateError::InUse(path.to_owned())),
        Err(errno) => return Err(failed("open")(errno)),
    };
    let has_bytes = fs::seek(&file, fs::SeekFrom::End(0)).map_err(failed("measure"))?;
    if let Some(missing_bytes) = bytes.and_then(|bytes| bytes.checked_sub(has_bytes)).filter(|&missing| missing > 0) {
        let (mib, missing_mib) = (has_bytes >> 20, missing_bytes.div_ceil(1 << 20));
        return Err(CreateError::Device { path: path.to_owned(), mib, missing_mib });
    }
    let bytes = whole_clusters(path, bytes.unwrap_or(has_bytes), "use a larger device or size")?;
    // The flag is set on the open descriptor. Reopening the device would fail, because this process
    // has it open exclusively.
    let is_direct = fs::fcntl_setfl(&file, OFlags::DIRECT).is_ok() && can_read(&file);
    if !is_direct {
        fs::fcntl_setfl(&file, OFlags::empty()).map_err(failed("open"))?;
    }
    let discard = swap_discard::probe(&file, Backing::Device);
    let (io_mode, medium) = (IoMode::new(is_direct), Medium::Disk);
    Ok(Created { file, bytes, io_mode, discard, was_stale: false, in_memory: false, medium })
}

/// Makes the file bypass the page cache if the file system supports that.
fn go_direct(file: OwnedFd) -> (OwnedFd, IoMode) {
    let is_direct = fs::fcntl_setfl(&file, OFlags::DIRECT).is_ok() && can_read(&file);
    if !is_direct {
        // Clearing a flag that could not be set cannot matter.
        let _ = fs::fcntl_setfl(&file, OFlags::empty());
    }
    (file, IoMode::new(is_direct))
}

/// Returns whether the first page can be read past the page cache, into aligned memory.
fn can_read(file: &OwnedFd) -> bool {
    let mut memory = vec![0; 2 * PAGE_BYTES];
    let start = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) - memory.as_ptr().addr();
    let mut page = &mut memory[start..start + PAGE_BYTES];
    let mut offset = 0;
    while !page.is_empty() {
        match rustix::io::pread(file, &mut *page, offset) {
            Ok(0) => return false,
            Ok(read) => {
                page = &mut page[read..];
                offset += read as u64;
            }
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

/// Opens the file that process `pid` has open as `descriptor`. Fails with `ESTALE` if it has
/// another identity than [`identity_of`] returned.
pub fn reopen(pid: u32, descriptor: u32, io_mode: IoMode, identity: (u64, u64)) -> Result<OwnedFd, Errno> {
    let mut path = [0; 64];
    let len = format_path(&mut path, pid, descriptor);
    let path = Path::new(std::ffi::OsStr::from_bytes(&path[..len]));
    let flags = OFlags::RDWR | OFlags::CLOEXEC | io_mode.flags();
    let file = fs::openat(fs::CWD, path, flags, Mode::empty())?;
    if identity_of(&file)? != identity {
        return Err(Errno::STALE);
    }
    Ok(file)
}

fn format_path(path: &mut [u8; 64], pid: u32, descriptor: u32) -> usize {
    use std::io::Write;
    let room = path.len();
    let mut rest = &mut path[..];
    // The buffer has room for two numbers of ten digits.
    let _ = write!(rest, "/proc/{pid}/fd/{descriptor}");
    room - rest.len()
}

/// Returns the device and the inode number of a file; of a block device, its device number.
pub fn identity_of(file: impl AsFd) -> Result<(u64, u64), Errno> {
    let stat = fs::fstat(file)?;
    Ok((
        stat.st_dev,
        if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice { stat.st_rdev } else { stat.st_ino },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("foliomem-swap-{}-{name}", std::process::id()))
    }

    #[test]
    fn only_a_file_that_a_killed_run_left_is_removed() {
        let path = scratch("there");
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(create(&path, None, 4 << 20).err(), Some(CreateError::Exists(path.clone())));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::write(&path, "").unwrap();
        assert_eq!(create(&path, None, 4 << 20).err(), Some(CreateError::Exists(path.clone())), "others may read it");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let created = create(&path, None, 4 << 20).unwrap();
        assert!(created.was_stale && !path.exists());
        assert_eq!(create(Path::new("/proc"), None, 4 << 20).err(), Some(CreateError::Kind("/proc".into())));
        assert!(matches!(create(Path::new("/nonexistent/f"), None, 4 << 20), Err(CreateError::System(..))));
        assert!(matches!(create(&path, Some(1 << 20), 0), Err(CreateError::TooSmall { .. })));
    }

    #[test]
    fn the_name_is_removed_at_once_if_files_need_one() {
        // procfs supports neither unnamed files nor new names; the error must be that of creating a
        // file with a name.
        let error = create(Path::new("/proc/self/swap"), Some(4 << 20), 0).unwrap_err();
        assert!(matches!(error, CreateError::System(_, "create", _)), "{error}");
    }
}
