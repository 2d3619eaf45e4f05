//! The way in which a process has ended that is not the caller's child.

use crate::{pagemap, raw_ioctl};
use rustix::fd::AsFd;
use rustix::ioctl::{Opcode, opcode};

/// `struct pidfd_info` of `linux/pidfd.h`, in its first version.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    /// Process, thread group and parent; then the user and group ids.
    ids: [u32; 11],
    exit_code: i32,
}

const PIDFD_GET_INFO: Opcode = opcode::read_write::<PidfdInfo>(0xff, 11);
/// Asks for the exit code, which the kernel gives once the process is reaped. Since Linux 6.15.
const PIDFD_INFO_EXIT: u64 = 1 << 3;
/// Number of the state and of the exit code among the fields of `/proc/PID/stat`. Zombies have the
/// code.
const STATE: usize = 3;
const EXIT_CODE: usize = 52;

/// The status of an ended process, as `wait(2)` gives it to the parent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExitStatus(i32);

impl ExitStatus {
    /// Returns the status of the zombie with this `/proc/PID/stat`; `None` if the process lives, or
    /// if its parent has reaped it, or if the kernel does not tell.
    pub fn of_zombie(stat: impl AsFd) -> Option<ExitStatus> {
        let mut text = [0u8; 1024];
        let read = rustix::io::pread(stat, &mut text, 0).ok()?;
        let state: char = pagemap::stat_field(&text[..read], STATE)?;
        // 0 for a reader that may not trace the process.
        let code = pagemap::stat_field(&text[..read], EXIT_CODE)?;
        (state == 'Z').then_some(ExitStatus(code))
    }

    /// Returns the status of a process that its parent has reaped; `None` if it has not, or before
    /// Linux 6.15.
    pub fn of_reaped(pidfd: impl AsFd) -> Option<ExitStatus> {
        let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
        // SAFETY: the ioctl takes a `struct pidfd_info`, whose size is in its number.
        unsafe { raw_ioctl::call(pidfd, PIDFD_GET_INFO, &mut info) }.ok()?;
        (info.mask & PIDFD_INFO_EXIT != 0).then_some(ExitStatus(info.exit_code))
    }

    /// Returns whether the kernel has written a core dump.
    #[must_use]
    pub fn has_dumped_core(self) -> bool {
        libc::WIFSIGNALED(self.0) && libc::WCOREDUMP(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn the_status_is_known_before_and_after_the_parent_has_it() {
        for (script, ends) in [("exit 7", 7 << 8), ("kill -9 $$", 9)] {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let pid = Pid::from_child(&child);
            let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
            let stat = std::fs::File::open(format!("/proc/{}/stat", child.id())).unwrap();
            waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
            assert_eq!(ExitStatus::of_zombie(&stat), Some(ExitStatus(ends)));
            assert_eq!(ExitStatus::of_reaped(&pidfd), None);
            assert_eq!(child.wait().unwrap().into_raw(), ends);
            assert_eq!(ExitStatus::of_zombie(&stat), None);
            if is_since(6, 15) {
                assert_eq!(ExitStatus::of_reaped(&pidfd), Some(ExitStatus(ends)));
            }
        }
    }

    fn is_since(major: u32, minor: u32) -> bool {
        let name = rustix::system::uname();
        let release = name.release().to_str().unwrap();
        let mut numbers = release.split('.').map_while(|number| number.parse().ok());
        (numbers.next().unwrap(), numbers.next().unwrap()) >= (major, minor)
    }

    #[test]
    fn a_living_process_has_no_status_and_only_signals_dump_core() {
        let stat = std::fs::File::open("/proc/self/stat").unwrap();
        assert_eq!(ExitStatus::of_zombie(stat), None);
        assert!(ExitStatus(6 | 0x80).has_dumped_core());
        assert!(!ExitStatus(6).has_dumped_core() && !ExitStatus(0x80 << 8).has_dumped_core());
    }
}
