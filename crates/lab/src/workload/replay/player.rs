//! The player: it repeats on the lab's machine what a recorded run did at each event of its trace,
//! and adds the touches that the trace does not have.

use super::chance::Chance;
use super::memory::Unmanaged;
use super::places::{Place, Places};
use super::residency::{Origin, Stays};
use super::summary::Summary;
use crate::bits::{Bits, clear, clear_page, is_set, set, set_page};
use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::Access;
use crate::random::Random;
use foliomem_trace::Record;
use foliomem_types::trace_event::Event;
use foliomem_types::units::{BLOCK_PAGES, Order, PageNumber};
use std::collections::BTreeSet;
use std::ops::Range;

/// The resident pages of the recorded run in a block.
#[derive(Clone, Default)]
struct Resident {
    pages: Bits,
    /// Those that were in use until they were evicted.
    in_use: Bits,
}

/// The state of a replay.
pub struct Player<'a> {
    /// The lab, whose engine serves the touches.
    pub lab: &'a mut Lab,
    places: &'a Places,
    /// The pages with content and the mapped pages, by place.
    content: Box<[Bits]>,
    mapped: Box<[Bits]>,
    /// The processes recorded under a limit, their residency periods, and the number of periods so
    /// far.
    limited: BTreeSet<u32>,
    stays: &'a Stays,
    stay: usize,
    /// The resident pages of the recorded run, by place.
    resident: Box<[Resident]>,
    chance: Chance,
    unmanaged: Unmanaged,
    random: Random,
}

impl<'a> Player<'a> {
    /// Makes a player of the run with this summary; unknown touches are drawn from `seed`.
    pub fn new(lab: &'a mut Lab, summary: &'a Summary, seed: u64) -> Player<'a> {
        let places = summary.places.end().index();
        Player {
            lab,
            places: &summary.places,
            content: vec![Bits::default(); places].into(),
            mapped: vec![Bits::default(); places].into(),
            limited: BTreeSet::new(),
            stays: &summary.stays,
            stay: 0,
            resident: vec![Resident::default(); places].into(),
            chance: Chance::new(places),
            unmanaged: Unmanaged::default(),
            random: Random::new(seed),
        }
    }
}

impl Player<'_> {
    /// Replays an event of the run, after the unseen touches that are due before the event.
    pub fn play(&mut self, Record { process, event, time_us }: Record) -> Result<(), LabError> {
        self.do_until(time_us)?;
        match event {
            Event::Start { .. }
            | Event::Lost(_)
            | Event::Faults { .. }
            | Event::Took { .. }
            | Event::Computed { .. }
            | Event::Delayed { .. }
            | Event::Moved { .. }
            | Event::Machine { .. } => {}
            Event::Compressed { pages, len_bytes } => {
                // A piece lies in one block.
                if let Some((place, part)) = self.places.parts(process, &pages).next() {
                    self.lab.machine().learn_density(&place.pages(part), len_bytes);
                }
            }
            Event::End => self.end(process),
            Event::Limit(_) => {
                self.limited.insert(process);
            }
            Event::Stage(range) => self.stage(process, &range, time_us),
            Event::Unmanaged(pages) => self.set_unmanaged(process, pages),
            Event::Map(range) => self.map(process, &range),
            Event::Unmap(range) => {
                self.forget(process, &range);
                self.unmap(process, &range);
            }
            Event::Discard(range) => self.forget(process, &range),
            Event::Remap(from, to) => {
                let target = to..PageNumber(to.0 + (from.end.0 - from.start.0));
                self.forget(process, &from);
                self.unmap(process, &from);
                self.fill(process, &target)?;
            }
            Event::Fill(range) => self.fill(process, &range)?,
            Event::Refault(range) if range.end == range.start.offset(1) => self.refault(process, &range, time_us)?,
            Event::Refault(range) => self.refault_stream(process, &range)?,
            Event::Activate(page) => match self.find(process, page) {
                Some(here) => {
                    self.see(process, here, time_us, Origin::Staged);
                    self.come_back(process, page, here)?;
                }
                None => self.fill(process, &page.folio(Order::ZERO))?,
            },
            Event::Along(range) => {
                for page in (range.start.0..range.end.0).map(PageNumber) {
                    if self.has(process, page) {
                        self.come(process, &page.folio(Order::ZERO));
                    }
                }
            }
        }
        Ok(())
    }

    /// Touches the page of `range` again, which was swapped out in the run.
    fn refault(&mut self, process: u32, range: &Range<PageNumber>, time_us: u64) -> Result<(), LabError> {
        let Some(here) = self.find(process, range.start) else { return self.fill(process, range) };
        self.see(process, here, time_us, Origin::Elsewhere);
        self.come_back(process, range.start, here)
    }

    /// Touches the pages of a stream again, which were swapped out in the run.
    fn refault_stream(&mut self, process: u32, range: &Range<PageNumber>) -> Result<(), LabError> {
        // The stream includes its touched page, which precedes the range in either direction.
        let stream = PageNumber(range.start.0.saturating_sub(1))..range.end.offset(1);
        self.places.parts(process, &stream).for_each(|(place, part)| self.chance.forget(place, part));
        for page in (range.start.0..range.end.0).map(PageNumber) {
            if let Some(here) = self.find(process, page) {
                self.come_back(process, page, here)?;
            }
        }
        Ok(())
    }

    /// Records that the run evicts pages.
    fn stage(&mut self, process: u32, range: &Range<PageNumber>, time_us: u64) {
        self.go(process, range);
        if self.limited.contains(&process) {
            let parts = self.places.parts(process, range);
            parts.for_each(|(place, part)| self.chance.leave(place, part, time_us));
        }
    }

    /// Records that a page, at `here`, was touched by itself while it was not resident in the run.
    /// (The trace has some of these touches twice.)
    fn see(&mut self, process: u32, here: PageNumber, now_us: u64, origin: Origin) {
        let Resident { pages, .. } = &self.resident[Place::of(here).index()];
        if self.limited.contains(&process) && !is_set(pages, here.index_in_block()) {
            self.chance.touched(here, now_us, origin);
        }
    }

    #[inline]
    fn come_back(&mut self, process: u32, page: PageNumber, here: PageNumber) -> Result<(), LabError> {
        self.come(process, &page.folio(Order::ZERO));
        self.lab.touch(here, Access::Read)
    }

    /// Returns the place of a page if it has content.
    fn find(&self, process: u32, page: PageNumber) -> Option<PageNumber> {
        let place = self.places.find(process, page.0 / BLOCK_PAGES as u64)?;
        is_set(&self.content[place.index()], page.index_in_block()).then(|| place.page(page.index_in_block()))
    }

    fn has(&self, process: u32, page: PageNumber) -> bool {
        self.find(process, page).is_some()
    }

    /// Marks pages as resident in the run. For a process recorded under a limit, also marks those
    /// that stay in use until their eviction.
    fn come(&mut self, process: u32, range: &Range<PageNumber>) {
        if self.limited.contains(&process) {
            for (place, part) in self.places.parts(process, range) {
                let Resident { pages, in_use } = &mut self.resident[place.index()];
                set(pages, part.clone());
                self.chance.come(place, part.clone());
                for at in part {
                    if self.stays.were_in_use(self.stay) {
                        set_page(in_use, at);
                    } else {
                        clear_page(in_use, at);
                    }
                    self.stay += 1;
                }
            }
        }
    }

    /// Marks pages as no longer resident in the run.
    fn go(&mut self, process: u32, range: &Range<PageNumber>) {
        if self.limited.contains(&process) {
            for (place, part) in self.places.parts(process, range) {
                let Resident { pages, in_use } = &mut self.resident[place.index()];
                clear(pages, part.clone());
                clear(in_use, part);
            }
        }
    }

    /// Schedules touches of the pages that the engine just staged and that were resident in the
    /// run: soon and once, if they were in use.
    #[inline]
    pub fn expect_moved_home(&mut self, now_us: u64) {
        if self.stays.is_empty() {
            return;
        }
        for range in self.lab.machine().take_moved_home() {
            for page in (range.start.0..range.end.0).map(PageNumber) {
                let Resident { pages, in_use } = &mut self.resident[Place::of(page).index()];
                if is_set(pages, page.index_in_block()) {
                    let soon = clear_page(in_use, page.index_in_block());
                    let wait_us = soon.then(|| self.random.below(2 * self.stays.staged_us() + 1));
                    self.chance.expect(page, wait_us, now_us, &mut self.random);
                }
            }
        }
    }

    /// Does all touches due until `time_us`.
    #[inline]
    fn do_until(&mut self, time_us: u64) -> Result<(), LabError> {
        while let Some(page) = self.chance.next(time_us) {
            self.lab.touch(page, Access::Read)?;
        }
        Ok(())
    }

    fn map(&mut self, process: u32, range: &Range<PageNumber>) {
        self.change_mappings(process, range, set);
    }

    fn unmap(&mut self, process: u32, range: &Range<PageNumber>) {
        self.change_mappings(process, range, clear);
    }

    /// Changes which pages of a range are mapped with `change`, which returns their number.
    fn change_mappings(
        &mut self,
        process: u32,
        range: &Range<PageNumber>,
        change: impl Fn(&mut Bits, Range<usize>) -> u32,
    ) {
        for (place, part) in self.places.parts(process, range) {
            let bits = &mut self.mapped[place.index()];
            if change(bits, part) > 0 {
                let mut at = 0;
                let runs = std::iter::from_fn(|| {
                    let start = (at..BLOCK_PAGES).find(|&page| is_set(bits, page))?;
                    at = (start..BLOCK_PAGES).find(|&page| !is_set(bits, page)).unwrap_or(BLOCK_PAGES);
                    Some(place.pages(start..at))
                });
                self.lab.machine().map_anew(place.pages(0..BLOCK_PAGES), runs);
            }
        }
    }

    fn fill(&mut self, process: u32, range: &Range<PageNumber>) -> Result<(), LabError> {
        // The trace has no events for growing mappings.
        self.map(process, range);
        self.come(process, range);
        for (place, part) in self.places.parts(process, range) {
            set(&mut self.content[place.index()], part.clone());
            self.lab.touch_all(place.pages(part), Access::Write)?;
        }
        Ok(())
    }

    fn forget(&mut self, process: u32, range: &Range<PageNumber>) {
        self.go(process, range);
        for (place, part) in self.places.parts(process, range) {
            clear(&mut self.content[place.index()], part.clone());
            self.chance.forget(place, part.clone());
            self.lab.forget(place.pages(part));
        }
    }

    fn set_unmanaged(&mut self, process: u32, pages: u32) {
        let before_pages = self.unmanaged.set(process, pages);
        self.lab.charge_others(before_pages, pages);
    }

    fn end(&mut self, process: u32) {
        let all = PageNumber(0)..PageNumber(u64::MAX);
        self.go(process, &all);
        self.limited.remove(&process);
        self.set_unmanaged(process, 0);
        for (place, part) in self.places.parts(process, &all) {
            (self.content[place.index()], self.mapped[place.index()]) = Default::default();
            self.chance.forget(place, part.clone());
            let pages = place.pages(part);
            self.lab.forget(pages.clone());
            self.lab.machine().map_anew(pages, std::iter::empty());
        }
    }
}
