//! The sizes of the engine's address spaces, computed from the limit. There is no lock.

use foliomem_types::settings::ARENA_MIN_BYTES;
use foliomem_types::units::PAGE_BYTES;

/// Maximum size of the arena, in bytes: the range of a 32-bit frame number, less one block, so that
/// no run wraps.
const ARENA_MAX_BYTES: usize = (u32::MAX as usize - 512) * PAGE_BYTES;
/// Swap slots for each page of the limit. Most pages of sparsely touched memory are zeros, and take
/// only their metadata; the metadata of this many pages fills the limit.
const SLOTS_PER_PAGE: i64 = 256;

/// Swap slots for each slot of the swap file, which packs compressed pieces.
const SLOTS_PER_FILE_SLOT: i64 = 4;

/// Returns the wanted and the needed size of the arena's address space, in bytes. Four times the
/// limit is needed: then an unpopulated run can always be found while every page of the budget has
/// a home frame. The machine's memory and swap are wanted: incompressible data exceed the limit,
/// and need home frames, too.
pub fn arena_bytes(limit_pages: i64) -> [usize; 2] {
    let needed = (limit_pages as usize).saturating_mul(4 * PAGE_BYTES).max(ARENA_MIN_BYTES);
    let info = rustix::system::sysinfo();
    let machine =
        (info.totalram as usize).saturating_add(info.totalswap as usize).saturating_mul(info.mem_unit as usize);
    [machine.max(needed), needed].map(|bytes| bytes.min(ARENA_MAX_BYTES).next_multiple_of(2 << 20))
}

/// Returns the number of slots of the swap device, with a swap file of `file_slots` slots behind
/// it. Unused slots cost nothing.
pub fn swap_slots(limit_pages: i64, file_slots: u32) -> u32 {
    let in_memory = limit_pages.saturating_mul(SLOTS_PER_PAGE);
    let slots = in_memory.saturating_add(i64::from(file_slots) * SLOTS_PER_FILE_SLOT).clamp(1 << 18, 1 << 30);
    (slots as u32).next_multiple_of(512)
}
