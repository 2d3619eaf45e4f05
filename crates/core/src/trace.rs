//! What a recorded run tells of a program: events, each of one process, in the order of a clock that all of them share.
//!
//! An unmodified program does not say which pages it uses. Where a page is first touched, and what becomes of
//! mappings, is heard; what is touched again is known of *watched* pages only. Of each *cell*, an aligned range of 2^shift
//! pages, one is watched: it is moved out of reach again and again, and its faults stand for the others. Now and then the
//! pages [beside](beside) it are moved with it, to tell whether they are touched together.
//!
//! An event is a tag and three numbers, in the ring between processes as in the file; how wide each is written there is
//! those modules' own.

use crate::units::{BLOCK_PAGES, Order, PAGE_BYTES, PageNumber};
use std::ops::Range;

/// What is compressed as one for the record, and what pages are touched together in: 64 KiB.
pub const UNIT: Order = Order::new(4).unwrap();
/// Cells have at most 2^this pages: 256 MiB.
pub const MOST_SHIFT: u8 = 16;

/// The page that is watched of the cell with this number, where cells have 2^`shift` pages. It lies anywhere in it, as programs
/// have patterns of their own; what is watched in a cell is watched in one of its halves, too.
pub const fn watched_page(mut cell: u64, mut shift: u8) -> PageNumber {
    while shift > 0 {
        shift -= 1;
        let mut hash = (cell ^ (shift as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        cell = cell << 1 | hash >> 63;
    }
    PageNumber(cell)
}

/// Whether a page is watched where cells have 2^`shift` pages.
pub const fn is_watched(page: PageNumber, shift: u8) -> bool {
    watched_page(page.0 >> shift, shift).0 == page.0
}

/// The pages beside `page` that tell what is touched together with it: in the other half of 2, 4, 8 and 16 pages.
pub fn beside(page: PageNumber) -> impl Iterator<Item = PageNumber> {
    (0..UNIT.get()).map(move |order| PageNumber(page.0 ^ 1 << order))
}

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
    /// A page is out of reach from now on, to see when it is touched.
    Arm(PageNumber),
    /// It was touched.
    Touch(PageNumber),
    /// Pages, no more than a block has, were put out of reach for the limit's sake.
    Stage(Range<PageNumber>),
    /// A page that was out of reach for another reason than watching, and not where it can be had at once, was touched again; or pages, no more than a
    /// block has, were brought back ahead of that.
    Refault(Range<PageNumber>),
    /// A page that was out of reach for another reason than watching was touched before it had gone further than that.
    Activate(PageNumber),
    /// Pages, no more than a block has, came into reach with one of them that was touched.
    Along(Range<PageNumber>),
    /// Cells have 2^this pages from now on. Where that is one, every touch is told of.
    Watch(u8),
    /// Pieces of it that were compressed as one each.
    Compressed {
        /// What each of them is.
        order: Order,
        /// So many.
        pieces: u64,
        /// What they have come to together.
        len_bytes: u64,
    },
    /// What of it is out and compressed now.
    Stored {
        /// So many, without those that repeat one word.
        pages: u64,
        /// What they have come to together.
        len_bytes: u64,
    },
    /// The tree may take so many pages, and nothing is watched: touches of what that leaves in reach go unseen.
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
            Event::Touch(page) => (8, [page.0, 0, 0]),
            Event::Refault(pages) => (9, range(pages)),
            Event::Watch(shift) => (10, [u64::from(*shift), 0, 0]),
            Event::Compressed { order, pieces, len_bytes } => (11, [u64::from(order.get()), *pieces, *len_bytes]),
            Event::Lost(events) => (12, [*events, 0, 0]),
            Event::Arm(page) => (13, [page.0, 0, 0]),
            Event::Limit(pages) => (14, [*pages, 0, 0]),
            Event::Unmanaged(pages) => (15, [u64::from(*pages), 0, 0]),
            Event::Stage(pages) => (16, range(pages)),
            Event::Activate(page) => (17, [page.0, 0, 0]),
            Event::Along(pages) => (18, range(pages)),
            Event::Stored { pages, len_bytes } => (19, [*pages, *len_bytes, 0]),
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
            8 => Event::Touch(page(a)?),
            9 => Event::Refault(range().filter(is_short)?),
            10 => Event::Watch(u8::try_from(a).ok().filter(|&shift| shift <= MOST_SHIFT)?),
            11 => {
                let order = Order::new(u8::try_from(a).ok()?)?;
                let (pieces, len_bytes) = (b, c);
                let fits = len_bytes <= pieces.checked_mul(order.bytes() as u64)?;
                fits.then_some(Event::Compressed { order, pieces, len_bytes })?
            }
            12 => Event::Lost(a),
            13 => Event::Arm(page(a)?),
            14 => Event::Limit(page(a)?.0),
            15 => Event::Unmanaged(u32::try_from(a).ok()?),
            16 => Event::Stage(range().filter(is_short)?),
            17 => Event::Activate(page(a)?),
            18 => Event::Along(range().filter(is_short)?),
            19 => {
                let (pages, len_bytes) = (a, b);
                let fits = len_bytes <= pages.checked_mul(PAGE_BYTES as u64)?;
                fits.then_some(Event::Stored { pages, len_bytes })?
            }
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
            for tag in [tag, tag % 20] {
                if let Some(event) = Event::decode(tag, numbers) {
                    let (tag, numbers) = event.encode();
                    prop_assert_eq!(Event::decode(tag, numbers), Some(event));
                }
            }
        }

        #[test]
        fn one_page_of_each_cell_is_watched_and_of_larger_cells_one_of_those(cell in 0u64..1 << 40, shift in 0..MOST_SHIFT) {
            let page = watched_page(cell, shift);
            prop_assert_eq!(page.0 >> shift, cell);
            prop_assert_eq!((cell << shift..(cell + 1) << shift).filter(|&page| is_watched(PageNumber(page), shift)).count(), 1);
            let of_more = watched_page(cell >> 1, shift + 1);
            prop_assert!(of_more == page || of_more == watched_page(cell ^ 1, shift));
        }

        #[test]
        fn pages_beside_another_lie_in_its_unit(page in 0u64..1 << 40) {
            let page = PageNumber(page);
            let pages: Vec<PageNumber> = beside(page).collect();
            prop_assert!(pages.iter().all(|&other| other != page && other.head(UNIT) == page.head(UNIT)));
            prop_assert_eq!(pages.len(), 4);
        }
    }

    #[test]
    fn watched_pages_lie_anywhere_in_their_units() {
        let mut seen = [0; 16];
        (0..1600).for_each(|cell| seen[watched_page(cell, 10).0 as usize % 16] += 1);
        assert!(seen.iter().all(|&times| (50..150).contains(&times)), "{seen:?}");
    }
}
