//! Probes of what a process may have: descriptors, processes, address space, and `/proc`.

use crate::region::Region;
use crate::system_checks::child::{self, Step};
use crate::thread::{self, Kind, Spec};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::sync::atomic::AtomicU32;

/// The stack of a process that ends at once, in bytes: its control block is the largest part.
const STACK_BYTES: usize = 128 << 10;
/// `f_type` of procfs.
const PROC_SUPER_MAGIC: u64 = 0x9fa0;

/// Opens descriptors until there are `most`; returns how many there were, and what refused the next
/// one.
///
/// # Errors
/// Fails if there can be no child to open them in.
pub fn open_descriptors(most: usize) -> Result<(u32, Option<Errno>), Errno> {
    let [count, refused] = child::run(|steps| {
        steps.count(0, 0);
        for number in 1..=most {
            // Kept open to the end of the child.
            let opened =
                steps.take(1, || open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map(std::mem::forget));
            if opened.is_none() {
                return;
            }
            steps.count(0, number);
        }
    })?;
    Ok((number(count), refused.errno()))
}

fn number(step: Step) -> u32 {
    match step {
        Step::Done(number) => number,
        _ => 0,
    }
}

/// Starts processes as the agent does, until there are `most`; returns how many there were, and
/// what refused the next one.
///
/// # Errors
/// Fails if there can be no child to start them from.
pub fn start_processes(most: usize) -> Result<(u32, Option<Errno>), Errno> {
    let [count, refused] = child::run(|steps| {
        steps.count(0, 0);
        for number in 1..=most {
            if steps.take(1, start_process).is_none() {
                break;
            }
            steps.count(0, number);
        }
        // Until it is waited for, each counts.
        while wait_for_any() > 0 {}
    })?;
    Ok((number(count), refused.errno()))
}

fn start_process() -> Result<Pid, Errno> {
    // The kernel writes the id there also when the process ends.
    static ID: AtomicU32 = AtomicU32::new(0);
    extern "C" fn end(_: *mut u8) {
        thread::exit_thread()
    }
    let stack = Region::reserve(STACK_BYTES)?;
    let spec = Spec { kind: Kind::Process, stack: &stack, cpu: None, id: &ID };
    // SAFETY: the stack stays, as it is forgotten, and is this process's own; the entry takes
    // nothing.
    let started = unsafe { thread::spawn(&spec, end, std::ptr::null_mut()) };
    std::mem::forget(stack);
    started
}

/// Waits for a process of any kind; returns its id.
fn wait_for_any() -> isize {
    let number = linux_raw_sys::general::__NR_wait4 as usize;
    // SAFETY: asks for no status.
    unsafe { thread::syscall4(number, usize::MAX, 0, linux_raw_sys::general::__WALL as usize, 0) }
}

/// Reserves the address space that the agent reserves: an arena, a heap, and stacks.
///
/// # Errors
/// Fails as the reservation does, or if there can be no child for it.
pub fn reserve(arena_bytes: usize, other_bytes: usize) -> Result<(), Errno> {
    let [arena, other] = child::run(|steps| {
        // Kept to the end of the child.
        let arena = steps.take(0, || Region::reserve_uncounted(arena_bytes));
        let other = steps.take(1, || Region::reserve(other_bytes));
        std::mem::forget((arena, other));
    })?;
    match (arena, other) {
        (Step::Failed(errno), _) | (_, Step::Failed(errno)) => Err(errno),
        _ => Ok(()),
    }
}

/// The files below `/proc` that the agent needs, and the descriptor of another process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proc {
    /// Whether something else is mounted there, or nothing.
    pub is_foreign: bool,
    /// The files, with the result of opening them.
    pub files: [(&'static str, Step); FILES.len()],
    /// Opening a descriptor of the parent's.
    pub parents_descriptor: Step,
}

/// Files that each agent opens.
const FILES: [&str; 4] = ["/proc/self/statm", "/proc/self/smaps_rollup", "/proc/self/maps", "/proc/self/pagemap"];

/// Opens what the agent needs.
///
/// # Errors
/// Fails if there can be no child to open it in, or nothing to open.
pub fn probe_proc() -> Result<Proc, Errno> {
    let is_foreign = rustix::fs::statfs("/proc").is_ok_and(|system| system.f_type as u64 != PROC_SUPER_MAGIC);
    let shared = any_file()?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), shared.as_raw_fd());
    let steps: [Step; FILES.len() + 1] = child::run(|steps| {
        for (step, file) in FILES.iter().enumerate() {
            steps.take(step, || open(*file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        }
        steps.take(FILES.len(), || open(path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
    })?;
    let files = std::array::from_fn(|index| (FILES[index], steps[index]));
    Ok(Proc { is_foreign, files, parents_descriptor: steps[FILES.len()] })
}

fn any_file() -> Result<OwnedFd, Errno> {
    open("/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Takes a descriptor of the parent's, as a forking thread takes one of its companion's: neither
/// descends from the other.
///
/// # Errors
/// Fails if there can be no child to take it in.
pub fn take_descriptor() -> Result<Step, Errno> {
    let shared = any_file()?;
    let (parent, number) = (rustix::process::getpid(), shared.as_fd().as_raw_fd());
    let [taken] = child::run(|steps| {
        steps.take(0, || pidfd_getfd(pidfd_open(parent, PidfdFlags::empty())?, number, PidfdGetfdFlags::empty()));
    })?;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allowed_is_counted() {
        assert_eq!(open_descriptors(5), Ok((5, None)));
        assert_eq!(start_processes(3), Ok((3, None)));
        assert_eq!(reserve(1 << 30, 1 << 20), Ok(()));
        assert_eq!(reserve(1 << 60, 1 << 20), Err(Errno::NOMEM));
        let proc = probe_proc().unwrap();
        assert!(!proc.is_foreign && proc.parents_descriptor.is_done(), "{proc:?}");
        assert!(proc.files.iter().all(|(_, step)| step.is_done()), "{proc:?}");
    }
}
