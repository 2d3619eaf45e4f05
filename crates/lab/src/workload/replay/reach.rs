//! What was in reach of a run that was recorded under a limit, and whether it was in use.
//!
//! Nobody sees the touches of a page while it is in reach. But at the end of each *stay* there the page was staged, and what was in use was touched again
//! before it had gone further than home: as the engine of the run has found out which pages to keep, so does the replay. Of a page that never left that is not known: it
//! is taken to be as it was when it left it before, or in use if it never did.

use super::{Block, blocks, part};
use crate::bits::{Bits, is_set, set};
use foliomem_core::units::{BLOCK_PAGES, PageNumber};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Nothing is at home for longer: a bad trace may say so.
const MOST_HOME_US: u64 = 10_000_000;

/// Whether each page was in use until it left reach, a bit for each stay, in the order in which they began: page by page of ranges.
#[derive(Clone, Debug, Default)]
pub struct Stays {
    bits: Vec<Bits>,
    len: usize,
    at_home_us: u64,
}

impl Stays {
    fn push(&mut self, in_use: bool) {
        if self.len.is_multiple_of(BLOCK_PAGES) {
            self.bits.push(Bits::default());
        }
        self.len += 1;
        self.set(self.len - 1, in_use);
    }

    fn set(&mut self, stay: usize, in_use: bool) {
        let at = stay % BLOCK_PAGES;
        set(&mut self.bits[stay / BLOCK_PAGES], at..at + 1, in_use);
    }

    /// Whether there was none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the page of that stay was.
    pub fn were_in_use(&self, stay: usize) -> bool {
        // There are as many as in the summary, unless the file was changed since.
        self.bits.get(stay / BLOCK_PAGES).is_some_and(|bits| is_set(bits, stay % BLOCK_PAGES))
    }

    /// How long those that were had been at home by then, on average.
    pub fn at_home_us(&self) -> u64 {
        self.at_home_us
    }
}

/// A page's last stay.
#[derive(Clone, Copy, Default)]
struct Last {
    /// Its number and 1, 0 if there was none. (Behind 2^32 the wrong ones are told of.)
    count: u32,
    /// Whether it was in use at the end of the one before.
    was_in_use: Option<bool>,
    ended_us: Option<u64>,
}

/// Finds that out.
#[derive(Default)]
pub struct Reach {
    limited: BTreeSet<u32>,
    stays: Stays,
    last: BTreeMap<Block, Box<[Last; BLOCK_PAGES]>>,
    /// How long those that came back from home had been there, together, and how many they were.
    home_us: u64,
    homecomings: u64,
}

impl Reach {
    /// The process is recorded under a limit. Others are passed over.
    pub fn begin(&mut self, process: u32) {
        self.limited.insert(process);
    }

    /// The process has ended.
    pub fn end(&mut self, process: u32) {
        if self.limited.remove(&process) {
            self.last.retain(|&(of, _), _| of != process);
        }
    }

    /// Pages come into reach; `from_home`, if they had left it.
    pub fn come(&mut self, process: u32, pages: &Range<PageNumber>, now_us: u64, from_home: bool) {
        if !self.limited.contains(&process) {
            return;
        }
        for block in blocks(pages) {
            let last = self.last.entry((process, block)).or_insert_with(|| Box::new([Last::default(); BLOCK_PAGES]));
            for last in &mut last[part(pages, block)] {
                if let Some(ended_us) = last.ended_us {
                    self.stays.set(last.count as usize - 1, from_home);
                    last.was_in_use = Some(from_home);
                    self.home_us += now_us.saturating_sub(ended_us).min(MOST_HOME_US) * u64::from(from_home);
                    self.homecomings += u64::from(from_home);
                }
                self.stays.push(last.was_in_use.unwrap_or(true));
                *last = Last { count: self.stays.len as u32, ended_us: None, ..*last };
            }
        }
    }

    /// They leave it, for ever unless they come again.
    pub fn go(&mut self, process: u32, pages: &Range<PageNumber>, now_us: u64) {
        let blocks = blocks(pages);
        for (&(_, block), last) in self.last.range_mut((process, blocks.start)..(process, blocks.end)) {
            for last in last[part(pages, block)].iter_mut().filter(|last| last.count > 0) {
                last.ended_us = Some(now_us);
                self.stays.set(last.count as usize - 1, false);
            }
        }
    }

    /// All of it.
    pub fn stays(self) -> Stays {
        Stays { at_home_us: self.home_us / self.homecomings.max(1), ..self.stays }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(start: u64, end: u64) -> Range<PageNumber> {
        PageNumber(start)..PageNumber(end)
    }

    /// By stay.
    fn in_use(reach: Reach) -> Vec<bool> {
        let stays = reach.stays();
        (0..stays.len).map(|stay| stays.were_in_use(stay)).collect()
    }

    #[test]
    fn what_comes_back_from_home_was_in_use() {
        let mut reach = Reach::default();
        reach.begin(1);
        // Across a border of blocks.
        reach.come(1, &pages(510, 514), 0, false);
        reach.go(1, &pages(510, 513), 1000);
        reach.come(1, &pages(511, 512), 1040, true);
        reach.come(1, &pages(512, 513), 9000, false);
        assert_eq!(reach.homecomings, 1);
        // The second was, and is taken to be again; the third was not; the fourth never left.
        assert_eq!(in_use(reach), [false, true, false, true, true, false]);
    }

    #[test]
    fn how_long_it_takes_at_home_is_known_on_average() {
        let mut reach = Reach::default();
        assert_eq!(Reach::default().stays().at_home_us(), 0);
        reach.begin(0);
        for (now_us, from_home, wait_us) in [(0, false, 0), (1000, true, 30), (2000, false, 900), (3000, true, 50)] {
            reach.go(0, &pages(7, 8), now_us);
            reach.come(0, &pages(7, 8), now_us + wait_us, from_home);
        }
        assert_eq!(reach.stays().at_home_us(), 40);
    }

    #[test]
    fn of_processes_without_a_limit_nothing_is_kept() {
        let mut reach = Reach::default();
        reach.begin(1);
        reach.come(1, &pages(0, 1), 0, false);
        reach.come(2, &pages(0, 600), 0, false);
        reach.end(1);
        reach.go(1, &pages(0, 1), 5);
        reach.come(1, &pages(0, 1), 5, false);
        assert_eq!(in_use(reach), [true], "an ended one neither");
    }
}
