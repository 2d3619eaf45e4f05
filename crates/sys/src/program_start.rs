//! Holding a program at its entry point: before `main`, and before any of its own code runs but
//! constructors of libraries.
//!
//! The loader runs the constructors of preloaded libraries, and then jumps to the program's entry
//! point. A loader that cannot load a library goes on without it. So the supervisor traces the
//! program (ptrace(2)) up to that jump, and lets it go on only if the library has reported. The
//! kernel names the entry point in the auxiliary vector. During this time the entry point holds a
//! breakpoint. The supervisor sets it anew after each execve(2), because a constructor may call
//! execve(2).
//!
//! A program that may not be traced starts without being held.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, waitpid};
use rustix::time::Timespec;
use std::fs::{self, File};
use std::io::{PipeReader, Write, pipe};
use std::os::unix::fs::FileExt;

/// `int3`
const BREAKPOINT: u8 = 0xcc;
/// Bytes of an entry of the auxiliary vector: its type and its value.
const ENTRY_BYTES: usize = 16;

/// How a program got to its entry point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// The program is held at its entry point, until it is let go.
    Held,
    /// The program has ended before its entry point. The exit code is 128 + n after signal n.
    Ended(u8),
    /// The program cannot be traced, and runs.
    Unheld,
}

/// The right to trace a program, which the program's process gives before it executes the program.
#[derive(Debug)]
pub struct Consent {
    reader: PipeReader,
}

impl Consent {
    /// Returns a consent that is not given yet, and the function that gives it. The child of a fork
    /// calls that function, which makes only system calls.
    ///
    /// # Errors
    /// Fails if there is no room for a pipe.
    pub fn ask() -> std::io::Result<(Consent, impl FnMut() + Send + Sync + 'static)> {
        let (reader, mut writer) = pipe()?;
        let give = move || {
            // SAFETY: the call takes numbers alone, no pointer.
            if unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } == 0 {
                let _ = writer.write(b"1");
            }
        };
        Ok((Consent { reader }, give))
    }

    fn is_given(&self) -> bool {
        poll(&mut [PollFd::new(&self.reader, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
    }

    /// Runs the program `pid`, which has been executed, to its entry point. The calling thread is
    /// the one that has started it.
    pub fn hold(self, pid: Pid) -> Start {
        if !self.is_given() {
            return Start::Unheld;
        }
        run_to_entry(pid).unwrap_or_else(|_| {
            let_go(pid);
            Start::Unheld
        })
    }
}

/// Lets a held program go on.
pub fn let_go(pid: Pid) {
    let _ = trace(pid, libc::PTRACE_DETACH, 0);
}

/// A breakpoint at the entry point, and the instruction byte that it replaces.
#[derive(Clone, Copy)]
struct Breakpoint {
    address: u64,
    byte: u8,
}

fn run_to_entry(pid: Pid) -> Result<Start, Errno> {
    // The first stop is that of execve(2), or of a signal before it.
    if let Some(code) = ended(wait(pid)?) {
        return Ok(Start::Ended(code));
    }
    trace(pid, libc::PTRACE_SETOPTIONS, libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACEEXEC)?;
    let mut breakpoint = Breakpoint::set(pid)?;
    let mut signal = 0;
    loop {
        trace(pid, libc::PTRACE_CONT, signal)?;
        let status = wait(pid)?;
        if let Some(code) = ended(status) {
            return Ok(Start::Ended(code));
        }
        signal = 0;
        let is_exec = status.as_raw() >> 8 == libc::SIGTRAP | libc::PTRACE_EVENT_EXEC << 8;
        if is_exec {
            breakpoint = Breakpoint::set(pid)?;
        } else if status.stopping_signal() == Some(libc::SIGTRAP) && breakpoint.remove_if_reached(pid)? {
            return Ok(Start::Held);
        } else {
            signal = status.stopping_signal().unwrap_or(0);
        }
    }
}

impl Breakpoint {
    fn set(pid: Pid) -> Result<Breakpoint, Errno> {
        let address = entry_point(pid).ok_or(Errno::NOENT)?;
        let (memory, mut byte) = (memory(pid)?, [0]);
        memory.read_exact_at(&mut byte, address).map_err(errno)?;
        memory.write_all_at(&[BREAKPOINT], address).map_err(errno)?;
        Ok(Breakpoint { address, byte: byte[0] })
    }

    /// Returns whether the program has come here. Then its next instruction is the replaced one.
    fn remove_if_reached(self, pid: Pid) -> Result<bool, Errno> {
        // SAFETY: zeros are a valid value of a struct of integers.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        // SAFETY: the call fills the struct.
        check(unsafe { libc::ptrace(libc::PTRACE_GETREGS, raw(pid), 0, &raw mut registers) })?;
        if registers.rip != self.address + 1 {
            return Ok(false);
        }
        memory(pid)?.write_all_at(&[self.byte], self.address).map_err(errno)?;
        registers.rip = self.address;
        // SAFETY: the call reads the struct.
        check(unsafe { libc::ptrace(libc::PTRACE_SETREGS, raw(pid), 0, &raw const registers) })?;
        Ok(true)
    }
}

/// The entry point, as the kernel tells the loader.
fn entry_point(pid: Pid) -> Option<u64> {
    let vector = fs::read(format!("/proc/{}/auxv", raw(pid))).ok()?;
    let word = |bytes: &[u8]| u64::from_ne_bytes(std::array::from_fn(|index| bytes[index]));
    let mut entries = vector.chunks_exact(ENTRY_BYTES).map(|entry| (word(entry), word(&entry[8..])));
    entries.find_map(|(kind, value)| (kind == libc::AT_ENTRY).then_some(value))
}

fn memory(pid: Pid) -> Result<File, Errno> {
    File::options().read(true).write(true).open(format!("/proc/{}/mem", raw(pid))).map_err(errno)
}

/// The C library's type of a request of ptrace(2).
#[cfg(target_env = "musl")]
type Request = libc::c_int;
#[cfg(not(target_env = "musl"))]
type Request = libc::c_uint;

/// Makes a request to a traced process that takes a number.
fn trace(pid: Pid, request: Request, number: i32) -> Result<(), Errno> {
    // SAFETY: the requests that come here take numbers.
    check(unsafe { libc::ptrace(request, raw(pid), 0, libc::c_long::from(number)) })
}

fn check(result: libc::c_long) -> Result<(), Errno> {
    if result < 0 { Err(errno(std::io::Error::last_os_error())) } else { Ok(()) }
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

fn wait(pid: Pid) -> Result<WaitStatus, Errno> {
    loop {
        match waitpid(Some(pid), WaitOptions::UNTRACED) {
            Ok(Some((_, status))) => return Ok(status),
            Ok(None) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// The exit code of a process that has ended.
pub(crate) fn ended(status: WaitStatus) -> Option<u8> {
    let by_signal = status.terminating_signal().map(|signal| 128 + signal as u8);
    status.exit_status().map(|code| code as u8).or(by_signal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    /// Starts a program that is held, and returns how it got to its entry point.
    fn started(command: &mut Command) -> (Start, Pid) {
        let (consent, mut give) = Consent::ask().unwrap();
        // SAFETY: only system calls.
        unsafe {
            command.pre_exec(move || {
                give();
                Ok(())
            });
        }
        let pid = Pid::from_raw(command.spawn().unwrap().id() as i32).unwrap();
        (consent.hold(pid), pid)
    }

    #[test]
    fn a_program_is_held_before_it_runs_and_goes_on_as_it_was() {
        let file = std::env::temp_dir().join(format!("foliomem-held-{}", std::process::id()));
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("echo held > {}; exit 7", file.display()));
        let (start, pid) = started(&mut command);
        assert_eq!(start, Start::Held);
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!file.exists());
        let_go(pid);
        assert_eq!(ended(wait(pid).unwrap()), Some(7));
        assert_eq!(fs::read_to_string(&file).unwrap(), "held\n");
        fs::remove_file(file).unwrap();
    }

    #[test]
    fn a_program_that_ends_before_has_its_exit_code() {
        let mut command = Command::new("true");
        command.env("LD_PRELOAD", "").env("LD_TRACE_LOADED_OBJECTS", "1").stdout(std::process::Stdio::null());
        assert_eq!(started(&mut command).0, Start::Ended(0));
    }

    #[test]
    fn a_script_is_held_at_the_entry_of_its_interpreter() {
        let (start, pid) = started(Command::new("/bin/sh").args(["-c", "kill -9 $$"]));
        assert_eq!(start, Start::Held);
        let_go(pid);
        assert_eq!(ended(wait(pid).unwrap()), Some(137));
    }
}
