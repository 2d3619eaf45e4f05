//! The door: a socket that gives the control segment to programs that cannot open the supervisor's
//! descriptor.
//!
//! `/proc/PID/fd/N` fails for a program in another user namespace or of another user, because the
//! kernel refuses access. With a `/proc` of another pid namespace the path means something else.
//! For these programs the supervisor listens on a socket in the file system, and sends the
//! descriptor to each process of the run that connects. A process of another user must descend from
//! the supervisor, which is the parent of all orphans of the run.
//!
//! The door also sends the userfaultfd device: a sandbox often has a `/dev` of its own, and another
//! user may not open the device. It sends the files of the process's memory, which a process cannot
//! open after it has become another user, and the swap file.
//!
//! A network namespace is no obstacle. A program with another root directory finds neither the
//! socket nor the agent's library. There is no lock.

mod room;

use foliomem_sys::descriptor_passing;
use foliomem_sys::pagemap;
use foliomem_sys::signals::without_signals;
use foliomem_sys::socket::peer_pidfd;
use foliomem_sys::userfaultfd;
use room::Room;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{self, AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::Timespec;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// Maximum time that a program waits for the supervisor, which a terminal may have stopped.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Maximum number of searches of a process's ancestors; a search may fail because an ancestor ends.
const MAX_SEARCHES: u32 = 4;
/// Maximum number of ancestors of a process that a search visits: more than any tree has.
const MAX_GENERATIONS: u32 = 1 << 16;
/// Pause after an error, before the next program is let in.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// A socket that gives the control segment. Dropping the door removes it.
#[derive(Debug)]
pub struct Door {
    room: Room,
}

impl Door {
    /// Creates the socket in the directory for temporary files, and serves `segment` and
    /// `swap_file` from a thread. Fails if the directory, the socket or the thread cannot be
    /// created.
    pub fn open(segment: BorrowedFd<'_>, swap_file: Option<BorrowedFd<'_>>) -> io::Result<Door> {
        let parent = std::env::temp_dir();
        let door = Door { room: Room::new(&parent)? };
        let listener = UnixListener::bind(door.path())?;
        std::fs::set_permissions(door.path(), std::fs::Permissions::from_mode(0o666))?;
        let store = Store {
            segment: segment.try_clone_to_owned()?,
            swap_file: swap_file.map(|file| file.try_clone_to_owned()).transpose()?,
            device: userfaultfd::device().ok(),
        };
        without_signals(|| {
            let serve = move || {
                room::remove_left(&parent);
                serve(&listener, &store)
            };
            std::thread::Builder::new().name("foliomem-door".to_owned()).spawn(serve)
        })?;
        Ok(door)
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        self.room.socket()
    }
}

/// The descriptors that a door gives to every process.
struct Store {
    segment: OwnedFd,
    swap_file: Option<OwnedFd>,
    device: Option<OwnedFd>,
}

fn serve(listener: &UnixListener, store: &Store) {
    loop {
        let sent = listener.accept().and_then(|(program, _)| Ok(give(&program, store)?));
        if sent.is_err() {
            std::thread::sleep(ERROR_PAUSE);
        }
    }
}

/// Sends the descriptors to the process behind `program`, if it belongs to the run. Fails with
/// `EACCES` otherwise.
fn give(program: &UnixStream, store: &Store) -> Result<(), Errno> {
    let peer = Peer::of(program)?;
    if !peer.belongs_to_run() {
        return Err(Errno::ACCESS);
    }
    let [pagemap, memory] = ["pagemap", "mem"].map(|file| peer.open(file));
    // If the process has ended, another process may have its pid.
    if peer.has_ended() {
        return Err(Errno::SRCH);
    }
    let [pagemap, memory] = [pagemap.as_ref(), memory.as_ref()].map(|file| file.ok().map(AsFd::as_fd));
    let [device, swap_file] = [&store.device, &store.swap_file].map(|file| file.as_ref().map(AsFd::as_fd));
    descriptor_passing::send(program, [Some(store.segment.as_fd()), device, pagemap, memory, swap_file])
}

/// The process that has connected to the door.
struct Peer {
    pid: i32,
    is_own_user: bool,
    pidfd: OwnedFd,
}

impl Peer {
    fn of(socket: &UnixStream) -> Result<Peer, Errno> {
        let credentials = socket_peercred(socket)?;
        let pidfd = peer_pidfd(socket)?;
        let is_own_user = credentials.uid == rustix::process::geteuid();
        Ok(Peer { pid: credentials.pid.as_raw_nonzero().get(), is_own_user, pidfd })
    }

    fn has_ended(&self) -> bool {
        let ended = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&Timespec::default()));
        !ended.is_ok_and(|ready| ready == 0)
    }

    /// Opens a file of the process's directory in `/proc`.
    fn open(&self, file: &str) -> io::Result<File> {
        File::open(format!("/proc/{}/{file}", self.pid))
    }

    fn belongs_to_run(&self) -> bool {
        self.is_own_user || (0..MAX_SEARCHES).any(|_| descends_from_caller(self.pid))
    }
}

/// Returns whether the process `pid` descends from the calling process. An ancestor that ends
/// during the search can hide that.
fn descends_from_caller(pid: i32) -> bool {
    let own = std::process::id();
    let mut at = pid as u32;
    for _ in 0..MAX_GENERATIONS {
        match parent(at) {
            Some(found) if found == own => return true,
            Some(found) if found > 1 => at = found,
            _ => return false,
        }
    }
    false
}

fn parent(pid: u32) -> Option<u32> {
    pagemap::process_field(pid, 4)
}

/// The descriptors that a process gets from a door.
#[derive(Debug)]
pub struct Given {
    /// The control segment.
    pub segment: OwnedFd,
    /// `/dev/userfaultfd`, if the supervisor may use it.
    pub device: Option<OwnedFd>,
    /// The caller's `/proc/self/pagemap`, if the supervisor may open it.
    pub pagemap: Option<OwnedFd>,
    /// The caller's `/proc/self/mem`, if the supervisor may open it.
    pub memory: Option<OwnedFd>,
    /// The swap file, if there is one.
    pub swap_file: Option<OwnedFd>,
}

/// Connects to the door at `path` and receives its descriptors. Fails if nobody serves the door, or
/// with `EBADMSG` if it sends no segment.
pub fn knock(path: &CStr) -> Result<Given, Errno> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for wait in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, wait, Some(MAX_WAIT))?;
    }
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let [segment, device, pagemap, memory, swap_file] = descriptor_passing::receive(&socket, RecvFlags::empty())?;
    Ok(Given { segment: segment.ok_or(Errno::BADMSG)?, device, pagemap, memory, swap_file })
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
    fn every_process_gets_the_same_file() {
        let file = rustix::fs::memfd_create("segment", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, b"for all").unwrap();
        let door = Door::open(file.as_fd(), None).unwrap();
        let path = c_path(door.path());
        for _ in 0..3 {
            let Given { segment: given, device, pagemap, memory, swap_file } = knock(&path).unwrap();
            assert!(swap_file.is_none(), "this run has no swap file");
            assert_eq!(device.is_some(), userfaultfd::device().is_ok());
            let (words, mut found) = ([7u8; 16], [0u8; 16]);
            let address = words.as_ptr().expose_provenance() as u64;
            assert_eq!(rustix::io::pread(memory.unwrap(), &mut found, address), Ok(16));
            assert_eq!(words, found, "the memory of the process that knocks");
            assert_eq!(rustix::io::pread(pagemap.unwrap(), &mut found[..8], address >> 12 << 3), Ok(8));
            let mut bytes = [0; 7];
            assert_eq!(rustix::io::pread(&given, &mut bytes, 0), Ok(7));
            assert_eq!(&bytes, b"for all");
            assert!(rustix::io::fcntl_getfd(&given).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        let directory = door.path().parent().unwrap().to_owned();
        drop(door);
        assert!(!directory.exists());
        assert_eq!(knock(&path).err(), Some(Errno::NOENT));
    }

    #[test]
    fn descendants_of_this_process_are_known() {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "sleep 60 & echo $!; wait"]);
        let mut child = shell.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        let grandchild: i32 = line.trim().parse().unwrap();
        assert!(descends_from_caller(grandchild) && descends_from_caller(child.id() as i32));
        assert!(!descends_from_caller(1) && !descends_from_caller(std::os::unix::process::parent_id() as i32));
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(grandchild).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        child.wait().unwrap();
        assert!(!descends_from_caller(grandchild));
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
