//! A probe: it takes numbered steps, and each leaves a result.
//!
//! A filter of system calls (seccomp) may kill the caller. So a child can take the steps. The
//! child's results lie in shared memory: a killed child has left the results of its earlier steps.
//! No descriptor is needed.
//!
//! A child costs more than most probes, and each run begins with probes. So the caller takes the
//! steps itself if no filter checks its system calls. A probe leaves nothing behind in the caller.

use crate::thread::exit_process;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::thread::{SecureComputingMode, secure_computing_mode};
use std::sync::atomic::{AtomicI32, Ordering};

/// Value of a step that was not taken.
const NOT_TAKEN: i32 = i32::MIN;
/// Value of a step that is being taken.
const BEGUN: i32 = NOT_TAKEN + 1;

/// The process that takes the steps of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// The calling process.
    Caller,
    /// A child of it.
    Child,
}

impl By {
    /// Returns a child where a filter may kill it, else the caller.
    pub fn expendable() -> By {
        if is_filtered() { By::Child } else { By::Caller }
    }
}

/// Returns whether a filter checks the system calls of this process. A filter may refuse the query.
pub fn is_filtered() -> bool {
    secure_computing_mode() != Ok(SecureComputingMode::Disabled)
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// It was not taken, because an earlier step failed or made it needless.
    NotTaken,
    /// It succeeded, with this number.
    Done(u32),
    /// It failed.
    Failed(Errno),
    /// A signal ended the child during the step: only a filter does that.
    Killed,
}

impl Step {
    /// Returns whether the step succeeded.
    pub fn is_done(self) -> bool {
        matches!(self, Step::Done(_))
    }

    /// Returns the error of a step that failed.
    pub fn errno(self) -> Option<Errno> {
        match self {
            Step::Failed(errno) => Some(errno),
            _ => None,
        }
    }
}

/// Where a probe leaves its results.
#[derive(Debug)]
pub struct Steps<'a>(&'a [AtomicI32]);

impl Steps<'_> {
    /// Takes a step, and returns its value if it succeeded.
    pub fn take<T>(&self, step: usize, action: impl FnOnce() -> Result<T, Errno>) -> Option<T> {
        self.0[step].store(BEGUN, Ordering::Relaxed);
        let result = action();
        let value = result.as_ref().map_or_else(|errno| -errno.raw_os_error(), |_| 0);
        self.0[step].store(value, Ordering::Relaxed);
        result.ok()
    }

    /// Returns whether a step has succeeded.
    pub fn is_done(&self, step: usize) -> bool {
        self.0[step].load(Ordering::Relaxed) >= 0
    }

    /// Notes the number with which a step succeeded.
    pub fn count(&self, step: usize, number: usize) {
        self.0[step].store(i32::try_from(number).unwrap_or(i32::MAX), Ordering::Relaxed);
    }
}

/// Runs `probe`, and returns the results of its steps. A step that was begun and not finished has
/// killed the child. In a child of a process with several threads, a probe makes only system calls:
/// the other threads may have held locks when it was made.
///
/// # Errors
/// Fails if there can be no child, or no memory to share with it.
pub fn run<const N: usize>(by: By, probe: impl FnOnce(&Steps<'_>)) -> Result<[Step; N], Errno> {
    let results = match by {
        By::Caller => {
            let results = [const { AtomicI32::new(NOT_TAKEN) }; N];
            probe(&Steps(&results));
            results.map(AtomicI32::into_inner)
        }
        By::Child => run_in_child(probe)?,
    };
    Ok(results.map(|value| match value {
        NOT_TAKEN => Step::NotTaken,
        BEGUN => Step::Killed,
        number @ 0.. => Step::Done(number.cast_unsigned()),
        errno => Step::Failed(Errno::from_raw_os_error(-errno)),
    }))
}

fn run_in_child<const N: usize>(probe: impl FnOnce(&Steps<'_>)) -> Result<[i32; N], Errno> {
    let bytes = N * size_of::<AtomicI32>();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::SHARED) }?;
    // SAFETY: zeroed memory of that size, aligned to a page, that is unmapped below, after its last
    // use.
    let shared = unsafe { &*memory.cast::<[AtomicI32; N]>() };
    shared.iter().for_each(|step| step.store(NOT_TAKEN, Ordering::Relaxed));
    // SAFETY: the child ends without running anything else of the parent's.
    let made = match unsafe { libc::fork() } {
        0 => {
            probe(&Steps(shared));
            exit_process(0)
        }
        child => Pid::from_raw(child.max(0)).ok_or_else(last_errno).and_then(wait),
    };
    let results = shared.each_ref().map(|step| step.load(Ordering::Relaxed));
    // SAFETY: mapped above; `shared` is not used from here on.
    unsafe { munmap(memory, bytes) }?;
    made.map(|()| results)
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::AGAIN)
}

fn wait(child: Pid) -> Result<(), Errno> {
    while let Err(errno) = waitpid(Some(child), WaitOptions::empty()) {
        if errno != Errno::INTR {
            return Err(errno);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_before_the_child_was_killed_are_reported() {
        for by in [By::Caller, By::Child] {
            let whole = run(by, |steps| {
                steps.take(0, || Ok(()));
                steps.take(1, || Err::<(), _>(Errno::PERM));
                steps.count(3, 7);
            });
            assert_eq!(whole, Ok([Step::Done(0), Step::Failed(Errno::PERM), Step::NotTaken, Step::Done(7)]));
        }
        let killed = run(By::Child, |steps| {
            steps.take(0, || Ok(()));
            steps.take(2, || rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::SYS));
        });
        assert_eq!(killed, Ok([Step::Done(0), Step::NotTaken, Step::Killed]));
    }
}
