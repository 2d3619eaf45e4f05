//! A descriptor on its way from the parent's companion to the child's: the swap file, or `/proc`
//! and the userfaultfd device where the program has changed its root.
//!
//! The companion has a descriptor table of its own, and a fork copies the program's table. So the
//! forking thread copies the descriptor into the program's table before the fork, both sides close
//! it right after the fork, and the child's companion takes it from its own copy of the table.
//! Nothing is opened anew, so it does not matter what the program has become since: for example
//! another user, who may neither open the file nor look at other processes.
//!
//! The forking thread takes the copy by `pidfd_getfd(2)` if the kernel allows that. It does not
//! where the program has become another user, has entered a user namespace, or is not to be dumped.
//! Then the companion *lends*: the forking thread makes a pair of sockets, and the companion, which
//! has the credentials that the program had once, takes one of them and sends the descriptors over
//! it. There is no lock: one thread forks at a time.

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
    /// Forking thread, before the fork: takes `descriptor` from the table of `process`, if the
    /// system allows that.
    pub fn take(&self, process: Pid, descriptor: RawFd) {
        let Ok(pidfd) = pidfd_open(process, PidfdFlags::empty()) else { return };
        if let Ok(file) = pidfd_getfd(&pidfd, descriptor, PidfdGetfdFlags::empty()) {
            self.0.store(file.into_raw_fd(), Ordering::Relaxed);
        }
        close(pidfd.into_raw_fd());
    }

    /// The thread that starts the first companion: hands `descriptor` over.
    pub fn give(&self, descriptor: OwnedFd) {
        self.0.store(descriptor.into_raw_fd(), Ordering::Relaxed);
    }

    /// Forking thread, after the fork, on both sides: closes the descriptor.
    pub fn finish(&self) {
        let descriptor = self.0.swap(NONE, Ordering::Relaxed);
        if descriptor != NONE {
            close(descriptor);
        }
    }

    /// The number of the descriptor in the tables of the program and of the child's companion.
    pub fn descriptor(&self) -> Option<RawFd> {
        Some(self.0.load(Ordering::Relaxed)).filter(|&descriptor| descriptor != NONE)
    }

    /// The child's monitor: takes its own copy of the descriptor.
    ///
    /// # Safety
    /// Called once by a monitor that has not closed it, before [`DescriptorHandOver::finish`].
    pub unsafe fn receive(&self) -> Option<OwnedFd> {
        // SAFETY: this table's copy is the monitor's, by the contract.
        self.descriptor().map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

/// Whether the calling process can open something by itself.
pub fn can_open(opened: Result<OwnedFd, Errno>) -> bool {
    opened.map(|descriptor| close(descriptor.into_raw_fd())).is_ok()
}

/// Closes by a system call: the C library's `close` reads the thread's state, which may be swapped
/// out.
fn close(descriptor: RawFd) {
    // SAFETY: both callers own it.
    unsafe { rustix::io::close(descriptor) };
}

/// What the companion lends the forking thread. See the module.
#[derive(Debug)]
pub struct Lending {
    /// The forking thread's socket, and the companion's, in the table of the program.
    sockets: [AtomicI32; 2],
}

impl Default for Lending {
    fn default() -> Lending {
        Lending { sockets: [const { AtomicI32::new(NONE) }; 2] }
    }
}

impl Lending {
    /// The forking thread, before the companion quiesces: asks for descriptors.
    pub fn ask(&self) {
        let made = socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let Ok((own, companions)) = made else { return };
        for (socket, made) in self.sockets.iter().zip([own, companions]) {
            socket.store(made.into_raw_fd(), Ordering::Relaxed);
        }
    }

    /// The companion: lends descriptors to `program`, if that has asked.
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

    /// The forking thread, while everything is quiesced: takes what has been lent.
    pub fn take(&self, to: [&DescriptorHandOver; 3]) {
        let [own, companions] = self.sockets.each_ref().map(|socket| socket.swap(NONE, Ordering::Relaxed));
        if own == NONE {
            return;
        }
        // SAFETY: open until the end of this.
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
            // SAFETY: only this thread's own table is not shared any more.
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
            // Before Linux 6.9, or forbidden: there is none, and all the same nothing is left open.
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
    fn what_is_lent_is_taken_in_its_place_and_nothing_is_left_open() {
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
            // SAFETY: asks whether it is open.
            let open = unsafe { rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(socket)) };
            assert_eq!(open, Err(Errno::BADF));
        }
    }
}
