//! Breaks copy-on-write without waiting for a userfaultfd.
//!
//! A fork leaves pages shared, and the kernel moves only pages that one process has alone. A write by
//! a thread of the agent makes a page the process's own, but such a write may find that another
//! thread has just swapped the page out. The writing thread would then wait for a handler, and the
//! handler may wait for a lock of that thread. So the write is `FUTEX_WAKE_OP`, an atomic addition
//! of 0: where the page is missing, the kernel cannot retry this kind of fault and returns `EFAULT`.

use crate::thread::syscall6;
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::mm::{Advice, madvise};
use std::sync::atomic::AtomicU32;

/// Adds 0, and compares the word with a number that few words are: then the kernel also wakes a
/// thread that waits for the word, which every such thread allows for.
const ADD_NOTHING: u32 = raw::FUTEX_OP_ADD << 28 | raw::FUTEX_OP_CMP_EQ << 24 | 0x801;
const WAKE_OP_PRIVATE: u32 = raw::FUTEX_WAKE_OP | raw::FUTEX_PRIVATE_FLAG;
/// No thread waits for this word.
static NOBODY: AtomicU32 = AtomicU32::new(0);

/// Makes resident pages that a fork left shared the process's own, up to the first that is missing
/// or cannot be written. Changes no content. Never waits for a handler.
///
/// Of a shared huge page the kernel hands a part over as it is once nobody else maps it. It then
/// decides by the first page of the huge page whether it moves the part (Linux 6.18). So the huge
/// page is split, which is what `MADV_COLD` does to one that is only partly in its range.
pub fn unshare(start: usize, len: usize) {
    let mut pages = (start..start + len).step_by(PAGE_BYTES);
    let _ = pages.find(|&page| !is_written(page));
    // SAFETY: changes no content. A failure leaves the pages where they are.
    let _ = unsafe { madvise(std::ptr::with_exposed_provenance_mut(start), len, Advice::LinuxCold) };
}

/// Writes to a page without changing it; whether that succeeds.
fn is_written(page: usize) -> bool {
    let nobody = (&raw const NOBODY).expose_provenance();
    let arguments = [nobody, WAKE_OP_PRIVATE as usize, 0, 0, page, ADD_NOTHING as usize];
    // SAFETY: the kernel adds 0 to a word in one atomic step, or fails.
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
        // Not joined: a thread that waits for a handler never ends.
        std::thread::spawn(move || {
            unshare(start, 4 * PAGE_BYTES);
            sender.send(()).unwrap();
        });
        receiver.recv_timeout(Duration::from_secs(5)).expect("it waits for a handler");
        assert!(!userfaultfd.has_message(), "a fault was raised");
        assert!(region.as_mut_slice()[..2 * PAGE_BYTES].iter().all(|&byte| byte == 7));
    }

    #[test]
    fn a_page_that_a_fork_left_shared_can_be_moved_afterwards() {
        let mut region = Region::reserve(2 * PAGE_BYTES).unwrap();
        region.as_mut_slice()[..PAGE_BYTES].fill(7);
        let start = region.start();
        // The child keeps the page shared until it is killed.
        // SAFETY: the child only sleeps and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: system calls without memory.
            unsafe {
                libc::sleep(60);
                libc::_exit(0);
            }
        }
        let userfaultfd = Userfaultfd::open(Features { events: false }).unwrap();
        userfaultfd.register(start, region.len(), Mode::Destination).unwrap();
        // SAFETY: the second page is empty, and nobody else uses either.
        let move_page = || unsafe { userfaultfd.move_pages(start + PAGE_BYTES, start, PAGE_BYTES) };
        assert!(move_page().error.is_some(), "a shared page was moved");
        unshare(start, PAGE_BYTES);
        assert!(move_page().error.is_none());
        assert!(region.as_mut_slice()[PAGE_BYTES..].iter().all(|&byte| byte == 7));
        // SAFETY: our own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
    }
}
