//! Residency: which pages were resident in a run recorded under a limit, and whether they were in
//! use.
//!
//! The run does not see touches of resident pages. But at the end of each residency period (*stay*)
//! the page was staged, and a page in use was touched again before it was written back: the run's
//! engine found out in this way which pages to keep, and so does the replay. For a page that was
//! never evicted that is unknown: it counts as it did at its previous eviction, or as in use if
//! there was none.

use super::{Block, blocks, part};
use crate::bits::{Bits, is_set, set};
use foliomem_types::units::{BLOCK_PAGES, PageNumber};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Maximum time a page is staged, in microseconds: a bad trace may contain any.
const MAX_HOME_US: u64 = 10_000_000;

/// Whether the page of each stay was in use until the end, one bit for each, in the order in which
/// stays began: page by page of ranges.
#[derive(Clone, Debug, Default)]
pub struct Stays {
    bits: Vec<Bits>,
    len: usize,
    staged_us: u64,
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

    /// Returns whether there were no stays.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the page of this stay was in use until the end.
    pub fn were_in_use(&self, stay: usize) -> bool {
        // The summary has a bit for each, unless the file changed since.
        self.bits.get(stay / BLOCK_PAGES).is_some_and(|bits| is_set(bits, stay % BLOCK_PAGES))
    }

    /// Returns the average time for which used pages had been staged when they were touched.
    pub fn staged_us(&self) -> u64 {
        self.staged_us
    }
}

/// The last stay of a page.
#[derive(Clone, Copy, Default)]
struct Last {
    /// The number of the stay plus 1, 0 if there was none. (Beyond 2^32 the numbers wrap.)
    count: u32,
    /// Whether the page was in use at the end of the previous stay.
    was_in_use: Option<bool>,
    ended_us: Option<u64>,
}

/// A collector of stays.
#[derive(Default)]
pub struct Reach {
    limited: BTreeSet<u32>,
    stays: Stays,
    last: BTreeMap<Block, Box<[Last; BLOCK_PAGES]>>,
    /// Total time for which pages touched again had been staged, and their number.
    home_us: u64,
    homecomings: u64,
}

impl Reach {
    /// Records that the process is recorded under a limit. Other processes are ignored.
    pub fn begin(&mut self, process: u32) {
        self.limited.insert(process);
    }

    /// Drops a process that ended.
    pub fn end(&mut self, process: u32) {
        if self.limited.remove(&process) {
            self.last.retain(|&(of, _), _| of != process);
        }
    }

    /// Records that pages become resident; `from_home` says that they were staged.
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
                    self.home_us += now_us.saturating_sub(ended_us).min(MAX_HOME_US) * u64::from(from_home);
                    self.homecomings += u64::from(from_home);
                }
                self.stays.push(last.was_in_use.unwrap_or(true));
                *last = Last { count: self.stays.len as u32, ended_us: None, ..*last };
            }
        }
    }

    /// Records that pages are evicted, for good unless they come again.
    pub fn go(&mut self, process: u32, pages: &Range<PageNumber>, now_us: u64) {
        let blocks = blocks(pages);
        for (&(_, block), last) in self.last.range_mut((process, blocks.start)..(process, blocks.end)) {
            for last in last[part(pages, block)].iter_mut().filter(|last| last.count > 0) {
                last.ended_us = Some(now_us);
                self.stays.set(last.count as usize - 1, false);
            }
        }
    }

    /// Returns all stays.
    pub fn stays(self) -> Stays {
        Stays { staged_us: self.home_us / self.homecomings.max(1), ..self.stays }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(start: u64, end: u64) -> Range<PageNumber> {
        PageNumber(start)..PageNumber(end)
    }

    /// Returns for each stay whether its page was in use.
    fn in_use(reach: Reach) -> Vec<bool> {
        let stays = reach.stays();
        (0..stays.len).map(|stay| stays.were_in_use(stay)).collect()
    }

    #[test]
    fn pages_touched_while_staged_were_in_use() {
        let mut reach = Reach::default();
        reach.begin(1);
        // The range crosses a block border.
        reach.come(1, &pages(510, 514), 0, false);
        reach.go(1, &pages(510, 513), 1000);
        reach.come(1, &pages(511, 512), 1040, true);
        reach.come(1, &pages(512, 513), 9000, false);
        assert_eq!(reach.homecomings, 1);
        // The second page was in use and counts so again; the third was not; the fourth was never
        // evicted.
        assert_eq!(in_use(reach), [false, true, false, true, true, false]);
    }

    #[test]
    fn the_average_staged_time_is_known() {
        let mut reach = Reach::default();
        assert_eq!(Reach::default().stays().staged_us(), 0);
        reach.begin(0);
        for (now_us, from_home, wait_us) in [(0, false, 0), (1000, true, 30), (2000, false, 900), (3000, true, 50)] {
            reach.go(0, &pages(7, 8), now_us);
            reach.come(0, &pages(7, 8), now_us + wait_us, from_home);
        }
        assert_eq!(reach.stays().staged_us(), 40);
    }

    #[test]
    fn processes_without_a_limit_are_ignored() {
        let mut reach = Reach::default();
        reach.begin(1);
        reach.come(1, &pages(0, 1), 0, false);
        reach.come(2, &pages(0, 600), 0, false);
        reach.end(1);
        reach.go(1, &pages(0, 1), 5);
        reach.come(1, &pages(0, 1), 5, false);
        assert_eq!(in_use(reach), [true], "an ended process is ignored, too");
    }
}
