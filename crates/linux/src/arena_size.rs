//! How large the engine's address spaces are made for a limit.

use foliomem_core::units::PAGE_BYTES;

/// The largest arena: what a 32-bit frame number reaches, less one block so that no run wraps.
const ARENA_MAX_BYTES: usize = (u32::MAX as usize - 512) * PAGE_BYTES;
/// The smallest: room for what a small budget moves about.
pub const ARENA_MIN_BYTES: usize = 1 << 30;
/// Slots for each page of the limit: of what is touched here and there most is zeros, which take nothing but what is to be known of
/// them. For so many pages, that alone is the limit.
const SLOTS_PER_PAGE: i64 = 256;

/// Slots for each slot of the swap file, where what is compressed is packed.
const SLOTS_PER_FILE_SLOT: i64 = 4;

/// Address space for the arena: four times the limit, so that an empty run can always be found
/// while every page of the budget has a home; and, where there is so much, as much as the machine has memory and swap: data that
/// do not compress go over the limit, and need homes, too.
pub fn arena_bytes(limit_pages: i64) -> [usize; 2] {
    let needed = (limit_pages as usize).saturating_mul(4 * PAGE_BYTES).max(ARENA_MIN_BYTES);
    let info = rustix::system::sysinfo();
    let machine =
        (info.totalram as usize).saturating_add(info.totalswap as usize).saturating_mul(info.mem_unit as usize);
    [machine.max(needed), needed].map(|bytes| bytes.min(ARENA_MAX_BYTES).next_multiple_of(2 << 20))
}

/// Slots of the swap device, with a swap file of `file_slots` behind it. Slots that are not used cost nothing.
pub fn swap_slots(limit_pages: i64, file_slots: u32) -> u32 {
    let in_memory = limit_pages.saturating_mul(SLOTS_PER_PAGE);
    let slots = in_memory.saturating_add(i64::from(file_slots) * SLOTS_PER_FILE_SLOT).clamp(1 << 18, 1 << 30);
    (slots as u32).next_multiple_of(512)
}

/// What the store may take before it is written back to the swap file: half of the limit. What is in the store has been
/// out of use for longer than what is in the program.
pub fn store_pages(limit_pages: i64) -> u32 {
    (limit_pages / 2).clamp(0, i64::from(u32::MAX)) as u32
}
