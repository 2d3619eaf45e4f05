//! Schedule tests of the cell list: a spare cell belongs to one thread at a time, and none is lost.

#[path = "../../core/tests/schedules/mod.rs"]
mod explorer;

use crate::cell_list::{Cell, CellList};
use explorer::explore;
use foliomem_sync::atomic::{AtomicU32, Ordering::SeqCst};
use shuttle::sync::Arc;
use shuttle::thread;
use std::ptr::NonNull;

/// Waits until all threads have ended.
fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_spare_cell_belongs_to_one_thread_at_a_time() {
    explore(4000, || {
        let list = Arc::new(CellList::<AtomicU32>::new());
        let cells: Vec<_> = (0..3).map(|_| Box::into_raw(Box::new(Cell::new(AtomicU32::new(0))))).collect();
        for &cell in &cells {
            // SAFETY: the cell is new, and is freed when all threads have ended.
            unsafe { list.give_back(NonNull::new(cell).unwrap()) };
        }
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let list = Arc::clone(&list);
                thread::spawn(move || {
                    for _ in 0..2 {
                        let Some(cell) = list.take() else { continue };
                        // SAFETY: this thread took the cell, and uses it only until it gives it
                        // back.
                        unsafe {
                            assert_eq!(cell.as_ref().value.fetch_add(1, SeqCst), 0, "two threads have the cell");
                            cell.as_ref().value.fetch_sub(1, SeqCst);
                            list.give_back(cell);
                        }
                    }
                })
            })
            .collect();
        join(threads);
        assert_eq!(std::iter::from_fn(|| list.take()).count(), cells.len(), "a cell is lost");
        for cell in cells {
            // SAFETY: all threads have ended, so this is the only owner.
            drop(unsafe { Box::from_raw(cell) });
        }
    });
}
