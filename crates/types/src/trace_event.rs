//! Trace events: the record of how a program used its memory. Each event belongs to one process;
//! all processes share one clock.
//!
//! An unmodified program does not report which pages it uses. The trace records first touches and
//! mapping changes, which the agent receives as messages, and every page that reclaim makes
//! non-resident and the program touches again. The last events of a trace give the totals of the
//! whole run; the supervisor adds these events.
//!
//! An event is a tag and three numbers, both in the ring between processes and in the trace file.
//! The modules of the ring and of the file define the width of the numbers.

use crate::counters::FaultKind;
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
    /// The faults of one kind that the whole run had.
    Faults {
        /// The kind.
        kind: FaultKind,
        /// The number of faults.
        faults: u64,
        /// The time from reading each fault to waking its thread, added up.
        waited_ns: u64,
    },
    /// The time that the whole run took.
    Took {
        /// The duration of the run.
        elapsed_us: u64,
        /// CPU time of the program and of its children.
        program_cpu_us: u64,
        /// CPU time of the companions.
        companion_cpu_us: u64,
    },
    /// The part of the program's CPU time that its code took.
    Computed {
        /// User time of the program and of its children.
        user_us: u64,
    },
    /// The time that runnable threads of the whole run waited for a CPU.
    Delayed {
        /// Threads of the program and of its children.
        program_us: u64,
        /// Threads of the companions.
        companion_us: u64,
        /// CPU time that other programs of the machine used meanwhile.
        others_cpu_us: u64,
    },
    /// The pages that the whole run allocated at first touches and moved.
    Moved {
        /// Pages of folios that were allocated at first touches.
        allocated_pages: u64,
        /// Pages that were swapped in.
        swpin_pages: u64,
        /// Pages that were swapped out.
        swpout_pages: u64,
    },
    /// The machine, as measured when the run had ended.
    Machine {
        /// The number of CPUs.
        cpus: u64,
        /// CPU time of a fault that does nothing but move a page in.
        round_trip_ns: u64,
        /// CPU time in which the kernel allocates and zeroes a page.
        populate_page_ns: u64,
    },
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
            Event::Faults { kind, faults, waited_ns } => (16, [*kind as u64, *faults, *waited_ns]),
            Event::Took { elapsed_us, program_cpu_us, companion_cpu_us } => {
                (17, [*elapsed_us, *program_cpu_us, *companion_cpu_us])
            }
            Event::Computed { user_us } => (21, [*user_us, 0, 0]),
            Event::Delayed { program_us, companion_us, others_cpu_us } => {
                (20, [*program_us, *companion_us, *others_cpu_us])
            }
            Event::Moved { allocated_pages, swpin_pages, swpout_pages } => {
                (18, [*allocated_pages, *swpin_pages, *swpout_pages])
            }
            Event::Machine { cpus, round_trip_ns, populate_page_ns } => {
                (19, [*cpus, *round_trip_ns, *populate_page_ns])
            }
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
            16 => {
                let kind = *FaultKind::ALL.get(usize::try_from(a).ok()?)?;
                Event::Faults { kind, faults: b, waited_ns: c }
            }
            17 => Event::Took { elapsed_us: a, program_cpu_us: b, companion_cpu_us: c },
            18 => Event::Moved { allocated_pages: a, swpin_pages: b, swpout_pages: c },
            21 => Event::Computed { user_us: a },
            20 => Event::Delayed { program_us: a, companion_us: b, others_cpu_us: c },
            19 => Event::Machine { cpus: a, round_trip_ns: b, populate_page_ns: c },
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
            for tag in [tag, tag % 21] {
                if let Some(event) = Event::decode(tag, numbers) {
                    let (tag, numbers) = event.encode();
                    prop_assert_eq!(Event::decode(tag, numbers), Some(event));
                }
            }
        }
    }
}
