//! A descriptor on its way from the parent's companion to the child's: the swap file, or `/proc`
//! and the userfaultfd device if the program has changed its root.
//!
//! The companion has a descriptor table of its own, and a fork copies the program's table. So the
//! forking thread copies the descriptor into the program's table before the fork. Both sides close
//! it right after the fork, and the child's companion takes it from its own copy of the table.
//! Nothing is opened again, so it does not matter whether the program has since become another user
//! who may neither open the file nor inspect other processes.
//!
//! The forking thread takes the copy by `pidfd_getfd(2)` if the kernel allows that. The kernel
//! refuses if the program has become another user, has entered a user namespace, or is undumpable.
//! Then the companion *lends* the descriptors: the forking thread creates a pair of sockets, and
//! the companion, which has the credentials that the program had once, takes one of them and sends
//! the descriptors over it. There is no lock: one thread forks at a time.

use foliomem_sys::descriptor_passing;
use rustix::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::sync::atomic::{AtomicI32, Ordering};

const NONE: RawFd = -1;

/// The number of the descriptor on its way; -1 without one.
#[derive(Debug)]
pub struct DescriptorHandOver(AtomicI32);

impl Default for DescriptorHandOver {
    fn default() -> DescriptorHandOver {
        DescriptorHandOver(AtomicI32::new(NONE))
    }
}

impl DescriptorHandOver {
    /// Takes `descriptor` from the table of `process`, if the kernel allows that. The forking
    /// thread calls this before the fork.
    pub fn take(&self, process: Pid, descriptor: RawFd) {
        let Ok(pidfd) = pidfd_open(process, PidfdFlags::empty()) else { return };
        if let Ok(file) = pidfd_getfd(&pidfd, descriptor, PidfdGetfdFlags::empty()) {
            self.0.store(file.into_raw_fd(), Ordering::Relaxed);
        }
        close(pidfd.into_raw_fd());
    }

    /// Hands `descriptor` over. The thread that starts the first companion calls this.
    pub fn give(&self, descriptor: OwnedFd) {
        self.0.store(descriptor.into_raw_fd(), Ordering::Relaxed);
    }

    /// Closes the descriptor. The forking thread calls this after the fork, on both sides.
    pub fn finish(&self) {
        let descriptor = self.0.swap(NONE, Ordering::Relaxed);
        if descriptor != NONE {
            close(descriptor);
        }
    }

    /// Returns the number of the descriptor in the tables of the program and of the child's
    /// companion.
    pub fn descriptor(&self) -> Option<RawFd> {
        Some(self.0.load(Ordering::Relaxed)).filter(|&descriptor| descriptor != NONE)
    }

    /// Takes the child's own copy of the descriptor. The child's monitor calls this.
    ///
    /// # Safety
    /// The caller has not closed the descriptor, calls this once, and before
    /// [`DescriptorHandOver::finish`].
    pub unsafe fn receive(&self) -> Option<OwnedFd> {
        // SAFETY: the caller's contract: the copy in this table belongs to the monitor.
        self.descriptor().map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

/// Returns whether `opened` is a descriptor, and closes it.
pub fn can_open(opened: Result<OwnedFd, Errno>) -> bool {
    opened.map(|descriptor| close(descriptor.into_raw_fd())).is_ok()
}

/// Closes a descriptor by a system call: the C library's `close` reads the thread's state, which
/// may be swapped out.
fn close(descriptor: RawFd) {
    // SAFETY: the callers own the descriptor.
    unsafe { rustix::io::close(descriptor) };
}

/// The sockets by which the companion lends descriptors to the forking thread.
#[derive(Debug)]
pub struct Lending {
    /// The sockets of the forking thread and of the companion, in the program's table.
    sockets: [AtomicI32; 2],
}

impl Default for Lending {
    fn default() -> Lending {
        Lending { sockets: [const { AtomicI32::new(NONE) }; 2] }
    }
}

impl Lending {
    /// Asks for descriptors. The forking thread calls this before the companion quiesces.
    pub fn ask(&self) {
        let made = socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let Ok((own, companions)) = made else { return };
        for (socket, made) in self.sockets.iter().zip([own, companions]) {
            socket.store(made.into_raw_fd(), Ordering::Relaxed);
        }
    }

    /// Lends descriptors to `program`, if that has asked. The companion calls this.
    pub fn lend(&self, program: Pid, [proc, device, swap_file]: [Option<BorrowedFd<'_>>; 3]) {
        let socket = self.sockets[1].load(Ordering::Relaxed);
        if socket == NONE {
            return;
        }
        let socket = pidfd_open(program, PidfdFlags::empty())
            .and_then(|pidfd| pidfd_getfd(&pidfd, socket, PidfdGetfdFlags::empty()));
        if let Ok(socket) = socket {
            let _ = descriptor_passing::send(&socket, [proc, device, swap_file, None, None]);
        }
    }

    /// Takes the lent descriptors. The forking thread calls this while the agent is quiesced.
    pub fn take(&self, to: [&DescriptorHandOver; 3]) {
        let [own, companions] = self.sockets.each_ref().map(|socket| socket.swap(NONE, Ordering::Relaxed));
        if own == NONE {
            return;
        }
        // SAFETY: `own` stays open until the end of this function.
        let received = descriptor_passing::receive(unsafe { BorrowedFd::borrow_raw(own) }, RecvFlags::DONTWAIT);
        for (hand_over, descriptor) in to.into_iter().zip(received.into_iter().flatten()) {
            if let Some(descriptor) = descriptor {
                hand_over.0.store(descriptor.into_raw_fd(), Ordering::Relaxed);
            }
        }
        close(own);
        close(companions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::{AsFd, AsRawFd};
    use std::sync::mpsc;

    #[test]
    fn a_descriptor_comes_from_the_table_of_another_thread() {
        let (ready, go) = (mpsc::channel(), mpsc::channel::<()>());
        let thread = std::thread::spawn(move || {
            // SAFETY: the thread gets a table of its own, and no other thread relies on it.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }.unwrap();
            let file = rustix::fs::memfd_create("handed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&file, b"from there").unwrap();
            ready.0.send((rustix::thread::gettid(), file.as_raw_fd())).unwrap();
            let _ = go.1.recv();
        });
        let (owner, descriptor) = ready.1.recv().unwrap();
        let handed = DescriptorHandOver::default();
        handed.take(owner, descriptor);
        let Some(here) = handed.descriptor() else {
            // Before Linux 6.9, or if it is forbidden, there is no copy; and nothing is left open.
            return;
        };
        // SAFETY: open until `finish`.
        let file = unsafe { rustix::fd::BorrowedFd::borrow_raw(here) };
        let mut bytes = [0; 10];
        assert_eq!(rustix::io::pread(file.as_fd(), &mut bytes, 0), Ok(10));
        assert_eq!(&bytes, b"from there");
        assert!(rustix::io::fcntl_getfd(file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        handed.finish();
        assert_eq!(handed.descriptor(), None);
        drop(go.0);
        thread.join().unwrap();
    }

    #[test]
    fn lent_descriptors_are_taken_in_order_and_none_is_left_open() {
        let (lending, taken) = (Lending::default(), [const { DescriptorHandOver(AtomicI32::new(NONE)) }; 3]);
        let file = rustix::fs::memfd_create("lent", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let lend = || lending.lend(rustix::process::getpid(), [None, Some(file.as_fd()), None]);
        let take = || {
            lending.take(taken.each_ref());
            let descriptors = taken.each_ref().map(DescriptorHandOver::descriptor);
            taken.iter().for_each(DescriptorHandOver::finish);
            descriptors.map(|descriptor| descriptor.is_some())
        };
        lend();
        assert_eq!(take(), [false; 3], "nobody has asked");
        lending.ask();
        assert_eq!(take(), [false; 3], "nobody has lent");
        lending.ask();
        let sockets = lending.sockets.each_ref().map(|socket| socket.load(Ordering::Relaxed));
        lend();
        assert_eq!(take(), [false, true, false]);
        for socket in sockets {
            // SAFETY: the descriptor number is only checked.
            let open = unsafe { rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(socket)) };
            assert_eq!(open, Err(Errno::BADF));
        }
    }
}
