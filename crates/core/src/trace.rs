//! What a recorded run tells of a program: events, each of one process, in the order of a clock that all of them share.
//!
//! An unmodified program does not say which pages it uses. Where a page is first touched, and what becomes of
//! mappings, is heard; and so is what a limit puts out of reach, and when that is touched again.
//!
//! An event is a tag and three numbers, in the ring between processes as in the file; how wide each is written there is
//! those modules' own.

use crate::units::{BLOCK_PAGES, PAGE_BYTES, PageNumber};
use std::ops::Range;

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The process begins, or another program in its place.
    Start {
        /// Its number in the system.
        pid: u32,
    },
    /// It has ended.
    End,
    /// Memory of it is managed from now on.
    Map(Range<PageNumber>),
    /// It has unmapped memory.
    Unmap(Range<PageNumber>),
    /// It has discarded what was there: zeros at the next touch.
    Discard(Range<PageNumber>),
    /// It has moved memory.
    Remap(Range<PageNumber>, PageNumber),
    /// The pages have content now: touched for the first time, or found in use.
    Fill(Range<PageNumber>),
    /// Pages, no more than a block has, were put out of reach for the limit's sake.
    Stage(Range<PageNumber>),
    /// A page that was out of reach, and not where it can be had at once, was touched again; or pages, no more than a
    /// block has, were brought back ahead of that.
    Refault(Range<PageNumber>),
    /// A page that was out of reach was touched before it had gone further than that.
    Activate(PageNumber),
    /// Pages, no more than a block has, came into reach with one of them that was touched.
    Along(Range<PageNumber>),
    /// Pages, no more than a block has, were compressed as one piece.
    Compressed {
        /// Which.
        pages: Range<PageNumber>,
        /// What they came to: nothing where they repeat one word.
        len_bytes: u32,
    },
    /// The tree may take so many pages from now on: touches of what that leaves in reach go unseen.
    Limit(u64),
    /// So many pages it takes beside its managed memory from now on.
    Unmanaged(u32),
    /// So many events before this one are missing.
    Lost(u64),
}

impl Event {
    /// The event as a tag and numbers.
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

    /// The event of a tag and its numbers, if they are one.
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
        fn what_is_decoded_is_encoded_the_same(tag: u8, a: u64, b in 0u64..1 << 40, c: u64, shift in 0u32..64) {
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
