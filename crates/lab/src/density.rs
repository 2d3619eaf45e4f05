//! Density: how well each part of a recorded program's memory compresses, for each [`UNIT`] of the
//! address space. It is given in thousandths of the size that the cost table has for a piece of
//! that order.
//!
//! Parts hold different content, and content that is often swapped differs from content that stays
//! out, so one ratio for a whole program gives it too much or too little room. Until a part is
//! first compressed, the result of that first compression is assumed; for a part that is never
//! compressed, the average of the others.

use foliomem_types::units::{MAX_ORDER, ORDERS, Order, PageNumber};
use std::ops::Range;

/// The unit of density: 64 KiB.
pub const UNIT: Order = Order::new(4).unwrap();
/// Maximum density: no piece differs more from the table.
const MAX_PERMILLE: u64 = 50_000;

/// A unit with the first piece that was compressed of it.
#[derive(Clone, Debug)]
pub struct FirstPiece {
    /// The first page of the unit.
    pub unit: PageNumber,
    /// The order of the piece.
    pub order: Order,
    /// The compressed length of the piece.
    pub len_bytes: u32,
}

/// Returns the order of a piece of these pages. (A bad trace may contain any number of pages.)
pub fn order_of(pages: &Range<PageNumber>) -> Order {
    let order = (pages.end.0 - pages.start.0).max(1).ilog2() as u8;
    Order::new(order).unwrap_or(MAX_ORDER)
}

/// The densities of one program's memory.
#[derive(Clone, Debug)]
pub struct Density {
    ratio_percent: [u32; ORDERS],
    /// The average density, used for unknown units.
    mean_permille: u64,
    /// The density by unit; 0 if unknown.
    units: Box<[u16]>,
}

impl Density {
    /// Makes the densities of an address space of `pages` pages. `ratio_percent` comes from the
    /// cost table.
    pub fn new(pages: usize, first: &[FirstPiece], ratio_percent: [u32; ORDERS]) -> Density {
        let units = vec![0; pages.div_ceil(UNIT.pages() as usize)].into();
        let mut density = Density { ratio_percent, mean_permille: 1000, units };
        let mut sum = 0;
        for &FirstPiece { unit, order, len_bytes } in first {
            let permille = density.permille_of(order, len_bytes);
            density.units[(unit.0 >> UNIT.get()) as usize] = permille as u16;
            sum += permille;
        }
        density.mean_permille = if first.is_empty() { 1000 } else { sum / first.len() as u64 };
        density
    }

    /// Returns the compressed length of a piece, relative to the cost table.
    fn permille_of(&self, order: Order, len_bytes: u32) -> u64 {
        let by_table_bytes = order.bytes() as u64 * 100 / u64::from(self.ratio_percent[order.index()].max(1));
        (u64::from(len_bytes) * 1000 / by_table_bytes.max(1)).clamp(1, MAX_PERMILLE)
    }

    #[inline]
    fn known(&self, unit: u64) -> Option<u64> {
        let permille = self.units[unit as usize];
        (permille > 0).then_some(permille.into())
    }

    /// Returns the density of a page, and whether it is known for its unit.
    #[inline]
    pub fn permille(&self, page: PageNumber) -> (u64, bool) {
        let known = self.known(page.0 >> UNIT.get());
        (known.unwrap_or(self.mean_permille), known.is_some())
    }

    /// Records that `pages` were compressed as one piece of `len_bytes`.
    pub fn learn(&mut self, pages: &Range<PageNumber>, len_bytes: u32) {
        let permille = self.permille_of(order_of(pages), len_bytes);
        for unit in pages.start.0 >> UNIT.get()..pages.end.0.div_ceil(UNIT.pages().into()) {
            let whole = PageNumber(unit << UNIT.get()).folio(UNIT);
            let here = whole.end.min(pages.end).0 - whole.start.max(pages.start).0;
            // The rest of the unit keeps its density.
            let rest = u64::from(UNIT.pages()) - here;
            let mixed = (self.known(unit).unwrap_or(permille) * rest + permille * here) / u64::from(UNIT.pages());
            self.units[unit as usize] = mixed.max(1) as u16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(density: &Density, pages: [u64; 4]) -> [Option<u64>; 4] {
        pages.map(|page| {
            let (permille, is_known) = density.permille(PageNumber(page));
            is_known.then_some(permille)
        })
    }

    #[test]
    fn a_unit_has_the_density_of_its_pieces() {
        let ratio_percent = [200, 200, 200, 200, 400, 400, 400, 400, 400, 400];
        let mut density = Density::new(100, &[], ratio_percent);
        assert_eq!((known(&density, [0, 16, 32, 99]), density.permille(PageNumber(7))), ([None; 4], (1000, false)));
        let mut learn = |start, end, len_bytes| density.learn(&(PageNumber(start)..PageNumber(end)), len_bytes);
        // The table's length for 64 KiB; twice that length; four times, for a part of the unit.
        learn(16, 32, 16 << 10);
        learn(32, 48, 32 << 10);
        learn(36, 40, 8 << 10);
        // The first known part stands for the whole unit.
        learn(3, 4, 0);
        learn(64, 65, u32::MAX);
        assert_eq!(known(&density, [15, 16, 31, 63]), [Some(1), Some(1000), Some(1000), None]);
        assert_eq!(known(&density, [32, 47, 64, 79]), [1750, 1750, MAX_PERMILLE, MAX_PERMILLE].map(Some));
    }

    #[test]
    fn an_unknown_unit_has_the_mean_density() {
        let first = [(0, 4, 32 << 10), (32, 0, 1024), (48, 5, 0)].map(|(unit, order, len_bytes)| FirstPiece {
            unit: PageNumber(unit),
            order: Order::new(order).unwrap(),
            len_bytes,
        });
        let density = Density::new(100, &first, [200; ORDERS]);
        assert_eq!(known(&density, [15, 16, 32, 48]), [Some(1000), None, Some(500), Some(1)]);
        assert_eq!(density.permille(PageNumber(20)), (1501 / 3, false));
    }

    #[test]
    fn any_page_count_of_a_trace_has_an_order() {
        let order = |pages: u64| order_of(&(PageNumber(7)..PageNumber(7 + pages))).get();
        assert_eq!([1, 2, 3, 16, 31, 512, 5000].map(order), [0, 1, 1, 4, 4, 9, 9]);
    }
}
