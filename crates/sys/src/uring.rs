//! Asynchronous writes: a ring of io_uring(7) for one thread and one file.
//!
//! The ring belongs to the thread that made it. Forks do not copy its memory (`MADV_DONTFORK`); the
//! threads of the child make rings of their own. The ring's system calls bypass the C library,
//! whose `syscall` the agent replaces.
//!
//! The kernel may forbid io_uring (ENOSYS, EPERM, `kernel.io_uring_disabled`). A program may
//! install a filter (seccomp) later that kills it for unknown system calls. So a thread with a
//! filter stops using its ring. Pending writes complete nevertheless, because completions arrive
//! with any system call. There is no lock.

use io_uring::{IoUring, opcode, types::Fd};
use linux_raw_sys::io_uring::IORING_ENTER_GETEVENTS;
use rustix::fd::{AsRawFd, BorrowedFd, RawFd};
use rustix::io::Errno;
use rustix::thread::{SecureComputingMode, secure_computing_mode};

/// Asynchronous writes to a file. Implemented by the kernel's rings, and by rings of tests that
/// fail.
pub trait Ring {
    /// Starts to write `bytes` at `offset`. `number` identifies the write; no other pending write
    /// has it.
    ///
    /// # Safety
    /// `bytes` stay valid and unchanged until [`Ring::wait`] has returned for this number.
    ///
    /// # Errors
    /// Fails if the ring cannot be used any more. Then the write has not started.
    unsafe fn submit(&mut self, number: usize, bytes: &[u8], offset: u64) -> Result<(), Errno>;
    /// Waits for write `number`, which was started, and returns the number of bytes written.
    ///
    /// # Errors
    /// Fails if the write failed.
    fn wait(&mut self, number: usize) -> Result<usize, Errno>;
}

/// A ring of one thread for one file, with up to `WRITES` pending writes.
pub struct Uring<const WRITES: usize> {
    ring: IoUring,
    file: RawFd,
    /// Results of completed writes for which nobody has waited yet: a length or a negated error
    /// number.
    ended: [Option<i32>; WRITES],
    /// Whether the kernel has refused a write. Entries left in the submission queue are never
    /// submitted.
    is_refused: bool,
}

impl<const WRITES: usize> Uring<WRITES> {
    /// Makes a ring for writes to `file`. The caller keeps `file` open as long as the ring lives.
    ///
    /// # Errors
    /// Fails with `PERM` if the thread has a filter, or if the kernel forbids io_uring.
    pub fn new(file: BorrowedFd<'_>) -> Result<Self, Errno> {
        if is_filtered() {
            return Err(Errno::PERM);
        }
        let ring = IoUring::builder()
            .dontfork()
            // Completions do not interrupt the thread, because it polls for them.
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(WRITES as u32)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOSYS))?;
        Ok(Uring { ring, file: file.as_raw_fd(), ended: [None; WRITES], is_refused: false })
    }
}

/// Returns whether a filter checks the thread's system calls, or whether that is unknown.
fn is_filtered() -> bool {
    secure_computing_mode() != Ok(SecureComputingMode::Disabled)
}

impl<const WRITES: usize> Ring for Uring<WRITES> {
    unsafe fn submit(&mut self, number: usize, bytes: &[u8], offset: u64) -> Result<(), Errno> {
        if self.is_refused || is_filtered() {
            return Err(Errno::PERM);
        }
        let entry = opcode::Write::new(Fd(self.file), bytes.as_ptr(), bytes.len() as u32).offset(offset).build();
        // SAFETY: the bytes stay valid until the write has completed, by the contract of `submit`.
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
                // SAFETY: the call submits no entries, and passes no argument.
                unsafe { ring.submitter().enter::<()>(0, 1, IORING_ENTER_GETEVENTS, None) }
            };
            if is_filtered() || wait(&self.ring).is_err() {
                foliomem_sync::back_off();
            }
        }
    }
}
