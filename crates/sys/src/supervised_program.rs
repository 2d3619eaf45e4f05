//! The supervised program: starting it, waiting for its end, and passing signals to it.
//!
//! The program runs in the supervisor's process group, so the terminal treats both as one job. The
//! kernel sends a signal of the terminal (Ctrl-C) to the whole group, so the supervisor does not
//! pass it on. It passes on a signal that a process sends to the supervisor. If a process sends a
//! signal to the group, the program gets it twice, because the supervisor cannot tell that the
//! program got it.
//!
//! The supervisor blocks all signals and reads them from a signalfd. The program starts with the
//! signal mask that the supervisor was started with, and is killed when the supervisor ends. There
//! is no lock.

use crate::clock::timespec;
use crate::program_start::{self, Consent, Start};
use crate::signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, waitpid};
use std::cell::Cell;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Signals that report an error of the supervisor itself. They stay unblocked.
const SYNCHRONOUS: [i32; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP, libc::SIGSYS];

/// A program that the supervisor has started.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    /// The signalfd of all blocked signals.
    signals: OwnedFd,
    consent: Option<Consent>,
    /// The exit code, if the program ended before its entry point.
    ended_early: Option<u8>,
    /// CPU time of the program and of its children, once it has ended.
    cpu_time: Cell<CpuTime>,
    /// Whether the kernel has written a core dump of the program, once it has ended.
    dumped_core: Cell<bool>,
}

/// An event that the supervisor waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProgramEvent {
    /// The program has ended with this exit code, which is 128 + n after signal n.
    Ended(u8),
    /// The terminal has stopped the program.
    Stopped,
    /// A process has sent this signal to the supervisor.
    Signalled(i32),
    /// Nothing has happened before the time was over.
    Nothing,
}

impl Child {
    /// Starts `command`. The calling thread is the only one of the supervisor.
    ///
    /// # Errors
    /// Fails if the kernel refuses a signalfd or the role of a subreaper, or if the program cannot
    /// be started.
    pub fn start(command: &mut Command) -> io::Result<Child> {
        // SAFETY: the sets are plain words on this stack that the calls fill. Blocking the signals
        // of the supervisor's only thread touches no memory. The new descriptor has no other owner.
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
        // A companion is not a child of its program, so the supervisor must adopt it.
        rustix::process::set_child_subreaper(Some(supervisor))?;
        let (consent, mut give_consent) = Consent::ask()?;
        // SAFETY: the function makes only system calls, which are safe after a fork.
        unsafe {
            command.pre_exec(move || {
                give_consent();
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
        Ok(Child {
            pid,
            signals,
            consent: Some(consent),
            ended_early: None,
            cpu_time: Cell::default(),
            dumped_core: Cell::default(),
        })
    }

    /// Runs the program to its entry point, and holds it there until [`Child::let_go`]. The calling
    /// thread is the one that has started it, and calls this once.
    pub fn hold(&mut self) -> Start {
        let start = self.consent.take().map_or(Start::Unheld, |consent| consent.hold(self.pid));
        if let Start::Ended(code) = start {
            self.ended_early = Some(code);
        }
        start
    }

    /// Lets the held program go on.
    pub fn let_go(&self) {
        program_start::let_go(self.pid);
    }

    /// Returns the path under `/proc` of the file that the program executes.
    pub fn executable(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/exe", self.pid.as_raw_nonzero()))
    }

    /// Returns the process id of the program.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the CPU time of the program and of its children; zero until it has ended.
    pub fn cpu_time(&self) -> CpuTime {
        self.cpu_time.get()
    }

    /// Returns whether the kernel has written a core dump of the program.
    pub fn has_dumped_core(&self) -> bool {
        self.dumped_core.get()
    }

    /// Waits up to `max_time` for an event.
    ///
    /// # Errors
    /// Fails if the kernel refuses to wait.
    pub fn wait(&self, max_time: Duration) -> Result<ProgramEvent, Errno> {
        if let Some(event) = self.changed()? {
            return Ok(event);
        }
        let timeout = timespec(max_time);
        let mut fds = [PollFd::new(&self.signals, PollFlags::IN)];
        if poll(&mut fds, Some(&timeout))? == 0 {
            return Ok(ProgramEvent::Nothing);
        }
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.signals, &mut info) {
            Ok(_) => {}
            Err(Errno::AGAIN) => return Ok(ProgramEvent::Nothing),
            Err(errno) => return Err(errno),
        }
        // SAFETY: the struct consists of integers, and the kernel writes it as a whole.
        let info: libc::signalfd_siginfo = unsafe { std::mem::transmute(info) };
        let signal = info.ssi_signo as i32;
        if signal == libc::SIGCHLD {
            return Ok(self.changed()?.unwrap_or(ProgramEvent::Nothing));
        }
        // The kernel sends a signal of the terminal to the whole group, so the program has it
        // already.
        let by_process = matches!(info.ssi_code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
        Ok(if by_process { ProgramEvent::Signalled(signal) } else { ProgramEvent::Nothing })
    }

    /// Returns the event if the program has ended, or the terminal has stopped it, since the last
    /// call.
    fn changed(&self) -> Result<Option<ProgramEvent>, Errno> {
        if let Some(code) = self.ended_early {
            return Ok(Some(ProgramEvent::Ended(code)));
        }
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
        let before = reaped_cpu_time();
        let Some((_, status)) = waitpid(Some(self.pid), options)? else { return Ok(None) };
        self.cpu_time.set(reaped_cpu_time().since(before));
        let by_terminal = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
        if let Some(code) = program_start::ended(status) {
            self.dumped_core.set(libc::WCOREDUMP(status.as_raw()));
            return Ok(Some(ProgramEvent::Ended(code)));
        }
        Ok(status.stopping_signal().filter(|signal| by_terminal.contains(signal)).map(|_| ProgramEvent::Stopped))
    }

    /// Reaps adopted processes that have ended, but not the program. Calls `crashed` with each that
    /// a signal of [`signals::is_crash`] ended, before another process can see that it is reaped.
    pub fn reap_adopted(&self, mut crashed: impl FnMut(Pid)) {
        loop {
            // SAFETY: the struct consists of integers, for which zero is valid, and waitid(2) fills
            // it.
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

    /// Sends `signal` to the program.
    pub fn signal(&self, signal: i32) {
        signal_process(self.pid, signal);
    }
}

/// CPU time of processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuTime {
    /// Time in the code of the processes.
    pub user: Duration,
    /// Time in the kernel.
    pub system: Duration,
}

impl CpuTime {
    /// Returns the time in both.
    pub fn total(self) -> Duration {
        self.user + self.system
    }

    fn since(self, before: CpuTime) -> CpuTime {
        let CpuTime { user, system } = before;
        CpuTime { user: self.user.saturating_sub(user), system: self.system.saturating_sub(system) }
    }
}

/// Returns the CPU time of all children that this process has reaped, and of theirs.
pub fn reaped_cpu_time() -> CpuTime {
    // SAFETY: the struct consists of integers, for which zero is valid, and getrusage(2) fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let [user, system] =
        [usage.ru_utime, usage.ru_stime].map(|time| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000));
    CpuTime { user, system }
}

/// Sends `signal` to process `pid`. Does nothing if the process has ended.
pub fn signal_process(pid: Pid, signal: i32) {
    // SAFETY: kill(2) takes two numbers and touches no memory.
    unsafe { libc::kill(pid.as_raw_nonzero().get(), signal) };
}

/// Stops the supervisor, as the terminal has stopped the program. Returns when it is continued.
pub fn stop_self() {
    signal_process(rustix::process::getpid(), libc::SIGSTOP);
}

#[cfg(test)]
mod tests {
    use super::*;

    // This is one test: the signal mask belongs to the thread, and the signals to the process.
    #[test]
    fn the_end_of_the_program_is_reported() {
        let outcome = |script: &str, signal: Option<i32>| {
            let mut child = Child::start(Command::new("sh").args(["-c", script])).unwrap();
            assert_eq!(child.hold(), Start::Held);
            child.let_go();
            if let Some(signal) = signal {
                child.signal(signal);
            }
            loop {
                if let ProgramEvent::Ended(code) = child.wait(Duration::from_secs(10)).unwrap() {
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
