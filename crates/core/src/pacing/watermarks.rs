//! Watermarks: how much room below the limit makes the engine do what.

use foliomem_types::units::PAGE_BYTES;

/// Activation mark as a shift of the limit (1/2^3), and its minimum, 24 MiB: a program touches that
/// much memory while the monitor sleeps.
const ACTIVATION_SHIFT: u32 = 3;
const ACTIVATION_MIN_PAGES: i64 = (24 << 20) / PAGE_BYTES as i64;
/// Low watermark as a shift of the limit: background reclaim keeps 1/2^7 of the limit free.
const LOW_SHIFT: u32 = 7;
/// Lower bound of the low watermark, in pages: 1 MiB, which covers a batch of reclaim.
const LOW_MIN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;
/// Upper bound of the low watermark, in pages: 64 MiB.
const LOW_MAX_PAGES: i64 = (64 << 20) / PAGE_BYTES as i64;
/// Protected minimum as a shift of the limit (1/2^4), and its lower bound, 4 MiB.
const PROTECTED_SHIFT: u32 = 4;
const PROTECTED_MIN_PAGES: i64 = (4 << 20) / PAGE_BYTES as i64;
/// Maximum of the store in front of a swap file as a shift of the limit: half of it. Pieces in the
/// store have been out of use for longer than resident pages.
const STORE_SHIFT: u32 = 1;

/// The watermarks of a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watermarks {
    limit_pages: i64,
}

impl Watermarks {
    /// Returns the watermarks of a limit of `limit_pages`.
    #[inline]
    pub fn of(limit_pages: i64) -> Watermarks {
        Watermarks { limit_pages }
    }

    /// Returns the activation mark: with less room, the agent begins to manage the program's
    /// memory. It is no more than half of the limit.
    pub fn activation_pages(self) -> i64 {
        (self.limit_pages >> ACTIVATION_SHIFT).max(ACTIVATION_MIN_PAGES).min(self.limit_pages / 2)
    }

    /// Returns the low watermark: with less room, background reclaim starts.
    #[inline]
    pub fn low_pages(self) -> i64 {
        (self.limit_pages >> LOW_SHIFT).clamp(LOW_MIN_PAGES, LOW_MAX_PAGES)
    }

    /// Returns the high watermark: with as much room, background reclaim stops.
    #[inline]
    pub fn high_pages(self) -> i64 {
        2 * self.low_pages()
    }

    /// Returns the protected minimum: the pages that a program keeps resident even if its data do
    /// not compress into the limit.
    pub fn protected_pages(self) -> u64 {
        (self.limit_pages >> PROTECTED_SHIFT).max(PROTECTED_MIN_PAGES) as u64
    }

    /// Returns the maximum of the store: if it takes more, its oldest pieces go to the swap file.
    pub fn store_pages(self) -> u32 {
        (self.limit_pages >> STORE_SHIFT).clamp(0, i64::from(u32::MAX)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pacing::BATCH_PAGES;

    #[test]
    fn watermarks_are_small_parts_of_the_limit_in_ascending_order() {
        for limit_mib in [16, 60, 192, 4096, 1 << 20] {
            let limit_pages = limit_mib << 8;
            let marks = Watermarks::of(limit_pages);
            assert!(marks.low_pages() >= BATCH_PAGES as i64 && marks.high_pages() > marks.low_pages(), "{marks:?}");
            assert!(marks.high_pages() <= limit_pages / 8, "{marks:?}");
            assert!(marks.high_pages() <= marks.activation_pages(), "{marks:?}");
            assert!(marks.activation_pages() <= limit_pages / 2, "{marks:?}");
            assert!(marks.protected_pages() as i64 <= limit_pages / 4, "{marks:?}");
            assert!(i64::from(marks.store_pages()) <= limit_pages / 2, "{marks:?}");
        }
    }
}
