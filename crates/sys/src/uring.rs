//! Asynchronous writes: a ring of io_uring(7) for one thread and one file.
//!
//! The ring belongs to the thread that made it. Forks do not copy its memory (`MADV_DONTFORK`), and
//! the child's threads make rings of their own. Its system calls bypass the C library, whose
//! `syscall` the agent replaces.
//!
//! The kernel may forbid io_uring (ENOSYS, EPERM, `kernel.io_uring_disabled`). A program that
//! filters its system calls later (seccomp) may have chosen to be killed for those that it does not
//! know. So a thread with a filter does not use its ring any more. Writes under way complete all
//! the same, because completions arrive with any system call. There is no lock.

use io_uring::{IoUring, opcode, types::Fd};
use linux_raw_sys::io_uring::IORING_ENTER_GETEVENTS;
use rustix::fd::{AsRawFd, BorrowedFd, RawFd};
use rustix::io::Errno;
use rustix::thread::{SecureComputingMode, secure_computing_mode};

/// What can have writes to a file under way. (The system's rings, and those of tests that fail.)
pub trait Ring {
    /// Begins to write `bytes` from `offset` on, as number `number`, which no other write under
    /// way has.
    ///
    /// # Safety
    /// `bytes` stay where they are and as they are until [`Ring::wait`] has returned for this number.
    unsafe fn submit(&mut self, number: usize, bytes: &[u8], offset: u64) -> Result<(), Errno>;
    /// Waits for a write that was begun; returns how many bytes were written.
    fn wait(&mut self, number: usize) -> Result<usize, Errno>;
}

/// A ring of one thread for one file, with up to `WRITES` writes under way.
pub struct Uring<const WRITES: usize> {
    ring: IoUring,
    file: RawFd,
    /// How those have ended that nobody has waited for yet: as system calls do.
    ended: [Option<i32>; WRITES],
    /// The system has refused something: what is in the submission queue is never submitted.
    is_refused: bool,
}

impl<const WRITES: usize> Uring<WRITES> {
    /// A ring for writes to `file`, which is open as long as the ring lives.
    pub fn new(file: BorrowedFd<'_>) -> Result<Self, Errno> {
        if is_filtered() {
            return Err(Errno::PERM);
        }
        let ring = IoUring::builder()
            .dontfork()
            // Completions interrupt nothing: they are fetched.
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(WRITES as u32)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOSYS))?;
        Ok(Uring { ring, file: file.as_raw_fd(), ended: [None; WRITES], is_refused: false })
    }
}

/// Whether the thread's system calls go through a filter; if that cannot be known, they do.
fn is_filtered() -> bool {
    secure_computing_mode() != Ok(SecureComputingMode::Disabled)
}

impl<const WRITES: usize> Ring for Uring<WRITES> {
    unsafe fn submit(&mut self, number: usize, bytes: &[u8], offset: u64) -> Result<(), Errno> {
        if self.is_refused || is_filtered() {
            return Err(Errno::PERM);
        }
        let entry = opcode::Write::new(Fd(self.file), bytes.as_ptr(), bytes.len() as u32).offset(offset).build();
        // SAFETY: the bytes stay, by the contract.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(number as u64)) };
        if pushed.is_err() || !matches!(self.ring.submit(), Ok(1)) {
            self.is_refused = true;
            return Err(Errno::AGAIN);
        }
        Ok(())
    }

    fn wait(&mut self, number: usize) -> Result<usize, Errno> {
        loop {
            for completion in self.ring.completion() {
                self.ended[completion.user_data() as usize] = Some(completion.result());
            }
            if let Some(result) = self.ended[number].take() {
                return usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
            }
            let wait = |ring: &IoUring| {
                // SAFETY: submits nothing, and passes no argument.
                unsafe { ring.submitter().enter::<()>(0, 1, IORING_ENTER_GETEVENTS, None) }
            };
            if is_filtered() || wait(&self.ring).is_err() {
                foliomem_sync::back_off();
            }
        }
    }
}
