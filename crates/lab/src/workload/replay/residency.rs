//! Residency: which pages were resident in a run recorded under a limit, and whether they were in
//! use.
//!
//! The recorded run does not see touches of resident pages. But at the end of each residency period
//! (*stay*) the page was staged, and a page in use was touched again before it was written back.
//! The run's engine learned in this way which pages to keep, and so does the replay. The use of a
//! page at the end of its last stay is unknown if the run never evicted the page again. The page
//! then counts as it did at its previous eviction, or as in use if it was never evicted.

use super::places::{Block, blocks, part};
use crate::bits::{Bits, clear_page, is_set, set_page};
use foliomem_types::units::{BLOCK_PAGES, PageNumber};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Maximum time a page is staged, in microseconds: a bad trace may contain any.
const MAX_STAGED_US: u64 = 10_000_000;

/// Where a page was before it became resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// In the arena: it was touched before it was written back.
    Staged,
    /// In the store, or the page is new.
    Elsewhere,
}

/// The use of a page at the end of a stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Usage {
    InUse,
    Idle,
}

/// Whether the page of each stay was in use until the end, one bit for each, in the order in which
/// stays began: page by page of ranges.
#[derive(Clone, Debug, Default)]
pub struct Stays {
    bits: Vec<Bits>,
    len: usize,
    staged_us: u64,
}

impl Stays {
    fn push(&mut self, usage: Usage) {
        if self.len.is_multiple_of(BLOCK_PAGES) {
            self.bits.push(Bits::default());
        }
        self.len += 1;
        self.set(self.len - 1, usage);
    }

    fn set(&mut self, stay: usize, usage: Usage) {
        let (bits, at) = (&mut self.bits[stay / BLOCK_PAGES], stay % BLOCK_PAGES);
        match usage {
            Usage::InUse => set_page(bits, at),
            Usage::Idle => {
                clear_page(bits, at);
            }
        }
    }

    /// Returns whether there were no stays.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the page of this stay was in use until the end.
    pub fn were_in_use(&self, stay: usize) -> bool {
        // The summary has a bit for each stay, unless the trace file has changed since it was
        // summarised.
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
    /// The use of the page at the end of the previous stay.
    before: Option<Usage>,
    ended_us: Option<u64>,
}

/// A collector of stays.
#[derive(Default)]
pub struct Residency {
    limited: BTreeSet<u32>,
    stays: Stays,
    last: BTreeMap<Block, Box<[Last; BLOCK_PAGES]>>,
    /// Total time for which pages touched again had been staged, and their number.
    staged_us: u64,
    returns: u64,
}

impl Residency {
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

    /// Records that pages become resident. A staged page was in use at the end of its last stay.
    pub fn come(&mut self, process: u32, pages: &Range<PageNumber>, now_us: u64, origin: Origin) {
        if !self.limited.contains(&process) {
            return;
        }
        let usage = if origin == Origin::Staged { Usage::InUse } else { Usage::Idle };
        for block in blocks(pages) {
            let last = self.last.entry((process, block)).or_insert_with(|| Box::new([Last::default(); BLOCK_PAGES]));
            for last in &mut last[part(pages, block)] {
                if let Some(ended_us) = last.ended_us {
                    self.stays.set(last.count as usize - 1, usage);
                    last.before = Some(usage);
                    if usage == Usage::InUse {
                        self.staged_us += now_us.saturating_sub(ended_us).min(MAX_STAGED_US);
                        self.returns += 1;
                    }
                }
                self.stays.push(last.before.unwrap_or(Usage::InUse));
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
                self.stays.set(last.count as usize - 1, Usage::Idle);
            }
        }
    }

    /// Returns all stays.
    pub fn stays(self) -> Stays {
        Stays { staged_us: self.staged_us / self.returns.max(1), ..self.stays }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(start: u64, end: u64) -> Range<PageNumber> {
        PageNumber(start)..PageNumber(end)
    }

    /// Returns for each stay whether its page was in use.
    fn in_use(residency: Residency) -> Vec<bool> {
        let stays = residency.stays();
        (0..stays.len).map(|stay| stays.were_in_use(stay)).collect()
    }

    #[test]
    fn pages_touched_while_staged_were_in_use() {
        let mut residency = Residency::default();
        residency.begin(1);
        // The range crosses a block border.
        residency.come(1, &pages(510, 514), 0, Origin::Elsewhere);
        residency.go(1, &pages(510, 513), 1000);
        residency.come(1, &pages(511, 512), 1040, Origin::Staged);
        residency.come(1, &pages(512, 513), 9000, Origin::Elsewhere);
        assert_eq!(residency.returns, 1);
        // The second page was in use and counts so again; the third was not; the fourth was never
        // evicted.
        assert_eq!(in_use(residency), [false, true, false, true, true, false]);
    }

    #[test]
    fn the_average_staged_time_is_known() {
        let mut residency = Residency::default();
        assert_eq!(Residency::default().stays().staged_us(), 0);
        residency.begin(0);
        let (staged, elsewhere) = (Origin::Staged, Origin::Elsewhere);
        for (now_us, origin, wait_us) in
            [(0, elsewhere, 0), (1000, staged, 30), (2000, elsewhere, 900), (3000, staged, 50)]
        {
            residency.go(0, &pages(7, 8), now_us);
            residency.come(0, &pages(7, 8), now_us + wait_us, origin);
        }
        assert_eq!(residency.stays().staged_us(), 40);
    }

    #[test]
    fn processes_without_a_limit_are_ignored() {
        let mut residency = Residency::default();
        residency.begin(1);
        residency.come(1, &pages(0, 1), 0, Origin::Elsewhere);
        residency.come(2, &pages(0, 600), 0, Origin::Elsewhere);
        residency.end(1);
        residency.go(1, &pages(0, 1), 5);
        residency.come(1, &pages(0, 1), 5, Origin::Elsewhere);
        assert_eq!(in_use(residency), [true], "an ended process is ignored, too");
    }
}
