//! What the supervisor has configured, as the agent uses it.

use crate::codec::Codec;
use crate::control::Header;
use foliomem_core::units::{Order, OrderSet, PAGE_BYTES};

/// The largest arena: what a 32-bit frame number reaches, less one block so that no run wraps.
const ARENA_MAX_BYTES: usize = (u32::MAX as usize - 512) * PAGE_BYTES;
/// The smallest: room for what a small budget moves about.
const ARENA_MIN_BYTES: usize = 1 << 30;
/// Slots for each page of the limit: content that compresses further than 1/16 hardly exists, but for
/// equal-filled memory.
const SLOTS_PER_PAGE: i64 = 16;

/// See the module.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Enabled folio sizes.
    pub sizes: OrderSet,
    /// The largest piece compressed as one.
    pub granule: Order,
    /// How it is compressed.
    pub codec: Codec,
    /// Evict as much as possible, all the time.
    pub torture: bool,
}

impl Settings {
    /// What the control segment says.
    pub fn from_header(header: &Header) -> Settings {
        Settings {
            sizes: OrderSet::from_bits(header.sizes),
            granule: Order::new(header.granule_order).unwrap_or(Order::ZERO),
            codec: header.codec(),
            torture: header.torture(),
        }
    }

    /// Address space for the arena: four times the limit, so that an empty run can always be found
    /// while every page of the budget has a home.
    pub fn arena_bytes(&self, limit_pages: i64) -> usize {
        (limit_pages as usize)
            .saturating_mul(4 * PAGE_BYTES)
            .clamp(ARENA_MIN_BYTES, ARENA_MAX_BYTES)
            .next_multiple_of(2 << 20)
    }

    /// Slots of the swap device. Slots that are not used cost nothing.
    pub fn swap_slots(&self, limit_pages: i64) -> u32 {
        let slots = limit_pages.saturating_mul(SLOTS_PER_PAGE).clamp(1 << 18, 1 << 30);
        (slots as u32).next_multiple_of(512)
    }
}
