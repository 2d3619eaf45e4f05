//! The program under its supervisor: how it is started and watched, and gets the supervisor's
//! signals.
//!
//! The program runs in the supervisor's process group, so the terminal treats both as one job. The
//! kernel sends a signal of the terminal (Ctrl-C) to the whole group, so the supervisor does not
//! pass it on. It passes on a signal that a process sends to the supervisor. A signal that a
//! process sends to the group reaches the program twice, because its receivers do not learn of each
//! other.
//!
//! The supervisor blocks all signals and reads them from a signalfd. The program starts with the
//! mask that the supervisor was started with, and ends when the supervisor ends.

use crate::clock::timespec;
use crate::signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, waitpid};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// Signals that report an error of the supervisor itself.
const SYNCHRONOUS: [i32; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP, libc::SIGSYS];

/// A program that was started.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    signals: OwnedFd,
}

/// What has happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The program has ended with this exit code; 128 + n after signal n.
    Ended(u8),
    /// The terminal has stopped the program.
    Stopped,
    /// A process has sent the supervisor this signal.
    Signalled(i32),
    /// Nothing, for as long as was asked.
    Nothing,
}

impl Child {
    /// Starts `command`.
    pub fn start(command: &mut Command) -> io::Result<Child> {
        // SAFETY: the sets are plain words filled by the calls; blocking signals of this thread, the
        // only one, touches no memory.
        let (signals, before) = unsafe {
            let (mut set, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut set);
            for signal in SYNCHRONOUS {
                libc::sigdelset(&raw mut set, signal);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &raw const set, &raw mut before);
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            (OwnedFd::from_raw_fd(fd), before)
        };
        let supervisor = rustix::process::getpid();
        // Companions are nobody's children that the program might wait for: they become ours.
        rustix::process::set_child_subreaper(Some(supervisor))?;
        // SAFETY: only system calls, which are safe after a fork.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if rustix::process::getppid() != Some(supervisor) {
                    libc::_exit(128 + libc::SIGKILL);
                }
                libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
                Ok(())
            });
        }
        let child = command.spawn()?;
        let Some(pid) = Pid::from_raw(child.id() as i32) else { return Err(io::ErrorKind::NotFound.into()) };
        Ok(Child { pid, signals })
    }

    /// Its pid.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits up to `most` for something to happen.
    pub fn wait(&self, most: Duration) -> Result<Event, Errno> {
        if let Some(event) = self.changed()? {
            return Ok(event);
        }
        let timeout = timespec(most);
        let mut fds = [PollFd::new(&self.signals, PollFlags::IN)];
        if poll(&mut fds, Some(&timeout))? == 0 {
            return Ok(Event::Nothing);
        }
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.signals, &mut info) {
            Ok(_) => {}
            Err(Errno::AGAIN) => return Ok(Event::Nothing),
            Err(errno) => return Err(errno),
        }
        // SAFETY: the kernel writes whole structs of plain integers.
        let info: libc::signalfd_siginfo = unsafe { std::mem::transmute(info) };
        let signal = info.ssi_signo as i32;
        if signal == libc::SIGCHLD {
            return Ok(self.changed()?.unwrap_or(Event::Nothing));
        }
        // What the kernel sends goes to the whole group.
        let by_process = matches!(info.ssi_code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
        Ok(if by_process { Event::Signalled(signal) } else { Event::Nothing })
    }

    fn changed(&self) -> Result<Option<Event>, Errno> {
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
        let Some((_, status)) = waitpid(Some(self.pid), options)? else { return Ok(None) };
        let by_terminal = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
        if let Some(code) = status.exit_status() {
            return Ok(Some(Event::Ended(code as u8)));
        }
        if let Some(signal) = status.terminating_signal() {
            return Ok(Some(Event::Ended(128 + signal as u8)));
        }
        Ok(status.stopping_signal().filter(|signal| by_terminal.contains(signal)).map(|_| Event::Stopped))
    }

    /// Takes the statuses of adopted processes that have ended, but not the program's. Calls `crashed`, before others can
    /// see that the status is taken, with each that has crashed: its memory was not there.
    pub fn reap_adopted(&self, mut crashed: impl FnMut(Pid)) {
        loop {
            // SAFETY: a struct of integers, filled by the call.
            let (pid, how, signal) = unsafe {
                let mut status: libc::siginfo_t = std::mem::zeroed();
                let ended = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
                if libc::waitid(libc::P_ALL, 0, &raw mut status, ended) < 0 {
                    return;
                }
                (status.si_pid(), status.si_code, status.si_status())
            };
            match Pid::from_raw(pid).filter(|&pid| pid != self.pid) {
                Some(pid) => {
                    let is_signalled = how == libc::CLD_KILLED || how == libc::CLD_DUMPED;
                    if is_signalled && signals::is_crash(signal) {
                        crashed(pid);
                    }
                    let _ = waitpid(Some(pid), WaitOptions::NOHANG);
                }
                None => return,
            }
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        signal_process(self.pid, signal);
    }
}

/// Sends a process a signal, if it is still there.
pub fn signal_process(pid: Pid, signal: i32) {
    // SAFETY: takes two numbers.
    unsafe { libc::kill(pid.as_raw_nonzero().get(), signal) };
}

/// Stops the supervisor, as the terminal has stopped the program; returns when it is continued.
pub fn stop_self() {
    signal_process(rustix::process::getpid(), libc::SIGSTOP);
}

#[cfg(test)]
mod tests {
    use super::*;

    // One test: the signal mask is the thread's, the signals are the process's.
    #[test]
    fn what_happens_to_the_program_is_told() {
        let outcome = |script: &str, signal: Option<i32>| {
            let child = Child::start(Command::new("sh").args(["-c", script])).unwrap();
            if let Some(signal) = signal {
                child.signal(signal);
            }
            loop {
                if let Event::Ended(code) = child.wait(Duration::from_secs(10)).unwrap() {
                    return code;
                }
            }
        };
        assert_eq!(outcome("exit 7", None), 7);
        assert_eq!(outcome("kill -9 $$", None), 137);
        assert_eq!(outcome("sleep 30", Some(libc::SIGTERM)), 143);
        let missing = Child::start(&mut Command::new("/nonexistent/program")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
