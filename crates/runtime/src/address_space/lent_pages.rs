//! Lent pages: whether others may hold references to pages of the program.
//!
//! `vmsplice(2)`, `MSG_ZEROCOPY` and zero-copy sends of an io_uring keep references to pages. Such
//! a page moves like any other, and no interface of the kernel shows the reference (Linux 6.18). If
//! the page's frame were used again in place, the holder of the reference would read other content.
//! A page that goes back to the kernel is safe, because the reference keeps it.
//!
//! After the first sign of such a call, no frame is used again in place for the rest of the
//! process's life: another process may hold the pages long after the call, and can pass them on
//! (`tee(2)`, `splice(2)`). The signs are:
//!
//! - a call of the C library that was seen ([`foliomem_sys::unseen_calls`]);
//! - an io_uring, or a socket with `SO_ZEROCOPY`, among the process's descriptors: it may come from
//!   another process;
//! - a pipe open for writing, if the program can make unseen calls.
//!
//! The monitor and each fork look at the descriptors. If the program can make unseen calls, a
//! thread also looks before it uses a frame of the program's again, unless the last look was less
//! than [`LOOK_INTERVAL_NS`] ago and the number of descriptors is the same. A descriptor that is
//! made, used, passed on and closed between two looks is missed. There is no lock.

use crate::companion::memory_users;
use foliomem_sys::clock::now_ns;
use foliomem_sys::filters::{self, Call};
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::socket::has_zerocopy;
use foliomem_sys::unseen_calls;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, RawDir, SeekFrom, fstat, readlinkat_raw, seek, statat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// The shortest time between two looks at as many descriptors.
const LOOK_INTERVAL_NS: u64 = 1_000_000;
/// Looks take one part of so many of the time, at most.
const LOOK_SHARE: u64 = 64;

/// What a descriptor can lend pages by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(crate) enum Lender {
    None,
    /// A pipe that can be written to: by `vmsplice`.
    Pipe,
    /// An io_uring, or a socket that sends by reference.
    Direct,
}

/// The descriptors of the program, as the agent sees them.
#[derive(Debug)]
pub(crate) struct Table {
    /// `/proc/PID/fd` of the program. `None` where the kernel refuses it: then there may be anything.
    directory: Option<OwnedFd>,
    /// The program. `None` where the kernel refuses it.
    process: Option<OwnedFd>,
}

impl Table {
    /// The table of the process `pid`, which `proc` shows as `number`.
    pub(crate) fn open(proc: &OwnedFd, pid: Pid, number: u32) -> Table {
        let directory = memory_users::open_directory_in(proc, format_args!("{number}/fd"));
        let process = filters::allow(Call::PidfdOpen).then(|| pidfd_open(pid, PidfdFlags::empty()));
        Table { directory, process: process.and_then(Result::ok) }
    }

    /// How many are open, on Linux 6.2 and later.
    fn open_descriptors(&self) -> u64 {
        self.directory.as_ref().and_then(|directory| fstat(directory).ok()).map_or(0, |stat| stat.st_size as u64)
    }

    /// What they can lend pages by. An error counts as the worst.
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
        // The table of a thread group whose first thread has ended looks empty.
        if seen == 0 { Lender::Direct } else { found }
    }

    fn lender(&self, directory: &OwnedFd, name: &CStr) -> Lender {
        let mut link = [MaybeUninit::uninit(); 64];
        let Ok((target, _)) = readlinkat_raw(directory, name, &mut link[..]) else {
            // Closed meanwhile.
            return Lender::None;
        };
        let direct = |lends: bool| if lends { Lender::Direct } else { Lender::None };
        let pipe = || if is_written(directory, name) { Lender::Pipe } else { Lender::None };
        match &*target {
            target if target.starts_with(b"pipe:") => pipe(),
            target if target.starts_with(b"socket:") => direct(self.sends_by_reference(name)),
            target if target.starts_with(b"anon_inode:") => direct(target.ends_with(b"[io_uring]")),
            // A named pipe.
            target if target.starts_with(b"/") => {
                let stat = statat(directory, name, AtFlags::empty());
                let is_pipe = stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
                if is_pipe { pipe() } else { Lender::None }
            }
            _ => Lender::None,
        }
    }

    /// Whether a socket has `SO_ZEROCOPY`. Where the kernel does not let us ask, it counts as yes.
    fn sends_by_reference(&self, name: &CStr) -> bool {
        let number = name.to_str().ok().and_then(|name| name.parse().ok());
        let (Some(process), Some(number)) = (&self.process, number) else { return true };
        match pidfd_getfd(process, number, PidfdGetfdFlags::empty()) {
            Ok(socket) => has_zerocopy(&socket),
            Err(Errno::BADF) => false,
            Err(_) => true,
        }
    }
}

/// The mode of the link tells how the descriptor was opened.
fn is_written(directory: &OwnedFd, name: &CStr) -> bool {
    let link = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
    link.is_ok_and(|link| Mode::from_raw_mode(link.st_mode).contains(Mode::WUSR))
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lenders {
    /// The worst [`Lender`] that was ever found.
    worst: AtomicU8,
    is_looking: AtomicBool,
    /// When the next look is due, and how many descriptors the last one saw.
    due_ns: AtomicU64,
    seen: AtomicU64,
    table: ForkCell<Option<Table>>,
}

impl Default for Lenders {
    fn default() -> Lenders {
        Lenders {
            worst: AtomicU8::new(Lender::None as u8),
            is_looking: AtomicBool::new(false),
            due_ns: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            table: ForkCell::new(None),
        }
    }
}

impl Lenders {
    /// The program's descriptors are to be found here.
    ///
    /// # Safety
    /// No other thread looks meanwhile.
    pub(crate) unsafe fn arm(&self, table: Table) {
        self.is_looking.store(false, Ordering::Relaxed);
        self.due_ns.store(0, Ordering::Relaxed);
        // SAFETY: by the contract. What was there is the parent's.
        unsafe { self.table.replace_forgetting(Some(table)) };
    }

    /// Whether the program may have lent pages. Looks if a look is due and calls can be made unseen.
    #[inline]
    pub(crate) fn may_have_lent(&self) -> bool {
        if unseen_calls::have_lent() {
            return true;
        }
        if unseen_calls::can_be_made() {
            self.has_found(Lender::Pipe) || self.is_due() && self.look() >= Lender::Pipe
        } else {
            self.has_found(Lender::Direct)
        }
    }

    /// Looks if a look is due.
    pub(crate) fn look_if_due(&self) {
        if !self.has_found(Lender::Direct) && self.is_due() {
            self.look();
        }
    }

    fn has_found(&self, lender: Lender) -> bool {
        self.worst.load(Ordering::Relaxed) >= lender as u8
    }

    fn is_due(&self) -> bool {
        now_ns() >= self.due_ns.load(Ordering::Relaxed)
            || (*self.table).as_ref().is_none_or(|table| table.open_descriptors() != self.seen.load(Ordering::Relaxed))
    }

    /// Looks, whether a look is due or not. Who comes meanwhile is told the worst.
    pub(crate) fn look(&self) -> Lender {
        let Some(table) = &*self.table else { return Lender::Direct };
        // Acquire pairs with the Release of the last look.
        if self.has_found(Lender::Direct) || self.is_looking.swap(true, Ordering::Acquire) {
            return Lender::Direct;
        }
        let (started_ns, seen) = (now_ns(), table.open_descriptors());
        let found = table.lenders();
        self.worst.fetch_max(found as u8, Ordering::Relaxed);
        self.seen.store(seen, Ordering::Relaxed);
        let took_ns = now_ns() - started_ns;
        self.due_ns.store(started_ns + LOOK_INTERVAL_NS.max(took_ns * LOOK_SHARE), Ordering::Relaxed);
        // Release pairs with the Acquire of the next look.
        self.is_looking.store(false, Ordering::Release);
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
        // SAFETY: setsockopt reads an int.
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
    fn what_was_found_is_remembered_after_it_is_closed() {
        let proc = openat(rustix::fs::CWD, "/proc", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let lenders = Lenders::default();
        assert_eq!(lenders.look(), Lender::Direct, "nobody knows before the table is open");
        // SAFETY: nobody else looks.
        unsafe { lenders.arm(Table::open(&proc, getpid(), std::process::id())) };
        let pipe = std::io::pipe().unwrap();
        assert!(lenders.look() >= Lender::Pipe);
        drop(pipe);
        assert!(lenders.has_found(Lender::Pipe));
    }
}
