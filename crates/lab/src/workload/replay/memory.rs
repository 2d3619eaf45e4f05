//! The memory of the processes of a recorded run: pages with content, and unmanaged memory.

use super::places::{Block, blocks, part};
use crate::bits::{Bits, clear, is_set, set};
use foliomem_types::units::{BLOCK_PAGES, PageNumber};
use std::collections::BTreeMap;
use std::ops::Range;

/// The pages with content, by block.
#[derive(Default)]
pub struct PagesWithContent {
    blocks: BTreeMap<Block, Bits>,
    pages: u64,
}

impl PagesWithContent {
    /// Returns the number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Adds the pages of a range.
    pub fn add(&mut self, process: u32, pages: &Range<PageNumber>) {
        for block in blocks(pages) {
            let bits = self.blocks.entry((process, block)).or_default();
            self.pages += u64::from(set(bits, part(pages, block)));
        }
    }

    /// Removes the pages of a range.
    pub fn remove(&mut self, process: u32, pages: &Range<PageNumber>) {
        let blocks = blocks(pages);
        for (&(_, block), bits) in self.blocks.range_mut((process, blocks.start)..(process, blocks.end)) {
            self.pages -= u64::from(clear(bits, part(pages, block)));
        }
    }

    /// Removes the pages of a process that ended.
    pub fn end(&mut self, process: u32) {
        let of_process = (process, 0)..=(process, u64::MAX);
        while let Some((&block, bits)) = self.blocks.range(of_process.clone()).next() {
            self.pages -= bits.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            self.blocks.remove(&block);
        }
    }

    /// Iterates over the parts of a range that have content.
    pub fn runs(&self, process: u32, pages: &Range<PageNumber>) -> impl Iterator<Item = Range<PageNumber>> {
        let (mut at, end) = (pages.start.0, pages.end.0);
        let mut next = move |on: bool| {
            at = (at..end).find(|&page| self.has(process, PageNumber(page)) == on).unwrap_or(end);
            PageNumber(at)
        };
        std::iter::from_fn(move || Some(next(true)..next(false)).filter(|run| !run.is_empty()))
    }

    /// Returns whether a page has content.
    pub fn has(&self, process: u32, page: PageNumber) -> bool {
        let bits = self.blocks.get(&(process, page.0 / BLOCK_PAGES as u64));
        bits.is_some_and(|bits| is_set(bits, page.index_in_block()))
    }
}

/// Unmanaged memory by process.
#[derive(Default)]
pub struct Unmanaged {
    by_process: BTreeMap<u32, u32>,
    pages: u64,
}

impl Unmanaged {
    /// Returns the number of pages of all processes.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Sets the unmanaged memory of a process; returns the previous value.
    pub fn set(&mut self, process: u32, pages: u32) -> u32 {
        let before_pages = self.by_process.insert(process, pages).unwrap_or(0);
        self.pages = self.pages + u64::from(pages) - u64::from(before_pages);
        before_pages
    }
}
