//! Chance: when to touch a page that was resident in the run and that the replay has staged. The
//! run did not see such touches.
//!
//! A page in use until its eviction is touched soon ([`super::residency`]). A page that the run
//! fetched by itself several times, and not in a stream since, is touched by chance: as often as
//! when it was not resident and its touches were seen. Otherwise a replay that keeps other pages
//! resident than the run did would miss all touches of the pages that it does not keep.

use super::places::Place;
use super::residency::Origin;
use crate::random::Random;
use foliomem_types::units::{BLOCK_PAGES, PageNumber};
use std::collections::BTreeSet;
use std::ops::Range;

/// Weight of the moving average of waits as a shift: a new wait counts 1/2^2.
const WAIT_SHIFT: u32 = 2;
/// Unit of times of pages as a shift, 2^4 µs from the first one on: 32 bits cover 19 hours; later
/// times saturate.
const TICK_SHIFT: u32 = 4;
/// Number of single returns after which a page is touched by chance: a program that picks some of
/// its memory once mostly writes there next.
const ENOUGH: u8 = 3;
/// Maximum age of an estimate, as a multiple of the page's wait: a page unseen for longer may no
/// longer be in use.
const MAX_WAITS: u64 = 16;

/// The estimate for a page; 0 where unknown.
#[derive(Clone, Copy, Default)]
struct Page {
    /// When the page was evicted in the run, or was touched since.
    left: u32,
    /// The average wait for a touch, and the number of waits averaged, up to [`ENOUGH`].
    wait: u32,
    touches: u8,
    /// When the page is due to be touched.
    due: u32,
}

/// The scheduler of unseen touches.
pub struct Chance {
    pages: Box<[Option<Box<[Page; BLOCK_PAGES]>>]>,
    due: BTreeSet<(u32, PageNumber)>,
    start_us: Option<u64>,
}

impl Chance {
    /// Makes a scheduler for `places` places.
    pub fn new(places: usize) -> Chance {
        Chance { pages: vec![None; places].into(), due: BTreeSet::new(), start_us: None }
    }

    fn tick(&mut self, time_us: u64) -> u32 {
        let start_us = *self.start_us.get_or_insert(time_us);
        u32::try_from((time_us.saturating_sub(start_us) >> TICK_SHIFT) + 1).unwrap_or(u32::MAX)
    }

    fn part(&mut self, place: Place, part: Range<usize>) -> &mut [Page] {
        let pages = self.pages[place.index()].get_or_insert_with(|| Box::new([Page::default(); BLOCK_PAGES]));
        &mut pages[part]
    }

    /// Iterates over the pages that may have an estimate.
    fn known(&mut self, place: Place, part: Range<usize>) -> impl Iterator<Item = &mut Page> {
        self.pages[place.index()].iter_mut().flat_map(move |pages| &mut pages[part.clone()])
    }

    fn page(&mut self, page: PageNumber) -> &mut Page {
        let at = page.index_in_block();
        &mut self.part(Place::of(page), at..at + 1)[0]
    }

    /// Records that the run evicts pages.
    pub fn leave(&mut self, place: Place, part: Range<usize>, now_us: u64) {
        let left = self.tick(now_us);
        self.part(place, part).iter_mut().for_each(|page| (page.left, page.due) = (left, 0));
    }

    /// Records that pages become resident in the run, which cancels their scheduled touches.
    pub fn come(&mut self, place: Place, part: Range<usize>) {
        self.known(place, part).for_each(|page| page.due = 0);
    }

    /// Drops the estimates for pages that are gone or were touched in a stream.
    pub fn forget(&mut self, place: Place, part: Range<usize>) {
        self.known(place, part).for_each(|page| *page = Page::default());
    }

    /// Records that a page was touched by itself while it was not resident in the run. A touch of a
    /// staged page does not start an estimate.
    pub fn touched(&mut self, page: PageNumber, now_us: u64, origin: Origin) {
        let now = self.tick(now_us);
        let page = self.page(page);
        let waited = now.saturating_sub(std::mem::replace(&mut page.left, now)).max(1);
        match page.touches {
            0 if origin == Origin::Staged => {}
            0 => (page.wait, page.touches) = (waited, 1),
            touches => {
                page.wait = (page.wait - (page.wait >> WAIT_SHIFT) + (waited >> WAIT_SHIFT)).max(1);
                page.touches = (touches + 1).min(ENOUGH);
            }
        }
    }

    /// Schedules a touch of a page that is resident in the run and was staged here: after
    /// `wait_us`, or else by chance if there is an estimate.
    pub fn expect(&mut self, page: PageNumber, wait_us: Option<u64>, now_us: u64, random: &mut Random) {
        let now = self.tick(now_us);
        let Page { left: seen, wait, touches, .. } = *self.page(page);
        let may_wait = u64::from(wait) * MAX_WAITS;
        let is_by_chance = touches == ENOUGH && u64::from(now) < u64::from(seen) + may_wait;
        let wait_us = match wait_us {
            Some(wait_us) => wait_us,
            None if is_by_chance => random.exponential(u64::from(wait) << TICK_SHIFT),
            None => return,
        };
        let due = u64::from(now) + (wait_us >> TICK_SHIFT);
        if let Ok(due) = u32::try_from(due) {
            self.page(page).due = due;
            self.due.insert((due, page));
        }
    }

    /// Returns the next page that is due until `until_us`.
    #[inline]
    pub fn next(&mut self, until_us: u64) -> Option<PageNumber> {
        let until = self.tick(until_us);
        if self.due.is_empty() {
            return None;
        }
        while let Some(&first @ (due, page)) = self.due.first().filter(|&&(due, _)| due <= until) {
            self.due.remove(&first);
            let known = self.page(page);
            // A touch that was rescheduled or cancelled does not count.
            if known.due == due {
                known.due = 0;
                return Some(page);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PageNumber = PageNumber(BLOCK_PAGES as u64 + 7);

    fn place() -> (Place, Range<usize>) {
        (Place::of(PAGE), 7..8)
    }

    /// Returns the average wait of the page when it is staged, if it is touched at all.
    fn wait_us(chance: &mut Chance, now_us: u64) -> Option<u64> {
        let mut random = Random::new(1);
        let mut sum_us = 0;
        for _ in 0..1000 {
            chance.expect(PAGE, None, now_us, &mut random);
            let due = chance.due.first()?.0;
            sum_us += ((u64::from(due) - 1) << TICK_SHIFT) - now_us;
            assert_eq!(chance.next(u64::MAX >> 1), Some(PAGE));
            assert_eq!(chance.next(u64::MAX >> 1), None);
        }
        Some(sum_us / 1000)
    }

    #[test]
    fn pages_that_returned_singly_are_touched_as_often_as_in_the_run() {
        let mut chance = Chance::new(3);
        let (place, part) = place();
        chance.leave(place, part.clone(), 0);
        chance.touched(PAGE, 500, Origin::Staged);
        assert_eq!(wait_us(&mut chance, 0), None, "a staged page starts no estimate");
        for at in 0..20 {
            assert_eq!(wait_us(&mut chance, at * 10_000).is_some(), at >= ENOUGH.into(), "{at} times");
            chance.leave(place, part.clone(), at * 10_000);
            chance.touched(PAGE, at * 10_000 + 3200, Origin::Elsewhere);
        }
        let mean_us = wait_us(&mut chance, 200_000).unwrap();
        assert!((2800..3600).contains(&mean_us), "{mean_us}");
        assert_eq!(wait_us(&mut chance, 193_200 + 3200 * (MAX_WAITS + 1)), None, "the estimate is too old");
        chance.forget(place, part);
        assert_eq!(wait_us(&mut chance, 200_000), None, "a stream drops the estimate");
    }

    #[test]
    fn scheduled_touches_are_cancelled_when_pages_come_or_go() {
        let (mut chance, mut random) = (Chance::new(3), Random::new(1));
        let (place, part) = place();
        let mut expected = |change: &dyn Fn(&mut Chance)| {
            chance.expect(PAGE, Some(100), 1000, &mut random);
            change(&mut chance);
            (chance.next(1050), chance.next(1200))
        };
        assert_eq!(expected(&|_| {}), (None, Some(PAGE)));
        assert_eq!(expected(&|chance| chance.come(place, part.clone())), (None, None));
        assert_eq!(expected(&|chance| chance.leave(place, part.clone(), 1010)), (None, None));
        let mut random = Random::new(1);
        chance.expect(PAGE, Some(100), 1000, &mut random);
        chance.expect(PAGE, Some(500), 1000, &mut random);
        assert_eq!((chance.next(1200), chance.next(1600)), (None, Some(PAGE)), "the last schedule counts");
    }
}
