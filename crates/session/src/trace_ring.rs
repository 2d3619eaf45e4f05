//! The trace ring, by which the events of a recorded process reach the supervisor, which writes
//! them to a file.
//!
//! Each slot of the process table has a ring in the control segment. The process's agent writes to
//! it, one thread at a time under the tracer's lock, and the supervisor reads it. A process may be
//! killed at any instruction, so an event counts only when `written` includes it. Neither side
//! waits: if the ring is full, the agent counts lost events, and the count is the next event. A
//! program may overwrite the ring; the reader counts events that it cannot decode as lost.

use foliomem_sync::atomic::{AtomicU64, Ordering};
use foliomem_sys::shared_words;
use foliomem_types::trace_event::Event;

/// Capacity of a ring, in events: a process produces about 300 a millisecond, and the supervisor
/// fetches them every 10 ms.
const RECORDS: usize = if cfg!(feature = "shuttle") { 2 } else { 8192 };
const TAG_SHIFT: u32 = 56;

shared_words! {
    /// A ring of events with one writer and one reader.
    #[cfg_attr(all(test, feature = "shuttle"), derive(Default))]
    #[derive(Debug)]
    pub struct TraceRing {
        written: AtomicU64,
        read: AtomicU64,
        /// Each event: its tag and time, then its numbers.
        records: [[AtomicU64; 4]; RECORDS],
    }
}

impl TraceRing {
    /// Adds an event that happened at `time_us`; returns `false` if there is no room. Only one
    /// thread may write at a time.
    pub fn push(&self, time_us: u64, event: &Event) -> bool {
        let written = self.written.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `take`: the reader has finished with the record.
        if written.wrapping_sub(self.read.load(Ordering::Acquire)) >= RECORDS as u64 {
            return false;
        }
        let (tag, numbers) = event.encode();
        let record = &self.records[written as usize % RECORDS];
        record[0].store(u64::from(tag) << TAG_SHIFT | time_us & ((1 << TAG_SHIFT) - 1), Ordering::Relaxed);
        record[1..].iter().zip(numbers).for_each(|(word, number)| word.store(number, Ordering::Relaxed));
        // Release pairs with the Acquire in `take`: the event is complete.
        self.written.store(written.wrapping_add(1), Ordering::Release);
        true
    }

    /// Takes the events out in their order, and passes each with its time, in microseconds, to
    /// `on_event`. Only one thread may read at a time.
    pub fn take(&self, on_event: &mut dyn FnMut(u64, Event)) {
        // Acquire pairs with the Release in `push`: the events are complete.
        let written = self.written.load(Ordering::Acquire);
        let mut read = self.read.load(Ordering::Relaxed);
        if written.wrapping_sub(read) > RECORDS as u64 {
            // The program has overwritten the ring.
            read = written;
            on_event(0, Event::Lost(1));
        }
        while read != written {
            let words = self.records[read as usize % RECORDS].each_ref().map(|word| word.load(Ordering::Relaxed));
            let time_us = words[0] & ((1 << TAG_SHIFT) - 1);
            let event = Event::decode((words[0] >> TAG_SHIFT) as u8, [words[1], words[2], words[3]]);
            on_event(time_us, event.unwrap_or(Event::Lost(1)));
            read = read.wrapping_add(1);
        }
        // Release pairs with the Acquire in `push`, which may overwrite the records.
        self.read.store(read, Ordering::Release);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use foliomem_types::units::PageNumber;
    use proptest::prelude::*;

    fn ring() -> Box<TraceRing> {
        let zero = || AtomicU64::new(0);
        Box::new(TraceRing {
            written: zero(),
            read: zero(),
            records: std::array::from_fn(|_| std::array::from_fn(|_| zero())),
        })
    }

    fn taken(ring: &TraceRing) -> Vec<(u64, Event)> {
        let mut taken = Vec::new();
        ring.take(&mut |time_us, event| taken.push((time_us, event)));
        taken
    }

    proptest! {
        #[test]
        fn pushed_events_are_taken_in_order_and_a_full_ring_refuses_more(rounds in prop::collection::vec(0..2 * RECORDS as u64, 1..4)) {
            let ring = ring();
            for pushes in rounds {
                let events: Vec<_> = (0..pushes).map(|number| (number, Event::Activate(PageNumber(number * 7)))).collect();
                let there: Vec<_> = events.into_iter().filter(|(time_us, event)| ring.push(*time_us, event)).collect();
                prop_assert_eq!(there.len() as u64, pushes.min(RECORDS as u64));
                prop_assert_eq!(taken(&ring), there);
            }
        }

        #[test]
        fn an_overwritten_ring_is_read_to_its_end(written: u64, read: u64, noise in prop::collection::vec(any::<u64>(), 1..64)) {
            let ring = ring();
            ring.written.store(written, Ordering::Relaxed);
            ring.read.store(read, Ordering::Relaxed);
            ring.records.iter().flatten().zip(noise.iter().cycle()).for_each(|(word, &noise)| word.store(noise, Ordering::Relaxed));
            prop_assert!(taken(&ring).len() <= RECORDS);
            prop_assert!(ring.push(5, &Event::End));
            prop_assert_eq!(taken(&ring), [(5, Event::End)]);
        }
    }

    #[test]
    fn events_of_another_thread_are_taken_complete() {
        let ring = ring();
        const EVENTS: u64 = 100_000;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..EVENTS {
                    while !ring.push(number, &Event::Fill(PageNumber(number)..PageNumber(2 * number + 1))) {
                        foliomem_sync::back_off();
                    }
                }
            });
            let mut next = 0;
            while next < EVENTS {
                for (time_us, event) in taken(&ring) {
                    assert_eq!((time_us, event), (next, Event::Fill(PageNumber(next)..PageNumber(2 * next + 1))));
                    next += 1;
                }
            }
        });
    }
}
