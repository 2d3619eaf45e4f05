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
//! Only the monitor uses this. There is no lock.

use foliomem_sys::clock::now_ns;
use foliomem_sys::filters::{self, Call};
use foliomem_sys::identity;
use foliomem_sys::region;
use foliomem_sys::thread::{self, MemoryOf};
use foliomem_types::units::PAGE_BYTES;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal, test_kill_process};
use rustix::time::Timespec;

/// Two memories are different if this many comparisons of their sizes in a row find no equality.
const COMPARISONS: u32 = 200;
/// Changes of our size that a process of the same memory shows, and how large they are at most.
const CHANGES: u32 = 3;
const MAX_CHANGE_PAGES: usize = 10_007;
/// The longest that a killed process may take to end before others are looked for.
const MAX_KILL_WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A process that uses the memory.
#[derive(Debug)]
pub struct User {
    pid: Pid,
    /// The thread of the process that is watched.
    thread: Pid,
    /// The same process under `/proc`, which may be of another pid namespace.
    number: u32,
    /// `None` where a filter forbids it.
    pidfd: Option<OwnedFd>,
    /// The `statm` of the thread; `None` where `/proc` does not show it.
    statm: Option<OwnedFd>,
    origin: Origin,
}

/// What has become of a killed process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Killed {
    /// It has ended.
    Ended,
    /// It is there after the longest wait.
    Remains,
}

/// How a user is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    /// It has started the companion: as long as it does not execute another program, its memory is
    /// ours.
    Given,
    /// It was found. If kcmp(2) is not allowed, changes of its size are compared each time.
    Found,
}

impl User {
    /// Process `pid`, which uses the memory now. `proc` is `/proc`, and shows it as `number`.
    pub fn open(proc: &OwnedFd, pid: Pid, number: u32) -> Result<User, Errno> {
        let pidfd = open_pidfd(pid)?;
        let statm = open_in(proc, format_args!("{number}/statm"));
        Ok(User { pid, thread: pid, number, pidfd, statm, origin: Origin::Given })
    }

    /// Returns whether it uses the memory of the companion, whose `/proc/PID/statm` is `ours`.
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

    /// Whether the process has not ended, whichever memory it uses by now.
    pub fn lives(&self) -> bool {
        !self.has_ended(&Timespec::default())
    }

    /// Whether it ends within `time`.
    fn has_ended(&self, time: &Timespec) -> bool {
        let Some(pidfd) = &self.pidfd else { return test_kill_process(self.pid) == Err(Errno::SRCH) };
        poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(time)).is_ok_and(|ready| ready > 0)
    }

    /// Kills it, and waits until it has ended.
    pub fn kill(&self) -> Killed {
        let _ = match &self.pidfd {
            Some(pidfd) => pidfd_send_signal(pidfd, Signal::KILL),
            None => kill_process(self.pid, Signal::KILL),
        };
        if self.has_ended(&MAX_KILL_WAIT) { Killed::Ended } else { Killed::Remains }
    }
}

fn memory_of(thread: Pid) -> MemoryOf {
    if filters::allow(Call::Kcmp) { thread::compare_memory(thread) } else { MemoryOf::Unknown }
}

fn open_pidfd(pid: Pid) -> Result<Option<OwnedFd>, Errno> {
    match filters::allow(Call::PidfdOpen).then(|| pidfd_open(pid, PidfdFlags::empty())) {
        None | Some(Err(Errno::NOSYS | Errno::PERM)) => Ok(None),
        Some(opened) => opened.map(Some),
    }
}

/// Finds another user of the memory, where `last` has left: one of its threads, or another process.
/// `own` are the ids of the agent's processes, as `proc` numbers them.
pub fn find(proc: &OwnedFd, ours: &OwnedFd, last: &User, own: &[u32]) -> Option<User> {
    if uses_alone() {
        return None;
    }
    if let Some(user) = find_thread(proc, ours, last.number) {
        return Some(user);
    }
    let others = ids(proc, format_args!(".")).into_iter();
    others.filter(|number| *number != last.number && !own.contains(number)).find_map(|number| {
        let statm = open_in(proc, format_args!("{number}/statm"))?;
        match mapped_pages(&statm) {
            // The thread that the process began with has ended, others may not have; or it is the
            // kernel's.
            Some(0) => find_thread(proc, ours, number),
            Some(_) => user_if_same(proc, ours, (number, number), statm),
            None => None,
        }
    })
}

/// Whether the kernel says that nobody else uses the memory: only a process of one thread is told.
fn uses_alone() -> bool {
    filters::allow(Call::Unshare) && thread::is_only_user_of_memory()
}

/// The process `number` by that of its threads which uses the memory.
fn find_thread(proc: &OwnedFd, ours: &OwnedFd, number: u32) -> Option<User> {
    let tasks = ids(proc, format_args!("{number}/task"));
    if tasks.len() < 2 {
        // The thread that the process began with is the only one, and was looked at.
        return None;
    }
    let statm_of = |id| open_in(proc, format_args!("{number}/task/{id}/statm"));
    tasks.into_iter().find_map(|id| user_if_same(proc, ours, (number, id), statm_of(id)?))
}

/// The process `number`, if its thread `id` uses the memory.
fn user_if_same(proc: &OwnedFd, ours: &OwnedFd, (number, id): (u32, u32), statm: OwnedFd) -> Option<User> {
    let thread = own_pid_of(proc, id)?;
    if memory_of(thread) == MemoryOf::Other {
        return None;
    }
    let pid = if id == number { thread } else { own_pid_of(proc, number)? };
    let user = User { pid, thread, number, pidfd: open_pidfd(pid).ok()?, statm: Some(statm), origin: Origin::Found };
    user.remains(ours).then_some(user)
}

/// Returns whether `theirs` seems to be of the same memory as `ours`: it changes with ours.
fn is_same(theirs: &OwnedFd, ours: &OwnedFd) -> bool {
    (0..CHANGES).all(|_| {
        if !is_of_one_size(theirs, ours) {
            return false;
        }
        // Another companion that does the same at this moment takes another number.
        let bytes = (1 + (now_ns() ^ u64::from(std::process::id())) as usize % MAX_CHANGE_PAGES) * PAGE_BYTES;
        region::with_reserved(bytes, || is_of_one_size(theirs, ours)).unwrap_or(true)
    })
}

/// Returns whether both tell the same size at some instant. That `ours` is the same before and after
/// `theirs` is read does not mean that it has not changed between.
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

/// The first number of a `statm`: pages that are mapped. 0 for a thread that has no memory any
/// more.
fn mapped_pages(statm: impl AsFd) -> Option<u64> {
    let mut text = [0u8; 128];
    let read = rustix::io::pread(statm, &mut text, 0).ok()?;
    let digits = text[..read].split(|&byte| byte == b' ').next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The names in a directory under `/proc` that are numbers. None where there is no such directory.
pub(crate) fn ids(proc: &OwnedFd, path: std::fmt::Arguments<'_>) -> Vec<u32> {
    let entries = open_directory_in(proc, path).and_then(|directory| Dir::new(directory).ok());
    let names = entries.into_iter().flatten().flatten();
    names.filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok()).collect()
}

/// Opens the directory `path` of `proc`; `None` where there is none, or it is not for us.
pub(crate) fn open_directory_in(proc: &OwnedFd, path: std::fmt::Arguments<'_>) -> Option<OwnedFd> {
    open_with(proc, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)
}

/// Opens the file `path` of `proc`, likewise.
pub(crate) fn open_in(proc: &OwnedFd, path: std::fmt::Arguments<'_>) -> Option<OwnedFd> {
    open_with(proc, path, OFlags::RDONLY | OFlags::CLOEXEC)
}

fn open_with(proc: &OwnedFd, path: std::fmt::Arguments<'_>, flags: OFlags) -> Option<OwnedFd> {
    let mut name = [0u8; 64];
    std::io::Write::write_fmt(&mut &mut name[..63], path).ok()?;
    let name = std::ffi::CStr::from_bytes_until_nul(&name).ok()?;
    openat(proc, name, flags, Mode::empty()).ok()
}

/// The number that `proc` gives the calling process: not that of `getpid` where it is another
/// namespace's.
pub fn own_number(proc: &OwnedFd) -> Option<u32> {
    let link = filters::allow(Call::Readlinkat).then(|| rustix::fs::readlinkat(proc, c"self", Vec::new()))?.ok()?;
    link.to_str().ok()?.parse().ok()
}

/// The number that `proc` gives the program's process, of which the calling companion knows the `pid`.
pub fn number_of_program(proc: &OwnedFd, pid: Pid) -> u32 {
    let pid = pid.as_raw_nonzero().get() as u32;
    if !identity::is_nested() {
        return pid;
    }
    // There the companion is a child of the program's.
    with_status(proc, format_args!("self/status"), |status| numbers(status, "PPid:").next()).unwrap_or(pid)
}

/// The pid in the caller's pid namespace of the thread that `proc` shows as `number`.
pub fn own_pid_of(proc: &OwnedFd, number: u32) -> Option<Pid> {
    let pid = if identity::is_nested() {
        // A line of pids, one for each level of pid namespaces from that of `proc` on.
        let level =
            with_status(proc, format_args!("self/status"), |status| numbers(status, "NSpid:").count().checked_sub(1))?;
        with_status(proc, format_args!("{number}/status"), |status| numbers(status, "NSpid:").nth(level))?
    } else {
        number
    };
    Pid::from_raw(pid as i32)
}

/// What `read` finds in a file `status` of `proc`.
fn with_status<R>(proc: &OwnedFd, path: std::fmt::Arguments<'_>, read: impl FnOnce(&str) -> Option<R>) -> Option<R> {
    let mut text = [0u8; 2048];
    let len = rustix::io::read(open_in(proc, path)?, &mut text).ok()?;
    // A name that is no text comes first.
    let start = text[..len].windows(5).position(|line| line == b"\nPid:")?;
    read(std::str::from_utf8(&text[start..len]).ok()?)
}

/// The numbers in the line of `status` that begins with `key`.
fn numbers<'a>(status: &'a str, key: &'a str) -> impl Iterator<Item = u32> + 'a {
    let line = status.lines().find_map(move |line| line.strip_prefix(key)).unwrap_or_default();
    line.split_ascii_whitespace().map_while(|number| number.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_sys::region::Region;
    use foliomem_sys::thread::{Kind, Spec};
    use rustix::thread::futex;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn proc() -> OwnedFd {
        rustix::fs::open("/proc", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap()
    }

    static GO_ON: AtomicU32 = AtomicU32::new(0);

    extern "C" fn waits(_: *mut u8) {
        while GO_ON.load(Ordering::Acquire) == 0 {
            let _ = futex::wait(&GO_ON, futex::Flags::PRIVATE, 0, None);
        }
        thread::exit_process(0);
    }

    /// The size is the same before and after each pair of changes.
    fn assert_remains_while_sizes_change(user: &User, ours: &OwnedFd) {
        const CHANGES: u32 = 300_000;
        let made = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while made.fetch_add(1, Ordering::Relaxed) < CHANGES {
                    drop(Region::reserve(PAGE_BYTES).unwrap());
                }
            });
            let theirs = user.statm.as_ref().unwrap();
            while made.load(Ordering::Relaxed) < CHANGES {
                let has_remained = user.remains(ours) && is_of_one_size(theirs, ours);
                if !has_remained {
                    made.store(CHANGES, Ordering::Relaxed);
                }
                assert!(has_remained);
            }
        });
    }

    #[test]
    fn who_shares_the_memory_is_found_and_nobody_else() {
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
        // Other tests start processes, too, which share this memory for a moment.
        let others = || find(&proc, &ours, &stranger, &[own]).map(|user| user.pid);
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while others().is_some() && std::time::Instant::now() < until {}
        let stack = Box::leak(Box::new(Region::reserve(512 << 10).unwrap()));
        let spec = Spec { kind: Kind::Process, stack, cpu: None, id: &ID };
        // SAFETY: the stack is leaked and the word static.
        let id = unsafe { thread::spawn(&spec, waits, std::ptr::null_mut()) }.unwrap();
        assert!(others().is_some());
        let statm = open_in(&proc, format_args!("{}/statm", id.as_raw_nonzero())).unwrap();
        let number = id.as_raw_nonzero().get() as u32;
        let user = user_if_same(&proc, &ours, (number, number), statm).unwrap();
        assert_eq!((memory_of(id), memory_of(stranger.pid)), (MemoryOf::Caller, MemoryOf::Other));
        assert_remains_while_sizes_change(&user, &ours);
        GO_ON.store(1, Ordering::Release);
        let _ = futex::wake(&GO_ON, futex::Flags::PRIVATE, 1);
        thread::wait_for_exit(id, &ID);
        assert!(!user.remains(&ours));
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(!stranger.remains(&ours));
    }
}
