//! Files of tmpfs: they stay until the end and are swapped out under pressure as single pages.

use super::MIB;
use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::Access;
use foliomem_types::units::PageNumber;
use std::ops::Range;

/// Pages of a mapping of a file: no large folio fits into it.
const MAPPING_PAGES: u32 = 3;

/// All files, one after the other.
#[derive(Debug)]
pub struct Files {
    base: PageNumber,
    pages: u32,
}

impl Files {
    /// Returns the pages of address space for `pages` pages of files.
    pub fn address_pages(pages: u32) -> u32 {
        pages.div_ceil(MAPPING_PAGES) * (MAPPING_PAGES + 1)
    }

    /// Makes an empty tmpfs in the address space from `base` on.
    pub fn new(base: PageNumber) -> Files {
        Files { base, pages: 0 }
    }

    fn page(&self, number: u32) -> PageNumber {
        self.base.offset(number / MAPPING_PAGES * (MAPPING_PAGES + 1) + number % MAPPING_PAGES)
    }

    /// Writes `pages` more pages.
    pub fn write(&mut self, lab: &mut Lab, pages: u32) -> Result<(), LabError> {
        for number in self.pages..self.pages + pages {
            if number.is_multiple_of(MAPPING_PAGES) {
                let start = self.page(number);
                lab.map(start..start.offset(MAPPING_PAGES));
            }
            lab.touch(self.page(number), Access::Write)?;
        }
        self.pages += pages;
        Ok(())
    }

    /// Reads the existing pages of `range`.
    pub fn read(&self, lab: &mut Lab, range: Range<u32>) -> Result<(), LabError> {
        (range.start..range.end.min(self.pages)).try_for_each(|number| lab.touch(self.page(number), Access::Read))
    }
}

/// Returns the number of pages that hold `kib` KiB.
pub fn pages_of_kib(kib: u32) -> u32 {
    (kib * MIB).div_ceil(1024)
}
