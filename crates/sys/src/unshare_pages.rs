//! Breaks copy-on-write without waiting for a userfaultfd.
//!
//! A fork leaves pages shared, and the kernel moves only pages that belong to one process. A write
//! by a thread of the agent gives the process its own copy. But another thread may just have
//! swapped out the page. The writing thread would then wait for a handler, and the handler may wait
//! for a lock of the writing thread. So the write is `FUTEX_WAKE_OP`, an atomic addition of 0: if
//! the page is missing, the kernel cannot retry this kind of fault and returns `EFAULT`. There is
//! no lock.

use crate::thread::syscall6;
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::mm::{Advice, madvise};
use std::sync::atomic::AtomicU32;

/// The operation of `FUTEX_WAKE_OP`: adds 0, and compares the word with a number that it rarely
/// has. If it has, the kernel also wakes a sleeper on the word, and sleepers must expect such
/// wake-ups.
const ADD_NOTHING: u32 = raw::FUTEX_OP_ADD << 28 | raw::FUTEX_OP_CMP_EQ << 24 | 0x801;
/// The command of futex(2), for sleepers of this process.
const WAKE_OP_PRIVATE: u32 = raw::FUTEX_WAKE_OP | raw::FUTEX_PRIVATE_FLAG;
/// The first word of the operation, on which no thread sleeps.
static NOBODY: AtomicU32 = AtomicU32::new(0);

/// Gives the process its own copy of resident pages that a fork left shared. Stops at the first
/// page that is missing or cannot be written. Changes no content, and never waits for a handler.
///
/// If nobody else maps a shared huge page any more, the kernel does not copy the part that is
/// written. Later it decides by the first page of the huge page whether it moves the part (Linux
/// 6.18). So `MADV_COLD` splits the huge page, which it does if its range is only a part of one.
pub fn unshare(start: usize, len: usize) {
    let mut pages = (start..start + len).step_by(PAGE_BYTES);
    let _ = pages.find(|&page| !is_written(page));
    // SAFETY: the advice changes no content. A failure leaves the pages unchanged.
    let _ = unsafe { madvise(std::ptr::with_exposed_provenance_mut(start), len, Advice::LinuxCold) };
}

/// Writes to a page without changing it. Returns whether it could.
fn is_written(page: usize) -> bool {
    let nobody = (&raw const NOBODY).expose_provenance();
    let arguments = [nobody, WAKE_OP_PRIVATE as usize, 0, 0, page, ADD_NOTHING as usize];
    // SAFETY: the kernel adds 0 to the words atomically, or fails, so no content changes.
    unsafe { syscall6(raw::__NR_futex as usize, arguments) >= 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Region;
    use crate::userfaultfd::{Features, Mode, Userfaultfd};
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn a_missing_page_is_left_without_waiting_for_a_handler() {
        let mut region = Region::reserve(4 * PAGE_BYTES).unwrap();
        region.as_mut_slice()[..2 * PAGE_BYTES].fill(7);
        let start = region.start();
        let userfaultfd = Userfaultfd::open(Features { events: false }).unwrap();
        userfaultfd.register(start, region.len(), Mode::Faults).unwrap();
        let (sender, receiver) = mpsc::channel();
        // This thread is not joined: if it waits for a handler, it never ends.
        std::thread::spawn(move || {
            unshare(start, 4 * PAGE_BYTES);
            sender.send(()).unwrap();
        });
        receiver.recv_timeout(Duration::from_secs(5)).expect("the thread waits for a handler");
        assert!(!userfaultfd.has_message(), "a fault was raised");
        assert!(region.as_mut_slice()[..2 * PAGE_BYTES].iter().all(|&byte| byte == 7));
    }

    #[test]
    fn a_page_that_a_fork_left_shared_can_be_moved_afterwards() {
        let mut region = Region::reserve(2 * PAGE_BYTES).unwrap();
        region.as_mut_slice()[..PAGE_BYTES].fill(7);
        let start = region.start();
        // The child keeps the page shared until it is killed.
        // SAFETY: the child calls only sleep and _exit, which are safe after a fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: both calls take numbers only.
            unsafe {
                libc::sleep(60);
                libc::_exit(0);
            }
        }
        let userfaultfd = Userfaultfd::open(Features { events: false }).unwrap();
        userfaultfd.register(start, region.len(), Mode::Destination).unwrap();
        // SAFETY: the second page is empty, and no reference into the region is in use.
        let move_page = || unsafe { userfaultfd.move_pages(start + PAGE_BYTES, start, PAGE_BYTES) };
        assert!(move_page().error.is_some(), "a shared page was moved");
        unshare(start, PAGE_BYTES);
        assert!(move_page().error.is_none());
        assert!(region.as_mut_slice()[PAGE_BYTES..].iter().all(|&byte| byte == 7));
        // SAFETY: the calls get the id of the test's own child, and write no status.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
    }
}
