//! Finds the run that a process belongs to, and all runs, from outside.
//!
//! Every process of a run maps the control segment, and `/proc/<pid>/maps` shows its inode. The
//! supervisor also has it open as one of `/proc/*/fd`. The opened file must have that inode, and
//! [`Control::of`] verifies its content. The kernel grants access to the process's user and to
//! root. There is no lock.

use crate::segment::{Control, ControlError, SEGMENT_NAME};
use foliomem_sys::errno_text::ErrnoText;
use foliomem_sys::shared_memory::Mapped;
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Mode, OFlags, Stat, fstat, major, minor, openat, stat};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// Why no run was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FindError {
    /// No process has this pid.
    #[error("there is no process {0}")]
    NoProcess(u32),
    /// The process runs without foliomem.
    #[error("process {0} is not part of a run of foliomem")]
    NotInRun(u32),
    /// The process belongs to another user.
    #[error("process {0} cannot be inspected: {why}; run this command as its user, or as root", why = ErrnoText(*.1))]
    Forbidden(u32, Errno),
    /// The caller is root without the capability to inspect the process.
    #[error("process {0} cannot be inspected: this root lacks CAP_SYS_PTRACE; run this command as the user of the run")]
    Powerless(u32),
    /// The supervisor was killed, or belongs to another user.
    #[error("the supervisor of the run of process {0} cannot be reached: run this command as its user, or as root")]
    NoSupervisor(u32),
    /// The segment belongs to another version, or cannot be mapped.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// The identity of a segment, and so of its run, as `maps` shows it. The kernel may use it again
/// for a run that starts when this one has ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Inode {
    device: (u32, u32),
    number: u64,
}

impl Inode {
    fn of(stat: &Stat) -> Inode {
        Inode { device: (major(stat.st_dev), minor(stat.st_dev)), number: stat.st_ino }
    }
}

/// Returns the segment's inode if `line` of `maps` describes its mapping.
fn segment_in(line: &str) -> Option<Inode> {
    let mut fields = line.split_ascii_whitespace();
    let (_range, _protection, _offset) = (fields.next()?, fields.next()?, fields.next()?);
    let (device, number) = (fields.next()?, fields.next()?);
    let name = fields.next()?.strip_prefix("/memfd:")?;
    let (major, minor) = device.split_once(':')?;
    let hex = |text| u32::from_str_radix(text, 16).ok();
    let inode = Inode { device: (hex(major)?, hex(minor)?), number: number.parse().ok()? };
    (name == SEGMENT_NAME.to_str().ok()?).then_some(inode)
}

/// Returns the inode of the segment that process `pid` has mapped.
fn mapped_by(pid: u32) -> std::io::Result<Option<Inode>> {
    let maps = std::fs::read(format!("/proc/{pid}/maps"))?;
    Ok(String::from_utf8_lossy(&maps).lines().find_map(segment_in))
}

/// Returns whether a process with this text of `maps` has mapped the segment of a run.
pub fn has_segment(maps: &str) -> bool {
    maps.lines().any(|line| segment_in(line).is_some())
}

/// Returns the control segment of the run that process `pid` belongs to, mapped for the life of the
/// calling process.
pub fn run_of(pid: u32) -> Result<&'static Control, FindError> {
    let (_segment, control) = visit_run_of(pid)?;
    Ok(control.leak())
}

/// Returns the control segment of the run that process `pid` belongs to, and its identity.
pub fn visit_run_of(pid: u32) -> Result<(Inode, Mapped<Control>), FindError> {
    let segment = mapped_by(pid).map_err(|error| refused(pid, &error))?.ok_or(FindError::NotInRun(pid))?;
    let fd = std::iter::once(pid).chain(all_pids()).find_map(|pid| opened_by(pid, segment));
    Ok((segment, Control::visit(fd.ok_or(FindError::NoSupervisor(pid))?)?))
}

/// A run whose supervisor was found.
#[derive(Clone)]
pub struct Run {
    /// The identity of its segment.
    pub segment: Inode,
    /// The pid of its supervisor.
    pub pid: u32,
    /// Its segment. The mapping ends with the last reference.
    pub control: Arc<Mapped<Control>>,
}

/// The runs of which supervisors were found, by their segments. [`Runs::look`] finds new ones, and
/// forgets those that have ended.
#[derive(Default)]
pub struct Runs {
    /// The only run to find; `None` finds all runs.
    only: Option<Inode>,
    known: BTreeMap<Inode, Arc<Mapped<Control>>>,
}

impl Runs {
    /// Returns a set that finds only the run with this segment.
    pub fn only(segment: Inode) -> Runs {
        Runs { only: Some(segment), ..Runs::default() }
    }

    /// Returns the runs that go on and that the caller may look at, by the pids of their
    /// supervisors. A run of another version of foliomem is left out.
    ///
    /// Only a supervisor has the segment both mapped and open for longer than a moment. The
    /// function checks descriptors first: reading `maps` blocks a process that changes its
    /// mappings.
    pub fn look(&mut self) -> Vec<Run> {
        let (mut running, mut seen) = (Vec::new(), BTreeMap::new());
        let mut candidates: Vec<u32> = all_pids().filter(|&pid| has_open(pid)).collect();
        // A child that the supervisor has just forked has the segment mapped and open, too.
        candidates.sort_unstable();
        for pid in candidates {
            let is_wanted =
                |segment: &Inode| !seen.contains_key(segment) && self.only.is_none_or(|only| only == *segment);
            let Some(segment) = mapped_by(pid).ok().flatten().filter(is_wanted) else { continue };
            let open = || opened_by(pid, segment).and_then(|fd| Control::visit(fd).ok()).map(Arc::new);
            let Some(control) = self.known.get(&segment).cloned().or_else(open) else { continue };
            seen.insert(segment, Arc::clone(&control));
            if !control.has_ended() {
                running.push(Run { segment, pid, control });
            }
        }
        // The number of an ended run's inode may be used again.
        self.known = seen;
        running
    }
}

/// Returns the pids of all processes that /proc shows.
fn all_pids() -> impl Iterator<Item = u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns whether process `pid` has the segment of some run open.
fn has_open(pid: u32) -> bool {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.any(|target| is_segment_path(&target))
}

/// Returns whether the kernel shows a segment as `path`.
fn is_segment_path(path: &Path) -> bool {
    let name = path.as_os_str().as_bytes().strip_prefix(b"/memfd:");
    name.and_then(|name| name.strip_prefix(SEGMENT_NAME.to_bytes())) == Some(b" (deleted)")
}

fn refused(pid: u32, error: &io::Error) -> FindError {
    match Errno::from_io_error(error) {
        Some(Errno::ACCESS | Errno::PERM) if rustix::process::geteuid().is_root() => FindError::Powerless(pid),
        Some(errno @ (Errno::ACCESS | Errno::PERM)) => FindError::Forbidden(pid, errno),
        _ => FindError::NoProcess(pid),
    }
}

/// Opens the segment if process `pid` has it open.
fn opened_by(pid: u32, segment: Inode) -> Option<OwnedFd> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let is_segment = |path: &PathBuf| stat(path).is_ok_and(|stat| Inode::of(&stat) == segment);
    let path = descriptors.flatten().map(|entry| entry.path()).find(is_segment)?;
    let fd = openat(CWD, path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    // The descriptor may name another file by now.
    fstat(&fd).is_ok_and(|stat| Inode::of(&stat) == segment).then_some(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_segment_is_found_among_anything(
            major in 0u32..0x1000,
            minor in 0u32..0x10_0000,
            number: u64,
            noise in prop::collection::vec(any::<String>(), 0..6),
            at in any::<prop::sample::Index>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let line = format!("7f0000000000-7f0000001000 rw-s 00000000 {major:02x}:{minor:02x} {number}   /memfd:foliomem-control (deleted)");
            let found = Some(Inode { device: (major, minor), number });
            prop_assert_eq!(segment_in(&line), found);
            let mut lines = noise;
            lines.insert(at.index(lines.len() + 1), line.clone());
            let all = lines.join("\n");
            prop_assert_eq!(all.lines().find_map(segment_in), found);
            let cut = &line[..cut.index(line.len())];
            prop_assert!(segment_in(cut).is_none_or(|inode| Some(inode) == found));
        }
    }

    #[test]
    fn a_segment_is_known_by_its_name() {
        assert!(is_segment_path(Path::new("/memfd:foliomem-control (deleted)")));
        for other in
            ["/memfd:foliomem-control", "/memfd:foliomem-controls (deleted)", "/tmp/memfd:foliomem-control", ""]
        {
            assert!(!is_segment_path(Path::new(other)), "{other}");
        }
    }

    #[test]
    fn a_process_without_a_segment_is_in_no_run() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        assert_eq!(run_of(child.id()).err(), Some(FindError::NotInRun(child.id())));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(run_of(child.id()).err(), Some(FindError::NoProcess(child.id())));
    }
}
