//! The second way to the control segment, for programs that cannot open the supervisor's descriptor.
//!
//! `/proc/PID/fd/N` does not lead a program there that is in another user namespace (the kernel
//! refuses it), or that has a `/proc` of another pid namespace (the path means something else). For
//! these the supervisor listens on a socket in the file system, and sends the descriptor to whoever
//! connects. The socket lies in a directory that only the supervisor's user may enter.
//!
//! A sandbox often has a `/dev` of its own, too, so the userfaultfd device comes with the segment.
//!
//! A network namespace is no obstacle. A program that sees none of the file system of the supervisor
//! does not find the socket; it finds the agent's library there no more, either.

use crate::passing;
use crate::uffd;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::CStr;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest that a program waits for the supervisor, which the terminal may have stopped.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// After an error, before the next program is let in.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// A socket at which the segment is to be had. Removed with this.
#[derive(Debug)]
pub struct Door {
    directory: PathBuf,
    socket: PathBuf,
}

impl Door {
    /// Makes the socket, in the directory for temporary files, and serves it with `segment`.
    pub fn open(segment: BorrowedFd<'_>) -> io::Result<Door> {
        let mut key = [0u8; 8];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
        let directory = std::env::temp_dir().join(format!("foliomem-{:016x}", u64::from_ne_bytes(key)));
        std::fs::DirBuilder::new().mode(0o700).create(&directory)?;
        let door = Door { socket: directory.join("control"), directory };
        let listener = UnixListener::bind(&door.socket)?;
        let segment = segment.try_clone_to_owned()?;
        let device = uffd::device().ok();
        without_signals(|| {
            std::thread::Builder::new()
                .name("foliomem-door".to_owned())
                .spawn(move || serve(&listener, &segment, device.as_ref()))
        })?;
        Ok(door)
    }

    /// Where the socket is.
    pub fn path(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let _ = std::fs::remove_dir(&self.directory);
    }
}

/// Calls `make_thread`, and gives the thread no signals: the supervisor's are for another one.
fn without_signals<R>(make_thread: impl FnOnce() -> R) -> R {
    // SAFETY: the sets are plain words that the calls read and write.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = make_thread();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}

fn serve(listener: &UnixListener, segment: &OwnedFd, device: Option<&OwnedFd>) {
    let given = [Some(segment.as_fd()), device.map(AsFd::as_fd), None];
    loop {
        let sent = listener.accept().and_then(|(program, _)| Ok(passing::send(&program, given)?));
        if sent.is_err() {
            std::thread::sleep(ERROR_PAUSE);
        }
    }
}

/// What a door gives.
#[derive(Debug)]
pub struct Given {
    /// The control segment.
    pub segment: OwnedFd,
    /// `/dev/userfaultfd`, where the supervisor may use it.
    pub device: Option<OwnedFd>,
}

/// What the door at `path` gives.
pub fn knock(path: &CStr) -> Result<Given, Errno> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for wait in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, wait, Some(MAX_WAIT))?;
    }
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let [segment, device, _] = passing::receive(&socket, RecvFlags::empty())?;
    Ok(Given { segment: segment.ok_or(Errno::BADMSG)?, device })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    fn c_path(path: &Path) -> CString {
        CString::new(path.as_os_str().as_bytes()).unwrap()
    }

    #[test]
    fn everybody_who_knocks_is_given_the_same_file() {
        let file = rustix::fs::memfd_create("segment", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, b"for all").unwrap();
        let door = Door::open(file.as_fd()).unwrap();
        let path = c_path(door.path());
        for _ in 0..3 {
            let Given { segment: given, device } = knock(&path).unwrap();
            assert_eq!(device.is_some(), uffd::device().is_ok());
            let mut bytes = [0; 7];
            assert_eq!(rustix::io::pread(&given, &mut bytes, 0), Ok(7));
            assert_eq!(&bytes, b"for all");
            assert!(rustix::io::fcntl_getfd(&given).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        let directory = door.directory.clone();
        drop(door);
        assert!(!directory.exists());
        assert_eq!(knock(&path).err(), Some(Errno::NOENT));
    }

    #[test]
    fn a_door_that_gives_nothing_is_an_error() {
        let directory = std::env::temp_dir().join(format!("foliomem-no-door-{}", std::process::id()));
        let listener = UnixListener::bind(&directory).unwrap();
        let silent = std::thread::spawn(move || {
            drop(listener.accept().unwrap());
            std::io::Write::write_all(&mut listener.accept().unwrap().0, b"x").unwrap();
        });
        assert!(knock(&c_path(&directory)).is_err());
        assert_eq!(knock(&c_path(&directory)).err(), Some(Errno::BADMSG));
        silent.join().unwrap();
        std::fs::remove_file(directory).unwrap();
        let long = CString::new(vec![b'x'; 200]).unwrap();
        assert_eq!(knock(&long).err(), Some(Errno::NAMETOOLONG));
    }
}
