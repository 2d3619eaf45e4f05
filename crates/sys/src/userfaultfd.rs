//! The userfaultfd calls that foliomem needs, through rustix: no libc, no errno, no allocation.
//!
//! `UFFDIO_MOVE` (Linux 6.8) moves pages from one private anonymous mapping to another of the same
//! process. The destination must be registered with the userfaultfd of the call, in any mode; the
//! source need not be registered. Each of the two ranges must lie in one mapping, and both mappings
//! must have the same protection and lock flags.
//!
//! Handlers poll and then read one message at a time, in order, instead of blocking in `read`. This
//! costs 0.5 us a fault, and correctness needs it (see the handler in `foliomem_runtime`). Waking a
//! second handler on another CPU would cost about 6 us a fault.
//!
//! There is no lock.

use crate::errno_text::{Cause, ErrnoText};
use crate::maps::ADDRESSES_END;
use crate::raw_ioctl;
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode as FileMode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::UserfaultfdFlags;
use rustix::time::Timespec;
use std::ops::Range;
use thiserror::Error;

/// Addresses below belong to no program (`vm.mmap_min_addr` is 64K at most).
const FIRST_ADDRESS: usize = 1 << 16;
/// The type of userfaultfd's ioctls. The next constants are the ioctls.
const UFFDIO: u8 = 0xaa;
/// The version of the interface (`UFFD_API`).
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

/// Mode of REGISTER: report faults on missing pages. The next constants are modes of ioctls, too.
const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const MOVE_MODE_DONTWAKE: u64 = 1 << 0;
const POISON_MODE_DONTWAKE: u64 = 1 << 0;
const WRITE_PROTECT_MODE_WP: u64 = 1 << 0;
const WRITE_PROTECT_MODE_DONTWAKE: u64 = 1 << 1;

/// The reason why a userfaultfd cannot be used, with a remedy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum UffdError {
    /// No way to get permission is open.
    #[error(
        "no permission to use userfaultfd: give this user read and write access to /dev/userfaultfd, or set \
         vm.unprivileged_userfaultfd=1, or grant CAP_SYS_PTRACE ({})",
        ErrnoText(*.0)
    )]
    NoPermission(Errno),
    /// The process has reached a limit.
    #[error("cannot open a userfaultfd: {}", Cause(*.0))]
    Exhausted(Errno),
    /// The kernel was built without userfaultfd.
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")]
    Missing,
    /// The kernel is too old to move pages.
    #[error("this kernel cannot move pages (UFFDIO_MOVE): Linux 6.8 or later is needed")]
    NoMove,
    /// The userfaultfd was opened, but its ioctls are refused.
    #[error("userfaultfd does not answer: {}; does the program filter its system calls (seccomp) without ioctl?", ErrnoText(*.0))]
    Refused(Errno),
    /// The kernel refuses to register a range.
    #[error("cannot register memory with userfaultfd: {}", ErrnoText(*.0))]
    Register(Errno),
}

/// The reason why the kernel did not move, copy or protect pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MoveError {
    /// A mapping change is pending, or a signal interrupted the call.
    #[error("try again")]
    Again,
    /// A page is pinned, or shared with another process.
    #[error("pinned or shared")]
    Busy,
    /// The destination has a page.
    #[error("the destination is occupied")]
    Exists,
    /// The source has no page, or the destination is not mapped or not registered.
    #[error("nothing there")]
    NotFound,
    /// A range does not lie in one mapping, or the mappings do not match.
    #[error("the mappings do not allow it")]
    Invalid,
    /// The kernel has no memory.
    #[error("out of memory")]
    NoMemory,
    /// The address space does not exist any more.
    #[error("the process is gone")]
    Gone,
    /// Any other error.
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

/// The messages that a userfaultfd reports in addition to faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features {
    /// Mapping events: unmapped, remapped and discarded ranges.
    pub events: bool,
}

/// The purpose of a registered range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Report faults on missing pages, and writes to protected ones.
    Faults,
    /// Allow moves to the range without reporting faults. The range is registered for write
    /// protection, which is not used.
    Destination,
}

/// The result of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoveOutcome {
    /// Number of bytes moved.
    pub moved_bytes: usize,
    /// The reason why the move stopped before its end, if it did.
    pub error: Option<MoveError>,
}

/// A change of the program's mappings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// The content of the range is discarded.
    Discard(Range<usize>),
    /// The range is unmapped.
    Unmap(Range<usize>),
    /// A range is moved to another address.
    Remap {
        /// The old addresses.
        from: Range<usize>,
        /// The first new address.
        to: usize,
    },
}

/// A message of the kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// A thread touched a missing or protected page, and waits.
    Fault {
        /// The address.
        address: usize,
        /// Whether the thread wrote to a page that is present.
        protected: bool,
        /// The thread's id.
        thread: u32,
    },
    /// A thread has changed its mappings.
    Change(Change),
}

/// A userfaultfd, non-blocking, closed on exec.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Opens a userfaultfd for faults of user and kernel mode, by `/dev/userfaultfd` or else by the
    /// system call. A userfaultfd for faults of user mode only would make the program's system
    /// calls fail with EFAULT, so it is never used.
    ///
    /// # Errors
    /// Fails if the kernel refuses a userfaultfd, or if it cannot move pages.
    pub fn open(want: Features) -> Result<Userfaultfd, UffdError> {
        Userfaultfd::open_through(device().as_ref(), want)
    }

    /// Opens a userfaultfd like [`Userfaultfd::open`], by a `device` that is already open, or that
    /// could not be opened.
    ///
    /// # Errors
    /// Fails if the kernel refuses a userfaultfd, or if it cannot move pages.
    pub fn open_through(device: Result<&OwnedFd, &Errno>, want: Features) -> Result<Userfaultfd, UffdError> {
        let fd = device.map_err(|&errno| errno).and_then(ask_device).or_else(open_syscall)?;
        Userfaultfd::agree(fd, want).map_err(|errno| match errno {
            Errno::INVAL => UffdError::NoMove,
            other => UffdError::Refused(other),
        })
    }

    /// Agrees with the kernel on the features of a new userfaultfd.
    ///
    /// # Errors
    /// Fails with `EINVAL` if the kernel lacks a feature.
    pub(crate) fn agree(fd: OwnedFd, want: Features) -> Result<Userfaultfd, Errno> {
        let events = raw::UFFD_FEATURE_EVENT_REMAP | raw::UFFD_FEATURE_EVENT_REMOVE | raw::UFFD_FEATURE_EVENT_UNMAP;
        let always = raw::UFFD_FEATURE_MOVE | raw::UFFD_FEATURE_THREAD_ID | raw::UFFD_FEATURE_WP_UNPOPULATED;
        let features = always | if want.events { events } else { 0 };
        let mut api = raw::uffdio_api { api: API, features: u64::from(features), ioctls: 0 };
        // SAFETY: UFFDIO_API takes a `uffdio_api` and accesses no other memory.
        unsafe { raw_ioctl::call(&fd, UFFDIO_API, &mut api) }?;
        Ok(Userfaultfd(fd))
    }

    /// Registers `len` bytes at `start`; both are multiples of the page size.
    ///
    /// # Errors
    /// Fails if the kernel refuses, for example because another userfaultfd has registered the
    /// range.
    pub fn register(&self, start: usize, len: usize, mode: Mode) -> Result<(), UffdError> {
        let mode = match mode {
            Mode::Faults => REGISTER_MODE_MISSING | REGISTER_MODE_WP,
            Mode::Destination => REGISTER_MODE_WP,
        };
        let mut register = raw::uffdio_register { range: range(start, len), mode, ioctls: 0 };
        // SAFETY: UFFDIO_REGISTER takes a `uffdio_register`. Registering does not change memory.
        unsafe { raw_ioctl::call(&self.0, REGISTER, &mut register) }.map_err(UffdError::Register)?;
        Ok(())
    }

    /// Ends the registration of a range.
    ///
    /// # Errors
    /// Fails if the kernel refuses.
    pub fn unregister(&self, start: usize, len: usize) -> Result<(), UffdError> {
        // SAFETY: UFFDIO_UNREGISTER takes a `uffdio_range`, and does not change memory.
        unsafe { raw_ioctl::call(&self.0, UNREGISTER, &mut range(start, len)) }.map_err(UffdError::Register)?;
        Ok(())
    }

    /// Moves `len` bytes of whole pages from `src` to `dst`, which is registered with this
    /// userfaultfd. It does not wake waiting threads.
    ///
    /// # Safety
    /// The caller may remove the pages at `src` and fill `dst`: no reference relies on their
    /// content.
    pub unsafe fn move_pages(&self, dst: usize, src: usize, len: usize) -> MoveOutcome {
        let mode = MOVE_MODE_DONTWAKE;
        let mut request = raw::uffdio_move { dst: dst as u64, src: src as u64, len: len as u64, mode, move_: 0 };
        // SAFETY: UFFDIO_MOVE takes a `uffdio_move`. The caller allows its effect on memory.
        let result = unsafe { raw_ioctl::call(&self.0, MOVE, &mut request) };
        let error = result.err().map(MoveError::from);
        // If nothing was moved, the kernel stores the negated error number there.
        let moved_bytes = if error.is_none() { len } else { request.move_.max(0) as usize };
        MoveOutcome { moved_bytes, error }
    }

    /// Copies `len` bytes from `src` to new pages at `dst`. It does not wake waiting threads.
    ///
    /// # Safety
    /// `src` can be read for `len` bytes, and the caller may fill `dst`.
    ///
    /// # Errors
    /// Fails if the kernel cannot fill the pages.
    pub unsafe fn copy(&self, dst: usize, src: usize, len: usize) -> Result<(), MoveError> {
        let mode = u64::from(raw::UFFDIO_COPY_MODE_DONTWAKE);
        let mut request = raw::uffdio_copy { dst: dst as u64, src: src as u64, len: len as u64, mode, copy: 0 };
        // SAFETY: UFFDIO_COPY takes a `uffdio_copy`. The caller allows its effect on memory.
        unsafe { raw_ioctl::call(&self.0, COPY, &mut request) }?;
        Ok(())
    }

    /// Maps the kernel's page of zeros at `page`. It does not wake waiting threads.
    ///
    /// # Errors
    /// Fails if the kernel cannot fill the page.
    pub fn zero(&self, page: usize) -> Result<(), MoveError> {
        let mode = u64::from(raw::UFFDIO_ZEROPAGE_MODE_DONTWAKE);
        let mut request = raw::uffdio_zeropage { range: range(page, PAGE_BYTES), mode, zeropage: 0 };
        // SAFETY: UFFDIO_ZEROPAGE takes a `uffdio_zeropage`, and fills only a missing page.
        unsafe { raw_ioctl::call(&self.0, ZEROPAGE, &mut request) }?;
        Ok(())
    }

    /// Wakes the threads that wait for pages of the range.
    ///
    /// # Errors
    /// Fails if the kernel refuses.
    pub fn wake(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: UFFDIO_WAKE takes a `uffdio_range`, and does not change memory.
        unsafe { raw_ioctl::call(&self.0, WAKE, &mut range(start, len)) }?;
        Ok(())
    }

    /// Wakes all threads that wait for a page, also of what is no longer mapped.
    pub fn wake_all(&self) {
        // The kernel refuses the last page of the addresses, and the first ones, which no program
        // has.
        let woken = self.wake(FIRST_ADDRESS, ADDRESSES_END - PAGE_BYTES - FIRST_ADDRESS);
        debug_assert_eq!(woken, Ok(()));
    }

    /// Write-protects the pages of a range: writes to them are reported as faults. Missing pages
    /// get a marker (see `marks` in `foliomem_runtime`).
    ///
    /// # Errors
    /// Fails if the kernel refuses.
    pub fn protect(&self, start: usize, len: usize) -> Result<(), MoveError> {
        self.write_protect(start, len, WRITE_PROTECT_MODE_WP)
    }

    /// Removes write protection and markers from a range. It does not wake waiting threads. The
    /// caller leaves out pages that are swapped out, because they must keep their markers.
    ///
    /// # Errors
    /// Fails if the kernel refuses.
    pub fn unprotect(&self, start: usize, len: usize) -> Result<(), MoveError> {
        self.write_protect(start, len, WRITE_PROTECT_MODE_DONTWAKE)
    }

    /// Sets or removes write protection of a range, as `mode` says.
    fn write_protect(&self, start: usize, len: usize, mode: u64) -> Result<(), MoveError> {
        let mut request = raw::uffdio_writeprotect { range: range(start, len), mode };
        // SAFETY: UFFDIO_WRITEPROTECT takes a `uffdio_writeprotect`, and changes no content.
        unsafe { raw_ioctl::call(&self.0, WRITE_PROTECT, &mut request) }?;
        Ok(())
    }

    /// Makes every access to the missing pages of the range raise SIGBUS. It does not wake waiting
    /// threads.
    ///
    /// # Errors
    /// Fails if the kernel refuses.
    pub fn poison(&self, start: usize, len: usize) -> Result<(), MoveError> {
        let mut request = raw::uffdio_poison { range: range(start, len), mode: POISON_MODE_DONTWAKE, updated: 0 };
        // SAFETY: UFFDIO_POISON takes a `uffdio_poison`, and changes only missing pages.
        unsafe { raw_ioctl::call(&self.0, POISON, &mut request) }?;
        Ok(())
    }

    /// Returns whether a mapping change is pending, because no handler has read its message yet.
    /// While a change is pending, the kernel refuses to fill pages with EAGAIN, before it checks
    /// the range. So a request with an empty range shows a pending change and fills nothing.
    pub fn mapping_is_changing(&self) -> bool {
        let mut request = raw::uffdio_zeropage { range: range(0, 0), mode: 0, zeropage: 0 };
        // SAFETY: UFFDIO_ZEROPAGE takes a `uffdio_zeropage`. The kernel refuses an empty range.
        let answer = unsafe { raw_ioctl::call(&self.0, ZEROPAGE, &mut request) };
        answer == Err(Errno::AGAIN)
    }

    /// Returns whether the page at `address` is registered with this userfaultfd. It may also
    /// return `false` while a mapping change is pending.
    ///
    /// For registered private memory, UFFDIO_CONTINUE fails with EINVAL; for unregistered memory it
    /// fails with another error. A second registration then shows whether this userfaultfd has
    /// registered the memory: the kernel refuses it to any other userfaultfd.
    pub fn is_registered(&self, address: usize) -> bool {
        let mut request = raw::uffdio_continue { range: range(address, PAGE_BYTES), mode: 0, mapped: 0 };
        // SAFETY: UFFDIO_CONTINUE takes a `uffdio_continue`. The kernel refuses it for private
        // memory.
        let answer = unsafe { raw_ioctl::call(&self.0, CONTINUE, &mut request) };
        answer == Err(Errno::INVAL) && self.register(address, PAGE_BYTES, Mode::Faults).is_ok()
    }

    /// Waits until a message may be ready, or until `timeout` is over.
    ///
    /// # Errors
    /// Fails if poll(2) fails.
    pub fn wait(&self, timeout: Option<&Timespec>) -> Result<(), Errno> {
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout).map(|_| ())
    }

    /// Returns whether the page at `address` of private anonymous memory is registered with this
    /// userfaultfd. It may also return `false` while a mapping change is pending. It removes write
    /// protection and the marker of the page.
    ///
    /// [`Userfaultfd::is_registered`] gives an untouched mapping an `anon_vma` of its own. The
    /// kernel never merges two mappings with different `anon_vma`s, so mappings that are one to the
    /// program would stay split. This function does not have that effect.
    pub fn is_registered_unmarked(&self, address: usize) -> bool {
        self.unprotect(address, PAGE_BYTES).is_ok() && self.register(address, PAGE_BYTES, Mode::Faults).is_ok()
    }

    /// Returns whether a message is ready now.
    pub fn has_message(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Reads one message. Returns `None` if there is none. A program thread that changed its
    /// mappings continues as soon as its message is read.
    ///
    /// # Errors
    /// Fails if read(2) fails.
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

/// Opens `/dev/userfaultfd`.
///
/// # Errors
/// Fails if the device does not exist or may not be opened.
pub fn device() -> Result<OwnedFd, Errno> {
    rustix::fs::openat(CWD, "/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, FileMode::empty())
}

/// Makes a userfaultfd with the ioctl of the open `/dev/userfaultfd`.
pub(crate) fn ask_device(device: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = (OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as usize;
    // SAFETY: USERFAULTFD_IOC_NEW takes the flags by value and returns a new descriptor.
    let fd = unsafe { rustix::ioctl::ioctl(device, NewFd(flags)) }?;
    Ok(fd)
}

/// The faults that a userfaultfd serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Served {
    /// Faults of user mode and of the kernel. Serving faults of the kernel needs a permission.
    All,
    /// Faults of user mode only, which every process may serve.
    UserMode,
}

/// Makes a userfaultfd by the system call.
pub(crate) fn call(served: Served) -> Result<OwnedFd, Errno> {
    let flags = UserfaultfdFlags::CLOEXEC
        | UserfaultfdFlags::NONBLOCK
        | match served {
            Served::All => UserfaultfdFlags::empty(),
            Served::UserMode => UserfaultfdFlags::from_bits_retain(raw::UFFD_USER_MODE_ONLY),
        };
    // SAFETY: the call makes a new descriptor, with which nothing is registered yet.
    unsafe { rustix::mm::userfaultfd(flags) }
}

/// Makes a userfaultfd by the system call, after the device has failed with `device_error`.
fn open_syscall(device_error: Errno) -> Result<OwnedFd, UffdError> {
    call(Served::All).map_err(|errno| match errno {
        Errno::NOSYS => UffdError::Missing,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => UffdError::Exhausted(errno),
        Errno::PERM if device_error != Errno::NOENT => UffdError::NoPermission(device_error),
        errno => UffdError::NoPermission(errno),
    })
}

/// The ioctl USERFAULTFD_IOC_NEW, which takes flags by value and returns a descriptor.
struct NewFd(usize);

// SAFETY: the kernel accesses no memory for this ioctl.
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
        // SAFETY: a successful call returns a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

/// Converts a range to the type that the ioctls take.
fn range(start: usize, len: usize) -> raw::uffdio_range {
    raw::uffdio_range { start: start as u64, len: len as u64 }
}

/// Decodes a message. Returns `None` for a kind that was not requested.
pub(crate) fn decode(bytes: [u8; size_of::<raw::uffd_msg>()]) -> Option<Message> {
    const WRITE_PROTECTED: u64 = 1 << 1;
    // SAFETY: the struct consists of integers, for which every bit pattern is valid.
    let message: raw::uffd_msg = unsafe { std::mem::transmute(bytes) };
    // SAFETY: the event determines the member of the union that the kernel has filled; all members
    // consist of integers.
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

    /// Returns a message in the kernel's layout: its kind in the first byte, its words from the
    /// ninth on.
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
        fn messages_are_decoded(
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
        fn any_message_is_decoded_or_refused(kind in 0x10u32..0x18, words: [u64; 3], noise: [u8; size_of::<raw::uffd_msg>()]) {
            decode(message(kind, words));
            decode(noise);
        }
    }
}
