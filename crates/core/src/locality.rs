//! How much of a folio to bring back for a fault, and how much to compress as one.
//!
//! A large folio is worth fetching whole where the program goes on to touch the rest of it, and costs many times a
//! page where it does not. Nobody tells which pages are touched once they are in reach, so it is tried: now and then a
//! fault is served with a part of [`PART_ORDER`] only. If most of the other parts of the same [`WINDOW_PAGES`] are
//! faulted on soon, whole folios would have paid; if not, parts do from then on, until faults lie together again. (One
//! neighbour says nothing: it is the rest of an object that lies across two parts.) Counted by region, because a
//! program's heap and its arrays are used differently.
//!
//! Where parts pay, folios are compressed part by part, too: a part of a larger piece costs the decompression of what is
//! before it, and leaves the memory of the whole piece in use. And what is fetched by parts is worth its place in
//! memory more than a compressed copy is ([`crate::swap_cache`]).
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
/// Windows that are watched: few enough that random faults seldom meet one again by chance.
const WATCHED: usize = 32;
/// One fault in so many is served with a part where whole folios pay.
const TRY_EVERY: u32 = 8;
/// A judgement never goes further from its turning point (0), so that it can turn soon.
const MOST: i8 = 16;
/// What a window that would have paid weighs, against one for each that would not.
const PAYS_WEIGHT: i8 = 2;

/// A window that a part was fetched of.
#[derive(Clone, Copy, Debug)]
struct Watched {
    window: u64,
    /// Which parts of it were faulted on.
    parts: u16,
}

#[derive(Debug)]
struct Judgements {
    regions: [i8; REGIONS],
    watched: [Watched; WATCHED],
    oldest: usize,
    faults: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Locality(Mutex<Box<Judgements>>);

impl Default for Locality {
    fn default() -> Locality {
        let watched = [Watched { window: u64::MAX, parts: 0 }; WATCHED];
        Locality(Mutex::new(Box::new(Judgements { regions: [0; REGIONS], watched, oldest: 0, faults: 0 })))
    }
}

impl Locality {
    /// Whether a fault on `page` is to be served with a part of its folio. `expected`: it continues a stream.
    pub fn wants_part(&self, page: PageNumber, expected: bool) -> bool {
        self.0.lock().wants_part(page, expected)
    }

    /// Whether parts pay around `page`.
    pub fn prefers_parts(&self, page: PageNumber) -> bool {
        self.0.lock().regions[region(page)] < 0
    }
}

impl Judgements {
    fn wants_part(&mut self, page: PageNumber, expected: bool) -> bool {
        let judgement = &mut self.regions[region(page)];
        if expected {
            *judgement = (*judgement + 1).min(MOST);
            return false;
        }
        let window = page.0 / WINDOW_PAGES;
        let part = 1 << (page.0 % WINDOW_PAGES / u64::from(PART_ORDER.pages()));
        if let Some(watched) = self.watched.iter_mut().find(|watched| watched.window == window) {
            watched.parts |= part;
            return *judgement < 0;
        }
        self.faults = self.faults.wrapping_add(1);
        let wants = *judgement < 0 || self.faults.is_multiple_of(TRY_EVERY);
        if wants {
            let judged = std::mem::replace(&mut self.watched[self.oldest], Watched { window, parts: part });
            self.oldest = (self.oldest + 1) % WATCHED;
            self.judge(judged);
        }
        wants
    }

    fn judge(&mut self, Watched { window, parts }: Watched) {
        if parts == 0 {
            return;
        }
        let judgement = &mut self.regions[region(PageNumber(window * WINDOW_PAGES))];
        let pays = u64::from(parts.count_ones() * PART_ORDER.pages()) * 2 > WINDOW_PAGES;
        let change = if pays { PAYS_WEIGHT } else { -1 };
        *judgement = (*judgement + change).clamp(-MOST, MOST);
    }
}

fn region(page: PageNumber) -> usize {
    (page.0 / REGION_PAGES) as usize % REGIONS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the last 1000 of `faults` are served with parts.
    fn parts(locality: &Locality, faults: impl Iterator<Item = u64>) -> usize {
        let served: Vec<bool> = faults.map(|page| locality.wants_part(PageNumber(page), false)).collect();
        served[served.len() - 1000..].iter().filter(|&&part| part).count()
    }

    fn random() -> impl Iterator<Item = u64> {
        (1u64..).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % REGION_PAGES)
    }

    #[test]
    fn random_faults_get_parts_and_neighbouring_ones_whole_folios_again() {
        let locality = Locality::default();
        assert!(!locality.wants_part(PageNumber(0), false), "until something is known, folios come whole");
        assert!(parts(&locality, random().take(4000)) > 900);
        // Two parts of each window, as of an object that lies across both.
        let pages_of =
            |page: u64, count: u64| (0..count).map(move |step| page / WINDOW_PAGES * WINDOW_PAGES + step * 5);
        assert!(parts(&locality, random().flat_map(|page| pages_of(page, 2)).take(4000)) > 900);
        // Three, until a fault brings all of it.
        let served_whole = random()
            .take(4000)
            .filter(|&page| pages_of(page, 3).any(|page| !locality.wants_part(PageNumber(page), false)));
        assert!(served_whole.count() > 3000);
    }

    #[test]
    fn a_stream_ends_a_preference_for_parts() {
        let locality = Locality::default();
        parts(&locality, random().take(2000));
        assert!(locality.prefers_parts(PageNumber(0)));
        assert!((0..64).all(|n| !locality.wants_part(PageNumber(n * 4), true)));
        assert!(!locality.prefers_parts(PageNumber(0)));
    }

    #[test]
    fn regions_are_judged_apart() {
        let locality = Locality::default();
        parts(&locality, random().take(2000));
        let other = PageNumber(REGION_PAGES * 5);
        assert!((0..8u64).filter(|&n| locality.wants_part(other.offset(n as u32 * 64), false)).count() <= 2);
    }
}
