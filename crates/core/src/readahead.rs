//! Which folios to fetch, or to make, before they are touched.
//!
//! A program that reads its memory in order faults on every folio that is out, and waits for each. After a few
//! such faults in a row the next folios are brought in while the program works on the first: the window starts
//! small and doubles with every fault that confirms the stream, as the kernel's readahead of files does. Several
//! threads may fetch for one stream, each a chunk at a time.
//!
//! Two small folios in a row are no stream yet: one object that lies across both causes the same two faults. (redis
//! under random reads of 4 KiB values fetched as much ahead as it asked for.)
//!
//! Faults that step over what is between them are followed, too, if their steps are equal (`strides`). They are told from streams of
//! folios by where in its folio each fault is: a stream comes to the beginning.
//!
//! A program that writes new memory in order faults on every folio as well. There the next folios are made before
//! they are touched, from frames that lie ready: a fault, a move and a wake cost as much as a folio of zeros.
//!
//! Lock: one leaf lock, held for a look at a few streams.

mod recency;
mod strides;

use crate::sync::Mutex;
use crate::units::{MAX_ORDER, PageNumber};
use recency::Recency;
use std::ops::Range;
use strides::Strides;

/// Streams that are followed at the same time.
const STREAMS: usize = 16;
/// What makes a stream: faults in a row, or what they cover (two folios of 64 KiB).
const STREAM_FAULTS: u32 = 4;
const STREAM_PAGES: u64 = 32;
/// A stream of folios of this size, 64 KiB, or more may pass one that it does not fault on.
const LARGE_FOLIO_PAGES: u64 = 16;
/// A stream comes to each folio at its beginning, or so close behind it: whoever steps over more of them touches few of their pages.
const MOST_GAP_PAGES: u64 = 3;
/// What makes a stream of first touches: what is made ahead of one that is none is memory for nothing.
const NEW_STREAM_PAGES: u64 = 64;
/// The window then, and at most: 128 KiB and 1 MiB.
const FIRST_WINDOW_PAGES: u32 = 32;
const MOST_WINDOW_PAGES: u32 = 256;
/// What one thread fetches at a time: 256 KiB.
const CHUNK_PAGES: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The last fault was in the folio that ends here.
    position: PageNumber,
    /// Everything before this has been fetched, or is being fetched by somebody.
    claimed: PageNumber,
    /// Where it began, and the faults since.
    start: PageNumber,
    faults: u32,
    /// How far ahead of the position to fetch; 0 while it is no stream yet.
    window_pages: u32,
}

/// Where nothing lies, nor before it.
const NOWHERE: PageNumber = PageNumber(1 << 63);
const NO_STREAM: Stream = Stream { position: NOWHERE, claimed: NOWHERE, start: NOWHERE, faults: 0, window_pages: 0 };

impl Stream {
    /// Whether `page` lies from where the stream has come to on, and no more than `passed_pages` behind what is claimed.
    fn is_ahead(&self, page: PageNumber, passed_pages: u64) -> bool {
        page.0.wrapping_sub(self.position.0) <= self.claimed.0 + passed_pages - self.position.0
    }
}

/// Streams that are followed at the same time.
#[derive(Debug)]
struct Streams {
    streams: [Stream; STREAMS],
    recency: Recency<STREAMS>,
    /// How many have a window.
    with_window: usize,
    /// Of each the low bits of its position, and how far beyond that is claimed.
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

    /// Whether `page` may be [ahead](Stream::is_ahead) of one of them. Nearly none is at a random fault, and processors compare
    /// several small numbers at a time, if they are side by side and all are.
    fn may_be_ahead(&self, page: PageNumber, passed_pages: u64) -> bool {
        let (page, passed_pages) = (page.0 as u32, passed_pages as u32);
        let streams = self.positions.iter().zip(&self.claimed_pages);
        streams.fold(false, |found, (&position, &claimed_pages)| {
            found | (page.wrapping_sub(position) <= claimed_pages + passed_pages)
        })
    }

    /// A stream has changed.
    fn changed(&mut self, index: usize) {
        let Stream { position, claimed, .. } = self.streams[index];
        self.positions[index] = position.0 as u32;
        self.claimed_pages[index] = (claimed.0 - position.0) as u32;
    }

    /// There was a fault on `page` of the folio `folio`; whether that continues a stream, which is one if `is_one` says so. Otherwise
    /// another may begin there.
    #[inline]
    fn faulted(
        &mut self,
        page: PageNumber,
        folio: Range<PageNumber>,
        whole: bool,
        is_one: impl FnOnce(&Stream) -> bool,
    ) -> bool {
        let folio_pages = folio.end.0 - folio.start.0;
        // What it does not fault on is in reach yet.
        let passed_pages = if whole && folio_pages >= LARGE_FOLIO_PAGES { folio_pages } else { 0 };
        let has_come_to = page.0 - folio.start.0 <= MOST_GAP_PAGES;
        if has_come_to
            && self.may_be_ahead(folio.start, passed_pages)
            && let Some(index) = self.streams.iter().position(|stream| stream.is_ahead(folio.start, passed_pages))
        {
            let stream = &mut self.streams[index];
            stream.faults += 1;
            stream.position = folio.end;
            if is_one(stream) {
                self.with_window += usize::from(stream.window_pages == 0);
                stream.window_pages = (stream.window_pages * 2).clamp(FIRST_WINDOW_PAGES, MOST_WINDOW_PAGES);
            }
            stream.claimed = if whole { stream.claimed.max(folio.end) } else { folio.end };
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

    /// Whether `page` is the next of one of them.
    fn is_next(&self, page: PageNumber) -> bool {
        let is_next = |stream: &Stream| stream.window_pages > 0 && stream.is_ahead(page, 0);
        self.with_window > 0 && self.may_be_ahead(page, 0) && self.streams.iter().any(is_next)
    }

    /// Whether one of them may have come to the end of the folio of `page`, whatever its order.
    #[inline]
    fn may_claim(&self, page: PageNumber) -> bool {
        let first_end = (page.0 + 1) as u32;
        let ends_around = |position: u32| position.wrapping_sub(first_end) < MAX_ORDER.pages();
        self.with_window > 0 && self.positions.iter().fold(false, |found, &position| found | ends_around(position))
    }

    /// The next chunk of the window of the stream that has come to `position`.
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
    /// Of faults on what is out.
    streams: Streams,
    strides: Strides,
    /// Of first touches.
    new: Streams,
}

/// What to fetch or make next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ahead {
    /// All of this: it is read from one end to the other.
    Stream(Range<PageNumber>),
    /// What of its folio is fetched with this page, or the page alone.
    Step {
        /// Which.
        page: PageNumber,
        /// Nothing around it is likely to be touched.
        alone: bool,
    },
    /// All of this: it is touched for the first time from one end to the other.
    New(Range<PageNumber>),
}

/// See the module.
#[derive(Debug)]
pub struct Readahead(Mutex<Followed>);

impl Default for Readahead {
    fn default() -> Readahead {
        Readahead(Mutex::new(Followed { streams: Streams::NONE, strides: Strides::default(), new: Streams::NONE }))
    }
}

/// What is known of a fault before it is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    /// It continues a stream: all around it is touched.
    Stream,
    /// It is a far step of a walk: nothing else is.
    Step,
    /// Nothing.
    Nothing,
}

impl Readahead {
    /// What is known of a fault on `page`.
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

    /// The program has faulted on `page` of the folio `folio`, which was out. `whole`: the rest of what it is a part of is
    /// likely to be touched, too. Otherwise it takes the next part to be a stream.
    pub fn faulted(&self, page: PageNumber, folio: Range<PageNumber>, whole: bool) {
        let mut guard = self.0.lock();
        let Followed { streams, strides, .. } = &mut *guard;
        let is_one =
            |stream: &Stream| stream.faults >= STREAM_FAULTS || stream.position.0 - stream.start.0 >= STREAM_PAGES;
        if !streams.faulted(page, folio, whole, is_one) {
            strides.faulted(page);
        }
    }

    /// The program has touched something for the first time, and got the folio `folio`.
    pub fn touched(&self, folio: Range<PageNumber>) {
        // What could not be made ahead is tried again from there on.
        let is_one = |stream: &Stream| stream.position.0 - stream.start.0 >= NEW_STREAM_PAGES;
        self.0.lock().new.faulted(folio.start, folio, false, is_one);
    }

    /// Whether there may be something to fetch or make after the fault on `page`: asked before its folio is looked up, as after
    /// most faults there is not.
    pub fn may_claim(&self, page: PageNumber) -> bool {
        let followed = self.0.lock();
        followed.streams.may_claim(page) || followed.new.may_claim(page) || followed.strides.follows_any()
    }

    /// What the caller is to fetch or make next after the fault on `page` of the folio that ends at `position`; `None` when the
    /// window is full, or the program has gone on elsewhere.
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
    use crate::units::Order;

    fn folio(number: u64) -> Range<PageNumber> {
        PageNumber(number * 16)..PageNumber(number * 16 + 16)
    }

    fn faulted(readahead: &Readahead, folio: Range<PageNumber>, whole: bool) {
        readahead.faulted(folio.start, folio, whole);
    }

    /// Pages that are fetched for the stream that has come to `position`.
    fn claimed(readahead: &Readahead, position: PageNumber) -> u64 {
        let page = PageNumber(position.0 - 1);
        let pages = |ahead| match ahead {
            Ahead::Stream(pages) => pages.end.0 - pages.start.0,
            other => panic!("{other:?}"),
        };
        std::iter::from_fn(|| readahead.claim(page, position)).map(pages).sum()
    }

    #[test]
    fn a_stream_is_fetched_ahead_further_and_further() {
        let readahead = Readahead::default();
        faulted(&readahead, folio(10), true);
        assert_eq!(claimed(&readahead, folio(10).end), 0, "one fault is no stream");
        faulted(&readahead, folio(11), true);
        assert_eq!(claimed(&readahead, folio(11).end), 32);
        // The program faults again behind what was fetched.
        faulted(&readahead, folio(14), true);
        assert_eq!(claimed(&readahead, folio(14).end), 64);
        faulted(&readahead, folio(19), true);
        faulted(&readahead, folio(20), true);
        assert_eq!(claimed(&readahead, folio(20).end), u64::from(MOST_WINDOW_PAGES));
    }

    #[test]
    fn two_small_folios_in_a_row_are_no_stream() {
        let readahead = Readahead::default();
        let part = |number: u64| PageNumber(number * 4)..PageNumber(number * 4 + 4);
        for (number, ahead) in [(10, 0), (11, 0), (12, 0), (13, 32)] {
            faulted(&readahead, part(number), false);
            assert_eq!(readahead.expected(part(number).end) == Expected::Stream, ahead > 0);
            assert_eq!(claimed(&readahead, part(number).end), ahead, "after part {number}");
        }
    }

    #[test]
    fn steps_over_what_parts_leave_out_are_no_stream() {
        let readahead = Readahead::default();
        (10..14).for_each(|number| faulted(&readahead, folio(number), true));
        assert!(claimed(&readahead, folio(13).end) > 0);
        assert_eq!(readahead.expected(folio(14).start), Expected::Stream);
        // From now on single pages are fetched, each in the next folio.
        let page = |number: u64| folio(number).start..folio(number).start.offset(1);
        faulted(&readahead, page(14), false);
        assert_eq!(readahead.expected(page(15).start), Expected::Nothing);
        assert_eq!(readahead.expected(page(14).end), Expected::Stream, "the next page would be");
    }

    #[test]
    fn faults_here_and_there_fetch_nothing() {
        let readahead = Readahead::default();
        for number in 0..1000 {
            let folio = folio(number * 7919 % 4096 * 3);
            faulted(&readahead, folio.clone(), true);
            assert_eq!(claimed(&readahead, folio.end), 0);
        }
    }

    #[test]
    fn a_stream_of_large_folios_may_pass_one() {
        let readahead = Readahead::default();
        (0..2).for_each(|number| faulted(&readahead, folio(number), true));
        assert_eq!(claimed(&readahead, folio(1).end), 32);
        faulted(&readahead, folio(5), true);
        assert_eq!(claimed(&readahead, folio(5).end), 64);
        faulted(&readahead, folio(12), true);
        assert_eq!(claimed(&readahead, folio(12).end), 0, "two are too many");
    }

    #[test]
    fn who_steps_over_most_of_each_folio_is_no_stream() {
        for (step, is_stream) in [(16, true), (17, false), (19, false), (2, true)] {
            let readahead = Readahead::default();
            let mut fetched_until = PageNumber(0);
            for page in (0..20_000).map(|n| PageNumber(n * step)).take_while(|page| page.0 < 20_000) {
                if page >= fetched_until {
                    let folio = folio(page.0 / 16);
                    readahead.faulted(page, folio.clone(), true);
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
            (0..STREAMS as u64).for_each(|stream| faulted(&readahead, folio(stream * 1000 + step), true));
        }
        for stream in 0..STREAMS as u64 {
            assert_eq!(claimed(&readahead, folio(stream * 1000 + 1).end), 32);
        }
    }

    #[test]
    fn new_memory_is_made_ahead_of_who_writes_it_in_order() {
        let readahead = Readahead::default();
        let claim = |number: u64| readahead.claim(folio(number).start, folio(number).end);
        let pages = |from: u64, to: u64| Some(Ahead::New(folio(from).start..folio(to).start));
        for number in 10..13 {
            readahead.touched(folio(number));
            assert_eq!(claim(number), None, "three folios are little");
        }
        readahead.touched(folio(13));
        assert_eq!((claim(13), claim(13)), (pages(14, 16), None));
        // There was room for one.
        readahead.touched(folio(15));
        assert_eq!((claim(15), claim(15)), (pages(16, 20), None));
        assert_eq!(readahead.expected(folio(16).start), Expected::Nothing, "nothing of that is out");
    }

    #[test]
    fn equal_steps_are_followed() {
        let readahead = Readahead::default();
        let page = |step: u64| PageNumber(1000 + 40 * step);
        (0..4).for_each(|step| readahead.faulted(page(step), page(step).folio(Order::ZERO), false));
        assert_eq!(readahead.claim(page(3), page(3).offset(1)), Some(Ahead::Step { page: page(4), alone: true }));
    }
}
