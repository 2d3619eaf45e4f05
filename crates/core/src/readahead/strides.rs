//! Strided streams: faults at equal distances, such as columns of a matrix, one field of many
//! records, an array read backwards.
//!
//! A fault may be the next step of a known stream, or the second fault of a stream whose first
//! fault was near and recent. Two equal steps may be chance; three in a row hardly are. Pages
//! fetched ahead cause no fault, so the next fault of a stream may be several steps on.
//!
//! There is no lock: this is a part of [`Readahead`](super::Readahead).

use super::recency::Recency;
use super::{LARGE_FOLIO_PAGES, NOWHERE};
use foliomem_types::units::PageNumber;

/// Maximum number of strided streams followed at the same time.
const STRIDED_STREAMS: usize = 8;
/// Number of equal steps in a row that make a strided stream.
const STREAM_STEPS: u32 = 3;
/// Maximum length of a step: 4 MiB.
const MAX_STEP_PAGES: u64 = 1024;
/// Minimum step, in pages, from which the pages between two steps are not worth fetching.
const FAR_STEP_PAGES: u64 = 8;
/// Initial and maximum number of steps to fetch ahead. The program waits for far steps.
const FIRST_WINDOW: u32 = 4;
const MAX_WINDOW: u32 = 64;
const MAX_FAR_WINDOW: u32 = 16;

#[derive(Clone, Copy, Debug)]
struct StridedStream {
    /// The page of the last fault.
    last: PageNumber,
    /// Pages from one fault to the next; 0 after the first fault.
    step_pages: i64,
    /// Number of equal steps in a row.
    steps: u32,
    /// Number of steps to fetch ahead of the last fault, and how many of them are claimed.
    window: u32,
    claimed: u32,
}

impl StridedStream {
    /// A stream that may start at `page`.
    const fn from(page: PageNumber) -> StridedStream {
        StridedStream { last: page, step_pages: 0, steps: 0, window: 0, claimed: 0 }
    }

    /// Returns how many steps away `page` is, if it may be the next fault.
    fn steps_to(&self, page: PageNumber) -> Option<u32> {
        if self.step_pages == 0 {
            return None;
        }
        let distance = page.0.wrapping_sub(self.last.0) as i64;
        // The range check comes first, because a division takes longer than the rest of this
        // function.
        let farthest = self.step_pages * i64::from(self.claimed + 1);
        let (ahead, most) = if farthest < 0 { (-distance, -farthest) } else { (distance, farthest) };
        // The subtraction also excludes 0.
        let may_be_next = (ahead as u64).wrapping_sub(1) < most as u64;
        (may_be_next && distance % self.step_pages == 0).then(|| (distance / self.step_pages) as u32)
    }

    /// Returns whether the step to `page` may be the first one of this stream.
    fn may_begin_with(&self, page: PageNumber) -> bool {
        self.steps < STREAM_STEPS
            && self.last != page
            && page.0.wrapping_sub(self.last.0).wrapping_add(MAX_STEP_PAGES) <= 2 * MAX_STEP_PAGES
    }

    /// Returns whether only the pages at the steps are used.
    fn is_far(&self) -> bool {
        let step_pages = self.step_pages.unsigned_abs();
        // A program that reads all swapped-out pages also steps from folio to folio.
        self.steps >= STREAM_STEPS && step_pages >= FAR_STEP_PAGES && !step_pages.is_multiple_of(LARGE_FOLIO_PAGES)
    }

    fn at(&self, steps: u32) -> Option<PageNumber> {
        self.last.0.checked_add_signed(self.step_pages * i64::from(steps)).map(PageNumber)
    }
}

/// The strided streams of one program.
#[derive(Debug)]
pub(super) struct Strides {
    streams: [StridedStream; STRIDED_STREAMS],
    /// The low bits of each stream's last fault, and of the page one step after it.
    lasts: [u32; STRIDED_STREAMS],
    nexts: [u32; STRIDED_STREAMS],
    recency: Recency<STRIDED_STREAMS>,
    /// Number of streams with enough equal steps; nearly always 0 under random faults.
    followed: usize,
}

impl Default for Strides {
    fn default() -> Strides {
        Strides {
            streams: [StridedStream::from(NOWHERE); STRIDED_STREAMS],
            lasts: [NOWHERE.0 as u32; STRIDED_STREAMS],
            nexts: [NOWHERE.0 as u32; STRIDED_STREAMS],
            recency: Recency::NONE,
            followed: 0,
        }
    }
}

impl Strides {
    /// Records a fault on `page`, which was swapped out.
    #[inline]
    pub fn faulted(&mut self, page: PageNumber) {
        if !self.may_be_step(page) {
            return self.begin(page);
        }
        let streams = if self.may_continue(page) { &self.streams[..] } else { &[] };
        let mut streams = streams.iter().enumerate();
        let continued = streams.find_map(|(index, stream)| stream.steps_to(page).map(|steps| (index, steps)));
        if let Some((index, steps)) = continued {
            let mut stream = self.streams[index];
            stream.steps += 1;
            self.followed += usize::from(stream.steps == STREAM_STEPS);
            if stream.steps >= STREAM_STEPS {
                let max_window = if stream.is_far() { MAX_FAR_WINDOW } else { MAX_WINDOW };
                stream.window = (stream.window * 2).clamp(FIRST_WINDOW, max_window);
            }
            (stream.last, stream.claimed) = (page, stream.claimed.saturating_sub(steps));
            self.set(index, stream);
            self.recency.used(index);
            return;
        }
        // Chooses the most recently used one of several candidates.
        let near = self.recency.latest_first().find(|&index| self.streams[index].may_begin_with(page));
        if let Some(index) = near {
            let step_pages = page.0 as i64 - self.streams[index].last.0 as i64;
            self.set(index, StridedStream { step_pages, steps: 1, ..StridedStream::from(page) });
            self.recency.used(index);
        } else {
            self.begin(page);
        }
    }

    /// Returns whether one step of any length, or several claimed steps, may lead to `page`. Most
    /// faults are far from all others. One instruction can compare several of the small numbers.
    fn may_be_step(&self, page: PageNumber) -> bool {
        const MAX: u32 = MAX_STEP_PAGES as u32;
        let is_near = |last: u32| (page.0 as u32).wrapping_sub(last).wrapping_add(MAX) <= 2 * MAX;
        self.follows_any() || self.lasts.iter().fold(false, |found, &last| found | is_near(last))
    }

    /// Returns whether a stream may continue at `page`. While no stream is followed, no steps are
    /// claimed, so a stream can continue only at its next step.
    fn may_continue(&self, page: PageNumber) -> bool {
        self.follows_any() || self.nexts.iter().fold(false, |found, &next| found | (next == page.0 as u32))
    }

    fn set(&mut self, index: usize, stream: StridedStream) {
        self.streams[index] = stream;
        self.lasts[index] = stream.last.0 as u32;
        self.nexts[index] = stream.last.0.wrapping_add_signed(stream.step_pages) as u32;
    }

    /// Starts a possible stream at `page`.
    fn begin(&mut self, page: PageNumber) {
        let index = self.recency.use_oldest();
        self.followed -= usize::from(self.streams[index].steps >= STREAM_STEPS);
        self.set(index, StridedStream::from(page));
    }

    /// Returns whether there are streams to fetch ahead for.
    pub fn follows_any(&self) -> bool {
        self.followed > 0
    }

    /// Returns whether `page` is the next step of a stream that does not use the pages around it.
    pub fn is_far_step(&self, page: PageNumber) -> bool {
        self.follows_any() && self.streams.iter().any(|stream| stream.is_far() && stream.steps_to(page).is_some())
    }

    /// Returns whether the latest fault of a stream that does not use the pages around it was on
    /// `page`.
    pub fn has_stepped_far(&self, page: PageNumber) -> bool {
        self.follows_any() && self.streams.iter().any(|stream| stream.last == page && stream.is_far())
    }

    /// Claims the next page to fetch for the stream that faulted on `page`. Also returns whether to
    /// fetch that page alone.
    pub fn claim(&mut self, page: PageNumber) -> Option<(PageNumber, bool)> {
        if !self.follows_any() {
            return None;
        }
        let stream = self.streams.iter_mut().find(|stream| stream.last == page && stream.claimed < stream.window)?;
        stream.claimed += 1;
        stream.at(stream.claimed).map(|page| (page, stream.is_far()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claimed(strides: &mut Strides, page: u64) -> Vec<u64> {
        std::iter::from_fn(|| strides.claim(PageNumber(page))).map(|(page, _)| page.0).collect()
    }

    #[test]
    fn equal_steps_are_fetched_ahead_in_either_direction() {
        for step in [17, -5] {
            let at = |n: i64| (10_000 + n * step) as u64;
            let mut strides = Strides::default();
            for n in 0..3 {
                strides.faulted(PageNumber(at(n)));
                assert_eq!(claimed(&mut strides, at(n)), [], "after fault {n}");
            }
            strides.faulted(PageNumber(at(3)));
            assert_eq!(claimed(&mut strides, at(3)), [4, 5, 6, 7].map(at));
            // The first fault follows the fetched pages; the second hits a page that is still being
            // fetched.
            strides.faulted(PageNumber(at(8)));
            assert_eq!(claimed(&mut strides, at(8)), (9..17).map(at).collect::<Vec<_>>());
            strides.faulted(PageNumber(at(10)));
            assert_eq!(claimed(&mut strides, at(10)), (17..27).map(at).collect::<Vec<_>>());
        }
    }

    #[test]
    fn pages_between_far_steps_are_not_fetched() {
        for (step, is_far) in [(17, true), (-8, true), (7, false), (2, false), (16, false), (128, false)] {
            let at = |n: i64| PageNumber((10_000 + n * step) as u64);
            let mut strides = Strides::default();
            (0..3).for_each(|n| strides.faulted(at(n)));
            assert!(!strides.is_far_step(at(3)), "two equal steps may be chance");
            assert!(!strides.has_stepped_far(at(2)), "{step}");
            strides.faulted(at(3));
            assert_eq!(strides.has_stepped_far(at(3)), is_far, "{step}");
            assert!(!strides.has_stepped_far(at(4)), "{step}");
            assert_eq!(strides.is_far_step(at(4)), is_far, "{step}");
            assert!(!strides.is_far_step(PageNumber(at(4).0 + 1)), "{step}");
            assert_eq!(strides.claim(at(3)), Some((at(4), is_far)));
        }
    }

    #[test]
    fn steps_match_a_division() {
        for (step_pages, claimed, distance) in
            (-9..10).flat_map(|step| (0..5).flat_map(move |claimed| (-70..70).map(move |far| (step, claimed, far))))
        {
            let stream = StridedStream { step_pages, claimed, ..StridedStream::from(PageNumber(1000)) };
            let steps = if step_pages != 0 && distance % step_pages == 0 { distance / step_pages } else { 0 };
            let expected = u32::try_from(steps).ok().filter(|steps| (1..=claimed + 1).contains(steps));
            let page = PageNumber((1000 + distance) as u64);
            assert_eq!(stream.steps_to(page), expected, "{distance} by {step_pages}, {claimed} claimed");
        }
    }

    #[test]
    fn a_window_is_bounded() {
        for (step_pages, max_window) in [(3, MAX_WINDOW), (17, MAX_FAR_WINDOW)] {
            let mut strides = Strides::default();
            let mut most = 0;
            let mut page = 1000;
            for _ in 0..20 {
                strides.faulted(PageNumber(page));
                let ahead = claimed(&mut strides, page);
                most = most.max(ahead.len());
                page = ahead.last().unwrap_or(&page) + step_pages;
            }
            assert_eq!(most, max_window as usize);
        }
    }

    #[test]
    fn interleaved_strided_streams_are_distinguished() {
        let mut strides = Strides::default();
        let at = |stream: u64, n: u64| stream * 100_000 + n * (stream + 2);
        for n in 0..4 {
            (0..STRIDED_STREAMS as u64).for_each(|stream| strides.faulted(PageNumber(at(stream, n))));
        }
        for stream in 0..STRIDED_STREAMS as u64 {
            assert_eq!(claimed(&mut strides, at(stream, 3)).len(), FIRST_WINDOW as usize);
        }
    }

    #[test]
    fn random_faults_make_no_strided_stream() {
        let mut strides = Strides::default();
        let mut fetched = 0;
        for n in 1..20_000u64 {
            let page = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 49_152;
            strides.faulted(PageNumber(page));
            fetched += claimed(&mut strides, page).len();
        }
        assert!(fetched < 20, "{fetched} pages fetched for 20000 random faults");
    }

    #[test]
    fn a_strided_stream_ends_with_the_address_space() {
        let mut strides = Strides::default();
        (0..4).for_each(|n| strides.faulted(PageNumber(40 - 10 * n)));
        assert_eq!(claimed(&mut strides, 10), [0]);
    }
}
