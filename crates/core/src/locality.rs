//! How much of a folio to bring back for a fault that continues no stream.
//!
//! A large folio is worth fetching whole where the program goes on to touch the rest of it, and costs many times a
//! page where it does not. Nobody tells which pages are touched once they are in reach, so it is tried: now and then a
//! fault is served with a part of [`PART_ORDER`] only. If other parts of the same [`WINDOW_PAGES`] are faulted on soon,
//! whole folios would have paid; if not, parts do from then on, until faults lie together again. Counted by region,
//! because a program's heap and its arrays are used differently.
//!
//! Lock: one leaf lock, held for a look at a few words.

use crate::sync::Mutex;
use crate::units::{Order, PageNumber};

/// What a fault is served with where the rest of a folio is not used: 16 KiB. (redis under random reads took 19.0 s
/// with it, 28.3 s with 8 KiB, 49.0 s with 4 KiB, 19.8 s with 32 KiB, and 30.8 s before there were parts.)
pub const PART_ORDER: Order = Order::new(2).unwrap();

/// What counts as together: 64 KiB.
const WINDOW_PAGES: u64 = 16;
/// What is judged as one: 16 MiB.
const REGION_PAGES: u64 = 4096;
/// Regions that are told apart; beyond that, some share a judgement.
const REGIONS: usize = 1024;
/// Windows that count as touched soon before: few enough that random faults seldom meet one.
const RECENT: usize = 32;
/// One fault in so many is served with a part where whole folios pay.
const TRY_EVERY: u32 = 8;
/// A judgement never goes further from its turning point (0), so that it can turn soon.
const MOST: i8 = 16;
/// What a fault near a part weighs, against one for each part: whole folios pay if a quarter of the parts have a
/// neighbour touched.
const NEIGHBOUR_WEIGHT: i8 = 4;

#[derive(Debug)]
struct Judgements {
    regions: [i8; REGIONS],
    recent: [u64; RECENT],
    next_recent: usize,
    faults: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Locality(Mutex<Box<Judgements>>);

impl Default for Locality {
    fn default() -> Locality {
        let none = u64::MAX;
        let judgements = Judgements { regions: [0; REGIONS], recent: [none; RECENT], next_recent: 0, faults: 0 };
        Locality(Mutex::new(Box::new(judgements)))
    }
}

impl Locality {
    /// Whether a fault on `page`, which continues no stream, is to be served with a part of its folio.
    pub fn wants_part(&self, page: PageNumber) -> bool {
        let mut guard = self.0.lock();
        let Judgements { regions, recent, next_recent, faults } = &mut **guard;
        let region = &mut regions[(page.0 / REGION_PAGES) as usize % REGIONS];
        let window = page.0 / WINDOW_PAGES;
        if recent.contains(&window) {
            *region = (*region + NEIGHBOUR_WEIGHT).min(MOST);
            return *region < 0;
        }
        *faults = faults.wrapping_add(1);
        let part = *region < 0 || faults.is_multiple_of(TRY_EVERY);
        if part {
            *region = (*region - 1).max(-MOST);
            recent[*next_recent] = window;
            *next_recent = (*next_recent + 1) % RECENT;
        }
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the last 1000 of `faults` are served with parts.
    fn parts(locality: &Locality, faults: impl Iterator<Item = u64>) -> usize {
        let served: Vec<bool> = faults.map(|page| locality.wants_part(PageNumber(page))).collect();
        served[served.len() - 1000..].iter().filter(|&&part| part).count()
    }

    fn random() -> impl Iterator<Item = u64> {
        (1u64..).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % REGION_PAGES)
    }

    #[test]
    fn random_faults_get_parts_and_neighbouring_ones_whole_folios_again() {
        let locality = Locality::default();
        assert!(!locality.wants_part(PageNumber(0)), "until something is known, folios come whole");
        assert!(parts(&locality, random().take(4000)) > 900);
        // Three pages of each window, one after the other.
        let near = random().flat_map(|page| (0..3).map(move |step| page / WINDOW_PAGES * WINDOW_PAGES + step * 5));
        assert!(parts(&locality, near.take(6000)) < 300);
    }

    #[test]
    fn regions_are_judged_apart() {
        let locality = Locality::default();
        parts(&locality, random().take(2000));
        let other = PageNumber(REGION_PAGES * 5);
        assert!((0..8u64).filter(|&n| locality.wants_part(other.offset(n as u32 * 64))).count() <= 2);
    }
}
