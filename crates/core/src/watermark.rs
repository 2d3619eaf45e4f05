//! How much room foliomem keeps below the limit, so that faults rarely have to make it.

use crate::units::PAGE_BYTES;

/// Background reclaim keeps 1/2^7 of the limit free, 1 MiB at least and 64 MiB at most, and when it
/// works it makes twice that.
const LOW_SHIFT: u32 = 7;
/// See `LOW_SHIFT`.
pub const LOW_MIN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;
const LOW_MAX_PAGES: i64 = (64 << 20) / PAGE_BYTES as i64;
/// Pages reclaimed before one looks around again.
pub const BATCH_PAGES: u64 = 256;

/// Below so many free pages of room background reclaim begins; at twice as many it ends.
pub fn low_pages(limit_pages: i64) -> i64 {
    (limit_pages >> LOW_SHIFT).clamp(LOW_MIN_PAGES, LOW_MAX_PAGES)
}

/// What a program keeps in reach though its data do not compress into the limit: 1/16 of the limit, and
/// at least 4 MiB.
pub fn floor_pages(limit_pages: i64) -> u64 {
    (limit_pages / 16).max(1024) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_that_is_kept_is_a_small_part_of_the_limit_and_enough_for_a_batch() {
        for limit_mib in [16, 60, 192, 4096, 1 << 20] {
            let limit_pages = limit_mib << 8;
            let low = low_pages(limit_pages);
            assert!(low >= BATCH_PAGES as i64 && 2 * low <= limit_pages / 8, "{limit_mib} MiB: {low}");
            assert!(floor_pages(limit_pages) as i64 <= limit_pages / 4, "{limit_mib} MiB");
        }
    }
}
