//! Trace events: what a recorded run says about a program. Each event belongs to one process; all
//! processes share one clock.
//!
//! An unmodified program does not report which pages it uses. The trace records first touches and
//! mapping changes, which the agent receives as messages, and every page that reclaim makes
//! non-resident and the program touches again.
//!
//! An event is a tag and three numbers, in the ring between processes and in the file. Those
//! modules define how wide they write the numbers.

use crate::units::{BLOCK_PAGES, PAGE_BYTES, PageNumber};
use std::ops::Range;

/// One event of a recorded run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The process starts, or it replaces its program (execve).
    Start {
        /// The process id.
        pid: u32,
    },
    /// The process ended.
    End,
    /// The agent manages these pages from now on.
    Map(Range<PageNumber>),
    /// The program unmapped these pages.
    Unmap(Range<PageNumber>),
    /// The program discarded the content of these pages; the next touch reads zeros.
    Discard(Range<PageNumber>),
    /// The program moved the pages of the range so that they start at the given page (mremap).
    Remap(Range<PageNumber>, PageNumber),
    /// These pages have content now: the program touched them first, or the agent found them in
    /// use.
    Fill(Range<PageNumber>),
    /// Reclaim staged these pages, at most one block of them, to keep the limit.
    Stage(Range<PageNumber>),
    /// The program touched a swapped-out page that was not staged; or readahead brought back these
    /// pages, at most one block.
    Refault(Range<PageNumber>),
    /// The program touched a staged page before it was written back (second chance).
    Activate(PageNumber),
    /// These pages, at most one block, became resident because the program touched one of them.
    Along(Range<PageNumber>),
    /// The store compressed these pages, at most one block, as one piece.
    Compressed {
        /// The pages of the piece.
        pages: Range<PageNumber>,
        /// Compressed size in bytes; 0 if all pages repeat one word.
        len_bytes: u32,
    },
    /// The tree's limit in pages from now on. The trace does not show touches of pages that this
    /// limit leaves resident.
    Limit(u64),
    /// The process's unmanaged memory in pages from now on.
    Unmanaged(u32),
    /// The number of events that were lost before this one.
    Lost(u64),
}

impl Event {
    /// Encodes the event as a tag and three numbers.
    pub fn encode(&self) -> (u8, [u64; 3]) {
        let range = |range: &Range<PageNumber>| [range.start.0, range.end.0.saturating_sub(range.start.0), 0];
        match self {
            Event::Start { pid } => (1, [u64::from(*pid), 0, 0]),
            Event::End => (2, [0; 3]),
            Event::Map(pages) => (3, range(pages)),
            Event::Unmap(pages) => (4, range(pages)),
            Event::Discard(pages) => (5, range(pages)),
            Event::Remap(from, to) => (6, [from.start.0, range(from)[1], to.0]),
            Event::Fill(pages) => (7, range(pages)),
            Event::Refault(pages) => (8, range(pages)),
            Event::Compressed { pages, len_bytes } => (9, [pages.start.0, range(pages)[1], u64::from(*len_bytes)]),
            Event::Lost(events) => (10, [*events, 0, 0]),
            Event::Limit(pages) => (11, [*pages, 0, 0]),
            Event::Unmanaged(pages) => (12, [u64::from(*pages), 0, 0]),
            Event::Stage(pages) => (13, range(pages)),
            Event::Activate(page) => (14, [page.0, 0, 0]),
            Event::Along(pages) => (15, range(pages)),
        }
    }

    /// Decodes an event, or returns `None` if the tag and the numbers encode none.
    #[inline]
    pub fn decode(tag: u8, [a, b, c]: [u64; 3]) -> Option<Event> {
        let page = |number: u64| (number < 1 << (64 - crate::units::PAGE_SHIFT)).then_some(PageNumber(number));
        let range = || {
            let (start, end) = (page(a)?, page(a.checked_add(b)?)?);
            (start < end).then_some(start..end)
        };
        let is_short = |pages: &Range<PageNumber>| pages.end.0 - pages.start.0 <= BLOCK_PAGES as u64;
        Some(match tag {
            1 => Event::Start { pid: u32::try_from(a).ok()? },
            2 => Event::End,
            3 => Event::Map(range()?),
            4 => Event::Unmap(range()?),
            5 => Event::Discard(range()?),
            6 => {
                page(c.checked_add(b)?)?;
                Event::Remap(range()?, page(c)?)
            }
            7 => Event::Fill(range()?),
            8 => Event::Refault(range().filter(is_short)?),
            9 => {
                let pages = range().filter(is_short)?;
                let fits = c <= (pages.end.0 - pages.start.0) * PAGE_BYTES as u64;
                fits.then_some(Event::Compressed { pages, len_bytes: c as u32 })?
            }
            10 => Event::Lost(a),
            11 => Event::Limit(page(a)?.0),
            12 => Event::Unmanaged(u32::try_from(a).ok()?),
            13 => Event::Stage(range().filter(is_short)?),
            14 => Event::Activate(page(a)?),
            15 => Event::Along(range().filter(is_short)?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_decoded_event_survives_encoding(tag: u8, a: u64, b in 0u64..1 << 40, c: u64, shift in 0u32..64) {
            let numbers = [a >> shift, b, c >> shift];
            for tag in [tag, tag % 16] {
                if let Some(event) = Event::decode(tag, numbers) {
                    let (tag, numbers) = event.encode();
                    prop_assert_eq!(Event::decode(tag, numbers), Some(event));
                }
            }
        }
    }
}
