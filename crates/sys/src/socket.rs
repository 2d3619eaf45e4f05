//! Socket options for which rustix has no function. There is no lock.

use linux_raw_sys::net::SO_PEERPIDFD;
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

use crate::thread::syscall5;

/// Returns a pidfd of the process at the other end of `socket` (`SO_PEERPIDFD`).
///
/// # Errors
/// Fails with `NOTSUP` if the kernel refuses: Linux before 6.5 has no such option.
pub fn peer_pidfd(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    let mut pidfd: i32 = -1;
    let mut len = size_of::<i32>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, SO_PEERPIDFD as i32);
    let number = socket.as_fd().as_raw_fd();
    // SAFETY: getsockopt(2) writes at most `len` bytes to `pidfd`, which is as long.
    let result = unsafe { libc::getsockopt(number, level, name, (&raw mut pidfd).cast(), &raw mut len) };
    if result != 0 {
        return Err(Errno::NOTSUP);
    }
    // SAFETY: the kernel has just made the descriptor for this call, so nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Returns whether `SO_ZEROCOPY` is set. Sockets of most families do not have the option.
pub fn has_zerocopy(socket: &OwnedFd) -> bool {
    let (mut value, mut len) = (0i32, size_of::<i32>() as u32);
    // SAFETY: getsockopt(2) writes at most `len` bytes to `value`, which is as long.
    let result = unsafe {
        syscall5(
            libc::SYS_getsockopt as usize,
            [
                socket.as_raw_fd() as usize,
                libc::SOL_SOCKET as usize,
                libc::SO_ZEROCOPY as usize,
                (&raw mut value).expose_provenance(),
                (&raw mut len).expose_provenance(),
            ],
        )
    };
    result == 0 && value != 0
}
