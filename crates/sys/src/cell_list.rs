//! A list of spare cells without a lock, for threads that a fork may interrupt anywhere.
//!
//! To take a cell, a thread takes the whole list for a moment and puts the rest back. So no other
//! thread changes the links that it reads. Cells that a thread holds at the moment of a fork are
//! lost to the child.

use foliomem_sync::atomic::{AtomicPtr, Ordering};
use std::ptr::{NonNull, null_mut};

/// A value that can be in a list.
#[derive(Debug)]
pub struct Cell<T> {
    /// The value, which belongs to the thread that has taken the cell.
    pub value: T,
    next: *mut Cell<T>,
}

impl<T> Cell<T> {
    /// Makes a cell that is in no list.
    pub const fn new(value: T) -> Cell<T> {
        Cell { value, next: null_mut() }
    }
}

/// The spare cells. A cell lives as long as the process; the list never frees one.
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
    /// Makes an empty list.
    pub const fn new() -> CellList<T> {
        CellList { first: AtomicPtr::new(null_mut()) }
    }

    /// Takes a cell out of the list, if it has one. The cell belongs to the caller from then on.
    pub fn take(&self) -> Option<NonNull<Cell<T>>> {
        // Acquire pairs with the Release in `give_back` and below: this thread sees the links of
        // all cells that it takes.
        let first = NonNull::new(self.first.swap(null_mut(), Ordering::Acquire))?;
        // SAFETY: the swap took the whole list, so its cells belong to this thread.
        let mut rest = unsafe { (*first.as_ptr()).next };
        // Release pairs with the Acquire above: the thread that takes the rest sees its links,
        // which other threads wrote and this thread acquired.
        if self.first.compare_exchange(null_mut(), rest, Ordering::Release, Ordering::Relaxed).is_err() {
            while let Some(cell) = NonNull::new(rest) {
                // SAFETY: `rest` belongs to this thread since the swap, and `give_back` gets each
                // cell once, after its link was read.
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
    /// The caller owns the cell and does not use it afterwards. The cell is valid as long as the
    /// process lives.
    pub unsafe fn give_back(&self, cell: NonNull<Cell<T>>) {
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the caller owns the cell, by the contract. `first` is not dereferenced.
            unsafe { (*cell.as_ptr()).next = first };
            // Release pairs with the Acquire in `take`: it publishes this link and the cell's
            // value. Older links were published when they were added; this change continues their
            // release sequence.
            match self.first.compare_exchange_weak(first, cell.as_ptr(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }
}

// SAFETY: only the thread that has taken a cell uses its value.
unsafe impl<T: Send> Sync for CellList<T> {}
