//! A list of spare cells without a lock, for threads that a fork may interrupt anywhere.
//!
//! A thread that takes a cell takes the whole list for a moment, so no other thread changes what it
//! reads, and puts the rest back. Cells that a fork catches there are lost to the child.

use foliomem_sync::atomic::{AtomicPtr, Ordering};
use std::ptr::{NonNull, null_mut};

/// A value in a list.
#[derive(Debug)]
pub struct Cell<T> {
    /// What its owner has put there.
    pub value: T,
    next: *mut Cell<T>,
}

impl<T> Cell<T> {
    /// A cell in no list.
    pub const fn new(value: T) -> Cell<T> {
        Cell { value, next: null_mut() }
    }
}

/// The spare cells. They live as long as the process; the list frees none.
#[derive(Debug)]
pub struct CellList<T> {
    first: AtomicPtr<Cell<T>>,
}

impl<T> Default for CellList<T> {
    fn default() -> Self {
        CellList::new()
    }
}

impl<T> CellList<T> {
    /// No cells.
    pub const fn new() -> CellList<T> {
        CellList { first: AtomicPtr::new(null_mut()) }
    }

    /// Takes a cell out, if one is there. It is the caller's.
    pub fn take(&self) -> Option<NonNull<Cell<T>>> {
        // Acquire pairs with the Release in `give_back` and below: the links of all cells that are
        // taken are seen.
        let first = NonNull::new(self.first.swap(null_mut(), Ordering::Acquire))?;
        // SAFETY: what was in the list is ours.
        let mut rest = unsafe { (*first.as_ptr()).next };
        // Release pairs with the Acquire above: who takes the rest sees its links, which others
        // have written and we have acquired.
        if self.first.compare_exchange(null_mut(), rest, Ordering::Release, Ordering::Relaxed).is_err() {
            while let Some(cell) = NonNull::new(rest) {
                // SAFETY: as above; `give_back` gets each cell once.
                unsafe {
                    rest = (*cell.as_ptr()).next;
                    self.give_back(cell);
                }
            }
        }
        Some(first)
    }

    /// Puts a cell into the list.
    ///
    /// # Safety
    /// The cell is the caller's, is valid as long as the process lives, and is not used by the
    /// caller any more.
    pub unsafe fn give_back(&self, cell: NonNull<Cell<T>>) {
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the cell is the caller's, by the contract. `first` is not looked into.
            unsafe { (*cell.as_ptr()).next = first };
            // Release pairs with the Acquire in `take`: this link and what is in the cell. Older
            // links are still released by the change that was made with them: this one continues
            // its release sequence.
            match self.first.compare_exchange_weak(first, cell.as_ptr(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }
}

// SAFETY: a cell is used by whoever has taken it, one thread at a time.
unsafe impl<T: Send> Sync for CellList<T> {}
