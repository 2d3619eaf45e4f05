//! The processes that use the program's memory besides the companion.
//!
//! The companion keeps the memory alive while it runs, so it must end when no other process uses
//! the memory. It must not end earlier: swapped-out pages read as zeros without it. A user is the
//! program's process, or any other process that `clone(CLONE_VM)` has made (a `vfork` child, which
//! may outlive its parent). A user leaves when its last thread ends, and when it executes another
//! program.
//!
//! One user at a time is watched. Its pidfd reports its end, and kcmp(2) an exec. When it has left,
//! all processes are searched for another user.
//!
//! Where kcmp(2) is not allowed, the sizes in `/proc/PID/statm` are compared. A user has the size
//! of the companion's memory, and the same changes of size. The two sizes cannot be read at one
//! instant, and the program may change its size all the time: an `mmap` over a mapping makes it
//! smaller for a moment. So only a row of differing sizes shows that a user has left.
//!
//! The monitor uses this, and so does the guard when the companion has been killed, perhaps while
//! it held locks, the heap's among them. So no function here takes a lock or allocates.

use foliomem_sys::clock::{self, now_ns};
use foliomem_sys::exit_status::ExitStatus;
use foliomem_sys::identity;
use foliomem_sys::pagemap::mapped_pages;
use foliomem_sys::region;
use foliomem_sys::seccomp::{self, Call};
use foliomem_sys::thread::{self, MemoryOf};
use foliomem_types::units::PAGE_BYTES;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags, RawDir, openat, readlinkat_raw};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal, test_kill_process};
use rustix::time::Timespec;
use std::mem::MaybeUninit;
use std::time::Duration;

/// Two memories are different if this many comparisons of their sizes in a row find no equality.
const COMPARISONS: u32 = 200;
/// Number of changes of its own size that the monitor expects another process to show, and their
/// maximum in pages.
const CHANGES: u32 = 3;
const MAX_CHANGE_PAGES: usize = 10_007;
/// Maximum time that a process may take to end that was killed, or has lost its memory.
const MAX_KILL_WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A process that uses the memory.
#[derive(Debug)]
pub struct User {
    pid: Pid,
    /// The thread of the process that is watched.
    thread: Pid,
    /// The process's number under `/proc`, which may be of another pid namespace.
    number: u32,
    /// The process's pidfd; `None` if a filter forbids pidfd_open(2).
    pidfd: Option<OwnedFd>,
    /// The `statm` of the thread; `None` where `/proc` does not show it.
    statm: Option<OwnedFd>,
    origin: Origin,
}

/// The state of a killed process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Killed {
    /// The process has ended.
    Ended,
    /// The process exists after the maximum wait.
    Remains,
}

/// How a process is known to be a user.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    /// It has started the companion: until it executes another program, it uses the companion's
    /// memory.
    Given,
    /// It was found. If kcmp(2) is not allowed, changes of its size are compared each time.
    Found,
}

impl User {
    /// Opens process `pid`, which uses the memory now. `proc` is `/proc`, and shows it as `number`.
    /// Fails if it has ended.
    pub fn open(proc: &OwnedFd, pid: Pid, number: u32) -> Result<User, Errno> {
        let pidfd = open_pidfd(pid)?;
        let statm = open_in(proc, format_args!("{number}/statm"));
        Ok(User { pid, thread: pid, number, pidfd, statm, origin: Origin::Given })
    }

    /// Returns whether the user still uses the memory of the companion. `ours` is the companion's
    /// `/proc/PID/statm`.
    pub fn remains(&self, ours: &OwnedFd) -> bool {
        !self.has_ended(&Timespec::default())
            && match memory_of(self.thread) {
                MemoryOf::Caller => true,
                MemoryOf::Other => false,
                MemoryOf::Unknown => self.statm.as_ref().is_none_or(|theirs| self.seems_to_remain(theirs, ours)),
            }
    }

    fn seems_to_remain(&self, theirs: &OwnedFd, ours: &OwnedFd) -> bool {
        match self.origin {
            Origin::Given => is_of_one_size(theirs, ours),
            Origin::Found => is_same(theirs, ours),
        }
    }

    /// Returns whether the process has not ended, whichever memory it uses.
    pub fn lives(&self) -> bool {
        !self.has_ended(&Timespec::default())
    }

    /// Returns the CPU time that the process has used so far. Returns `None` if the system does not
    /// tell.
    pub fn cpu_time(&self) -> Option<Duration> {
        clock::process_cpu_time(self.pid.as_raw_nonzero().get() as u32)
    }

    /// Returns whether the process ends within `time`.
    fn has_ended(&self, time: &Timespec) -> bool {
        ends_within(self.pid, self.pidfd.as_ref(), time)
    }

    /// Returns whether the process has ended and the kernel has written a core dump of it. Returns
    /// false if the system does not tell: the process is reaped, and Linux is older than 6.15.
    pub fn has_dumped_core(&self, proc: &OwnedFd) -> bool {
        let zombie = || ExitStatus::of_zombie(open_in(proc, format_args!("{}/stat", self.number))?);
        // In this order, because the parent may reap the process in between.
        let status = || zombie().or_else(|| ExitStatus::of_reaped(self.pidfd.as_ref()?));
        // A process loses its memory a moment before it has ended.
        let has_memory = || self.statm.as_ref().and_then(mapped_pages).is_some_and(|pages| pages > 0);
        let has_ended = !self.lives() || !has_memory() && self.has_ended(&MAX_KILL_WAIT);
        has_ended && status().is_some_and(ExitStatus::has_dumped_core)
    }

    /// Kills the process, and waits for its end.
    pub fn kill(&self) -> Killed {
        let _ = match &self.pidfd {
            Some(pidfd) => pidfd_send_signal(pidfd, Signal::KILL),
            None => kill_process(self.pid, Signal::KILL),
        };
        if self.has_ended(&MAX_KILL_WAIT) { Killed::Ended } else { Killed::Remains }
    }
}

/// Returns whether process `pid` has ended, perhaps without being reaped yet.
pub(crate) fn has_ended(pid: Pid) -> bool {
    match open_pidfd(pid) {
        Ok(pidfd) => ends_within(pid, pidfd.as_ref(), &Timespec::default()),
        Err(errno) => errno == Errno::SRCH,
    }
}

/// Returns whether process `pid` ends within `time`.
fn ends_within(pid: Pid, pidfd: Option<&OwnedFd>, time: &Timespec) -> bool {
    let Some(pidfd) = pidfd else { return test_kill_process(pid) == Err(Errno::SRCH) };
    poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(time)).is_ok_and(|ready| ready > 0)
}

fn memory_of(thread: Pid) -> MemoryOf {
    if seccomp::allow(Call::Kcmp) { thread::compare_memory(thread) } else { MemoryOf::Unknown }
}

/// Opens a process, if the system allows that. Fails if it has ended.
pub(crate) fn open_pidfd(pid: Pid) -> Result<Option<OwnedFd>, Errno> {
    match seccomp::allow(Call::PidfdOpen).then(|| pidfd_open(pid, PidfdFlags::empty())) {
        None | Some(Err(Errno::NOSYS | Errno::PERM)) => Ok(None),
        Some(opened) => opened.map(Some),
    }
}

/// Finds another user of the memory after `last` has left: one of its threads, or another process.
/// `own` are the agent's processes.
pub fn find(proc: &OwnedFd, ours: &OwnedFd, last: &User, own: [Option<Pid>; 2]) -> Option<User> {
    if uses_alone() {
        return None;
    }
    if let Some(user) = find_thread(proc, ours, last.number) {
        return Some(user);
    }
    find_id(proc, format_args!("."), |number| {
        if number == last.number {
            return None;
        }
        let statm = open_in(proc, format_args!("{number}/statm"))?;
        match mapped_pages(&statm) {
            // The process's first thread has ended, but others may be left; or this is a kernel
            // thread.
            Some(0) => find_thread(proc, ours, number),
            // The agent's processes are known by their own pids: in a nested namespace, a process
            // that has just started does not know its number yet.
            Some(_) => user_if_same(proc, ours, (number, number), statm).filter(|user| !own.contains(&Some(user.pid))),
            None => None,
        }
    })
}

/// Returns whether the kernel says that no other process uses the memory. It answers only processes
/// with one thread.
fn uses_alone() -> bool {
    seccomp::allow(Call::Unshare) && thread::is_only_user_of_memory()
}

/// Returns the process `number` if one of its threads uses the memory.
fn find_thread(proc: &OwnedFd, ours: &OwnedFd, number: u32) -> Option<User> {
    let mut tasks = 0;
    find_id(proc, format_args!("{number}/task"), |_| {
        tasks += 1;
        None::<()>
    });
    if tasks < 2 {
        // The only thread is the first one, which was checked already.
        return None;
    }
    let statm_of = |id| open_in(proc, format_args!("{number}/task/{id}/statm"));
    find_id(proc, format_args!("{number}/task"), |id| user_if_same(proc, ours, (number, id), statm_of(id)?))
}

/// Returns process `number` if its thread `id` uses the memory.
fn user_if_same(proc: &OwnedFd, ours: &OwnedFd, (number, id): (u32, u32), statm: OwnedFd) -> Option<User> {
    let thread = own_pid_of(proc, id)?;
    if memory_of(thread) == MemoryOf::Other {
        return None;
    }
    let pid = if id == number { thread } else { own_pid_of(proc, number)? };
    let user = User { pid, thread, number, pidfd: open_pidfd(pid).ok()?, statm: Some(statm), origin: Origin::Found };
    user.remains(ours).then_some(user)
}

/// Returns whether the two `statm` files seem to show the same memory: `theirs` shows the changes
/// of size that this function makes in `ours`.
fn is_same(theirs: &OwnedFd, ours: &OwnedFd) -> bool {
    (0..CHANGES).all(|_| {
        if !is_of_one_size(theirs, ours) {
            return false;
        }
        // Another companion that does this at the same moment takes another number.
        let bytes = (1 + (now_ns() ^ u64::from(std::process::id())) as usize % MAX_CHANGE_PAGES) * PAGE_BYTES;
        region::with_reserved(bytes, || is_of_one_size(theirs, ours)).unwrap_or(true)
    })
}

/// Returns whether both files show the same size at some instant. Equal sizes in two reads of
/// `ours` do not prove that the size was constant in between.
fn is_of_one_size(theirs: &OwnedFd, ours: impl AsFd) -> bool {
    let mut before = mapped_pages(&ours);
    for _ in 0..COMPARISONS {
        let (size, after) = (mapped_pages(theirs), mapped_pages(&ours));
        if size.is_none_or(|pages| pages == 0) {
            return false;
        }
        if size == before || size == after {
            return true;
        }
        before = after;
    }
    false
}

/// Passes the numeric names in a directory under `/proc` to `visit` until it returns a value, and
/// returns that. Visits nothing where there is no such directory.
pub(crate) fn find_id<R>(
    proc: &OwnedFd,
    path: std::fmt::Arguments<'_>,
    mut visit: impl FnMut(u32) -> Option<R>,
) -> Option<R> {
    let directory = open_directory_in(proc, path)?;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&directory, &mut buffer);
    while let Some(Ok(entry)) = entries.next() {
        let number = entry.file_name().to_str().ok().and_then(|name| name.parse().ok());
        if let Some(found) = number.and_then(&mut visit) {
            return Some(found);
        }
    }
    None
}

/// Opens the directory `path` of `proc`; `None` if it does not exist or the kernel refuses it.
pub(crate) fn open_directory_in(proc: &OwnedFd, path: std::fmt::Arguments<'_>) -> Option<OwnedFd> {
    open_with(proc, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)
}

/// Opens the file `path` of `proc`; `None` if it does not exist or the kernel refuses it.
pub(crate) fn open_in(proc: &OwnedFd, path: std::fmt::Arguments<'_>) -> Option<OwnedFd> {
    open_with(proc, path, OFlags::RDONLY | OFlags::CLOEXEC)
}

fn open_with(proc: &OwnedFd, path: std::fmt::Arguments<'_>, flags: OFlags) -> Option<OwnedFd> {
    let mut name = [0u8; 64];
    std::io::Write::write_fmt(&mut &mut name[..63], path).ok()?;
    let name = std::ffi::CStr::from_bytes_until_nul(&name).ok()?;
    openat(proc, name, flags, Mode::empty()).ok()
}

/// Returns the number that `proc` gives the calling process. In another pid namespace it differs
/// from `getpid`.
pub fn own_number(proc: &OwnedFd) -> Option<u32> {
    let mut buffer = [MaybeUninit::uninit(); 16];
    let link = seccomp::allow(Call::Readlinkat).then(|| readlinkat_raw(proc, c"self", &mut buffer[..]))?;
    str::from_utf8(link.ok()?.0).ok()?.parse().ok()
}

/// Returns the number that `proc` gives the program's process, whose pid in the companion's
/// namespace is `pid`.
pub fn number_of_program(proc: &OwnedFd, pid: Pid) -> u32 {
    let pid = pid.as_raw_nonzero().get() as u32;
    if !identity::is_nested() {
        return pid;
    }
    // In a nested namespace, the companion is a child of the program.
    with_status(proc, format_args!("self/status"), |status| numbers(status, "PPid:").next()).unwrap_or(pid)
}

/// Returns the pid that the thread with `number` in `proc` has in the caller's pid namespace.
pub fn own_pid_of(proc: &OwnedFd, number: u32) -> Option<Pid> {
    let pid = if identity::is_nested() {
        // The line has one pid for each level of pid namespaces, beginning with that of `proc`.
        let level =
            with_status(proc, format_args!("self/status"), |status| numbers(status, "NSpid:").count().checked_sub(1))?;
        with_status(proc, format_args!("{number}/status"), |status| numbers(status, "NSpid:").nth(level))?
    } else {
        number
    };
    Pid::from_raw(pid as i32)
}

/// Returns whether process `number` has a thread whose id in the caller's pid namespace is
/// `thread`.
pub(crate) fn has_thread(proc: &OwnedFd, number: u32, thread: u32) -> bool {
    if identity::is_nested() {
        let of_thread = |id| (own_pid_of(proc, id)?.as_raw_nonzero().get() as u32 == thread).then_some(());
        find_id(proc, format_args!("{number}/task"), of_thread).is_some()
    } else {
        open_directory_in(proc, format_args!("{number}/task/{thread}")).is_some()
    }
}

/// Returns whether a debugger traces `process`.
pub(crate) fn is_traced(proc: &OwnedFd, process: Pid) -> bool {
    let path = format_args!("{}/status", process.as_raw_nonzero());
    with_status(proc, path, |status| numbers(status, "TracerPid:").next()).is_some_and(|tracer| tracer != 0)
}

/// Returns what `read` finds in a `status` file of `proc`.
fn with_status<R>(proc: &OwnedFd, path: std::fmt::Arguments<'_>, read: impl FnOnce(&str) -> Option<R>) -> Option<R> {
    let mut text = [0u8; 2048];
    let len = rustix::io::read(open_in(proc, path)?, &mut text).ok()?;
    // Skip the process's name, which may be invalid UTF-8.
    let start = text[..len].windows(5).position(|line| line == b"\nPid:")?;
    read(std::str::from_utf8(&text[start..len]).ok()?)
}

/// Returns the numbers in the line of `status` that begins with `key`.
fn numbers<'a>(status: &'a str, key: &'a str) -> impl Iterator<Item = u32> + 'a {
    let line = status.lines().find_map(move |line| line.strip_prefix(key)).unwrap_or_default();
    line.split_ascii_whitespace().map_while(|number| number.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_sys::pagemap;
    use foliomem_sys::region::Region;
    use foliomem_sys::thread::{Kind, Spec};
    use rustix::thread::futex;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn proc() -> OwnedFd {
        rustix::fs::openat(rustix::fs::CWD, "/proc", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap()
    }

    static GO_ON: AtomicU32 = AtomicU32::new(0);

    extern "C" fn waits(_: *mut u8) {
        while GO_ON.load(Ordering::Acquire) == 0 {
            let _ = futex::wait(&GO_ON, futex::Flags::PRIVATE, 0, None);
        }
        thread::exit_process(0);
    }

    /// Returns whether `user` remains while the size changes and is the same again after each two
    /// changes.
    fn remains_while_sizes_change(user: &User, ours: &OwnedFd) -> bool {
        const CHANGES: u32 = 100_000;
        let made = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while made.fetch_add(1, Ordering::Relaxed) < CHANGES {
                    drop(Region::reserve(PAGE_BYTES).unwrap());
                }
            });
            let theirs = user.statm.as_ref().unwrap();
            let mut remains = true;
            while remains && made.load(Ordering::Relaxed) < CHANGES {
                remains = user.remains(ours) && is_of_one_size(theirs, ours);
            }
            made.store(CHANGES, Ordering::Relaxed);
            remains
        })
    }

    /// Checks what a guard calls when the companion has been killed inside the heap's lock.
    fn assert_allocates_nothing(proc: &OwnedFd, ours: &OwnedFd, stranger: &User, own: u32) {
        let allocations = allocation_counter::measure(|| {
            let user = find(proc, ours, stranger, [Pid::from_raw(own as i32), None]).unwrap();
            assert!(user.lives());
            assert!(User::open(proc, user.pid, user.number).unwrap().remains(ours));
            assert!(find_thread(proc, ours, user.number).is_none() && find_thread(proc, ours, own).is_some());
            assert_eq!((own_number(proc), own_pid_of(proc, own)), (Some(own), Pid::from_raw(own as i32)));
            assert!(pagemap::exit_status(open_in(proc, format_args!("{own}/stat")).unwrap()).is_some());
        });
        assert_eq!(allocations.count_total, 0);
    }

    #[test]
    fn only_processes_that_share_the_memory_are_found() {
        static ID: AtomicU32 = AtomicU32::new(0);
        let proc = proc();
        let ours = open_in(&proc, format_args!("self/statm")).unwrap();
        let own = own_number(&proc).unwrap();
        assert_eq!(own, std::process::id());
        let parent = with_status(&proc, format_args!("self/status"), |status| numbers(status, "PPid:").next());
        assert_eq!(parent, Some(std::os::unix::process::parent_id()));
        let levels = with_status(&proc, format_args!("self/status"), |status| numbers(status, "NSpid:").last());
        assert_eq!(levels, Some(own));
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stranger = User::open(&proc, Pid::from_raw(other.id() as i32).unwrap(), other.id()).unwrap();
        assert!(!stranger.remains(&ours));
        // Other tests start processes that share this memory for a moment.
        let others = || find(&proc, &ours, &stranger, [Pid::from_raw(own as i32), None]).map(|user| user.pid);
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while others().is_some() && std::time::Instant::now() < until {}
        let stack = Box::leak(Box::new(Region::reserve(512 << 10).unwrap()));
        let spec = Spec { kind: Kind::Process, stack, cpu: None, id: &ID };
        // SAFETY: the stack is leaked and the id is static, so both outlive the thread.
        let id = unsafe { thread::spawn(&spec, waits, std::ptr::null_mut()) }.unwrap();
        assert!(others().is_some());
        let statm = open_in(&proc, format_args!("{}/statm", id.as_raw_nonzero())).unwrap();
        let number = id.as_raw_nonzero().get() as u32;
        let user = user_if_same(&proc, &ours, (number, number), statm).unwrap();
        assert_allocates_nothing(&proc, &ours, &stranger, own);
        assert_eq!((memory_of(id), memory_of(stranger.pid)), (MemoryOf::Caller, MemoryOf::Other));
        let this_thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        assert!(has_thread(&proc, own, this_thread) && has_thread(&proc, number, number));
        assert!(!has_thread(&proc, number, this_thread) && !has_thread(&proc, own, number));
        let has_remained = remains_while_sizes_change(&user, &ours);
        GO_ON.store(1, Ordering::Release);
        let _ = futex::wake(&GO_ON, futex::Flags::PRIVATE, 1);
        thread::wait_for_exit(id, &ID);
        assert!(has_remained);
        assert!(!user.remains(&ours));
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(!stranger.remains(&ours));
    }
}
