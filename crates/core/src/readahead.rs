//! Readahead: which folios to fetch or make before the program touches them.
//!
//! A program that reads its memory in order faults on every swapped-out folio and waits for each.
//! After a few such faults in a row the next folios are mapped in while the program works on the
//! first. The readahead window starts small and doubles with every fault that confirms the stream,
//! as the kernel's readahead of files does. Several threads may fetch for one stream, each one
//! chunk at a time.
//!
//! Two small folios in a row are no stream: one object that spans both causes the same two faults,
//! and [`crate::locality`] knows how often.
//! (When two small folios counted as a stream, redis under random reads of 4 KiB values fetched as
//! many pages ahead as it read.)
//!
//! Faults at equal distances are followed, too (`strides`). The position of a fault in its folio
//! distinguishes such strided streams from streams of folios: the latter reach a folio at its
//! start.
//!
//! A program that writes new memory in order also faults on every folio. There the engine makes the
//! next folios from free populated frames before the program touches them: a fault, a move and a
//! wake cost as much as zeroing a folio.
//!
//! Lock: one leaf lock, held while a few streams are read.

mod recency;
mod strides;

use crate::sync::Mutex;
use foliomem_types::units::{MAX_ORDER, PageNumber};
use recency::Recency;
use std::ops::Range;
use strides::Strides;

/// Maximum number of streams followed at the same time.
const STREAMS: usize = 16;
/// Faults in a row, or pages that they cover (two folios of 64 KiB), that make a stream.
const STREAM_FAULTS: u32 = 4;
const STREAM_PAGES: u64 = 32;
/// Minimum folio size, 64 KiB, of a stream that may skip one folio.
const LARGE_FOLIO_PAGES: u64 = 16;
/// Maximum distance of a stream's fault from the beginning of its folio. A program with larger gaps
/// touches few pages of a folio.
const MAX_GAP_PAGES: u64 = 3;
/// Pages of first touches that make a stream: memory made ahead of a false stream is wasted.
const NEW_STREAM_PAGES: u64 = 64;
/// The initial and the maximum readahead window: 128 KiB and 1 MiB.
const FIRST_WINDOW_PAGES: u32 = 32;
const MAX_WINDOW_PAGES: u32 = 256;
/// Pages that one thread fetches at a time: 256 KiB.
const CHUNK_PAGES: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The end of the folio with the last fault.
    position: PageNumber,
    /// The end of the pages that were fetched or that a thread is fetching.
    claimed: PageNumber,
    /// The start of the stream, and its number of faults.
    start: PageNumber,
    faults: u32,
    /// How far ahead of the position to fetch; 0 while the faults make no stream.
    window_pages: u32,
}

/// A page number where no page is, nor before it.
const NOWHERE: PageNumber = PageNumber(1 << 63);
const NO_STREAM: Stream = Stream { position: NOWHERE, claimed: NOWHERE, start: NOWHERE, faults: 0, window_pages: 0 };

impl Stream {
    /// Returns whether `page` is between the position and at most `passed_pages` beyond the claimed
    /// end.
    fn is_ahead(&self, page: PageNumber, passed_pages: u64) -> bool {
        page.0.wrapping_sub(self.position.0) <= self.claimed.0 + passed_pages - self.position.0
    }
}

/// The streams followed at the same time.
#[derive(Debug)]
struct Streams {
    streams: [Stream; STREAMS],
    recency: Recency<STREAMS>,
    /// Number of streams with a readahead window.
    with_window: usize,
    /// The low bits of each position, and the distance from it to the claimed end.
    positions: [u32; STREAMS],
    claimed_pages: [u32; STREAMS],
}

impl Streams {
    const NONE: Streams = Streams {
        streams: [NO_STREAM; STREAMS],
        recency: Recency::NONE,
        with_window: 0,
        positions: [NOWHERE.0 as u32; STREAMS],
        claimed_pages: [0; STREAMS],
    };

    /// Returns whether `page` may be [ahead](Stream::is_ahead) of a stream; at random faults it
    /// nearly never is. The loop has no early exit, so that one instruction can compare several of
    /// the small, adjacent numbers.
    fn may_be_ahead(&self, page: PageNumber, passed_pages: u64) -> bool {
        let (page, passed_pages) = (page.0 as u32, passed_pages as u32);
        let streams = self.positions.iter().zip(&self.claimed_pages);
        streams.fold(false, |found, (&position, &claimed_pages)| {
            found | (page.wrapping_sub(position) <= claimed_pages + passed_pages)
        })
    }

    /// Updates the summary of a changed stream.
    fn changed(&mut self, index: usize) {
        let Stream { position, claimed, .. } = self.streams[index];
        self.positions[index] = position.0 as u32;
        self.claimed_pages[index] = (claimed.0 - position.0) as u32;
    }

    /// Records a fault on `page` of `folio`. Returns whether the fault continues a stream; `is_one`
    /// decides whether the faults so far make a stream. A fault that continues nothing may start a
    /// new stream.
    #[inline]
    fn faulted(
        &mut self,
        page: PageNumber,
        folio: Range<PageNumber>,
        likely_use: LikelyUse,
        is_one: impl FnOnce(&Stream) -> bool,
    ) -> bool {
        let folio_pages = folio.end.0 - folio.start.0;
        // The pages skipped without a fault are resident already.
        let passed_pages = match likely_use {
            LikelyUse::WholeFolio if folio_pages >= LARGE_FOLIO_PAGES => folio_pages,
            LikelyUse::WholeFolio | LikelyUse::Part => 0,
        };
        let has_come_to = page.0 - folio.start.0 <= MAX_GAP_PAGES;
        if has_come_to
            && self.may_be_ahead(folio.start, passed_pages)
            && let Some(index) = self.streams.iter().position(|stream| stream.is_ahead(folio.start, passed_pages))
        {
            let stream = &mut self.streams[index];
            stream.faults += 1;
            stream.position = folio.end;
            if is_one(stream) {
                self.with_window += usize::from(stream.window_pages == 0);
                stream.window_pages = (stream.window_pages * 2).clamp(FIRST_WINDOW_PAGES, MAX_WINDOW_PAGES);
            }
            stream.claimed = match likely_use {
                LikelyUse::WholeFolio => stream.claimed.max(folio.end),
                LikelyUse::Part => folio.end,
            };
            self.changed(index);
            self.recency.used(index);
            return true;
        }
        let index = self.recency.use_oldest();
        let oldest = &mut self.streams[index];
        self.with_window -= usize::from(oldest.window_pages > 0);
        let (position, claimed) = (folio.end, folio.end);
        *oldest = Stream { position, claimed, start: folio.start, faults: 1, window_pages: 0 };
        self.changed(index);
        false
    }

    /// Returns whether `page` is the next page of a stream.
    fn is_next(&self, page: PageNumber) -> bool {
        let is_next = |stream: &Stream| stream.window_pages > 0 && stream.is_ahead(page, 0);
        self.with_window > 0 && self.may_be_ahead(page, 0) && self.streams.iter().any(is_next)
    }

    /// Returns whether a stream may have reached the end of the folio of `page`, whatever its
    /// order.
    #[inline]
    fn may_claim(&self, page: PageNumber) -> bool {
        let first_end = (page.0 + 1) as u32;
        let ends_around = |position: u32| position.wrapping_sub(first_end) < MAX_ORDER.pages();
        self.with_window > 0 && self.positions.iter().fold(false, |found, &position| found | ends_around(position))
    }

    /// Claims the next chunk of the window of the stream at `position`.
    fn claim(&mut self, position: PageNumber) -> Option<Range<PageNumber>> {
        if self.with_window == 0 {
            return None;
        }
        let index = self.streams.iter().position(|stream| stream.position == position)?;
        let stream = &mut self.streams[index];
        let end = position.offset(stream.window_pages);
        let chunk = stream.claimed..stream.claimed.offset(CHUNK_PAGES).min(end);
        if chunk.is_empty() {
            return None;
        }
        stream.claimed = chunk.end;
        self.changed(index);
        Some(chunk)
    }
}

#[derive(Debug)]
struct Followed {
    /// Streams of faults on swapped-out folios.
    streams: Streams,
    strides: Strides,
    /// Streams of first touches.
    new: Streams,
}

/// Pages to fetch or make next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ahead {
    /// Fetch all of these pages: the program reads them in order.
    Stream(Range<PageNumber>),
    /// Fetch the part of the folio that belongs to this page, or only the page.
    Step {
        /// The page.
        page: PageNumber,
        /// Whether the pages around it are unlikely to be touched.
        alone: bool,
    },
    /// Make all of these pages: the program touches them for the first time, in order.
    New(Range<PageNumber>),
}

/// The streams and strided streams of one program.
#[derive(Debug)]
pub struct Readahead(Mutex<Followed>);

impl Default for Readahead {
    fn default() -> Readahead {
        Readahead(Mutex::new(Followed { streams: Streams::NONE, strides: Strides::default(), new: Streams::NONE }))
    }
}

/// The prediction for a fault before it is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    /// The fault continues a stream: the program touches all pages around it.
    Stream,
    /// The fault is a far step of a strided stream: the program touches nothing else there.
    Step,
    /// No prediction.
    Nothing,
}

/// How much of a folio the program is likely to use after a touch of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LikelyUse {
    /// All of it.
    WholeFolio,
    /// The part around the page: only a touch of the next part continues a stream.
    Part,
}

impl Readahead {
    /// Returns the prediction for a fault on `page`.
    #[inline]
    pub fn expected(&self, page: PageNumber) -> Expected {
        let followed = self.0.lock();
        if followed.streams.is_next(page) {
            Expected::Stream
        } else if followed.strides.is_far_step(page) {
            Expected::Step
        } else {
            Expected::Nothing
        }
    }

    /// Records a fault on `page` of the swapped-out pages `folio`.
    pub fn faulted(&self, page: PageNumber, folio: Range<PageNumber>, likely_use: LikelyUse) {
        let mut guard = self.0.lock();
        let Followed { streams, strides, .. } = &mut *guard;
        let is_one =
            |stream: &Stream| stream.faults >= STREAM_FAULTS || stream.position.0 - stream.start.0 >= STREAM_PAGES;
        if !streams.faulted(page, folio, likely_use, is_one) {
            strides.faulted(page);
        }
    }

    /// Records a first touch that was served with the folio `folio`.
    pub fn touched(&self, folio: Range<PageNumber>) {
        // If the engine could not make some pages ahead, the program touches them and the stream
        // continues there.
        let is_one = |stream: &Stream| stream.position.0 - stream.start.0 >= NEW_STREAM_PAGES;
        self.0.lock().new.faulted(folio.start, folio, LikelyUse::Part, is_one);
    }

    /// Returns whether there may be pages to fetch or make after the fault on `page`. Callers ask
    /// this before they look up the folio, because after most faults there are none.
    pub fn may_claim(&self, page: PageNumber) -> bool {
        let followed = self.0.lock();
        followed.streams.may_claim(page) || followed.new.may_claim(page) || followed.strides.follows_any()
    }

    /// Returns whether a fault on `page` was a far step of a strided stream, whose next steps are
    /// fetched with less work before the program goes on than beside it.
    pub fn has_stepped_far(&self, page: PageNumber) -> bool {
        self.0.lock().strides.has_stepped_far(page)
    }

    /// Claims what the caller must fetch or make next after the fault on `page`, whose folio ends
    /// at `position`. Returns `None` if the window is full or the program went elsewhere.
    pub fn claim(&self, page: PageNumber, position: PageNumber) -> Option<Ahead> {
        let mut guard = self.0.lock();
        let Followed { streams, strides, new } = &mut *guard;
        if let Some(chunk) = streams.claim(position) {
            return Some(Ahead::Stream(chunk));
        }
        new.claim(position).map(Ahead::New).or_else(|| {
            let step = strides.claim(page);
            step.map(|(page, alone)| Ahead::Step { page, alone })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::units::Order;

    fn folio(number: u64) -> Range<PageNumber> {
        PageNumber(number * 16)..PageNumber(number * 16 + 16)
    }

    fn faulted(readahead: &Readahead, folio: Range<PageNumber>, likely_use: LikelyUse) {
        readahead.faulted(folio.start, folio, likely_use);
    }

    /// Returns how many pages are claimed for the stream at `position`.
    fn claimed(readahead: &Readahead, position: PageNumber) -> u64 {
        let page = PageNumber(position.0 - 1);
        let pages = |ahead| match ahead {
            Ahead::Stream(pages) => pages.end.0 - pages.start.0,
            other => panic!("{other:?}"),
        };
        std::iter::from_fn(|| readahead.claim(page, position)).map(pages).sum()
    }

    #[test]
    fn the_window_of_a_stream_grows() {
        let readahead = Readahead::default();
        faulted(&readahead, folio(10), LikelyUse::WholeFolio);
        assert_eq!(claimed(&readahead, folio(10).end), 0, "one fault makes no stream");
        faulted(&readahead, folio(11), LikelyUse::WholeFolio);
        assert_eq!(claimed(&readahead, folio(11).end), 32);
        // The program faults again after the fetched pages.
        faulted(&readahead, folio(14), LikelyUse::WholeFolio);
        assert_eq!(claimed(&readahead, folio(14).end), 64);
        faulted(&readahead, folio(19), LikelyUse::WholeFolio);
        faulted(&readahead, folio(20), LikelyUse::WholeFolio);
        assert_eq!(claimed(&readahead, folio(20).end), u64::from(MAX_WINDOW_PAGES));
    }

    #[test]
    fn two_small_folios_in_a_row_are_no_stream() {
        let readahead = Readahead::default();
        let part = |number: u64| PageNumber(number * 4)..PageNumber(number * 4 + 4);
        for (number, ahead) in [(10, 0), (11, 0), (12, 0), (13, 32)] {
            faulted(&readahead, part(number), LikelyUse::Part);
            assert_eq!(readahead.expected(part(number).end) == Expected::Stream, ahead > 0);
            assert_eq!(claimed(&readahead, part(number).end), ahead, "after part {number}");
        }
    }

    #[test]
    fn steps_over_pages_between_parts_are_no_stream() {
        let readahead = Readahead::default();
        (10..14).for_each(|number| faulted(&readahead, folio(number), LikelyUse::WholeFolio));
        assert!(claimed(&readahead, folio(13).end) > 0);
        assert_eq!(readahead.expected(folio(14).start), Expected::Stream);
        // From here on single pages are fetched, each in the next folio.
        let page = |number: u64| folio(number).start..folio(number).start.offset(1);
        faulted(&readahead, page(14), LikelyUse::Part);
        assert_eq!(readahead.expected(page(15).start), Expected::Nothing);
        assert_eq!(readahead.expected(page(14).end), Expected::Stream, "the next page continues it");
    }

    #[test]
    fn faults_here_and_there_fetch_nothing() {
        let readahead = Readahead::default();
        for number in 0..1000 {
            let folio = folio(number * 7919 % 4096 * 3);
            faulted(&readahead, folio.clone(), LikelyUse::WholeFolio);
            assert_eq!(claimed(&readahead, folio.end), 0);
        }
    }

    #[test]
    fn a_stream_of_large_folios_may_pass_one() {
        let readahead = Readahead::default();
        (0..2).for_each(|number| faulted(&readahead, folio(number), LikelyUse::WholeFolio));
        assert_eq!(claimed(&readahead, folio(1).end), 32);
        faulted(&readahead, folio(5), LikelyUse::WholeFolio);
        assert_eq!(claimed(&readahead, folio(5).end), 64);
        faulted(&readahead, folio(12), LikelyUse::WholeFolio);
        assert_eq!(claimed(&readahead, folio(12).end), 0, "a stream may skip one folio, not two");
    }

    #[test]
    fn steps_over_most_of_each_folio_are_no_stream() {
        for (step, is_stream) in [(16, true), (17, false), (19, false), (2, true)] {
            let readahead = Readahead::default();
            let mut fetched_until = PageNumber(0);
            for page in (0..20_000).map(|n| PageNumber(n * step)).take_while(|page| page.0 < 20_000) {
                if page >= fetched_until {
                    let folio = folio(page.0 / 16);
                    readahead.faulted(page, folio.clone(), LikelyUse::WholeFolio);
                    fetched_until = folio.end;
                }
            }
            assert_eq!(readahead.expected(fetched_until) == Expected::Stream, is_stream, "{step}");
        }
    }

    #[test]
    fn many_streams_are_followed_at_once() {
        let readahead = Readahead::default();
        for step in 0..2 {
            (0..STREAMS as u64)
                .for_each(|stream| faulted(&readahead, folio(stream * 1000 + step), LikelyUse::WholeFolio));
        }
        for stream in 0..STREAMS as u64 {
            assert_eq!(claimed(&readahead, folio(stream * 1000 + 1).end), 32);
        }
    }

    #[test]
    fn new_memory_is_made_ahead_of_sequential_writes() {
        let readahead = Readahead::default();
        let claim = |number: u64| readahead.claim(folio(number).start, folio(number).end);
        let pages = |from: u64, to: u64| Some(Ahead::New(folio(from).start..folio(to).start));
        for number in 10..13 {
            readahead.touched(folio(number));
            assert_eq!(claim(number), None, "three folios make no stream");
        }
        readahead.touched(folio(13));
        assert_eq!((claim(13), claim(13)), (pages(14, 16), None));
        // There was room for one folio only.
        readahead.touched(folio(15));
        assert_eq!((claim(15), claim(15)), (pages(16, 20), None));
        assert_eq!(readahead.expected(folio(16).start), Expected::Nothing, "no page of it is swapped out");
    }

    #[test]
    fn strided_streams_are_followed() {
        let readahead = Readahead::default();
        let page = |step: u64| PageNumber(1000 + 40 * step);
        (0..4).for_each(|step| readahead.faulted(page(step), page(step).folio(Order::ZERO), LikelyUse::Part));
        assert_eq!(readahead.claim(page(3), page(3).offset(1)), Some(Ahead::Step { page: page(4), alone: true }));
    }
}
