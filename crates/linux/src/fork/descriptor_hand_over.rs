//! A descriptor on its way from the parent's companion to the child's: the swap file, or `/proc`
//! where the program has changed its root.
//!
//! The companion has a descriptor table of its own, and a fork copies the program's table. So the
//! forking thread copies the descriptor into the program's table before the fork, both sides close
//! it right after the fork, and the child's companion takes it from its own copy of the table.
//! Nothing is opened anew, so it does not matter what the program has become since: for example
//! another user, who may neither open the file nor look at other processes.
//!
//! A process may take descriptors of its companion by `pidfd_getfd(2)`. There is no lock: one
//! thread forks at a time.

use rustix::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
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

/// Closes by a system call: the C library's `close` reads the thread's state, which may be swapped
/// out.
fn close(descriptor: RawFd) {
    // SAFETY: both callers own it.
    unsafe { rustix::io::close(descriptor) };
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
}
