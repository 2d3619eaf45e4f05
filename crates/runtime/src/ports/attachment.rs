//! The connection of a process to its program: the descriptors by which the ports reach the memory.
//!
//! After a fork the child makes descriptors of its own. A child whose companion cannot start is
//! *detached*: its only thread copies its memory back by itself. There is no lock.

use foliomem_core::ports::{MoveError, Stopped};
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::pagemap;
use foliomem_sys::userfaultfd::{self, Userfaultfd};
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The descriptors of one process. The child of a fork opens its own.
#[derive(Debug)]
pub struct Descriptors {
    /// Receives the program's faults and mapping events.
    pub program: Userfaultfd,
    /// `/proc/self/pagemap`.
    pub pagemap: OwnedFd,
    /// `/proc/self/maps`.
    pub maps: OwnedFd,
    /// `/proc/self/mem`.
    pub memory: OwnedFd,
    /// The swap file, if there is one.
    pub swap_file: Option<OwnedFd>,
}

/// The connection to the program.
pub struct Attachment {
    descriptors: ForkCell<Descriptors>,
    /// Set by [`Attachment::detach`].
    is_detached: AtomicBool,
    detached_swap_file: AtomicI32,
}

impl Attachment {
    /// Makes the connection by `descriptors`.
    pub(super) fn new(descriptors: Descriptors) -> Attachment {
        Attachment {
            descriptors: ForkCell::new(descriptors),
            is_detached: AtomicBool::new(false),
            detached_swap_file: AtomicI32::new(-1),
        }
    }

    /// Returns the descriptors of this process.
    pub fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// Replaces the descriptors, in the child of a fork.
    ///
    /// # Safety
    /// No other thread of this process uses the ports.
    pub(super) unsafe fn replace(&self, descriptors: Descriptors) {
        // SAFETY: no other thread, by the contract. The old descriptors are those of the parent's
        // threads and do not exist in this process's table: they are forgotten, not closed.
        unsafe { self.descriptors.replace_forgetting(descriptors) };
    }

    /// Makes the calling thread copy pages to the program from now on, without a userfaultfd.
    /// `swap_file` is the number of the swap file in this thread's descriptor table.
    ///
    /// # Safety
    /// The calling thread is the only one that uses the memory. No page moves out from now on. The
    /// swap file stays open until all pieces are read.
    pub(super) unsafe fn detach(&self, swap_file: Option<RawFd>) {
        self.is_detached.store(true, Ordering::Relaxed);
        self.detached_swap_file.store(swap_file.unwrap_or(-1), Ordering::Relaxed);
    }

    /// Returns whether the process continues without its agent.
    pub(super) fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Relaxed)
    }

    /// Returns the swap file's descriptor, if there is one.
    pub(super) fn swap_file(&self) -> Option<BorrowedFd<'_>> {
        if !self.is_detached() {
            return self.descriptors().swap_file.as_ref().map(AsFd::as_fd);
        }
        let number = self.detached_swap_file.load(Ordering::Relaxed);
        // SAFETY: the caller of `detach` keeps the descriptor open until all pieces are read.
        (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// Copies pages of the arena to the program, when the calling thread is the only user of the
    /// program's memory.
    pub(super) fn copy_detached(&self, to: usize, from: usize, len: usize) {
        let target: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
        // SAFETY: the source is a run of the arena that the engine holds. The target is managed
        // memory of the program, readable and writable in this process (`detach`), and no other
        // thread runs here.
        unsafe { std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance::<u8>(from), target, len) };
    }

    /// Moves `pages` pages. On an error, returns how far the move came, as the engine expects.
    pub(super) fn move_pages(&self, to: usize, from: usize, pages: u32) -> Result<(), Stopped> {
        let len = pages as usize * PAGE_BYTES;
        if self.is_detached() {
            self.copy_detached(to, from, len);
            return Ok(());
        }
        let mut moved = 0;
        while moved < len {
            let before = moved;
            // SAFETY: one side is a run of the arena that the engine holds. The other is memory of
            // the program; the kernel checks that it is registered or movable.
            let outcome = unsafe { self.descriptors().program.move_pages(to + moved, from + moved, len - moved) };
            moved += outcome.moved_bytes;
            let Some(error) = outcome.error else { continue };
            if matches!(error, userfaultfd::MoveError::Exists | userfaultfd::MoveError::NotFound) {
                // Linux 6.18 repeats a step that has succeeded after a retry, and finds the pages
                // already moved. So its count of moved bytes is too small.
                moved += pagemap::moved_bytes(&self.descriptors().pagemap, to + moved, from + moved, len - moved);
            }
            // An error after some progress is an interruption: continue while there is progress.
            if moved == before {
                return Err(Stopped { moved_pages: (moved / PAGE_BYTES) as u32, error: move_error(error) });
            }
        }
        Ok(())
    }
}

/// Converts an error of userfaultfd to the engine's type.
pub(super) fn move_error(error: userfaultfd::MoveError) -> MoveError {
    match error {
        userfaultfd::MoveError::Again => MoveError::Changing,
        userfaultfd::MoveError::Busy => MoveError::Busy,
        userfaultfd::MoveError::Exists => MoveError::Exists,
        userfaultfd::MoveError::NotFound => MoveError::Absent,
        userfaultfd::MoveError::Gone => MoveError::Gone,
        userfaultfd::MoveError::Invalid | userfaultfd::MoveError::NoMemory | userfaultfd::MoveError::Other(_) => {
            MoveError::Refused
        }
    }
}
