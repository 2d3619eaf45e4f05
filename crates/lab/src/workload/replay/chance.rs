//! When a page is touched next that is in reach of the recorded run, and that the replay has moved home: nobody saw that.
//!
//! A page that was in use until it left that reach is touched soon ([`super::reach`]). One that the run has brought back on its own some times, and not in a
//! stream meanwhile, is touched by chance: as often as it was when it was out of reach, where its touches were seen. Without that a replay that keeps
//! other pages in reach than the run did would miss all touches of those that it does not keep.

use super::Place;
use crate::random::Random;
use foliomem_core::units::{BLOCK_PAGES, PageNumber};
use std::collections::BTreeSet;
use std::ops::Range;

/// A new wait counts 1/2^2 in their mean.
const WAIT_SHIFT: u32 = 2;
/// Times of pages are kept in 2^4 us, from the first one on: in 32 bits for 19 hours, behind which all times are the last one.
const TICK_SHIFT: u32 = 4;
/// What is touched by chance has come back so often on its own: where a program picks some of its memory once, it mostly writes there next.
const ENOUGH: u8 = 3;
/// Who has not seen a page for so many times as long as it waits does not know any more whether it is in use.
const MOST_WAITS: u64 = 16;

/// What is known of a page; 0 where it is not.
#[derive(Clone, Copy, Default)]
struct Page {
    /// When it left the recorded reach, or was touched since.
    left: u32,
    /// How long it waits for a touch on average, and of how many that is, up to [`ENOUGH`].
    wait: u32,
    touches: u8,
    /// When it is to be touched.
    due: u32,
}

/// See the module.
pub struct Chance {
    pages: Box<[Option<Box<[Page; BLOCK_PAGES]>>]>,
    due: BTreeSet<(u32, PageNumber)>,
    start_us: Option<u64>,
}

impl Chance {
    /// Of so many places.
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

    /// Those of which something may be known.
    fn known(&mut self, place: Place, part: Range<usize>) -> impl Iterator<Item = &mut Page> {
        self.pages[place.index()].iter_mut().flat_map(move |pages| &mut pages[part.clone()])
    }

    fn page(&mut self, page: PageNumber) -> &mut Page {
        let at = page.index_in_block();
        &mut self.part(Place::of(page), at..at + 1)[0]
    }

    /// Pages leave the recorded reach.
    pub fn leave(&mut self, place: Place, part: Range<usize>, now_us: u64) {
        let left = self.tick(now_us);
        self.part(place, part).iter_mut().for_each(|page| (page.left, page.due) = (left, 0));
    }

    /// Pages come into it: whatever was expected of them.
    pub fn come(&mut self, place: Place, part: Range<usize>) {
        self.known(place, part).for_each(|page| page.due = 0);
    }

    /// What is known of pages holds no more: they are gone, or were touched in a stream.
    pub fn forget(&mut self, place: Place, part: Range<usize>) {
        self.known(place, part).for_each(|page| *page = Page::default());
    }

    /// A page was touched on its own while it was out of the recorded reach; `from_home`, if it had gone no further. That alone does not say
    /// that it is touched by chance.
    pub fn touched(&mut self, page: PageNumber, now_us: u64, from_home: bool) {
        let now = self.tick(now_us);
        let page = self.page(page);
        let waited = now.saturating_sub(std::mem::replace(&mut page.left, now)).max(1);
        match page.touches {
            0 if from_home => {}
            0 => (page.wait, page.touches) = (waited, 1),
            touches => {
                page.wait = (page.wait - (page.wait >> WAIT_SHIFT) + (waited >> WAIT_SHIFT)).max(1);
                page.touches = (touches + 1).min(ENOUGH);
            }
        }
    }

    /// A page that is in the recorded reach was moved home: it is touched in `wait_us`, or else by chance, if that is known of it.
    pub fn expect(&mut self, page: PageNumber, wait_us: Option<u64>, now_us: u64, random: &mut Random) {
        let now = self.tick(now_us);
        let Page { left: seen, wait, touches, .. } = *self.page(page);
        let may_wait = u64::from(wait) * MOST_WAITS;
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

    /// The next page that is to be touched until then.
    #[inline]
    pub fn next(&mut self, until_us: u64) -> Option<PageNumber> {
        let until = self.tick(until_us);
        if self.due.is_empty() {
            return None;
        }
        while let Some(&first @ (due, page)) = self.due.first().filter(|&&(due, _)| due <= until) {
            self.due.remove(&first);
            let known = self.page(page);
            // What was expected later on, or of a page that has come or gone since, does not count.
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

    /// How long it waits on average when it is moved home, if it is touched at all.
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
    fn what_came_back_on_its_own_is_touched_as_often_as_it_was() {
        let mut chance = Chance::new(3);
        let (place, part) = place();
        chance.leave(place, part.clone(), 0);
        chance.touched(PAGE, 500, true);
        assert_eq!(wait_us(&mut chance, 0), None, "from home");
        for at in 0..20 {
            assert_eq!(wait_us(&mut chance, at * 10_000).is_some(), at >= ENOUGH.into(), "{at} times");
            chance.leave(place, part.clone(), at * 10_000);
            chance.touched(PAGE, at * 10_000 + 3200, false);
        }
        let mean_us = wait_us(&mut chance, 200_000).unwrap();
        assert!((2800..3600).contains(&mean_us), "{mean_us}");
        assert_eq!(wait_us(&mut chance, 193_200 + 3200 * (MOST_WAITS + 1)), None, "for too long not seen");
        chance.forget(place, part);
        assert_eq!(wait_us(&mut chance, 200_000), None, "in a stream");
    }

    #[test]
    fn what_comes_or_goes_is_not_touched_as_was_expected() {
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
        assert_eq!((chance.next(1200), chance.next(1600)), (None, Some(PAGE)), "what was expected last counts");
    }
}
