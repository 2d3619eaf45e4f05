//! How much of a folio to bring back for a fault, and how much to compress as one.
//!
//! A large folio is worth fetching whole where the program goes on to touch the rest of it, and costs many times a
//! page where it does not. Nobody tells which pages are touched once they are in reach, so it is tried: now and then all
//! faults in one window of [`WINDOW_PAGES`] are served with single pages, and so show which of its pages are touched
//! within a short time. What serving them with parts of each order would have cost is known then; the cheapest order
//! is used until that changes. Counted by region, because a program's heap and its arrays are used differently; where
//! nothing is known of a region, what is known of all goes for it. To watch a window that is touched all over costs 16 faults
//! for one, so the longer windows have shown the same, the fewer are watched: all of a stream's faults, at one in 32, took a
//! seventh of its time.
//!
//! A stream of faults may touch one page of each folio only, so its windows are watched, too, and nothing is fetched
//! ahead there. Where parts pay already, it is a stream only if it goes on from part to part, and so touches everything.
//!
//! Where parts pay, folios are compressed part by part, too: a part of a larger piece costs the decompression of what is
//! before it, and leaves the memory of the whole piece in use. And what is fetched by parts is worth its place in
//! memory more than a compressed copy is ([`crate::swap_cache`]).
//!
//! Lock: one leaf lock, held for a look at a few words.

use crate::readahead::Expected;
use crate::sync::Mutex;
use crate::units::{Order, PageNumber};
use std::cmp::Reverse;

/// What is watched as one: 64 KiB. Also the largest part that is told from the whole.
const WINDOW_ORDER: Order = Order::new(4).unwrap();
const WINDOW_PAGES: u64 = 16;
const PART_ORDERS: usize = WINDOW_ORDER.index() + 1;
/// What is judged as one: 16 MiB.
const REGION_PAGES: u64 = 4096;
/// Regions that are told apart; beyond that, some share a judgement.
const REGIONS: usize = 1024;
/// Windows that are watched: few enough that random faults seldom meet one again by chance.
const WATCHED: usize = 32;
/// One fault in so many on average begins to watch its window: where nothing is known, and where something is; twice
/// as many with every second window in a row that has shown what was known, at most [`WATCH_SURE_EVERY`]. (Each page that is
/// touched in such a window is a fault.)
const WATCH_FIRST_EVERY: u32 = 8;
const WATCH_EVERY: u32 = 32;
const WATCH_SURE_EVERY: u32 = 256;

const _: () = assert!(WATCH_FIRST_EVERY.is_power_of_two() && WATCH_EVERY.is_power_of_two());
const _: () = assert!(WATCH_SURE_EVERY.is_power_of_two());

/// Faults after which a window has shown what it will.
const WATCH_FAULTS: u64 = 256;
/// What a fault costs, and each page of its folio, which is also to go out again: in µs, but only the ratio counts. (redis under
/// random reads of 4 KiB that lie across two pages, by the order of all parts: 29 µs a fault of one page, 30 of two, 32 of four,
/// while another CPU has time to compress; 8 more a page while it has not. With 2 a page, twice as many pages came in
/// under uniformly random touches as were touched, and under Zipf's law.)
const FAULT_COST: u32 = 32;
const PAGE_COST: u32 = 4;
/// A judgement forgets 1/2^3 with each window.
const FORGET_SHIFT: u32 = 3;

/// What a region's windows have shown.
#[derive(Clone, Copy, Debug, Default)]
struct Judgement {
    /// What a window's faults would have cost by the order of the parts, in 2^[`FORGET_SHIFT`]ths of their moving average.
    costs: [u32; PART_ORDERS],
    /// The cheapest order; `None` for the whole, also while nothing is known. Every fault asks, and few change it.
    best: Option<Order>,
    /// Windows in a row for which that was cheapest.
    agreed: u8,
}

impl Judgement {
    fn of(touched: u16) -> impl Iterator<Item = u32> {
        // A bit for each part that has touched pages, at its first page.
        let mut parts = touched;
        (0..PART_ORDERS).map(move |order| {
            let part_pages = 1u32 << order;
            let first_pages = u32::from(u16::MAX) / ((1 << part_pages) - 1);
            parts = (parts | parts >> (part_pages / 2)) & first_pages as u16;
            parts.count_ones() * (FAULT_COST + PAGE_COST * part_pages)
        })
    }

    fn learn(&mut self, touched: u16) {
        for (average, cost) in self.costs.iter_mut().zip(Self::of(touched)) {
            *average = *average - (*average >> FORGET_SHIFT) + cost;
        }
        let best = Self::cheapest(self.costs);
        self.agreed = if Self::cheapest(Self::of(touched)) == best { self.agreed.saturating_add(1) } else { 0 };
        self.best = best;
    }

    /// The order of the least of `costs`, the largest where it is several; `None` for the whole.
    fn cheapest(costs: impl IntoIterator<Item = u32>) -> Option<Order> {
        let cheapest = Order::all().zip(costs).min_by_key(|&(order, cost)| (cost, Reverse(order)));
        cheapest.map(|(order, _)| order).filter(|&order| order < WINDOW_ORDER)
    }

    fn is_known(&self) -> bool {
        self.costs[0] != 0
    }
}

/// A window whose faults are served with single pages, to see which are touched.
#[derive(Clone, Copy, Debug)]
struct Watched {
    /// Bit for page; none of a window that has been learnt from, or never was one.
    touched: u16,
    /// The number of the fault that it began with.
    since: u64,
}

const NOT_WATCHED: Watched = Watched { touched: 0, since: 0 };

/// The number of a window: 31 bits in a 47-bit address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Window(u32);

impl Window {
    const NONE: Window = Window(u32::MAX);

    fn of(page: PageNumber) -> Window {
        Window((page.0 / WINDOW_PAGES) as u32)
    }

    fn first_page(self) -> PageNumber {
        PageNumber(u64::from(self.0) * WINDOW_PAGES)
    }
}

#[derive(Debug)]
struct Judgements {
    regions: [Judgement; REGIONS],
    all: Judgement,
    /// Which windows are watched, side by side: every fault looks for its own.
    windows: [Window; WATCHED],
    watched: [Watched; WATCHED],
    oldest: usize,
    /// Which of them was looked at last, whether it has shown what it will.
    looked_at: usize,
    random: u32,
    /// Faults so far, and folios that came without one.
    faults: u64,
}

/// How much of a folio a fault brings back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SwapIn {
    /// What would have cost least lately.
    #[default]
    Adaptive,
    /// All of it, if its size is enabled, or else the page: Linux since 6.12.
    Whole,
    /// The page: Linux before.
    Page,
}

/// See the module.
#[derive(Debug)]
pub struct Locality {
    swap_in: SwapIn,
    judgements: Mutex<Box<Judgements>>,
}

impl Default for Judgements {
    fn default() -> Judgements {
        let watched = [NOT_WATCHED; WATCHED];
        let regions = [Judgement::default(); REGIONS];
        let windows = [Window::NONE; WATCHED];
        let all = Judgement::default();
        Judgements { regions, all, windows, watched, oldest: 0, looked_at: 0, random: 1, faults: 0 }
    }
}

impl Locality {
    /// Knows nothing yet.
    pub fn new(swap_in: SwapIn) -> Locality {
        Locality { swap_in, judgements: Mutex::default() }
    }

    /// The order of the part that a fault on `page` is to be served with; `None` for the whole folio.
    #[inline]
    pub fn part_for_fault(&self, page: PageNumber, expected: Expected) -> Option<Order> {
        match self.swap_in {
            SwapIn::Adaptive => self.judgements.lock().part_for_fault(page, expected),
            SwapIn::Whole => None,
            SwapIn::Page => Some(Order::ZERO),
        }
    }

    /// Where the window of `page` ends if it is watched: what is fetched there before it is touched shows nothing.
    pub fn watched_until(&self, page: PageNumber) -> Option<PageNumber> {
        let is_watched = self.judgements.lock().is_watched(Window::of(page));
        is_watched.then_some(PageNumber((page.0 / WINDOW_PAGES + 1) * WINDOW_PAGES))
    }

    /// So many folios were fetched ahead of faults, each of which would have been one: windows that are watched grow old by them, too.
    pub fn fetched_ahead(&self, folios: usize) {
        if self.swap_in == SwapIn::Adaptive {
            self.judgements.lock().faults += folios as u64;
        }
    }

    /// The order of the parts that pay around `page`; `None` where whole folios do.
    pub fn part_order(&self, page: PageNumber) -> Option<Order> {
        match self.swap_in {
            SwapIn::Adaptive => self.judgements.lock().judgement(page).best,
            SwapIn::Whole => None,
            SwapIn::Page => Some(Order::ZERO),
        }
    }
}

impl Judgements {
    /// What is known of the surroundings of `page`.
    fn judgement(&mut self, page: PageNumber) -> &mut Judgement {
        let judgement = &mut self.regions[region(page)];
        if judgement.is_known() { judgement } else { &mut self.all }
    }

    fn is_watched(&self, window: Window) -> bool {
        // All of them, as several are compared at a time then.
        self.windows.iter().fold(false, |found, &watched| found | (watched == window))
    }

    fn part_for_fault(&mut self, page: PageNumber, expected: Expected) -> Option<Order> {
        let window = Window::of(page);
        let touched = 1 << (page.0 % WINDOW_PAGES);
        self.faults += 1;
        // Not by the number of faults: that jumps, and would pass some by for ever.
        self.looked_at = (self.looked_at + 1) % WATCHED;
        let looked_at = self.looked_at;
        if self.faults - self.watched[looked_at].since >= WATCH_FAULTS {
            self.end_watch(looked_at);
        }
        if self.is_watched(window)
            && let Some(index) = self.windows.iter().position(|&watched| watched == window)
        {
            self.watched[index].touched |= touched;
            if self.watched[index].touched == u16::MAX {
                self.end_watch(index);
            }
            return Some(Order::ZERO);
        }
        // xorshift: at regular intervals it might always be the second page of two that begins.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        // A power of two: a mask is enough, where a division takes as long as all else here.
        if self.random & (self.watch_every(page) - 1) != 0 {
            let judgement = self.judgement(page);
            return match (expected, judgement.best) {
                (Expected::Stream, Some(_)) => {
                    judgement.learn(u16::MAX);
                    None
                }
                (Expected::Step, _) => Some(Order::ZERO),
                (_, best) => best,
            };
        }
        self.end_watch(self.oldest);
        self.windows[self.oldest] = window;
        self.watched[self.oldest] = Watched { touched, since: self.faults };
        self.oldest = (self.oldest + 1) % WATCHED;
        Some(Order::ZERO)
    }

    /// One fault in so many begins to watch. What surprises anywhere may be news everywhere.
    fn watch_every(&self, page: PageNumber) -> u32 {
        let region = &self.regions[region(page)];
        let (every, agreed) = if region.is_known() {
            (WATCH_EVERY, region.agreed.min(self.all.agreed))
        } else {
            (WATCH_FIRST_EVERY, self.all.agreed)
        };
        (every << (agreed / 2).min(8)).min(WATCH_SURE_EVERY)
    }

    /// Learns what a window has shown, if there is one.
    fn end_watch(&mut self, index: usize) {
        let seen = std::mem::replace(&mut self.watched[index], NOT_WATCHED);
        let window = std::mem::replace(&mut self.windows[index], Window::NONE);
        if seen.touched != 0 {
            self.regions[region(window.first_page())].learn(seen.touched);
            self.all.learn(seen.touched);
        }
    }
}

fn region(page: PageNumber) -> usize {
    (page.0 / REGION_PAGES) as usize % REGIONS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 32 regions: enough that random faults do not meet by chance.
    const PAGES: u64 = REGION_PAGES * 32;

    /// Serves accesses to objects of `pages` pages, each of which may be anywhere, as a program would cause the faults; what the
    /// last 1000 faults were served with, by order (whole folios last).
    fn served(locality: &Locality, pages: u64, objects: usize) -> [usize; PART_ORDERS] {
        let mut orders = Vec::new();
        for object in random().take(objects) {
            let end = object + pages;
            let mut page = object;
            while page < end {
                let order = locality.part_for_fault(PageNumber(page), Expected::Nothing).unwrap_or(WINDOW_ORDER);
                orders.push(order.index());
                page = PageNumber(page).head(order).offset(order.pages()).0;
            }
        }
        let mut counts = [0; PART_ORDERS];
        orders[orders.len() - 1000..].iter().for_each(|&order| counts[order] += 1);
        counts
    }

    fn random() -> impl Iterator<Item = u64> {
        (1u64..).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % PAGES)
    }

    #[test]
    fn parts_are_as_large_as_what_is_used() {
        let locality = Locality::new(SwapIn::Adaptive);
        assert_eq!(
            locality.part_for_fault(PageNumber(0), Expected::Nothing),
            None,
            "until something is known, folios come whole"
        );
        assert!(served(&locality, 1, 60_000)[0] > 950, "single pages");
        let counts = served(&locality, 2, 60_000);
        assert!(counts[1] + counts[2] > 700, "two pages, wherever they lie: {counts:?}");
        let counts = served(&locality, 32, 60_000);
        assert!(counts[3] + counts[4] > 600, "whole windows: {counts:?}");
        assert!(served(&locality, 1, 60_000)[0] > 950, "single pages again");
        assert_eq!(locality.part_order(PageNumber(0)), Some(Order::ZERO));
    }

    #[test]
    fn a_stream_ends_a_preference_for_parts() {
        let locality = Locality::new(SwapIn::Adaptive);
        served(&locality, 1, 60_000);
        assert_eq!(locality.part_order(PageNumber(0)), Some(Order::ZERO));
        for n in 0..64 {
            locality.part_for_fault(PageNumber(n * 16), Expected::Stream);
        }
        assert_eq!(locality.part_order(PageNumber(0)), None);
    }

    #[test]
    fn a_stream_that_touches_a_page_of_each_folio_gets_pages() {
        let locality = Locality::new(SwapIn::Adaptive);
        let orders = (0..2000u64).map(|step| locality.part_for_fault(PageNumber(step * 17), Expected::Stream));
        let whole = orders.skip(1000).filter(Option::is_none).count();
        // Where it takes that for a stream of parts, it asks for the whole again; so only until something is known.
        assert_eq!(locality.part_order(PageNumber(3)), Some(Order::ZERO));
        assert!(whole <= 1000);
    }

    #[test]
    fn the_longer_all_of_it_is_touched_the_less_is_watched() {
        let locality = Locality::new(SwapIn::Adaptive);
        // The windows that are watched, of so many that are read from one end to the other.
        let watched = |windows: std::ops::Range<u64>| {
            let is_watched = |&window: &u64| {
                let page = PageNumber(window * WINDOW_PAGES);
                let is_watched = locality.part_for_fault(page, Expected::Stream).is_some();
                if is_watched {
                    let rest = 1..WINDOW_PAGES as u32;
                    assert!(
                        rest.map(|n| locality.part_for_fault(page.offset(n), Expected::Stream))
                            .all(|part| part.is_some())
                    );
                }
                is_watched
            };
            windows.filter(is_watched).count()
        };
        let (first, later) = (watched(0..500), watched(10_000..20_000));
        assert!((8..100).contains(&first) && (20..100).contains(&later), "{first} and {later}");
        // What is touched otherwise is noticed soon all the same.
        let served = served(&locality, 1, 3_000);
        assert!(served[0] > 900, "{served:?}");
    }

    #[test]
    fn what_is_watched_is_known() {
        let locality = Locality::new(SwapIn::Adaptive);
        let watched = |page: u64| locality.watched_until(PageNumber(page));
        let begins = |&window: &u64| {
            assert_eq!(watched(window * WINDOW_PAGES), None);
            locality.part_for_fault(PageNumber(window * WINDOW_PAGES + 3), Expected::Stream).is_some()
        };
        let window = (0..1000).find(begins).expect("one in eight");
        let end = (window + 1) * WINDOW_PAGES;
        assert_eq!(
            [end - WINDOW_PAGES, end - 1, end].map(watched),
            [Some(PageNumber(end)), Some(PageNumber(end)), None]
        );
    }

    #[test]
    fn regions_are_judged_apart() {
        let locality = Locality::new(SwapIn::Adaptive);
        served(&locality, 1, 60_000);
        let other = PageNumber(PAGES + REGION_PAGES * 5);
        assert_eq!(locality.part_order(other), Some(Order::ZERO), "as everywhere, until something is known of it");
        for n in 0..64 {
            locality.part_for_fault(other.offset(n), Expected::Stream);
        }
        for n in 0..20_000 {
            locality.part_for_fault(other.offset(n % 4096), Expected::Nothing);
        }
        assert!(locality.part_order(other) != Some(Order::ZERO), "touched all over");
        assert_eq!(locality.part_order(PageNumber(0)), Some(Order::ZERO));
    }

    #[test]
    fn costs_are_those_of_the_parts_that_are_touched() {
        let cost = |touched: u16| Judgement::of(touched).collect::<Vec<_>>();
        let fault = |parts: u32, pages: u32| parts * (FAULT_COST + PAGE_COST * pages);
        assert_eq!(cost(0b1), [fault(1, 1), fault(1, 2), fault(1, 4), fault(1, 8), fault(1, 16)]);
        assert_eq!(cost(0b110), [fault(2, 1), fault(2, 2), fault(1, 4), fault(1, 8), fault(1, 16)]);
        assert_eq!(cost(u16::MAX), [fault(16, 1), fault(8, 2), fault(4, 4), fault(2, 8), fault(1, 16)]);
    }

    #[test]
    fn parts_are_counted_as_they_lie() {
        for touched in 0..=u16::MAX {
            let pages =
                |part: usize, order: usize| (part << order..(part + 1) << order).any(|page| touched >> page & 1 != 0);
            let parts = |order: usize| (0..16 >> order).filter(|&part| pages(part, order)).count() as u32;
            let expected = (0..PART_ORDERS).map(|order| parts(order) * (FAULT_COST + PAGE_COST * (1 << order)));
            assert!(Judgement::of(touched).eq(expected), "{touched:#b}");
        }
    }

    #[test]
    fn nothing_is_judged_where_it_is_said_what_to_bring() {
        for (swap_in, part) in [(SwapIn::Whole, None), (SwapIn::Page, Some(Order::ZERO))] {
            let locality = Locality::new(swap_in);
            for page in random().take(1000) {
                assert_eq!(
                    locality.part_for_fault(
                        PageNumber(page),
                        if page.is_multiple_of(2) { Expected::Stream } else { Expected::Nothing }
                    ),
                    part
                );
                assert_eq!(locality.part_order(PageNumber(page)), part);
            }
        }
    }
}
