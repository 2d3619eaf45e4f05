//! Errno texts: what a system error means, without the C library.
//!
//! The C library selects the text by the locale of the calling thread. The agent's threads have no
//! locale, so calling it would end the program with SIGSEGV. There is no lock.

use rustix::io::Errno;
use std::fmt;

/// Prints the meaning of an error number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrnoText(pub Errno);

impl fmt::Display for ErrnoText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            Errno::PERM => "operation not permitted",
            Errno::NOENT => "no such file or directory",
            Errno::IO => "input/output error",
            Errno::NXIO => "no such device or address",
            Errno::AGAIN => "resource temporarily unavailable",
            Errno::NOMEM => "cannot allocate memory",
            Errno::ACCESS => "permission denied",
            Errno::BUSY => "device or resource busy",
            Errno::INVAL => "invalid argument",
            Errno::MFILE => "too many open files",
            Errno::NFILE => "too many open files in the system",
            Errno::FBIG => "file too large",
            Errno::NOSPC => "no space left on device",
            Errno::ROFS => "read-only file system",
            Errno::NOSYS => "function not implemented",
            Errno::STALE => "it is another file by now",
            Errno::DQUOT => "disk quota exceeded",
            other => return write!(f, "error {}", other.raw_os_error()),
        };
        f.write_str(text)
    }
}

/// Prints an error number with a hint at the limit of the process that probably caused it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cause(pub Errno);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = match self.0 {
            Errno::AGAIN => "; is there a limit on processes (ulimit -u, or pids.max of the container)?",
            Errno::MFILE => "; is there a limit on open files (ulimit -n)?",
            Errno::NOMEM => "; is there a limit on address space or data (ulimit -v, ulimit -d)?",
            Errno::NOENT => "; is /proc mounted?",
            _ => "",
        };
        write!(f, "{}{limit}", ErrnoText(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_a_text() {
        assert_eq!(ErrnoText(Errno::NOSPC).to_string(), "no space left on device");
        assert_eq!(ErrnoText(Errno::XDEV).to_string(), "error 18");
    }
}
