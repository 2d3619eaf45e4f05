//! Probes of what a process may have: descriptors, processes, address space, and `/proc`.

use crate::region::Region;
use crate::system_checks::steps::{self, By, Step, Steps};
use crate::thread;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// `f_type` of procfs.
const PROC_SUPER_MAGIC: u64 = 0x9fa0;

/// Opens descriptors until there are `most`. Returns how many could be opened, and the error of the
/// next one.
///
/// # Errors
/// Fails if there can be no child to open them in.
pub fn open_descriptors(most: usize, by: By) -> Result<(u32, Option<Errno>), Errno> {
    // The vector's memory is allocated before the child exists.
    let mut opened = Vec::with_capacity(most);
    let counted = steps::run(by, |steps| {
        count(steps, most, || openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map(|fd| opened.push(fd)))
    })?;
    Ok(number_and_refusal(counted))
}

/// Starts processes until there are `most`, and waits for them. Returns how many could be started,
/// and the error of the next one.
///
/// # Errors
/// Fails if there can be no child to start them from.
pub fn start_processes(most: usize, by: By) -> Result<(u32, Option<Errno>), Errno> {
    let mut started = Vec::with_capacity(most);
    let counted = steps::run(by, |steps| {
        count(steps, most, || thread::spawn_ending_process().map(|id| started.push(id)));
        // Each process counts against the limit until it is reaped.
        started.drain(..).for_each(thread::reap);
    })?;
    Ok(number_and_refusal(counted))
}

/// Takes a step until it was taken `most` times, or fails. Notes the number in the step before.
fn count(steps: &Steps<'_>, most: usize, mut action: impl FnMut() -> Result<(), Errno>) {
    steps.count(0, 0);
    for number in 1..=most {
        if steps.take(1, &mut action).is_none() {
            return;
        }
        steps.count(0, number);
    }
}

fn number_and_refusal([count, refused]: [Step; 2]) -> (u32, Option<Errno>) {
    let number = match count {
        Step::Done(number) => number,
        _ => 0,
    };
    (number, refused.errno())
}

/// Reserves the address space that the agent reserves: an arena, a heap, and stacks.
///
/// # Errors
/// Fails as the reservation does, or if there can be no child for it.
pub fn reserve(arena_bytes: usize, other_bytes: usize, by: By) -> Result<(), Errno> {
    let [arena, other] = steps::run(by, |steps| {
        // Both reservations exist at the same time.
        let _arena = steps.take(0, || Region::reserve_uncounted(arena_bytes));
        steps.take(1, || Region::reserve(other_bytes));
    })?;
    match (arena, other) {
        (Step::Failed(errno), _) | (_, Step::Failed(errno)) => Err(errno),
        _ => Ok(()),
    }
}

/// What an agent needs below `/proc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proc {
    /// Whether something else than procfs, or nothing, is mounted at `/proc`.
    pub is_foreign: bool,
    /// The files, with the result of opening them.
    pub files: [(&'static str, Step); FILES.len()],
}

/// Files that each agent opens.
const FILES: [&str; 4] = ["/proc/self/statm", "/proc/self/smaps_rollup", "/proc/self/maps", "/proc/self/pagemap"];

/// Opens the files of `/proc` that an agent needs.
///
/// # Errors
/// Fails if the child that opens them cannot be started.
pub fn probe_proc(by: By) -> Result<Proc, Errno> {
    let is_foreign = rustix::fs::statfs("/proc").is_ok_and(|system| system.f_type as u64 != PROC_SUPER_MAGIC);
    let steps: [Step; FILES.len()] = steps::run(by, |steps| {
        for (step, file) in FILES.iter().enumerate() {
            steps.take(step, || openat(CWD, *file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        }
    })?;
    Ok(Proc { is_foreign, files: std::array::from_fn(|index| (FILES[index], steps[index])) })
}

/// Opens one of the parent's descriptors through `/proc`.
///
/// # Errors
/// Fails if there can be no child to open it in, or nothing to open.
pub fn open_parents_descriptor() -> Result<Step, Errno> {
    let shared = any_file()?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), shared.as_raw_fd());
    let [opened] = steps::run(By::Child, |steps| {
        steps.take(0, || openat(CWD, path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
    })?;
    Ok(opened)
}

fn any_file() -> Result<OwnedFd, Errno> {
    openat(CWD, "/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Takes a descriptor of the parent's, as a forking thread takes one of its companion's: neither
/// descends from the other.
///
/// # Errors
/// Fails if there can be no child to take it in, or nothing to take.
pub fn take_parents_descriptor() -> Result<Step, Errno> {
    let shared = any_file()?;
    let (parent, number) = (rustix::process::getpid(), shared.as_fd().as_raw_fd());
    let [taken] = steps::run(By::Child, |steps| {
        steps.take(0, || pidfd_getfd(pidfd_open(parent, PidfdFlags::empty())?, number, PidfdGetfdFlags::empty()));
    })?;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allowed_is_counted() {
        for by in [By::Caller, By::Child] {
            assert_eq!(open_descriptors(5, by), Ok((5, None)));
            assert_eq!(start_processes(3, by), Ok((3, None)));
            assert_eq!(reserve(1 << 30, 1 << 20, by), Ok(()));
            assert_eq!(reserve(1 << 60, 1 << 20, by), Err(Errno::NOMEM));
            let proc = probe_proc(by).unwrap();
            assert!(!proc.is_foreign && proc.files.iter().all(|(_, step)| step.is_done()), "{proc:?}");
        }
        assert!(open_parents_descriptor().unwrap().is_done());
    }
}
