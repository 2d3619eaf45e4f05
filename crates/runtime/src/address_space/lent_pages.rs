//! Lent pages: whether externally referenced pages may exist.
//!
//! `vmsplice(2)`, `MSG_ZEROCOPY` and zero-copy sends of an io_uring keep references to pages. Such
//! a page moves like any other, and no interface of the kernel shows the reference (Linux 6.18). If
//! the page's frame were recycled in place, the holder of the reference would read other content. A
//! page that goes back to the kernel is safe, because the reference keeps it.
//!
//! After the first sign of such a call, no frame is recycled in place for the rest of the process's
//! life: another process may hold the pages long after the call, and can pass them on (`tee(2)`,
//! `splice(2)`). The signs are:
//!
//! - a call of the C library that was seen ([`foliomem_sys::unseen_calls`]);
//! - an io_uring, or a socket with `SO_ZEROCOPY`, among the process's descriptors: it may come from
//!   another process;
//! - a pipe open for writing, if the program can make unseen calls.
//!
//! The monitor and each fork check the descriptors, the monitor of a process in which nothing
//! happens once a second, or if their number has changed. If the program can make unseen calls, a
//! thread also checks before it recycles a frame of the program, unless the last check was less
//! than [`CHECK_INTERVAL_NS`] ago and the number of descriptors is unchanged. A descriptor that is
//! created, used, passed on and closed between two checks is missed. There is no lock.

use crate::companion::memory_users;
use foliomem_sys::clock::now_ns;
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::seccomp::{self, Call};
use foliomem_sys::socket::has_zerocopy;
use foliomem_sys::unseen_calls;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, RawDir, SeekFrom, fstat, readlinkat_raw, seek, statat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// Minimum time between two checks of the same number of descriptors, in nanoseconds.
const CHECK_INTERVAL_NS: u64 = 1_000_000;
/// Maximum share of time that checks take, as a divisor.
const CHECK_SHARE: u64 = 64;

/// How a descriptor can lend pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(crate) enum Lender {
    None,
    /// A pipe that is open for writing: by `vmsplice`.
    Pipe,
    /// An io_uring, or a socket that sends by reference.
    Direct,
}

/// The program's descriptors, as the agent sees them.
#[derive(Debug)]
pub(crate) struct Table {
    /// The program's `/proc/PID/fd`. `None` if the kernel refuses it: then any descriptor may
    /// exist.
    directory: Option<OwnedFd>,
    /// The program's pidfd. `None` if the kernel refuses it.
    process: Option<OwnedFd>,
}

impl Table {
    /// Opens the table of process `pid`, which `proc` shows as `number`.
    pub(crate) fn open(proc: &OwnedFd, pid: Pid, number: u32) -> Table {
        let directory = memory_users::open_directory_in(proc, format_args!("{number}/fd"));
        let process = seccomp::allow(Call::PidfdOpen).then(|| pidfd_open(pid, PidfdFlags::empty()));
        Table { directory, process: process.and_then(Result::ok) }
    }

    /// Returns the number of open descriptors, on Linux 6.2 and later.
    fn open_descriptors(&self) -> u64 {
        self.directory.as_ref().and_then(|directory| fstat(directory).ok()).map_or(0, |stat| stat.st_size as u64)
    }

    /// Returns the worst way in which a descriptor can lend pages. An error counts as the worst.
    fn lenders(&self) -> Lender {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let Some(directory) = self.directory.as_ref().filter(|directory| seek(directory, SeekFrom::Start(0)).is_ok())
        else {
            return Lender::Direct;
        };
        let mut entries = RawDir::new(directory, &mut buffer);
        let (mut seen, mut found) = (0, Lender::None);
        while let Some(entry) = entries.next() {
            let Ok(entry) = entry else { return Lender::Direct };
            let name = entry.file_name();
            if name.to_bytes().first().is_some_and(u8::is_ascii_digit) {
                seen += 1;
                found = found.max(self.lender(directory, name));
            }
        }
        // The kernel shows an empty table if the first thread of the thread group has ended.
        if seen == 0 { Lender::Direct } else { found }
    }

    fn lender(&self, directory: &OwnedFd, name: &CStr) -> Lender {
        let mut link = [MaybeUninit::uninit(); 64];
        let Ok((target, _)) = readlinkat_raw(directory, name, &mut link[..]) else {
            // The descriptor was closed meanwhile.
            return Lender::None;
        };
        let direct = |lends: bool| if lends { Lender::Direct } else { Lender::None };
        let pipe = || if is_written(directory, name) { Lender::Pipe } else { Lender::None };
        match &*target {
            target if target.starts_with(b"pipe:") => pipe(),
            target if target.starts_with(b"socket:") => direct(self.is_zerocopy_socket(name)),
            target if target.starts_with(b"anon_inode:") => direct(target.ends_with(b"[io_uring]")),
            // A path: it may be a named pipe.
            target if target.starts_with(b"/") => {
                let stat = statat(directory, name, AtFlags::empty());
                let is_pipe = stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
                if is_pipe { pipe() } else { Lender::None }
            }
            _ => Lender::None,
        }
    }

    /// Returns whether a socket has `SO_ZEROCOPY`. If the kernel refuses the query, the answer is
    /// `true`.
    fn is_zerocopy_socket(&self, name: &CStr) -> bool {
        let number = name.to_str().ok().and_then(|name| name.parse().ok());
        let (Some(process), Some(number)) = (&self.process, number) else { return true };
        match pidfd_getfd(process, number, PidfdGetfdFlags::empty()) {
            Ok(socket) => has_zerocopy(&socket),
            Err(Errno::BADF) => false,
            Err(_) => true,
        }
    }
}

/// Returns whether the descriptor is open for writing, which the mode of its link shows.
fn is_written(directory: &OwnedFd, name: &CStr) -> bool {
    let link = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
    link.is_ok_and(|link| Mode::from_raw_mode(link.st_mode).contains(Mode::WUSR))
}

/// Remembers whether a descriptor of the program was ever able to lend pages.
#[derive(Debug)]
pub(crate) struct Lenders {
    /// The worst [`Lender`] that any check has found.
    worst: AtomicU8,
    is_checking: AtomicBool,
    /// Time of the next check, in nanoseconds, and the number of descriptors at the last one.
    due_ns: AtomicU64,
    seen: AtomicU64,
    table: ForkCell<Option<Table>>,
}

impl Default for Lenders {
    fn default() -> Lenders {
        Lenders {
            worst: AtomicU8::new(Lender::None as u8),
            is_checking: AtomicBool::new(false),
            due_ns: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            table: ForkCell::new(None),
        }
    }
}

impl Lenders {
    /// Sets the table of the program's descriptors.
    ///
    /// # Safety
    /// No other thread checks meanwhile.
    pub(crate) unsafe fn arm(&self, table: Table) {
        self.is_checking.store(false, Ordering::Relaxed);
        self.due_ns.store(0, Ordering::Relaxed);
        // SAFETY: the caller's contract: nobody uses the table. The old value belongs to the
        // parent.
        unsafe { self.table.replace_forgetting(Some(table)) };
    }

    /// Returns whether the program may have lent pages. Checks the descriptors if a check is due
    /// and the program can make unseen calls.
    #[inline]
    pub(crate) fn may_have_lent(&self) -> bool {
        if unseen_calls::have_lent() {
            return true;
        }
        if unseen_calls::can_be_made() {
            self.has_found(Lender::Pipe) || self.is_due(0) && self.check() >= Lender::Pipe
        } else {
            self.has_found(Lender::Direct)
        }
    }

    /// Checks the descriptors if a check has been due for `overdue_ns`, or if their number has
    /// changed.
    pub(crate) fn check_if_due(&self, overdue_ns: u64) {
        if !self.has_found(Lender::Direct) && self.is_due(overdue_ns) {
            self.check();
        }
    }

    fn has_found(&self, lender: Lender) -> bool {
        self.worst.load(Ordering::Relaxed) >= lender as u8
    }

    fn is_due(&self, overdue_ns: u64) -> bool {
        now_ns() >= self.due_ns.load(Ordering::Relaxed) + overdue_ns
            || (*self.table).as_ref().is_none_or(|table| table.open_descriptors() != self.seen.load(Ordering::Relaxed))
    }

    /// Checks the descriptors, whether a check is due or not. Concurrent callers get the worst
    /// answer.
    pub(crate) fn check(&self) -> Lender {
        let Some(table) = &*self.table else { return Lender::Direct };
        // Acquire pairs with the Release of the last check.
        if self.has_found(Lender::Direct) || self.is_checking.swap(true, Ordering::Acquire) {
            return Lender::Direct;
        }
        let (started_ns, seen) = (now_ns(), table.open_descriptors());
        let found = table.lenders();
        self.worst.fetch_max(found as u8, Ordering::Relaxed);
        self.seen.store(seen, Ordering::Relaxed);
        let took_ns = now_ns() - started_ns;
        self.due_ns.store(started_ns + CHECK_INTERVAL_NS.max(took_ns * CHECK_SHARE), Ordering::Relaxed);
        // Release pairs with the Acquire of the next check.
        self.is_checking.store(false, Ordering::Release);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsRawFd;
    use rustix::fs::{OFlags, openat};
    use rustix::process::getpid;
    use std::ffi::CString;
    use std::net::{TcpListener, UdpSocket};
    use std::os::unix::net::UnixStream;

    fn lender(descriptor: &impl AsRawFd) -> Lender {
        let proc = openat(rustix::fs::CWD, "/proc", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let table = Table::open(&proc, getpid(), std::process::id());
        table.lender(table.directory.as_ref().unwrap(), &CString::new(descriptor.as_raw_fd().to_string()).unwrap())
    }

    fn ask_for_zerocopy(socket: &impl AsRawFd) -> bool {
        let one = 1i32;
        // SAFETY: setsockopt reads the int that it is given.
        let result = unsafe {
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const one).cast(), 4)
        };
        result == 0
    }

    #[test]
    fn a_pipe_lends_where_it_is_open_for_writing() {
        let (reader, writer) = std::io::pipe().unwrap();
        assert_eq!((lender(&reader), lender(&writer)), (Lender::None, Lender::Pipe));
    }

    #[test]
    fn a_socket_lends_once_it_sends_without_copies() {
        let (tcp, udp) = (TcpListener::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        assert_eq!((lender(&tcp), lender(&udp)), (Lender::None, Lender::None));
        assert!(ask_for_zerocopy(&tcp) && ask_for_zerocopy(&udp));
        assert_eq!((lender(&tcp), lender(&udp)), (Lender::Direct, Lender::Direct));
    }

    #[test]
    fn files_and_sockets_within_the_machine_lend_nothing() {
        let (file, (one, other)) = (std::fs::File::open("/proc/self/maps").unwrap(), UnixStream::pair().unwrap());
        assert_eq!([lender(&file), lender(&one), lender(&other)], [Lender::None; 3]);
    }

    #[test]
    fn a_lender_is_remembered_after_it_is_closed() {
        let proc = openat(rustix::fs::CWD, "/proc", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let lenders = Lenders::default();
        assert_eq!(lenders.check(), Lender::Direct, "without a table the worst is assumed");
        // SAFETY: no other thread checks.
        unsafe { lenders.arm(Table::open(&proc, getpid(), std::process::id())) };
        let pipe = std::io::pipe().unwrap();
        assert!(lenders.check() >= Lender::Pipe);
        drop(pipe);
        assert!(lenders.has_found(Lender::Pipe));
    }
}
