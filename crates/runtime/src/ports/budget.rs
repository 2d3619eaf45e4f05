//! The engine's budget: the process's part of the tree's limit.
//!
//! Its state is in [`foliomem_session::budget`], whose crate does not know the engine. There is no
//! lock.

use foliomem_core::ports;
use foliomem_session::budget::Budget;

/// The budget of this process.
#[derive(Clone, Copy)]
pub struct TreeBudget(pub(super) &'static Budget);

impl ports::Budget for TreeBudget {
    fn try_charge(&self, pages: u32) -> bool {
        self.0.try_charge(pages)
    }

    fn charge(&self, pages: u32) {
        self.0.charge(pages);
    }

    fn uncharge(&self, pages: u32) {
        self.0.uncharge(pages);
    }

    fn limit_pages(&self) -> i64 {
        self.0.limit_pages()
    }

    fn room_pages(&self) -> i64 {
        self.0.room_pages()
    }

    fn is_shrinking(&self) -> bool {
        self.0.is_shrinking()
    }
}
