//! The threads of a process, as `/proc` lists them.

use std::fs;
use std::path::PathBuf;

/// Returns the directories of the threads of a process; none if it has ended.
pub fn threads_of(pid: u32) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten().map(|thread| thread.path())
}
