//! The directory of a door, and the removal of those that killed runs have left.
//!
//! A supervisor that is killed removes nothing. So each one keeps a lock on its directory, and each
//! new one removes the directories of its user on which nobody has a lock.

use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, openat};
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The beginning of a directory's name, before the digits of a random number.
const PREFIX: &str = "foliomem-";
const DIGITS: usize = 16;
/// The name of the socket.
const SOCKET: &str = "control";
/// Minimum age of a directory that is removed: a younger one may belong to a run that has not
/// locked it yet.
const MIN_AGE: Duration = Duration::from_secs(10);

/// A directory for one socket. Dropping it removes both.
#[derive(Debug)]
pub(super) struct Room {
    directory: PathBuf,
    socket: PathBuf,
    /// The directory, locked where its file system has locks.
    _lock: OwnedFd,
}

impl Room {
    /// Creates a directory in `parent` that all users may enter, and nobody else may list.
    pub(super) fn new(parent: &Path) -> io::Result<Room> {
        let mut key = [0u8; DIGITS / 2];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
        let directory = parent.join(format!("{PREFIX}{:0DIGITS$x}", u64::from_ne_bytes(key)));
        std::fs::DirBuilder::new().mode(0o711).create(&directory)?;
        let lock = open(&directory)?;
        // Without a lock, nobody else gets one here, and so nobody removes the directory.
        let _ = flock(&lock, FlockOperation::NonBlockingLockShared);
        Ok(Room { socket: directory.join(SOCKET), directory, _lock: lock })
    }

    /// Returns the path of the socket.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        remove(&self.directory);
    }
}

/// Removes the directories in `parent` that killed supervisors of this user have left.
pub(super) fn remove_left(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    let named = entries.flatten().filter(|entry| is_name(&entry.file_name()));
    for directory in named.map(|entry| entry.path()).filter(|directory| is_old_and_own(directory)) {
        // The directory stays locked until it is gone.
        if let Ok(lock) = open(&directory)
            && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            remove(&directory);
        }
    }
}

fn open(directory: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(rustix::fs::CWD, directory, flags, Mode::empty())?)
}

fn is_name(name: &OsStr) -> bool {
    let digits = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    digits.is_some_and(|digits| digits.len() == DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

fn is_old_and_own(directory: &Path) -> bool {
    let Ok(metadata) = directory.symlink_metadata() else { return false };
    let is_old = metadata.modified().is_ok_and(|then| then.elapsed().is_ok_and(|age| age >= MIN_AGE));
    metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw() && is_old
}

fn remove(directory: &Path) {
    let _ = std::fs::remove_file(directory.join(SOCKET));
    // This fails if somebody has put something else into it.
    let _ = std::fs::remove_dir(directory);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::net::UnixListener;
    use std::time::SystemTime;

    fn make_old(directory: &Path) {
        let then = SystemTime::now() - MIN_AGE;
        File::open(directory).unwrap().set_modified(then).unwrap();
    }

    #[test]
    fn what_killed_runs_have_left_is_removed_and_nothing_else() {
        let parent = std::env::temp_dir().join(format!("foliomem-rooms-{}", std::process::id()));
        std::fs::create_dir(&parent).unwrap();
        let left = |number: u32| {
            let directory = parent.join(format!("{PREFIX}{number:016x}"));
            std::fs::create_dir(&directory).unwrap();
            drop(UnixListener::bind(directory.join(SOCKET)).unwrap());
            directory
        };
        let (old, young, with_a_file) = (left(1), left(2), left(3));
        std::fs::write(with_a_file.join("file"), "somebody's").unwrap();
        let used = Room::new(&parent).unwrap();
        drop(UnixListener::bind(used.socket()).unwrap());
        let others =
            ["foliomem-0123", "foliomem-0123456789abcdeg", "other-0123456789abcdef"].map(|name| parent.join(name));
        others.iter().for_each(|other| std::fs::create_dir(other).unwrap());
        [&old, &with_a_file, &used.directory].into_iter().chain(&others).for_each(|directory| make_old(directory));
        remove_left(&parent);
        assert!(!old.exists());
        assert!(young.exists() && with_a_file.join("file").exists() && used.socket().exists());
        assert!(others.iter().all(|other| other.exists()));
        let directory = used.directory.clone();
        drop(used);
        assert!(!directory.exists());
        std::fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn a_directory_without_its_owner_is_removed() {
        let parent = std::env::temp_dir().join(format!("foliomem-owners-{}", std::process::id()));
        std::fs::create_dir(&parent).unwrap();
        let room = Room::new(&parent).unwrap();
        let directory = room.directory.clone();
        make_old(&directory);
        remove_left(&parent);
        assert!(directory.exists());
        // As the kernel does at the end of a killed process.
        let Room { _lock: lock, .. } = &room;
        flock(lock, FlockOperation::Unlock).unwrap();
        remove_left(&parent);
        assert!(!directory.exists());
        std::fs::remove_dir_all(parent).unwrap();
    }
}
