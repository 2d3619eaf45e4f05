//! What a recorded run tells of a program: events, each of one process, in the order of a clock that all of them share.
//!
//! An unmodified program does not say which pages it uses. Where a page is first touched, and what becomes of
//! mappings, is heard; what is touched again is known of *watched* units of 64 KiB only, one of 2^shift, which
//! are moved out of reach page by page, again and again. They stand for the others.
//!
//! An event is a tag and three numbers, in the ring between processes as in the file; how wide each is written there is
//! those modules' own.

use crate::units::{Order, PageNumber};
use std::ops::Range;

/// What is watched as one.
pub const UNIT: Order = Order::new(4).unwrap();
/// At most one unit of 2^this is watched: 256 MiB.
pub const MOST_SHIFT: u8 = 12;
/// The low bits of a watched unit's number. Not the first of an aligned range: allocators have their own data there.
const WATCHED_UNIT: u64 = 0x5a5a_5a5a;

/// The smallest number of a unit from `unit` on that is watched where one of 2^`shift` is. What is watched at a shift is
/// watched at all smaller ones.
pub const fn next_watched(unit: u64, shift: u8) -> u64 {
    let mask = (1 << shift) - 1;
    unit + ((WATCHED_UNIT.wrapping_sub(unit)) & mask)
}

/// The unit of a page.
pub const fn unit_of(page: PageNumber) -> u64 {
    page.0 >> UNIT.get()
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
    /// A watched page was touched again.
    Touch(PageNumber),
    /// A page that is not watched, and was out of reach for another reason, was touched again.
    Refault(PageNumber),
    /// One unit of 2^this is watched from now on.
    Watch(u8),
    /// What so many pages of it compress to as one piece.
    Compressed(Order, u32),
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
            Event::Refault(page) => (9, [page.0, 0, 0]),
            Event::Watch(shift) => (10, [u64::from(*shift), 0, 0]),
            Event::Compressed(order, len_bytes) => (11, [u64::from(order.get()), u64::from(*len_bytes), 0]),
            Event::Lost(events) => (12, [*events, 0, 0]),
        }
    }

    /// The event of a tag and its numbers, if they are one.
    pub fn decode(tag: u8, [a, b, c]: [u64; 3]) -> Option<Event> {
        let page = |number: u64| (number < 1 << (64 - crate::units::PAGE_SHIFT)).then_some(PageNumber(number));
        let range = || {
            let (start, end) = (page(a)?, page(a.checked_add(b)?)?);
            (start < end).then_some(start..end)
        };
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
            9 => Event::Refault(page(a)?),
            10 => Event::Watch(u8::try_from(a).ok().filter(|&shift| shift <= MOST_SHIFT)?),
            11 => {
                let order = Order::new(u8::try_from(a).ok()?)?;
                let len_bytes = u32::try_from(b).ok().filter(|&len| len as usize <= order.bytes())?;
                Event::Compressed(order, len_bytes)
            }
            12 => Event::Lost(a),
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
            for tag in [tag, tag % 13] {
                if let Some(event) = Event::decode(tag, numbers) {
                    let (tag, numbers) = event.encode();
                    prop_assert_eq!(Event::decode(tag, numbers), Some(event));
                }
            }
        }

        #[test]
        fn one_unit_of_so_many_is_watched_and_fewer_where_more_are_left_out(unit in 0u64..1 << 40, shift in 0..MOST_SHIFT) {
            let next = next_watched(unit, shift);
            prop_assert!((unit..unit + (1 << shift)).contains(&next));
            prop_assert_eq!(next_watched(next + 1, shift), next + (1 << shift));
            let fewer = next_watched(unit, shift + 1);
            prop_assert_eq!(next_watched(fewer, shift), fewer);
        }
    }
}
