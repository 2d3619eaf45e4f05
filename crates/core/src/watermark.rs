//! Watermarks: how much free room below the limit background reclaim keeps, so that faults rarely
//! reclaim.

use foliomem_types::units::PAGE_BYTES;

/// Low watermark as a shift of the limit: background reclaim keeps 1/2^7 of the limit free, clamped
/// to 1 MiB..64 MiB. It stops at twice that.
const LOW_SHIFT: u32 = 7;
/// Lower bound of the low watermark, in pages: 1 MiB. `LOW_SHIFT` gives the share of the limit.
pub const LOW_MIN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;
const LOW_MAX_PAGES: i64 = (64 << 20) / PAGE_BYTES as i64;
/// Pages that reclaim frees before it checks the watermarks again.
pub const BATCH_PAGES: u64 = 256;

/// Returns the low watermark in pages: background reclaim starts below it and stops at twice it.
pub fn low_pages(limit_pages: i64) -> i64 {
    (limit_pages >> LOW_SHIFT).clamp(LOW_MIN_PAGES, LOW_MAX_PAGES)
}

/// Returns the protected minimum in pages: the pages that a program keeps resident even if its data
/// do not compress into the limit. It is 1/16 of the limit, at least 4 MiB.
pub fn floor_pages(limit_pages: i64) -> u64 {
    (limit_pages / 16).max(1024) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_low_watermark_is_a_small_part_of_the_limit_and_covers_a_batch() {
        for limit_mib in [16, 60, 192, 4096, 1 << 20] {
            let limit_pages = limit_mib << 8;
            let low = low_pages(limit_pages);
            assert!(low >= BATCH_PAGES as i64 && 2 * low <= limit_pages / 8, "{limit_mib} MiB: {low}");
            assert!(floor_pages(limit_pages) as i64 <= limit_pages / 4, "{limit_mib} MiB");
        }
    }
}
