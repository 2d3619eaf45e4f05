//! The replay workload: it repeats the mappings, touches and drops of a recorded run
//! ([`foliomem_trace`]).
//!
//! - The trace has every touch of pages that the limit had made non-resident, and everything read
//!   ahead. It does not have touches of resident pages. The run itself found out whether a page was
//!   in use until it was evicted, by staging it ([`reach`]). Such a page is touched after the
//!   engine stages it in the replay, after a delay like those of other pages, once for each time
//!   that it became resident. All these touches only read.
//! - Other pages that were resident in the run but are not in the replay are touched by chance in
//!   their place ([`chance`]).
//! - A trace without a limit has every touch.
//! - Memory compresses as it did in the run ([`crate::density`]).
//! - Unmanaged memory takes its part of the room.
//! - Pages of all processes lie in one address space. Used blocks of 2 MiB that were adjacent are
//!   adjacent here. Memory that was moved, or shared with a parent, counts as touched for the first
//!   time.

mod chance;
mod reach;

use self::chance::Chance;
use self::reach::{Reach, Stays};
use super::{MIB, Round, Rounds};
use crate::bits::{Bits, is_set, set};
use crate::costs::Costs;
use crate::density::{Density, FirstPiece, UNIT, order_of};
use crate::error::LabError;
use crate::lab::Lab;
use crate::random::Random;
use crate::schedule::Took;
use foliomem_trace::{Record, TraceReader};
use foliomem_types::trace_event::Event;
use foliomem_types::units::{BLOCK_PAGES, CpuNumber, Order, PageNumber};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A block of a process: the process's number and the block's.
type Block = (u32, u64);

/// Maximum number of blocks of a run: 1 TiB.
const MAX_BLOCKS: usize = (1 << 28) / BLOCK_PAGES;
/// Number of events between two counts of the swapped-out pages.
const NOTE_EVERY: u64 = 4096;

/// The summary of a trace.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Peak of the pages with content, plus unmanaged memory.
    pub peak_pages: u64,
    /// Maximum limit of the run, if it was recorded under one.
    pub limit_pages: Option<u64>,
    /// Number of processes large enough to be managed.
    pub managed_processes: u32,
    /// Number of all processes.
    pub processes: u32,
    /// Number of recorded touches.
    pub touches: u64,
    /// Number of lost events.
    pub lost: u64,
    places: Places,
    /// The residency periods of processes recorded under a limit.
    stays: Stays,
    /// The first piece of each unit of the address space that was compressed.
    first_pieces: Vec<FirstPiece>,
}

/// The place of each used block. Blocks are adjacent here exactly if they were adjacent in the run.
#[derive(Clone, Debug, Default)]
struct Places {
    /// Sorted by process and block.
    runs: Vec<BlockRun>,
}

/// Adjacent blocks of a process.
#[derive(Clone, Debug)]
struct BlockRun {
    process: u32,
    blocks: Range<u64>,
    /// The place of the first block.
    place: Place,
}

/// The place of a block: its number in the address space of the replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place(u32);

impl Place {
    /// Returns the place that contains a page of the address space.
    fn of(page: PageNumber) -> Place {
        Place((page.0 / BLOCK_PAGES as u64) as u32)
    }

    /// Returns the page with this index in the block.
    fn page(self, index: usize) -> PageNumber {
        PageNumber(u64::from(self.0) * BLOCK_PAGES as u64 + index as u64)
    }

    fn pages(self, part: Range<usize>) -> Range<PageNumber> {
        self.page(part.start)..self.page(part.end)
    }

    fn index(self) -> usize {
        self.0 as usize
    }
}

impl Places {
    /// Assigns places to `blocks`, in their order.
    fn of(blocks: impl IntoIterator<Item = Block>) -> Places {
        let mut runs: Vec<BlockRun> = Vec::new();
        for (process, block) in blocks {
            match runs.last_mut() {
                Some(last) if (last.process, last.blocks.end) == (process, block) => last.blocks.end += 1,
                last => {
                    let place = Place(last.map_or(1, |last| last.end().0 + 1));
                    runs.push(BlockRun { process, blocks: block..block + 1, place });
                }
            }
        }
        Places { runs }
    }

    /// Returns the place after the last one.
    fn end(&self) -> Place {
        self.runs.last().map_or(Place(0), BlockRun::end)
    }

    fn find(&self, process: u32, block: u64) -> Option<Place> {
        let run = self.runs.get(self.runs.partition_point(|run| run.ends_before(process, block)))?;
        (run.process == process).then(|| run.place_of(block)).flatten()
    }

    /// Iterates over the places of the used blocks in a range, each with its part of the range.
    fn parts(&self, process: u32, pages: &Range<PageNumber>) -> impl Iterator<Item = (Place, Range<usize>)> + use<'_> {
        let (blocks, pages) = (blocks(pages), pages.clone());
        let first = self.runs.partition_point(|run| run.ends_before(process, blocks.start));
        let Range { start, end } = blocks;
        let runs = self.runs[first..].iter().take_while(move |run| (run.process, run.blocks.start) < (process, end));
        runs.flat_map(move |run| {
            let here = run.blocks.start.max(start)..run.blocks.end.min(end);
            let pages = pages.clone();
            here.filter_map(move |block| Some((run.place_of(block)?, part(&pages, block))))
        })
    }
}

impl BlockRun {
    fn end(&self) -> Place {
        Place(self.place.0 + (self.blocks.end - self.blocks.start) as u32)
    }

    /// Returns whether the run ends before that block.
    fn ends_before(&self, process: u32, block: u64) -> bool {
        (self.process, self.blocks.end) <= (process, block)
    }

    fn place_of(&self, block: u64) -> Option<Place> {
        self.blocks.contains(&block).then(|| Place(self.place.0 + (block - self.blocks.start) as u32))
    }
}

/// Returns the blocks that a range overlaps.
fn blocks(pages: &Range<PageNumber>) -> Range<u64> {
    pages.start.0 / BLOCK_PAGES as u64..pages.end.0.div_ceil(BLOCK_PAGES as u64)
}

/// Returns the part of a block that a range covers.
fn part(pages: &Range<PageNumber>, block: u64) -> Range<usize> {
    let within = |page: PageNumber| page.0.saturating_sub(block * BLOCK_PAGES as u64).min(BLOCK_PAGES as u64) as usize;
    within(pages.start)..within(pages.end)
}

/// The pages with content, by block.
#[derive(Default)]
struct Content {
    blocks: BTreeMap<Block, Bits>,
    pages: u64,
}

impl Content {
    fn change(&mut self, process: u32, pages: &Range<PageNumber>, on: bool) {
        let blocks = blocks(pages);
        if on {
            for block in blocks {
                let bits = self.blocks.entry((process, block)).or_default();
                self.pages += u64::from(set(bits, part(pages, block), true));
            }
        } else {
            for (&(_, block), bits) in self.blocks.range_mut((process, blocks.start)..(process, blocks.end)) {
                self.pages -= u64::from(set(bits, part(pages, block), false));
            }
        }
    }

    /// Drops the content of a process that ended.
    fn end(&mut self, process: u32) {
        let of_process = (process, 0)..=(process, u64::MAX);
        while let Some((&block, bits)) = self.blocks.range(of_process.clone()).next() {
            self.pages -= bits.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            self.blocks.remove(&block);
        }
    }

    /// Iterates over the parts of a range that have content.
    fn runs(&self, process: u32, pages: &Range<PageNumber>) -> impl Iterator<Item = Range<PageNumber>> {
        let (mut at, end) = (pages.start.0, pages.end.0);
        let mut next = move |on: bool| {
            at = (at..end).find(|&page| self.has(process, PageNumber(page)) == on).unwrap_or(end);
            PageNumber(at)
        };
        std::iter::from_fn(move || Some(next(true)..next(false)).filter(|run| !run.is_empty()))
    }

    fn has(&self, process: u32, page: PageNumber) -> bool {
        let bits = self.blocks.get(&(process, page.0 / BLOCK_PAGES as u64));
        bits.is_some_and(|bits| is_set(bits, page.index_in_block()))
    }
}

/// Unmanaged memory by process.
#[derive(Default)]
struct Unmanaged {
    by_process: BTreeMap<u32, u32>,
    pages: u64,
}

impl Unmanaged {
    /// Sets the unmanaged memory of a process; returns the previous value.
    fn set(&mut self, process: u32, pages: u32) -> u32 {
        let before_pages = self.by_process.insert(process, pages).unwrap_or(0);
        self.pages = self.pages + u64::from(pages) - u64::from(before_pages);
        before_pages
    }
}

impl Summary {
    /// Reads a trace and summarises it.
    pub fn of(path: &Path) -> Result<Summary, LabError> {
        let mut summary = Summary::default();
        let (mut content, mut unmanaged, mut reach) = (Content::default(), Unmanaged::default(), Reach::default());
        let mut compressed: BTreeMap<(u32, u64), (Order, u32)> = BTreeMap::new();
        let (mut managed, mut used) = (BTreeSet::new(), BTreeSet::new());
        for record in TraceReader::open(path)? {
            let Record { process, event, time_us } = record?;
            let mut fill = |range: &Range<PageNumber>| {
                // Most touches are of pages with content.
                if range.end == range.start.offset(1) && content.has(process, range.start) {
                    return Ok(());
                }
                // A real process has no more pages than it had memory; a bad trace must not take
                // all of ours.
                let blocks = blocks(range);
                if (blocks.end - blocks.start) as usize + used.len() > MAX_BLOCKS {
                    return Err(LabError::TraceTooLarge(path.to_owned()));
                }
                used.extend(blocks.map(|block| (process, block)));
                content.change(process, range, true);
                Ok(())
            };
            match event {
                Event::Start { .. } => summary.processes += 1,
                Event::End => {
                    content.end(process);
                    unmanaged.set(process, 0);
                    reach.end(process);
                }
                Event::Limit(pages) => {
                    summary.limit_pages = summary.limit_pages.max(Some(pages));
                    reach.begin(process);
                }
                Event::Unmanaged(pages) => {
                    unmanaged.set(process, pages);
                    if unmanaged.pages > (MAX_BLOCKS * BLOCK_PAGES) as u64 {
                        return Err(LabError::TraceTooLarge(path.to_owned()));
                    }
                }
                Event::Map(_) => {
                    managed.insert(process);
                }
                Event::Stage(range) => reach.go(process, &range, time_us),
                Event::Unmap(range) | Event::Discard(range) => content.change(process, &range, false),
                Event::Remap(from, to) => {
                    let target = to..PageNumber(to.0 + (from.end.0 - from.start.0));
                    fill(&target)?;
                    content.change(process, &from, false);
                    reach.come(process, &target, time_us, false);
                }
                Event::Fill(range) => {
                    fill(&range)?;
                    reach.come(process, &range, time_us, false);
                }
                Event::Activate(page) => {
                    summary.touches += 1;
                    fill(&page.folio(Order::ZERO))?;
                    reach.come(process, &page.folio(Order::ZERO), time_us, true);
                }
                Event::Refault(range) => {
                    summary.touches += 1;
                    if range.end == range.start.offset(1) {
                        fill(&range)?;
                    }
                    content.runs(process, &range).for_each(|run| reach.come(process, &run, time_us, false));
                }
                Event::Along(range) => {
                    content.runs(process, &range).for_each(|run| reach.come(process, &run, time_us, false));
                }
                Event::Compressed { pages, len_bytes } => {
                    for unit in pages.start.0 >> UNIT.get()..pages.end.0.div_ceil(UNIT.pages().into()) {
                        compressed.entry((process, unit)).or_insert((order_of(&pages), len_bytes));
                    }
                }
                Event::Lost(events) => summary.lost += events,
            }
            summary.peak_pages = summary.peak_pages.max(content.pages + unmanaged.pages);
        }
        summary.managed_processes = managed.len() as u32;
        summary.stays = reach.stays();
        summary.places = Places::of(used);
        let places = &summary.places;
        let first_piece = |((process, unit), (order, len_bytes))| {
            let unit = PageNumber(unit << UNIT.get());
            let place = places.find(process, unit.0 / BLOCK_PAGES as u64)?;
            Some(FirstPiece { unit: place.page(unit.index_in_block()), order, len_bytes })
        };
        summary.first_pieces = compressed.into_iter().filter_map(first_piece).collect();
        Ok(summary)
    }

    /// Returns the scenario of the trace at `path`, whose settings can be replaced.
    pub fn scenario(&self, path: &Path) -> String {
        let file = toml::Value::String(path.display().to_string());
        format!(
            "about = \"a run recorded by foliomem record\"\nseed = 1\n\n[machine]\ncpus = 1\nlimit_mib = 16\nsizes_kib = []\n\
             no_room = \"reclaim\"\n\n[swap]\nsize_mib = {}\nstrategy = \"nonfull-first\"\nswap_in = \"adaptive\"\n\
             keep_copies = true\nsplit_kib = []\nstore = \"lz4\"\ngranule_kib = 64\n\n[workload.replay]\nfile = {file}\n",
            // Unused slots cost nothing.
            (self.peak_pages / u64::from(MIB) * 16).clamp(1024, 8_388_608)
        )
    }
}

/// The workload section of a scenario.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    file: PathBuf,
}

/// A recorded run to replay.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "File")]
pub struct Replay {
    file: PathBuf,
    summary: Arc<Summary>,
}

impl TryFrom<File> for Replay {
    type Error = LabError;

    fn try_from(File { file }: File) -> Result<Replay, LabError> {
        Ok(Replay { summary: Arc::new(Summary::of(&file)?), file })
    }
}

/// The resident pages of the recorded run in a block.
#[derive(Clone, Default)]
struct Resident {
    pages: Bits,
    /// Those that were in use until they were evicted.
    in_use: Bits,
}

/// Returns the index of `page` in its block, as a range.
fn at(page: PageNumber) -> Range<usize> {
    page.index_in_block()..page.index_in_block() + 1
}

/// The state of a replay.
struct Player<'a> {
    lab: &'a mut Lab,
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

impl Replay {
    /// Returns the pages of address space.
    pub fn pages(&self) -> u32 {
        (self.summary.places.end().0 + 1) * BLOCK_PAGES as u32
    }

    /// Returns the peak of the pages with content.
    pub fn peak_pages(&self) -> u32 {
        self.summary.peak_pages as u32
    }

    /// Returns the densities of the memory at its first compression, relative to the table of
    /// `costs`. (The run compressed with lz4; sizes for zstd differ from these as in the table.)
    pub fn density(&self, costs: &Costs) -> Density {
        Density::new(self.pages() as usize, &self.summary.first_pieces, costs.lz4.ratio_percent)
    }

    /// Replays the run on one CPU; unknown touches are drawn from `seed`.
    pub fn run(&self, lab: &mut Lab, seed: u64) -> Result<(Vec<Round>, Took), LabError> {
        let mut rounds = Rounds::new(lab);
        lab.keep();
        let no_pages = vec![Bits::default(); self.summary.places.end().index()];
        let mut player = Player {
            lab,
            places: &self.summary.places,
            content: no_pages.clone().into(),
            mapped: no_pages.into(),
            limited: BTreeSet::new(),
            stays: &self.summary.stays,
            stay: 0,
            resident: vec![Resident::default(); self.summary.places.end().index()].into(),
            chance: Chance::new(self.summary.places.end().index()),
            unmanaged: Unmanaged::default(),
            random: Random::new(seed),
        };
        let (mut took, mut clock_us) = (Took::default(), None);
        for (number, record) in (0..).zip(TraceReader::open(&self.file)?) {
            let record = record?;
            // The program's own time between events, as long as the clock does not go back.
            let before_us = clock_us.replace(record.time_us).unwrap_or(record.time_us);
            took.elapsed_ns += record.time_us.saturating_sub(before_us) * 1000;
            player.lab.begin(CpuNumber(0), took.elapsed_ns);
            player.play(record)?;
            player.expect_moved_home(clock_us.unwrap_or_default());
            let spent_ns = player.lab.machine().spent_ns();
            took.elapsed_ns += spent_ns;
            took.cpu_ns += spent_ns;
            if number % NOTE_EVERY == 0 {
                player.lab.note_swapped();
            }
        }
        player.lab.note_swapped();
        rounds.end(player.lab);
        Ok((rounds.rounds, took))
    }
}

impl Player<'_> {
    fn play(&mut self, Record { process, event, time_us }: Record) -> Result<(), LabError> {
        self.do_until(time_us)?;
        match event {
            Event::Start { .. } | Event::Lost(_) => {}
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
            Event::Stage(range) => {
                self.go(process, &range);
                if self.limited.contains(&process) {
                    let parts = self.places.parts(process, &range);
                    parts.for_each(|(place, part)| self.chance.leave(place, part, time_us));
                }
            }
            Event::Unmanaged(pages) => self.set_unmanaged(process, pages),
            Event::Map(range) => self.map(process, &range, true),
            Event::Unmap(range) => {
                self.forget(process, &range);
                self.map(process, &range, false);
            }
            Event::Discard(range) => self.forget(process, &range),
            Event::Remap(from, to) => {
                let target = to..PageNumber(to.0 + (from.end.0 - from.start.0));
                self.forget(process, &from);
                self.map(process, &from, false);
                self.fill(process, &target)?;
            }
            Event::Fill(range) => self.fill(process, &range)?,
            Event::Refault(range) => {
                let is_alone = range.end == range.start.offset(1);
                if !is_alone {
                    // The stream includes its touched page, which precedes the range in either
                    // direction.
                    let stream = PageNumber(range.start.0.saturating_sub(1))..range.end.offset(1);
                    self.places.parts(process, &stream).for_each(|(place, part)| self.chance.forget(place, part));
                }
                for page in (range.start.0..range.end.0).map(PageNumber) {
                    if let Some(here) = self.find(process, page) {
                        if is_alone {
                            self.see(process, here, time_us, false);
                        }
                        self.come_back(process, page, here)?;
                    } else if is_alone {
                        self.fill(process, &range)?;
                    }
                }
            }
            Event::Activate(page) => match self.find(process, page) {
                Some(here) => {
                    self.see(process, here, time_us, true);
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

    /// Records that a page, at `here`, was touched by itself while it was not resident in the run.
    /// (The trace has some of these touches twice.)
    fn see(&mut self, process: u32, here: PageNumber, now_us: u64, from_home: bool) {
        let Resident { pages, .. } = &self.resident[Place::of(here).index()];
        if self.limited.contains(&process) && !is_set(pages, here.index_in_block()) {
            self.chance.touched(here, now_us, from_home);
        }
    }

    #[inline]
    fn come_back(&mut self, process: u32, page: PageNumber, here: PageNumber) -> Result<(), LabError> {
        self.come(process, &page.folio(Order::ZERO));
        self.lab.touch(here, false)
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
                set(pages, part.clone(), true);
                self.chance.come(place, part.clone());
                for at in part {
                    set(in_use, at..at + 1, self.stays.were_in_use(self.stay));
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
                set(pages, part.clone(), false);
                set(in_use, part, false);
            }
        }
    }

    /// Schedules touches of the pages that the engine just staged and that were resident in the
    /// run: soon and once, if they were in use.
    #[inline]
    fn expect_moved_home(&mut self, now_us: u64) {
        if self.stays.is_empty() {
            return;
        }
        for range in self.lab.machine().take_moved_home() {
            for page in (range.start.0..range.end.0).map(PageNumber) {
                let Resident { pages, in_use } = &mut self.resident[Place::of(page).index()];
                if is_set(pages, page.index_in_block()) {
                    let soon = set(in_use, at(page), false) > 0;
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
            self.lab.touch(page, false)?;
        }
        Ok(())
    }

    fn map(&mut self, process: u32, range: &Range<PageNumber>, on: bool) {
        for (place, part) in self.places.parts(process, range) {
            let bits = &mut self.mapped[place.index()];
            if set(bits, part, on) > 0 {
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
        self.map(process, range, true);
        self.come(process, range);
        for (place, part) in self.places.parts(process, range) {
            set(&mut self.content[place.index()], part.clone(), true);
            self.lab.touch_all(place.pages(part), true)?;
        }
        Ok(())
    }

    fn forget(&mut self, process: u32, range: &Range<PageNumber>) {
        self.go(process, range);
        for (place, part) in self.places.parts(process, range) {
            set(&mut self.content[place.index()], part.clone(), false);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;
    use foliomem_trace::TraceWriter;
    use foliomem_types::units::PAGE_BYTES;

    const FIRST: u64 = 1 << 20;
    const PAGES: u64 = 1 << 13;
    const CHUNK_PAGES: u64 = 64;
    const CHUNKS: u64 = PAGES / CHUNK_PAGES;

    /// Replays a program that fills its pages and continues with `events`. Returns the accesses
    /// after the first one of each page, the faults from swap, and the resident pages of the first
    /// half at the end.
    fn replayed(name: &str, limit_mib: u32, events: impl IntoIterator<Item = (u64, Event)>) -> (u64, u64, usize) {
        let path = std::env::temp_dir().join(format!("foliomem-{name}-{}.mft", std::process::id()));
        let all = PageNumber(FIRST)..PageNumber(FIRST + PAGES);
        let begin = [Event::Start { pid: 1 }, Event::Map(all.clone()), Event::Fill(all)].map(|event| (0, event));
        let mut writer = TraceWriter::create(&path).unwrap();
        for (time_us, event) in begin.into_iter().chain(events) {
            writer.write(&Record { process: 0, time_us, event }).unwrap();
        }
        writer.finish().unwrap();
        let summary = Summary::of(&path).unwrap();
        let text = summary.scenario(&path);
        let set = [("machine.limit_mib".to_owned(), limit_mib.to_string())];
        let scenario = Scenario::parse_with("x", &text, &set).unwrap();
        let mut lab = scenario.lab(Some(64));
        let first = summary.places.find(0, FIRST / BLOCK_PAGES as u64).unwrap().page(0);
        scenario.workload.run(&mut lab, 1).unwrap();
        std::fs::remove_file(&path).unwrap();
        let resident = (0..PAGES / 2).filter(|&at| lab.engine().is_resident(PageNumber(first.0 + at)));
        (lab.accesses().0 - PAGES, lab.engine().counters().vm.pgmajfault.get(), resident.count())
    }

    #[test]
    fn adjacent_blocks_stay_adjacent() {
        let blocks = [(0, 7), (0, 8), (0, 20), (3, 21), (3, 22)];
        let places = Places::of(blocks);
        let found = blocks.map(|(process, block)| places.find(process, block).map(Place::index));
        assert_eq!(found, [1, 2, 4, 6, 7].map(Some));
        assert_eq!(places.end(), Place(8));
        for (process, block) in [(0, 6), (0, 9), (0, 21), (1, 7), (3, 20), (3, 23), (4, 21)] {
            assert_eq!(places.find(process, block), None);
        }
        let page = |block: u64, index: u64| PageNumber(block * BLOCK_PAGES as u64 + index);
        let parts = |process, from, to| {
            places.parts(process, &(from..to)).map(|(place, part)| (place.index(), part)).collect::<Vec<_>>()
        };
        assert_eq!(parts(0, page(8, 5), page(20, 3)), [(2, 5..BLOCK_PAGES), (4, 0..3)]);
        assert_eq!(parts(3, page(0, 0), PageNumber(u64::MAX)), [(6, 0..BLOCK_PAGES), (7, 0..BLOCK_PAGES)]);
        assert_eq!(parts(1, page(7, 0), page(30, 0)), []);
    }

    fn touch(page: u64) -> Event {
        Event::Refault(PageNumber(page).folio(Order::ZERO))
    }

    #[test]
    fn every_recorded_touch_is_replayed() {
        let touches = (0..PAGES * 2).map(|at| (at, touch(FIRST + at % PAGES)));
        let (accesses, faults, _) = replayed("each", 16, touches);
        assert_eq!(accesses, PAGES * 2);
        assert!(faults > 100, "{faults}");
    }

    #[test]
    fn a_replay_may_exceed_the_limit_as_the_run_did() {
        let beside = (0, Event::Unmanaged(40 << 8));
        let touches = (0..PAGES).map(|at| (at, touch(FIRST + at)));
        let (accesses, ..) = replayed("beyond", 16, [beside].into_iter().chain(touches));
        assert_eq!(accesses, PAGES);
    }

    fn chunk(number: u64) -> Range<PageNumber> {
        PageNumber(FIRST + number * CHUNK_PAGES)..PageNumber(FIRST + (number + 1) * CHUNK_PAGES)
    }

    /// Returns a run within a limit in which the chunks `out` were evicted, and `come_and_go` are
    /// fetched and evicted four times.
    fn limited(out: Range<u64>, come_and_go: Range<u64>) -> impl Iterator<Item = (u64, Event)> + Clone {
        let out = out.map(|number| (0, Event::Stage(chunk(number))));
        let laps = (0..4).flat_map(move |_| come_and_go.clone());
        let visits =
            laps.flat_map(|number| [(1000, Event::Refault(chunk(number))), (1000, Event::Stage(chunk(number)))]);
        let again = (0, Event::Fill(PageNumber(FIRST)..PageNumber(FIRST + PAGES / 2)));
        [(0, Event::Limit(16 << 8)), again].into_iter().chain(out).chain(visits)
    }

    #[test]
    fn a_run_recorded_under_a_limit_is_touched_alike() {
        let (accesses, faults, _) = replayed("limited", 16, limited(0..CHUNKS, 0..CHUNKS));
        assert_eq!(accesses, PAGES / 2 + PAGES * 4);
        assert!(faults > 100, "{faults}");
        // All pages fit, unless unmanaged memory takes some of the room.
        let beside = |pages| {
            replayed("beside", 40, [(0, Event::Unmanaged(pages))].into_iter().chain(limited(0..CHUNKS, 0..CHUNKS))).1
        };
        assert_eq!(beside(0), 0);
        assert!(beside(24 << 8) > 100);
    }

    #[test]
    fn pages_resident_under_a_limit_stay_resident_under_a_larger_one() {
        // The second half is fetched and evicted; the first is idle, or was resident at the end.
        let half = CHUNKS / 2;
        let (.., idle_pages) = replayed("idle", 28, limited(0..CHUNKS, half..CHUNKS));
        let (.., used_pages) = replayed("used", 28, limited(half..CHUNKS, half..CHUNKS));
        assert!(idle_pages * 3 < used_pages * 2, "{idle_pages} and {used_pages} pages");
    }

    #[test]
    fn pages_touched_while_staged_were_in_use_and_swapped_out_ones_were_not() {
        let half = CHUNKS / 2;
        // The second half is fetched and evicted; then the first is staged, and returns.
        let faults = |name, comes_back: fn(PageNumber) -> Event| {
            let stages = (0..half).map(|number| (2000, Event::Stage(chunk(number))));
            let touches = (FIRST..FIRST + PAGES / 2).map(|page| (2000, comes_back(PageNumber(page))));
            replayed(name, 28, limited(half..CHUNKS, half..CHUNKS).chain(stages).chain(touches)).1
        };
        let from_home = faults("from-home", Event::Activate);
        let from_swap = faults("from-swap", |page| Event::Refault(page.folio(Order::ZERO)));
        // Pages in use take room from those that come and go; unused ones are swapped out once.
        assert!(from_swap * 3 < from_home, "{from_home} and {from_swap}");
    }

    #[test]
    fn pages_resident_only_in_the_run_are_touched_by_chance() {
        let half = CHUNKS / 2;
        // The first half returns three times and stays; then the second is fetched and evicted.
        let accesses = |name, comes_back: fn(u64) -> Vec<Event>| {
            let laps = (0..3).flat_map(move |lap| {
                let out = (0..half).map(move |number| (lap * 40_000, Event::Stage(chunk(number))));
                let back = (0..half).flat_map(comes_back).map(move |event| (lap * 40_000 + 20_000, event));
                out.chain(back)
            });
            let visits = (0..5).flat_map(move |lap| {
                (half..CHUNKS).flat_map(move |number| {
                    let time_us = 120_000 + lap * 20_000;
                    [(time_us, Event::Refault(chunk(number))), (time_us + 10_000, Event::Stage(chunk(number)))]
                })
            });
            replayed(name, 20, [(0, Event::Limit(24 << 8))].into_iter().chain(laps).chain(visits)).0
        };
        let alone = accesses("alone", |number| {
            let pages = chunk(number);
            (pages.start.0..pages.end.0).map(touch).collect()
        });
        let streams = accesses("streams", |number| vec![Event::Refault(chunk(number))]);
        assert!(alone > streams + PAGES / 8, "{alone} and {streams}");
    }

    #[test]
    fn pages_mapped_in_along_with_another_are_not_touched() {
        let accesses = |along: Option<Event>| {
            let along = along.into_iter().map(|event| (2000, event));
            replayed("along", 40, limited(0..CHUNKS, 0..CHUNKS).chain(along)).0
        };
        assert_eq!(accesses(None), accesses(Some(Event::Along(chunk(0)))));
        assert_eq!(accesses(None) + CHUNK_PAGES, accesses(Some(Event::Refault(chunk(0)))));
    }

    #[test]
    fn each_part_of_memory_compresses_as_in_the_run() {
        // Half of the memory comes and goes and compresses to 8 - `share` eighths; the other half
        // stays out and compresses to `share` eighths.
        let faults = |share: u64| {
            let half = CHUNKS / 2;
            let compressed = (0..CHUNKS).map(move |number| {
                let eighths = if number < half { 8 - share } else { share };
                let len_bytes = (CHUNK_PAGES * PAGE_BYTES as u64 * eighths / 8) as u32;
                (0, Event::Compressed { pages: chunk(number), len_bytes })
            });
            replayed("dense", 24, limited(0..CHUNKS, half..CHUNKS).chain(compressed)).1
        };
        // The half that stays out takes the room.
        let [worst, even, best] = [1, 4, 7].map(faults);
        assert!(best < even && even < worst, "{worst}, {even}, {best}");
    }
}
