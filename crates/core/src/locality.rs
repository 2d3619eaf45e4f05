//! Locality: how much of a folio a fault maps in, and how much of it is compressed as one piece.
//!
//! Fetching a large folio whole pays where the program then touches the rest of the folio. Where
//! the program does not, the fetch costs many times as much as that of one page. The kernel does
//! not report touches of resident pages, so the module samples: now and then, all faults in one
//! *sampling window* of [`WINDOW_PAGES`] are served with single pages. These faults show which
//! pages of the window the program touches within a short time. From the touched pages the module
//! computes what fetching parts of each order would have cost, and what fetching each page with the
//! next one would have: many programs use objects of about a page, which lie across two. The
//! cheapest is used until the estimate changes.
//!
//! Estimates are kept by region, because a program uses its heap and its arrays differently; a
//! region without an estimate uses the estimate of the whole program. Sampling a fully used window
//! costs 16 faults instead of one, so the sampling rate backs off while windows agree: at one
//! window in 32, sampling took a seventh of a stream's time.
//!
//! A stream of faults may touch only one page of each folio. So the windows of streams are sampled,
//! too, and nothing is fetched ahead in a window that is being sampled. Where the estimate already
//! favours parts, faults count as a stream only if they continue from part to part: the program
//! then touches every part.
//!
//! Where parts pay, folios are also compressed part by part: a part of a larger piece costs the
//! decompression of everything before it, and keeps the memory of the whole piece in use. Pages
//! fetched by parts deserve their memory more than a swap-cache entry does ([`crate::swap_cache`]).
//!
//! Lock: one leaf lock, held while a few words are read.

use crate::readahead::Expected;
use crate::sync::Mutex;
use foliomem_types::units::{Order, PageNumber};
use std::cmp::Reverse;

/// Order of a sampling window, 64 KiB. Costs are estimated for parts up to this order; a part of
/// this order stands for the whole folio.
const WINDOW_ORDER: Order = Order::new(4).unwrap();
const WINDOW_PAGES: u64 = 16;
const PART_ORDERS: usize = WINDOW_ORDER.index() + 1;
/// Pages of [`Part::Pair`].
const PAIR_PAGES: u32 = 2;
/// Pages of a region with its own cost estimate: 16 MiB.
const REGION_PAGES: u64 = 4096;
/// Number of cost estimates; regions beyond that share one.
const REGIONS: usize = 1024;
/// Number of windows sampled at a time: few enough that random faults seldom hit one again by
/// chance.
const SAMPLED_WINDOWS: usize = 32;
/// Sampling rates: one fault in 8 starts a sampling window in a region without an estimate, one in
/// 32 elsewhere. The interval doubles with every second window in a row that confirmed the
/// estimate, up to [`SAMPLE_SURE_EVERY`]. (Each page touched in a sampling window costs a fault.)
const SAMPLE_FIRST_EVERY: u32 = 8;
const SAMPLE_EVERY: u32 = 32;
const SAMPLE_SURE_EVERY: u32 = 256;

const _: () = assert!(SAMPLE_FIRST_EVERY.is_power_of_two() && SAMPLE_EVERY.is_power_of_two());
const _: () = assert!(SAMPLE_SURE_EVERY.is_power_of_two());

/// Number of faults after which a sampling window ends.
const SAMPLE_FAULTS: u64 = 256;
/// Cost of a fault, and of each page that it fetches and that is swapped out again later; only the
/// ratio matters. (redis with random reads of 4 KiB that span two pages: a fault took 29 µs with
/// parts of one page, 30 with two pages and 32 with four while another CPU had time to compress.
/// When no CPU had time, each page added 8 µs. With a page cost of 2, twice as many pages were
/// fetched as were touched, both with uniformly random touches and with touches by Zipf's law.)
const FAULT_COST: u32 = 32;
const PAGE_COST: u32 = 4;
/// Weight of the moving average as a shift: each window replaces 1/2^3 of an estimate.
const FORGET_SHIFT: u32 = 3;

/// What a fault on a page of a swapped-out folio maps in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Part {
    /// The whole folio.
    #[default]
    Whole,
    /// The naturally aligned part of this order around the page.
    Aligned(Order),
    /// The page and the next one.
    Pair,
}

impl Part {
    /// The page alone.
    pub const PAGE: Part = Part::Aligned(Order::ZERO);

    /// Returns the order of the folio that is mapped in around the page; `None` for the whole
    /// folio.
    #[inline]
    pub fn order(self) -> Option<Order> {
        match self {
            Part::Whole => None,
            Part::Aligned(order) => Some(order),
            Part::Pair => Some(Order::ZERO),
        }
    }
}

/// The cost estimate of a region, learnt from its sampling windows.
#[derive(Clone, Copy, Debug, Default)]
struct CostEstimate {
    /// Moving average of the cost of a window by the order of the parts, in 2^[`FORGET_SHIFT`]ths.
    costs: [u32; PART_ORDERS],
    /// Moving average of the cost of a window if each fault fetches a pair.
    pair_cost: u32,
    /// The cheapest part; whole folios if there is no estimate. Every fault reads it and few change
    /// it.
    best: Part,
    /// Number of windows in a row that confirmed `best`.
    agreed: u8,
}

impl CostEstimate {
    /// Returns the cost of a window with these touched pages by the order of the parts.
    fn of(touched: u16) -> impl Iterator<Item = u32> {
        // One bit for each part with touched pages, at its first page.
        let mut parts = touched;
        (0..PART_ORDERS).map(move |order| {
            let part_pages = 1u32 << order;
            let first_pages = u32::from(u16::MAX) / ((1 << part_pages) - 1);
            parts = (parts | parts >> (part_pages / 2)) & first_pages as u16;
            parts.count_ones() * (FAULT_COST + PAGE_COST * part_pages)
        })
    }

    fn learn(&mut self, seen: Touched) {
        let (costs, pair_cost) = (Self::of(seen.pages), seen.pair_cost());
        let averages = self.costs.iter_mut().chain([&mut self.pair_cost]);
        for (average, cost) in averages.zip(costs.chain([pair_cost])) {
            *average = *average - (*average >> FORGET_SHIFT) + cost;
        }
        let best = Self::cheapest(self.costs, self.pair_cost);
        let confirms = Self::cheapest(Self::of(seen.pages), pair_cost) == best;
        self.agreed = if confirms { self.agreed.saturating_add(1) } else { 0 };
        self.best = best;
    }

    /// Returns the cheapest part, the largest aligned one if several are.
    fn cheapest(costs: impl IntoIterator<Item = u32>, pair_cost: u32) -> Part {
        let cheapest = Order::all().zip(costs).min_by_key(|&(order, cost)| (cost, Reverse(order)));
        match cheapest {
            Some((_, cost)) if pair_cost < cost => Part::Pair,
            Some((order, _)) if order < WINDOW_ORDER => Part::Aligned(order),
            _ => Part::Whole,
        }
    }

    fn is_known(&self) -> bool {
        self.costs[0] != 0
    }
}

/// The touched pages of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Touched {
    /// One bit for each touched page.
    pages: u16,
    /// One bit for each touched page that would have been a fault if pairs had been fetched. It
    /// depends on the order of the touches, not only on the pages.
    pair_faults: u16,
}

impl Touched {
    const NONE: Touched = Touched { pages: 0, pair_faults: 0 };
    /// All pages, from the first to the last.
    const ALL: Touched = Touched { pages: u16::MAX, pair_faults: 0x5555 };

    fn add(&mut self, page: PageNumber) {
        let touched = 1 << (page.0 % WINDOW_PAGES);
        let fetched = self.pair_faults | self.pair_faults << 1;
        self.pages |= touched;
        self.pair_faults |= touched & !fetched;
    }

    fn pair_cost(self) -> u32 {
        self.pair_faults.count_ones() * (FAULT_COST + PAGE_COST * PAIR_PAGES)
    }
}

/// A sampling window: its faults are served with single pages, to see which pages are touched.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// No page in an unused entry.
    touched: Touched,
    /// The number of the fault that started the window.
    since: u64,
}

const NOT_SAMPLED: Sample = Sample { touched: Touched::NONE, since: 0 };

/// A window number: 31 bits in a 47-bit address space.
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
struct Estimates {
    regions: [CostEstimate; REGIONS],
    all: CostEstimate,
    /// The windows being sampled, adjacent in memory: every fault searches them for the window of
    /// its page.
    windows: [Window; SAMPLED_WINDOWS],
    sampled: [Sample; SAMPLED_WINDOWS],
    oldest: usize,
    /// The index of the entry that was last checked for the end of its sampling.
    looked_at: usize,
    random: u32,
    /// Number of faults, plus folios fetched without one.
    faults: u64,
}

/// How much of a folio a fault maps in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SwapIn {
    /// The part that would have cost least recently.
    #[default]
    Adaptive,
    /// The whole folio if its size is enabled, else the page: Linux since 6.12.
    Whole,
    /// The page only: Linux before 6.12.
    Page,
}

/// The cost estimates and sampling windows of one program.
#[derive(Debug)]
pub struct Locality {
    swap_in: SwapIn,
    estimates: Mutex<Box<Estimates>>,
}

impl Default for Estimates {
    fn default() -> Estimates {
        let sampled = [NOT_SAMPLED; SAMPLED_WINDOWS];
        let regions = [CostEstimate::default(); REGIONS];
        let windows = [Window::NONE; SAMPLED_WINDOWS];
        let all = CostEstimate::default();
        Estimates { regions, all, windows, sampled, oldest: 0, looked_at: 0, random: 1, faults: 0 }
    }
}

impl Locality {
    /// Makes an instance without estimates.
    pub fn new(swap_in: SwapIn) -> Locality {
        Locality { swap_in, estimates: Mutex::default() }
    }

    /// Returns the part with which to serve a fault on `page`.
    #[inline]
    pub fn part_for_fault(&self, page: PageNumber, expected: Expected) -> Part {
        match self.swap_in {
            SwapIn::Adaptive => self.estimates.lock().part_for_fault(page, expected),
            SwapIn::Whole => Part::Whole,
            SwapIn::Page => Part::PAGE,
        }
    }

    /// Returns the end of the window of `page` if it is sampled: pages fetched there before they
    /// are touched would hide touches.
    pub fn sampled_until(&self, page: PageNumber) -> Option<PageNumber> {
        let is_sampled = self.estimates.lock().is_sampled(Window::of(page));
        is_sampled.then_some(PageNumber((page.0 / WINDOW_PAGES + 1) * WINDOW_PAGES))
    }

    /// Counts folios fetched ahead of faults: each would have been a fault, so sampling windows age
    /// by them.
    pub fn fetched_ahead(&self, folios: usize) {
        if self.swap_in == SwapIn::Adaptive {
            self.estimates.lock().faults += folios as u64;
        }
    }

    /// Returns the order of the parts that pay around `page`; `None` where whole folios pay.
    pub fn part_order(&self, page: PageNumber) -> Option<Order> {
        match self.swap_in {
            SwapIn::Adaptive => self.estimates.lock().estimate(page).best.order(),
            SwapIn::Whole => None,
            SwapIn::Page => Some(Order::ZERO),
        }
    }
}

impl Estimates {
    /// Returns the estimate for `page`: that of its region, or else that of the whole program.
    fn estimate(&mut self, page: PageNumber) -> &mut CostEstimate {
        let estimate = &mut self.regions[region(page)];
        if estimate.is_known() { estimate } else { &mut self.all }
    }

    fn is_sampled(&self, window: Window) -> bool {
        // Compares all windows without an early exit, so that one instruction can compare several.
        self.windows.iter().fold(false, |found, &sampled| found | (sampled == window))
    }

    fn part_for_fault(&mut self, page: PageNumber, expected: Expected) -> Part {
        let window = Window::of(page);
        self.faults += 1;
        // In turn, not by the fault number: that number jumps, and would skip some entries forever.
        self.looked_at = (self.looked_at + 1) % SAMPLED_WINDOWS;
        let looked_at = self.looked_at;
        if self.faults - self.sampled[looked_at].since >= SAMPLE_FAULTS {
            self.end_sampling(looked_at);
        }
        if self.is_sampled(window)
            && let Some(index) = self.windows.iter().position(|&sampled| sampled == window)
        {
            self.sampled[index].touched.add(page);
            if self.sampled[index].touched.pages == u16::MAX {
                self.end_sampling(index);
            }
            return Part::PAGE;
        }
        // A random choice (xorshift): at regular intervals, sampling might always start at the
        // second of two pages.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        // The interval is a power of two: a mask suffices, and a division would take as long as the
        // rest.
        if self.random & (self.sample_every(page) - 1) != 0 {
            let estimate = self.estimate(page);
            return match (expected, estimate.best) {
                (Expected::Stream, Part::Aligned(_) | Part::Pair) => {
                    estimate.learn(Touched::ALL);
                    Part::Whole
                }
                (Expected::Step, _) => Part::PAGE,
                (_, best) => best,
            };
        }
        self.end_sampling(self.oldest);
        self.windows[self.oldest] = window;
        let sample = &mut self.sampled[self.oldest];
        *sample = Sample { since: self.faults, ..NOT_SAMPLED };
        sample.touched.add(page);
        self.oldest = (self.oldest + 1) % SAMPLED_WINDOWS;
        Part::PAGE
    }

    /// Returns the sampling interval in faults. A disagreement anywhere shortens it everywhere.
    fn sample_every(&self, page: PageNumber) -> u32 {
        let region = &self.regions[region(page)];
        let (every, agreed) = if region.is_known() {
            (SAMPLE_EVERY, region.agreed.min(self.all.agreed))
        } else {
            (SAMPLE_FIRST_EVERY, self.all.agreed)
        };
        (every << (agreed / 2).min(8)).min(SAMPLE_SURE_EVERY)
    }

    /// Ends a sampling window, if there is one, and updates the estimates with it.
    fn end_sampling(&mut self, index: usize) {
        let seen = std::mem::replace(&mut self.sampled[index], NOT_SAMPLED);
        let window = std::mem::replace(&mut self.windows[index], Window::NONE);
        if seen.touched != Touched::NONE {
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

    /// The size of 32 regions: enough that random faults do not hit one window by chance.
    const PAGES: u64 = REGION_PAGES * 32;

    /// Serves accesses to objects of `pages` pages at random places, with the faults that a program
    /// would cause. Returns by what order the last 1000 faults were served (whole folios last), and
    /// after these how many by pairs.
    fn served(locality: &Locality, pages: u64, objects: usize) -> [usize; PART_ORDERS + 1] {
        let mut parts = Vec::new();
        for object in random().take(objects) {
            let end = object + pages;
            let mut page = object;
            while page < end {
                let part = locality.part_for_fault(PageNumber(page), Expected::Nothing);
                let order = part.order().unwrap_or(WINDOW_ORDER);
                parts.push(if part == Part::Pair { PART_ORDERS } else { order.index() });
                page = match part {
                    Part::Pair => page + u64::from(PAIR_PAGES),
                    _ => PageNumber(page).head(order).offset(order.pages()).0,
                };
            }
        }
        let mut counts = [0; PART_ORDERS + 1];
        parts[parts.len() - 1000..].iter().for_each(|&part| counts[part] += 1);
        counts
    }

    fn random() -> impl Iterator<Item = u64> {
        (1u64..).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % PAGES)
    }

    #[test]
    fn parts_are_as_large_as_the_objects_used() {
        let locality = Locality::new(SwapIn::Adaptive);
        assert_eq!(
            locality.part_for_fault(PageNumber(0), Expected::Nothing),
            Part::Whole,
            "folios are fetched whole until there is an estimate"
        );
        assert!(served(&locality, 1, 60_000)[0] > 950, "single pages");
        let counts = served(&locality, 2, 60_000);
        assert!(counts[PART_ORDERS] > 900, "two pages, wherever they lie: {counts:?}");
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
        let whole = orders.skip(1000).filter(|&part| part == Part::Whole).count();
        // Faults taken for a stream of parts fetch whole folios again, but only until there is an
        // estimate.
        assert_eq!(locality.part_order(PageNumber(3)), Some(Order::ZERO));
        assert!(whole <= 1000);
    }

    #[test]
    fn sampling_backs_off_while_windows_agree() {
        let locality = Locality::new(SwapIn::Adaptive);
        // Reads these windows from start to end; returns how many were sampled.
        let sampled = |windows: std::ops::Range<u64>| {
            let is_sampled = |&window: &u64| {
                let page = PageNumber(window * WINDOW_PAGES);
                let is_sampled = locality.part_for_fault(page, Expected::Stream) != Part::Whole;
                if is_sampled {
                    let rest = 1..WINDOW_PAGES as u32;
                    assert!(
                        rest.map(|n| locality.part_for_fault(page.offset(n), Expected::Stream))
                            .all(|part| part != Part::Whole)
                    );
                }
                is_sampled
            };
            windows.filter(is_sampled).count()
        };
        let (first, later) = (sampled(0..500), sampled(10_000..20_000));
        assert!((8..100).contains(&first) && (20..100).contains(&later), "{first} and {later}");
        // A change is still noticed soon.
        let served = served(&locality, 1, 3_000);
        assert!(served[0] > 900, "{served:?}");
    }

    #[test]
    fn a_sampled_window_is_reported() {
        let locality = Locality::new(SwapIn::Adaptive);
        let sampled = |page: u64| locality.sampled_until(PageNumber(page));
        let begins = |&window: &u64| {
            assert_eq!(sampled(window * WINDOW_PAGES), None);
            locality.part_for_fault(PageNumber(window * WINDOW_PAGES + 3), Expected::Stream) != Part::Whole
        };
        let window = (0..1000).find(begins).expect("one fault in eight starts a sampling window");
        let end = (window + 1) * WINDOW_PAGES;
        assert_eq!(
            [end - WINDOW_PAGES, end - 1, end].map(sampled),
            [Some(PageNumber(end)), Some(PageNumber(end)), None]
        );
    }

    #[test]
    fn each_region_has_its_own_estimate() {
        let locality = Locality::new(SwapIn::Adaptive);
        served(&locality, 1, 60_000);
        let other = PageNumber(PAGES + REGION_PAGES * 5);
        assert_eq!(
            locality.part_order(other),
            Some(Order::ZERO),
            "the whole program's estimate, until the region has one"
        );
        for n in 0..64 {
            locality.part_for_fault(other.offset(n), Expected::Stream);
        }
        for n in 0..20_000 {
            locality.part_for_fault(other.offset(n % 4096), Expected::Nothing);
        }
        assert!(locality.part_order(other) != Some(Order::ZERO), "the whole region is touched");
        assert_eq!(locality.part_order(PageNumber(0)), Some(Order::ZERO));
    }

    #[test]
    fn costs_count_the_touched_parts() {
        let cost = |touched: u16| CostEstimate::of(touched).collect::<Vec<_>>();
        let fault = |parts: u32, pages: u32| parts * (FAULT_COST + PAGE_COST * pages);
        assert_eq!(cost(0b1), [fault(1, 1), fault(1, 2), fault(1, 4), fault(1, 8), fault(1, 16)]);
        assert_eq!(cost(0b110), [fault(2, 1), fault(2, 2), fault(1, 4), fault(1, 8), fault(1, 16)]);
        assert_eq!(cost(u16::MAX), [fault(16, 1), fault(8, 2), fault(4, 4), fault(2, 8), fault(1, 16)]);
    }

    #[test]
    fn a_pair_needs_its_first_page_first() {
        let faults = |pages: &[u64]| {
            let mut touched = Touched::NONE;
            pages.iter().for_each(|&page| touched.add(PageNumber(32 + page)));
            assert_eq!(touched.pages.count_ones() as usize, pages.len());
            touched.pair_cost() / (FAULT_COST + PAGE_COST * PAIR_PAGES)
        };
        assert_eq!([faults(&[3, 4]), faults(&[4, 3]), faults(&[15])], [1, 2, 1]);
        assert_eq!([faults(&[0, 1, 2]), faults(&[5, 9, 6]), faults(&[7, 9, 8])], [2, 2, 2]);
        let mut all = Touched::NONE;
        (0..WINDOW_PAGES).for_each(|page| all.add(PageNumber(page)));
        assert_eq!(all, Touched::ALL);
    }

    #[test]
    fn touched_parts_match_a_naive_count() {
        for touched in 0..=u16::MAX {
            let pages =
                |part: usize, order: usize| (part << order..(part + 1) << order).any(|page| touched >> page & 1 != 0);
            let parts = |order: usize| (0..16 >> order).filter(|&part| pages(part, order)).count() as u32;
            let expected = (0..PART_ORDERS).map(|order| parts(order) * (FAULT_COST + PAGE_COST * (1 << order)));
            assert!(CostEstimate::of(touched).eq(expected), "{touched:#b}");
        }
    }

    #[test]
    fn a_fixed_mode_needs_no_estimate() {
        for (swap_in, part) in [(SwapIn::Whole, Part::Whole), (SwapIn::Page, Part::PAGE)] {
            let locality = Locality::new(swap_in);
            for page in random().take(1000) {
                assert_eq!(
                    locality.part_for_fault(
                        PageNumber(page),
                        if page.is_multiple_of(2) { Expected::Stream } else { Expected::Nothing }
                    ),
                    part
                );
                assert_eq!(locality.part_order(PageNumber(page)), part.order());
            }
        }
    }
}
