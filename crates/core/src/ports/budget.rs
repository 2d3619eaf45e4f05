//! The port to the budget: charges of the program against its limit.

use crate::sync::Shared;

/// Charges against the limit, in pages.
pub trait Budget: Shared {
    /// Charges `pages` to the budget unless that exceeds the limit. Returns whether it did.
    fn try_charge(&self, pages: u32) -> bool;
    /// Charges `pages` to the budget even beyond the limit.
    fn charge(&self, pages: u32);
    /// Returns `pages` to the budget.
    fn uncharge(&self, pages: u32);
    /// Returns the limit in pages.
    fn limit_pages(&self) -> i64;
    /// Returns the pages left below the limit; negative above the limit.
    fn room_pages(&self) -> i64;
    /// Returns whether the limit is exceeded, and some process of the tree freed memory recently:
    /// others may free more.
    fn is_shrinking(&self) -> bool;
}
