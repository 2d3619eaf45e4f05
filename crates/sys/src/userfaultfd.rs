//! userfaultfd, the calls foliomem needs, on rustix: no libc, no errno, no allocation.
//!
//! `UFFDIO_MOVE` (Linux 6.8) takes pages from one private anonymous mapping and puts them in another of
//! the same process. The destination must be registered with the userfaultfd it is called on, in any
//! mode; the source need not be registered. Both ranges must lie in one mapping each, with the same
//! protection and lock flags.
//!
//! A fault costs, to the wake of the program, with a MOVE of 4 KiB (2 CPUs, medians): 8.0 us with a
//! handler on the program's CPU that blocks in `read`, 8.5 us when it polls and reads under a lock, and 14
//! to 15 us either way when a second handler on the other CPU is woken, too. Polling lets messages be
//! read one at a time in order, which correctness needs (see the handler in `foliomem_runtime`), for 0.5 us.

use crate::errno_text::{Cause, ErrnoText};
use crate::raw_ioctl;
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode as FileMode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use rustix::time::Timespec;
use std::ops::Range;
use thiserror::Error;

const UFFDIO: u8 = 0xaa;
const API: u64 = 0xaa;
const NEW: Opcode = opcode::none(UFFDIO, 0);
const UFFDIO_API: Opcode = opcode::read_write::<raw::uffdio_api>(UFFDIO, raw::_UFFDIO_API as u8);
const REGISTER: Opcode = opcode::read_write::<raw::uffdio_register>(UFFDIO, raw::_UFFDIO_REGISTER as u8);
const UNREGISTER: Opcode = opcode::read::<raw::uffdio_range>(UFFDIO, raw::_UFFDIO_UNREGISTER as u8);
const WAKE: Opcode = opcode::read::<raw::uffdio_range>(UFFDIO, raw::_UFFDIO_WAKE as u8);
const COPY: Opcode = opcode::read_write::<raw::uffdio_copy>(UFFDIO, raw::_UFFDIO_COPY as u8);
const ZEROPAGE: Opcode = opcode::read_write::<raw::uffdio_zeropage>(UFFDIO, raw::_UFFDIO_ZEROPAGE as u8);
const MOVE: Opcode = opcode::read_write::<raw::uffdio_move>(UFFDIO, raw::_UFFDIO_MOVE as u8);
const CONTINUE: Opcode = opcode::read_write::<raw::uffdio_continue>(UFFDIO, raw::_UFFDIO_CONTINUE as u8);
const WRITE_PROTECT: Opcode = opcode::read_write::<raw::uffdio_writeprotect>(UFFDIO, raw::_UFFDIO_WRITEPROTECT as u8);
const POISON: Opcode = opcode::read_write::<raw::uffdio_poison>(UFFDIO, raw::_UFFDIO_POISON as u8);

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const MOVE_MODE_DONTWAKE: u64 = 1 << 0;
const POISON_MODE_DONTWAKE: u64 = 1 << 0;
const WRITE_PROTECT_MODE_WP: u64 = 1 << 0;
const WRITE_PROTECT_MODE_DONTWAKE: u64 = 1 << 1;

/// Why there is no userfaultfd, and what to do about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum UffdError {
    /// None of the ways in is open.
    #[error(
        "no permission to use userfaultfd: give this user read and write access to /dev/userfaultfd, or set \
         vm.unprivileged_userfaultfd=1, or grant CAP_SYS_PTRACE ({})",
        ErrnoText(*.0)
    )]
    NoPermission(Errno),
    /// This process may have no more of something.
    #[error("cannot open a userfaultfd: {}", Cause(*.0))]
    Exhausted(Errno),
    /// The kernel was built without it.
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")]
    Missing,
    /// The kernel is too old.
    #[error("this kernel cannot move pages (UFFDIO_MOVE): Linux 6.8 or later is needed")]
    NoMove,
    /// It has been opened, and then its calls are refused.
    #[error("userfaultfd does not answer: {}; does the program filter its system calls (seccomp) without ioctl?", ErrnoText(*.0))]
    Refused(Errno),
    /// A range could not be registered.
    #[error("cannot register memory with userfaultfd: {}", ErrnoText(*.0))]
    Register(Errno),
}

/// Why pages could not be moved or copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MoveError {
    /// A mapping change is under way, or the call was interrupted.
    #[error("try again")]
    Again,
    /// Pinned, or shared with another process.
    #[error("pinned or shared")]
    Busy,
    /// The destination holds a page.
    #[error("the destination is occupied")]
    Exists,
    /// There is no page at the source, or no mapping at the destination.
    #[error("nothing there")]
    NotFound,
    /// The ranges do not lie in one mapping each, or these do not match.
    #[error("the mappings do not allow it")]
    Invalid,
    /// Out of memory.
    #[error("out of memory")]
    NoMemory,
    /// The address space is gone.
    #[error("the process is gone")]
    Gone,
    /// Anything else.
    #[error("{0}")]
    Other(Errno),
}

impl From<Errno> for MoveError {
    fn from(errno: Errno) -> MoveError {
        match errno {
            Errno::AGAIN | Errno::INTR => MoveError::Again,
            Errno::BUSY => MoveError::Busy,
            Errno::EXIST => MoveError::Exists,
            Errno::NOENT => MoveError::NotFound,
            Errno::INVAL => MoveError::Invalid,
            Errno::NOMEM => MoveError::NoMemory,
            Errno::SRCH => MoveError::Gone,
            other => MoveError::Other(other),
        }
    }
}

/// What a userfaultfd hears of, beyond faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features {
    /// Unmapped, remapped and discarded ranges.
    pub events: bool,
}

/// What a registered range is registered for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Faults on pages that are not there, and writes to those that are protected.
    Faults,
    /// Write protection, of which no use is made: makes the range a destination for moves without
    /// raising faults.
    Destination,
}

/// How far a move went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoveOutcome {
    /// Bytes moved.
    pub moved_bytes: usize,
    /// What stopped it before the end.
    pub error: Option<MoveError>,
}

/// What the program did to its mappings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Discarded the content.
    Discard(Range<usize>),
    /// Unmapped.
    Unmap(Range<usize>),
    /// Moved a range to another address.
    Remap {
        /// From here.
        from: Range<usize>,
        /// To what starts here.
        to: usize,
    },
}

/// What the kernel reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// A thread touched a page that is not there or that is protected, and waits.
    Fault {
        /// Where.
        address: usize,
        /// It wrote to a page that is there.
        protected: bool,
        /// Its number.
        thread: u32,
    },
    /// A thread changes its mappings.
    Change(Change),
}

/// A userfaultfd, non-blocking, closed on exec.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Opens one for faults of user and kernel mode: through `/dev/userfaultfd`, else by the system call.
    /// One that only serves faults of user mode would make the program's system calls fail with EFAULT,
    /// so it is never used.
    pub fn open(want: Features) -> Result<Userfaultfd, UffdError> {
        Userfaultfd::open_through(device().as_ref(), want)
    }

    /// The same through a `device` that is open, or was not to be had.
    pub fn open_through(device: Result<&OwnedFd, &Errno>, want: Features) -> Result<Userfaultfd, UffdError> {
        let fd = device.map_err(|&errno| errno).and_then(ask_device).or_else(open_syscall)?;
        let events = raw::UFFD_FEATURE_EVENT_REMAP | raw::UFFD_FEATURE_EVENT_REMOVE | raw::UFFD_FEATURE_EVENT_UNMAP;
        let always = raw::UFFD_FEATURE_MOVE | raw::UFFD_FEATURE_THREAD_ID | raw::UFFD_FEATURE_WP_UNPOPULATED;
        let features = always | if want.events { events } else { 0 };
        let mut api = raw::uffdio_api { api: API, features: u64::from(features), ioctls: 0 };
        // SAFETY: UFFDIO_API takes a uffdio_api and touches nothing else.
        unsafe { raw_ioctl::call(&fd, UFFDIO_API, &mut api) }.map_err(|errno| match errno {
            Errno::INVAL => UffdError::NoMove,
            other => UffdError::Refused(other),
        })?;
        Ok(Userfaultfd(fd))
    }

    /// Registers the whole pages of `len` bytes at `start`.
    pub fn register(&self, start: usize, len: usize, mode: Mode) -> Result<(), UffdError> {
        let mode = match mode {
            Mode::Faults => REGISTER_MODE_MISSING | REGISTER_MODE_WP,
            Mode::Destination => REGISTER_MODE_WP,
        };
        let mut register = raw::uffdio_register { range: range(start, len), mode, ioctls: 0 };
        // SAFETY: takes a uffdio_register; registering changes who serves faults, not memory.
        unsafe { raw_ioctl::call(&self.0, REGISTER, &mut register) }.map_err(UffdError::Register)?;
        Ok(())
    }

    /// Takes the registration of a range back.
    pub fn unregister(&self, start: usize, len: usize) -> Result<(), UffdError> {
        // SAFETY: takes a uffdio_range.
        unsafe { raw_ioctl::call(&self.0, UNREGISTER, &mut range(start, len)) }.map_err(UffdError::Register)?;
        Ok(())
    }

    /// Moves `len` bytes of whole pages from `src` to `dst`, which is registered with this userfaultfd; wakes nobody.
    ///
    /// # Safety
    /// The caller may take the pages at `src` away and fill `dst`: nobody relies on what is there.
    pub unsafe fn move_pages(&self, dst: usize, src: usize, len: usize) -> MoveOutcome {
        let mode = MOVE_MODE_DONTWAKE;
        let mut request = raw::uffdio_move { dst: dst as u64, src: src as u64, len: len as u64, mode, move_: 0 };
        // SAFETY: takes a uffdio_move; the effect on memory is allowed by the contract.
        let result = unsafe { raw_ioctl::call(&self.0, MOVE, &mut request) };
        let error = result.err().map(MoveError::from);
        // On failure the kernel stores the errno there unless it got somewhere.
        let moved_bytes = if error.is_none() { len } else { request.move_.max(0) as usize };
        MoveOutcome { moved_bytes, error }
    }

    /// Copies `len` bytes from `src` into fresh pages at `dst`; wakes nobody.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes, and the caller may fill `dst`.
    pub unsafe fn copy(&self, dst: usize, src: usize, len: usize) -> Result<(), MoveError> {
        let mode = u64::from(raw::UFFDIO_COPY_MODE_DONTWAKE);
        let mut request = raw::uffdio_copy { dst: dst as u64, src: src as u64, len: len as u64, mode, copy: 0 };
        // SAFETY: takes a uffdio_copy; the effect on memory is allowed by the contract.
        unsafe { raw_ioctl::call(&self.0, COPY, &mut request) }?;
        Ok(())
    }

    /// Maps the kernel's page of zeros at `page`; wakes nobody.
    pub fn zero(&self, page: usize) -> Result<(), MoveError> {
        let mode = u64::from(raw::UFFDIO_ZEROPAGE_MODE_DONTWAKE);
        let mut request = raw::uffdio_zeropage { range: range(page, PAGE_BYTES), mode, zeropage: 0 };
        // SAFETY: takes a uffdio_zeropage; only an absent page is changed.
        unsafe { raw_ioctl::call(&self.0, ZEROPAGE, &mut request) }?;
        Ok(())
    }

    /// Wakes the threads that wait for pages of the range.
    pub fn wake(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: takes a uffdio_range.
        unsafe { raw_ioctl::call(&self.0, WAKE, &mut range(start, len)) }?;
        Ok(())
    }

    /// Makes writes to the pages of a range that are there raise faults, and marks those that are not there
    /// (`marks` in `foliomem_runtime`).
    pub fn protect(&self, start: usize, len: usize) -> Result<(), MoveError> {
        self.write_protect(start, len, WRITE_PROTECT_MODE_WP)
    }

    /// The reverse, for both; wakes nobody. Pages that are swapped out must keep their marks.
    pub fn unprotect(&self, start: usize, len: usize) -> Result<(), MoveError> {
        self.write_protect(start, len, WRITE_PROTECT_MODE_DONTWAKE)
    }

    fn write_protect(&self, start: usize, len: usize, mode: u64) -> Result<(), MoveError> {
        let mut request = raw::uffdio_writeprotect { range: range(start, len), mode };
        // SAFETY: takes a uffdio_writeprotect; changes no content.
        unsafe { raw_ioctl::call(&self.0, WRITE_PROTECT, &mut request) }?;
        Ok(())
    }

    /// Makes every access to the absent pages of the range raise SIGBUS; wakes nobody.
    pub fn poison(&self, start: usize, len: usize) -> Result<(), MoveError> {
        let mut request = raw::uffdio_poison { range: range(start, len), mode: POISON_MODE_DONTWAKE, updated: 0 };
        // SAFETY: takes a uffdio_poison; only absent pages are changed.
        unsafe { raw_ioctl::call(&self.0, POISON, &mut request) }?;
        Ok(())
    }

    /// Whether a change of mappings is under way that has not been heard. The kernel refuses to fill
    /// pages meanwhile, before it looks at which: asking for none tells.
    pub fn mapping_is_changing(&self) -> bool {
        let mut request = raw::uffdio_zeropage { range: range(0, 0), mode: 0, zeropage: 0 };
        // SAFETY: takes a uffdio_zeropage; an empty range is refused.
        let answer = unsafe { raw_ioctl::call(&self.0, ZEROPAGE, &mut request) };
        answer == Err(Errno::AGAIN)
    }

    /// Whether the page at `address` is known to be registered with this userfaultfd: not while a change of mappings is under
    /// way. The kernel refuses to continue a fault of private memory otherwise than one of memory that is not registered. It
    /// does so whoever has registered it, but lets nobody else register it again.
    pub fn is_registered(&self, address: usize) -> bool {
        let mut request = raw::uffdio_continue { range: range(address, PAGE_BYTES), mode: 0, mapped: 0 };
        // SAFETY: takes a uffdio_continue; refused in any case.
        let answer = unsafe { raw_ioctl::call(&self.0, CONTINUE, &mut request) };
        answer == Err(Errno::INVAL) && self.register(address, PAGE_BYTES, Mode::Faults).is_ok()
    }

    /// Waits until there may be something to read.
    pub fn wait(&self, timeout: Option<&Timespec>) -> Result<(), Errno> {
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout).map(|_| ())
    }

    /// Whether there is something to read now.
    pub fn has_message(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Reads one message; `None` when there is none. A program thread that changed its mappings goes on
    /// the moment its message is read.
    pub fn read_message(&self) -> Result<Option<Message>, Errno> {
        loop {
            let mut bytes = [0u8; size_of::<raw::uffd_msg>()];
            match rustix::io::read(&self.0, &mut bytes) {
                Ok(read) if read == bytes.len() => {
                    if let Some(message) = decode(bytes) {
                        return Ok(Some(message));
                    }
                }
                Ok(_) | Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// `/dev/userfaultfd`.
pub fn device() -> Result<OwnedFd, Errno> {
    rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, FileMode::empty())
}

fn ask_device(device: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = (OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as usize;
    // SAFETY: USERFAULTFD_IOC_NEW takes the flags by value and answers a new descriptor.
    let fd = unsafe { rustix::ioctl::ioctl(device, NewFd(flags)) }?;
    Ok(fd)
}

fn open_syscall(device_error: Errno) -> Result<OwnedFd, UffdError> {
    let flags = rustix::mm::UserfaultfdFlags::CLOEXEC | rustix::mm::UserfaultfdFlags::NONBLOCK;
    // SAFETY: a new descriptor; nothing is registered with it yet.
    unsafe { rustix::mm::userfaultfd(flags) }.map_err(|errno| match errno {
        Errno::NOSYS => UffdError::Missing,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => UffdError::Exhausted(errno),
        Errno::PERM if device_error != Errno::NOENT => UffdError::NoPermission(device_error),
        errno => UffdError::NoPermission(errno),
    })
}

/// USERFAULTFD_IOC_NEW: an argument by value, a descriptor as the answer.
struct NewFd(usize);

// SAFETY: the kernel neither reads nor writes memory for this ioctl.
unsafe impl rustix::ioctl::Ioctl for NewFd {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        NEW
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.0)
    }

    unsafe fn output_from_ptr(
        output: rustix::ioctl::IoctlOutput,
        _argument: *mut std::ffi::c_void,
    ) -> rustix::io::Result<OwnedFd> {
        use rustix::fd::FromRawFd;
        // SAFETY: a successful call answers a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

fn range(start: usize, len: usize) -> raw::uffdio_range {
    raw::uffdio_range { start: start as u64, len: len as u64 }
}

/// What a message says; `None` for one of a kind that was not asked for.
pub(crate) fn decode(bytes: [u8; size_of::<raw::uffd_msg>()]) -> Option<Message> {
    const WRITE_PROTECTED: u64 = 1 << 1;
    // SAFETY: a struct of integers: every bit pattern is one.
    let message: raw::uffd_msg = unsafe { std::mem::transmute(bytes) };
    // SAFETY: the event says which member of the union the kernel has filled.
    unsafe {
        match u32::from(message.event) {
            raw::UFFD_EVENT_PAGEFAULT => Some(Message::Fault {
                address: message.arg.pagefault.address as usize,
                protected: message.arg.pagefault.flags & WRITE_PROTECTED != 0,
                thread: message.arg.pagefault.feat.ptid,
            }),
            raw::UFFD_EVENT_REMOVE => Some(Message::Change(Change::Discard(
                message.arg.remove.start as usize..message.arg.remove.end as usize,
            ))),
            raw::UFFD_EVENT_UNMAP => {
                Some(Message::Change(Change::Unmap(message.arg.remove.start as usize..message.arg.remove.end as usize)))
            }
            raw::UFFD_EVENT_REMAP => {
                let (from, to) = (message.arg.remap.from as usize, message.arg.remap.to as usize);
                let end = from.saturating_add(message.arg.remap.len as usize);
                Some(Message::Change(Change::Remap { from: from..end, to }))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A message as the kernel lays it out: the kind in the first byte, what it says from the ninth on.
    fn message(kind: u32, words: [u64; 3]) -> [u8; size_of::<raw::uffd_msg>()] {
        let mut bytes = [0; size_of::<raw::uffd_msg>()];
        bytes[0] = kind as u8;
        for (bytes, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    proptest! {
        #[test]
        fn messages_are_understood(
            start in 0usize..1 << 47,
            len in 0usize..1 << 47,
            to in 0usize..1 << 47,
            protected: bool,
            thread: u32,
        ) {
            let range = start..start + len;
            let words = [range.start as u64, range.end as u64, 0];
            let change = |kind, words| match decode(message(kind, words)) {
                Some(Message::Change(change)) => Some(change),
                _ => None,
            };
            prop_assert_eq!(change(raw::UFFD_EVENT_REMOVE, words), Some(Change::Discard(range.clone())));
            prop_assert_eq!(change(raw::UFFD_EVENT_UNMAP, words), Some(Change::Unmap(range.clone())));
            let remap = change(raw::UFFD_EVENT_REMAP, [start as u64, to as u64, len as u64]);
            prop_assert_eq!(remap, Some(Change::Remap { from: range, to }));
            let fault = decode(message(raw::UFFD_EVENT_PAGEFAULT, [u64::from(protected) << 1, start as u64, thread.into()]));
            prop_assert_eq!(fault, Some(Message::Fault { address: start, protected, thread }));
            prop_assert_eq!(decode(message(raw::UFFD_EVENT_FORK, words)), None);
        }

        #[test]
        fn no_message_is_too_strange(kind in 0x10u32..0x18, words: [u64; 3], noise: [u8; size_of::<raw::uffd_msg>()]) {
            decode(message(kind, words));
            decode(noise);
        }
    }
}
