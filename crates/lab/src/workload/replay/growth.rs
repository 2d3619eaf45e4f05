//! Growth: whether a run leaks. A run leaks if it needs more and more memory and does not touch the
//! additional memory again.
//!
//! The trace does not show touches of resident pages. So only a page that was evicted once and
//! never returned counts as not touched again.

use super::places::{Block, blocks, part};
use foliomem_types::trace_event::Event;
use foliomem_types::units::{BLOCK_PAGES, Order, PAGE_BYTES, PageNumber};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// Minimum growth after the first quarter of the run: 16 MiB, and this part of the peak.
const MIN_GROWN_PAGES: u64 = (16 << 20) / PAGE_BYTES as u64;
const MIN_GROWN_SHIFT: u32 = 3;
/// Minimum part of the growth that is not touched again, in per cent.
const MIN_IDLE_PERCENT: u64 = 75;
/// Times of the run between which its need must grow, in per cent of its duration.
const QUARTERS: [u64; 4] = [25, 50, 75, 95];
/// Only pages first touched before this part of the run, in per cent, count as growth: the run had
/// no time to use later pages.
const NEW_UNTIL_PERCENT: u64 = 75;
/// Maximum length of the history; a longer one is thinned out.
const MAX_HISTORY: usize = 4096;

/// Memory that a run has leaked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Leak {
    /// Growth of the run between a quarter and three quarters of its time, in pages.
    pub grown_pages: u64,
    /// The part of the growth that was swapped out and not touched again until the end.
    pub idle_pages: u64,
}

/// The life of a page so far.
#[derive(Clone, Copy, Default)]
struct Life {
    /// The time of the first touch, in milliseconds after the first event, plus 1; 0 without
    /// content.
    born_ms: u32,
    is_out: bool,
    /// Whether the page was touched after it had been evicted.
    is_used: bool,
}

impl Life {
    fn touch(&mut self) {
        (self.is_out, self.is_used) = (false, true);
    }
}

/// The growth of a run.
#[derive(Default)]
pub struct Growth {
    started_us: Option<u64>,
    last_us: u64,
    pages: BTreeMap<Block, Box<[Life; BLOCK_PAGES]>>,
    content_pages: u64,
    peak_pages: u64,
    /// The pages with content at some times.
    history: Vec<(u64, u64)>,
    /// Minimum size of a change that the history shows, in pages.
    step_pages: u64,
    /// Pages with content when their processes ended, by the time of their birth in milliseconds,
    /// and how many of them were swapped out.
    ended: BTreeMap<u32, (u64, u64)>,
}

impl Growth {
    /// Takes the next event into account.
    pub fn note(&mut self, process: u32, event: &Event, time_us: u64) {
        let started_us = *self.started_us.get_or_insert(time_us);
        self.last_us = self.last_us.max(time_us);
        let now_ms = (time_us.saturating_sub(started_us) / 1000).min(u64::from(u32::MAX) - 1) as u32 + 1;
        match event {
            Event::Fill(pages) => self.fill(process, pages, now_ms),
            Event::Remap(from, to) => {
                self.fill(process, &(*to..PageNumber(to.0 + (from.end.0 - from.start.0))), now_ms);
                self.drop_pages(process, from);
            }
            Event::Stage(pages) => self.each(process, pages, |life| life.is_out = true),
            Event::Refault(pages) => self.each(process, pages, Life::touch),
            Event::Activate(page) => self.each(process, &page.folio(Order::ZERO), Life::touch),
            Event::Unmap(pages) | Event::Discard(pages) => self.drop_pages(process, pages),
            Event::End => self.end(process),
            _ => return,
        }
        self.peak_pages = self.peak_pages.max(self.content_pages);
        let last_pages = self.history.last().map_or(0, |&(_, pages)| pages);
        if self.content_pages.abs_diff(last_pages) > self.step_pages {
            self.history.push((time_us.saturating_sub(started_us), self.content_pages));
        }
        if self.history.len() > MAX_HISTORY {
            self.step_pages = self.step_pages * 2 + 1;
            let mut index = 0;
            self.history.retain(|_| {
                index += 1;
                index % 2 == 0
            });
        }
    }

    fn fill(&mut self, process: u32, pages: &Range<PageNumber>, now_ms: u32) {
        for block in blocks(pages) {
            let lives = self.pages.entry((process, block)).or_insert_with(|| Box::new([Life::default(); BLOCK_PAGES]));
            for life in &mut lives[part(pages, block)] {
                self.content_pages += u64::from(life.born_ms == 0);
                *life = match *life {
                    Life { born_ms: 0, .. } => Life { born_ms: now_ms, ..Life::default() },
                    Life { born_ms, .. } => Life { born_ms, is_out: false, is_used: true },
                };
            }
        }
    }

    fn each(&mut self, process: u32, pages: &Range<PageNumber>, change: impl Fn(&mut Life)) {
        let blocks = blocks(pages);
        for (&(_, block), lives) in self.pages.range_mut((process, blocks.start)..(process, blocks.end)) {
            lives[part(pages, block)].iter_mut().filter(|life| life.born_ms > 0).for_each(&change);
        }
    }

    fn drop_pages(&mut self, process: u32, pages: &Range<PageNumber>) {
        let mut dropped = 0;
        let blocks = blocks(pages);
        for (&(_, block), lives) in self.pages.range_mut((process, blocks.start)..(process, blocks.end)) {
            for life in &mut lives[part(pages, block)] {
                dropped += u64::from(life.born_ms > 0);
                *life = Life::default();
            }
        }
        self.content_pages -= dropped;
    }

    fn end(&mut self, process: u32) {
        let of_process: Vec<Block> = self.pages.range((process, 0)..=(process, u64::MAX)).map(|(&at, _)| at).collect();
        for lives in of_process.iter().filter_map(|block| self.pages.remove(block)) {
            for life in lives.iter().filter(|life| life.born_ms > 0) {
                self.content_pages -= 1;
                let (all, out) = self.ended.entry(life.born_ms).or_default();
                (*all, *out) = (*all + 1, *out + u64::from(life.is_out && !life.is_used));
            }
        }
    }

    /// Returns the pages with content at a time, from the history.
    fn pages_at(&self, time_us: u64) -> u64 {
        let until = self.history.partition_point(|&(at_us, _)| at_us <= time_us);
        until.checked_sub(1).map_or(0, |at| self.history[at].1)
    }

    /// Returns what the run has leaked, if it has.
    pub fn leak(mut self) -> Option<Leak> {
        let unended: Vec<u32> = self.pages.keys().map(|&(process, _)| process).collect();
        unended.into_iter().for_each(|process| self.end(process));
        let took_us = self.last_us - self.started_us?;
        let sizes = QUARTERS.map(|percent| self.pages_at(took_us * percent / 100));
        let min_pages = MIN_GROWN_PAGES.max(self.peak_pages >> MIN_GROWN_SHIFT);
        let grows = sizes.windows(2).all(|pair| pair[1] > pair[0]) && sizes[3] >= sizes[0] + min_pages;
        let at_ms = |percent: u64| (took_us / 1000 * percent / 100) as u32 + 1;
        let grown = self.ended.range(at_ms(QUARTERS[0])..at_ms(NEW_UNTIL_PERCENT)).map(|(_, &counts)| counts);
        let (grown_pages, idle_pages) = grown.fold((0, 0), |(a, b), (all, out)| (a + all, b + out));
        let is_leak = grows && grown_pages >= MIN_GROWN_PAGES / 2 && idle_pages * 100 >= grown_pages * MIN_IDLE_PERCENT;
        is_leak.then_some(Leak { grown_pages, idle_pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_PAGES: u64 = 512;
    const STEPS: u64 = 100;

    fn chunk(step: u64) -> Range<PageNumber> {
        PageNumber(step * STEP_PAGES)..PageNumber((step + 1) * STEP_PAGES)
    }

    /// Returns the leak of a run that grows in each step by a chunk, which is staged two steps
    /// later, and then does `more`.
    fn grown(more: impl Fn(u64) -> Vec<Event>) -> Option<Leak> {
        let mut growth = Growth::default();
        for step in 0..STEPS {
            let out = step.checked_sub(2).map(|before| Event::Stage(chunk(before)));
            for event in [Event::Fill(chunk(step))].into_iter().chain(out).chain(more(step)) {
                growth.note(0, &event, step * 10_000);
            }
        }
        growth.note(0, &Event::End, STEPS * 10_000);
        growth.leak()
    }

    #[test]
    fn what_grows_and_is_not_touched_again_leaks() {
        let leak = grown(|_| Vec::new()).unwrap();
        assert_eq!(leak.grown_pages, leak.idle_pages);
        assert_eq!(leak.grown_pages, 50 * STEP_PAGES);
    }

    #[test]
    fn what_is_used_does_not_leak() {
        assert_eq!(grown(|step| (0..step).map(|before| Event::Refault(chunk(before))).collect()), None);
        // One use at the end is enough.
        let at_end = |step: u64| if step == STEPS - 1 { 0..step } else { 0..0 };
        assert_eq!(grown(|step| at_end(step).map(|before| Event::Refault(chunk(before))).collect()), None);
        // One use is enough even if reading a chunk evicts the chunk that was read before.
        let read = |before| [Event::Refault(chunk(before)), Event::Stage(chunk(before))];
        assert_eq!(grown(|step| at_end(step).flat_map(read).collect()), None);
    }

    #[test]
    fn what_is_freed_does_not_leak() {
        let freed = |step: u64| step.checked_sub(5).map(|before| Event::Unmap(chunk(before)));
        assert_eq!(grown(|step| freed(step).into_iter().collect()), None);
        let at_once = |step: u64| (step == STEPS - 10).then(|| Event::Discard(chunk(0).start..chunk(step).start));
        assert_eq!(grown(|step| at_once(step).into_iter().collect()), None);
    }

    #[test]
    fn a_program_that_is_as_large_as_ever_does_not_leak() {
        let mut growth = Growth::default();
        growth.note(0, &Event::Fill(chunk(0).start..chunk(90).end), 0);
        growth.note(0, &Event::Stage(chunk(50)), 10);
        growth.note(0, &Event::End, 1_000_000);
        assert_eq!(growth.leak(), None);
        assert_eq!(Growth::default().leak(), None);
    }

    #[test]
    fn a_long_history_is_thinned_out() {
        let mut growth = Growth::default();
        for step in 0..40_000 {
            growth.note(0, &Event::Fill(PageNumber(step).folio(Order::ZERO)), step);
        }
        assert!(growth.history.len() <= MAX_HISTORY);
        let half = growth.pages_at(20_000);
        assert!((19_000..=20_000).contains(&half), "{half}");
    }
}
