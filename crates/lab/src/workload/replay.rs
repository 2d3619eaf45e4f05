//! A recorded run ([`crate::trace`]) once more: what it mapped, touched first and dropped is done as it was; what is known of
//! watched units stands for the units around them.
//!
//! - Of each *cell*, an aligned range of 2^shift pages, one was watched. Each of its touches is one of every page of the cell
//!   that has content.
//! - How many of them are touched at once is what the pages beside the watched one have shown there or nearby: a run of 1 to 16.
//!   Where runs go on upwards or downwards the cell is gone through like that; otherwise the order of its runs is random, and
//!   they are spread over the time until the next touch.
//! - While a page was in reach its touches went unseen. They are taken to be as frequent as those that were seen: at random, or
//!   regular where the program goes through its memory. All touches only read.
//! - Of a run that was recorded under a limit every touch of what that had put out of reach is known, and so is what was read
//!   ahead: nothing stands for anything else. Touches of what was in reach there were not seen. Whether a page was in use until it left that, the run itself has
//!   found out by staging it ([`reach`]): then it is touched when the engine moves it home, as long after that as others were, once for each time that it had come into reach.
//! - What was not managed takes its part of the room.
//! - Pages of all processes lie in one address space. Blocks of 2 MiB that were used are side by side where they were.
//!   Memory that was moved, or was shared with a parent, counts as touched anew.

mod reach;

use self::reach::{Reach, Stays};
use super::{MIB, Round, Rounds};
use crate::bits::{Bits, is_set, set};
use crate::costs::{CodecCosts, Costs};
use crate::error::LabError;
use crate::lab::Lab;
use crate::machine::mix;
use crate::random::Random;
use crate::schedule::Took;
use crate::trace::{Record, TraceReader};
use foliomem_core::trace::{Event, UNIT, beside, is_watched, watched_page};
use foliomem_core::units::{BLOCK_PAGES, CpuNumber, ORDERS, Order, PAGE_BYTES, PageNumber};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A block of a process, by its number and the block's.
type Block = (u32, u64);

/// Blocks that a run uses, at most: 1 TiB.
const MOST_BLOCKS: usize = (1 << 28) / BLOCK_PAGES;
/// Touches of a unit so near to each other belong together.
const TOGETHER_US: u64 = 1000;
/// Touches that were not seen are this far from each other at least: nothing falls out of use in less.
const LEAST_WAIT_US: u64 = 250;
/// A new wait counts 1/2^2 in their mean.
const WAIT_SHIFT: u32 = 2;
/// Places around one that tell what is touched together there.
const NEAREST: usize = 5;
/// Cells that share their pages, at most.
const SHARING: u64 = 16;
/// Cells that were gone through last: what goes on behind one of them does so in order.
const RECENT: usize = 4;
/// Events between two looks at how much is out.
const NOTE_EVERY: u64 = 4096;

/// What a trace comes to.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The most pages that had content at a time, with what was not managed.
    pub peak_pages: u64,
    /// Under which limit it was recorded, if under one.
    pub limit_pages: Option<u64>,
    /// Processes that were large enough to be looked at, and all.
    pub managed_processes: u32,
    /// See `managed_processes`.
    pub processes: u32,
    /// Touches that were seen.
    pub touches: u64,
    /// Events that are missing.
    pub lost: u64,
    /// Original bytes and compressed ones, by order; and of what was out at a time, of all times at which that was told.
    compressed: [[u64; 2]; ORDERS],
    stored: [u128; 2],
    places: Places,
    /// Of processes that were recorded under a limit.
    stays: Stays,
}

/// Where each block that was used lies: blocks that were side by side are so here, too, and nothing else is.
#[derive(Clone, Debug, Default)]
struct Places {
    /// By process and block.
    runs: Vec<BlockRun>,
}

/// Blocks of a process that were side by side.
#[derive(Clone, Debug)]
struct BlockRun {
    process: u32,
    blocks: Range<u64>,
    /// Where the first one lies.
    place: Place,
}

/// Where a block lies: the number of a block of the address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place(u32);

impl Place {
    /// The one in which a page of the address space is.
    fn of(page: PageNumber) -> Place {
        Place((page.0 / BLOCK_PAGES as u64) as u32)
    }

    /// The page of it that is the one of that number in its block.
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
    /// Places for `blocks`, in their order.
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

    /// The place behind the last one.
    fn end(&self) -> Place {
        self.runs.last().map_or(Place(0), BlockRun::end)
    }

    fn find(&self, process: u32, block: u64) -> Option<Place> {
        let run = self.runs.get(self.runs.partition_point(|run| run.ends_before(process, block)))?;
        (run.process == process).then(|| run.place_of(block)).flatten()
    }

    /// Where the blocks lie that a range has pages in, and which pages: of those that are ever used.
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

    /// Whether all of it is before that block.
    fn ends_before(&self, process: u32, block: u64) -> bool {
        (self.process, self.blocks.end) <= (process, block)
    }

    fn place_of(&self, block: u64) -> Option<Place> {
        self.blocks.contains(&block).then(|| Place(self.place.0 + (block - self.blocks.start) as u32))
    }
}

/// The blocks that a range has pages in.
fn blocks(pages: &Range<PageNumber>) -> Range<u64> {
    pages.start.0 / BLOCK_PAGES as u64..pages.end.0.div_ceil(BLOCK_PAGES as u64)
}

/// The pages of a block that a range has there.
fn part(pages: &Range<PageNumber>, block: u64) -> Range<usize> {
    let within = |page: PageNumber| page.0.saturating_sub(block * BLOCK_PAGES as u64).min(BLOCK_PAGES as u64) as usize;
    within(pages.start)..within(pages.end)
}

/// What has content, by block.
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

    /// The process has ended.
    fn end(&mut self, process: u32) {
        let of_process = (process, 0)..=(process, u64::MAX);
        while let Some((&block, bits)) = self.blocks.range(of_process.clone()).next() {
            self.pages -= bits.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            self.blocks.remove(&block);
        }
    }

    /// The parts of a range that have content.
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

/// What is not managed, by process.
#[derive(Default)]
struct Unmanaged {
    by_process: BTreeMap<u32, u32>,
    pages: u64,
}

impl Unmanaged {
    /// Returns how many they were.
    fn set(&mut self, process: u32, pages: u32) -> u32 {
        let before_pages = self.by_process.insert(process, pages).unwrap_or(0);
        self.pages = self.pages + u64::from(pages) - u64::from(before_pages);
        before_pages
    }
}

impl Summary {
    /// Reads a trace through.
    pub fn of(path: &Path) -> Result<Summary, LabError> {
        let mut summary = Summary::default();
        let (mut content, mut unmanaged, mut reach) = (Content::default(), Unmanaged::default(), Reach::default());
        let (mut managed, mut used) = (BTreeSet::new(), BTreeSet::new());
        for record in TraceReader::open(path)? {
            let Record { process, event, time_us } = record?;
            let mut fill = |range: &Range<PageNumber>| {
                // Most touches are of what is there.
                if range.end == range.start.offset(1) && content.has(process, range.start) {
                    return Ok(false);
                }
                // A trace of a living process has no more pages than it had memory; a bad one is not to take all of ours.
                let blocks = blocks(range);
                if (blocks.end - blocks.start) as usize + used.len() > MOST_BLOCKS {
                    return Err(LabError::TraceTooLarge(path.to_owned()));
                }
                used.extend(blocks.map(|block| (process, block)));
                content.change(process, range, true);
                Ok(true)
            };
            match event {
                Event::Start { .. } => summary.processes += 1,
                Event::End => {
                    content.end(process);
                    unmanaged.set(process, 0);
                    reach.end(process);
                }
                Event::Limit(pages) => {
                    summary.limit_pages = Some(pages);
                    reach.begin(process);
                }
                Event::Unmanaged(pages) => {
                    unmanaged.set(process, pages);
                    if unmanaged.pages > (MOST_BLOCKS * BLOCK_PAGES) as u64 {
                        return Err(LabError::TraceTooLarge(path.to_owned()));
                    }
                }
                Event::Map(_) => {
                    managed.insert(process);
                }
                Event::Watch(_) | Event::Arm(_) => {}
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
                Event::Touch(page) => {
                    summary.touches += 1;
                    if fill(&page.folio(Order::ZERO))? {
                        reach.come(process, &page.folio(Order::ZERO), time_us, false);
                    }
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
                Event::Compressed { order, pieces, len_bytes } => {
                    let [original, compressed] = &mut summary.compressed[order.index()];
                    *original = original.saturating_add(pieces * order.bytes() as u64);
                    *compressed = compressed.saturating_add(len_bytes);
                }
                Event::Stored { pages, len_bytes } => {
                    summary.stored[0] += u128::from(pages) * PAGE_BYTES as u128;
                    summary.stored[1] += u128::from(len_bytes);
                }
                Event::Lost(events) => summary.lost += events,
            }
            summary.peak_pages = summary.peak_pages.max(content.pages + unmanaged.pages);
        }
        summary.managed_processes = managed.len() as u32;
        summary.stays = reach.stays();
        summary.places = Places::of(used);
        Ok(summary)
    }

    /// The scenario of the trace, which is at `path`: the settings of a run, to be set as wanted.
    pub fn scenario(&self, path: &Path) -> String {
        let file = toml::Value::String(path.display().to_string());
        format!(
            "about = \"what foliomem record has recorded\"\nseed = 1\n\n[machine]\ncpus = 1\nlimit_mib = 16\nsizes_kib = []\n\
             no_room = \"reclaim\"\n\n[swap]\nsize_mib = {}\nstrategy = \"nonfull-first\"\nswap_in = \"adaptive\"\n\
             keep_copies = true\nsplit_kib = []\nstore = \"lz4\"\ngranule_kib = 64\n\n[workload.replay]\nfile = {file}\n",
            // Slots that are not used cost nothing.
            (self.peak_pages / u64::from(MIB) * 16).clamp(1024, 8_388_608)
        )
    }

    /// By how many thousandths what is out compresses better than what goes out: that counts a page as often as it does.
    fn stored_permille(&self) -> u128 {
        let gone_out = self.compressed.iter().fold([0, 0], |[all, all_len], &[original, compressed]| {
            [all + u128::from(original), all_len + u128::from(compressed)]
        });
        let ratio = |[original, compressed]: [u128; 2]| original * 1000 / compressed.max(original / 1000).max(1);
        let (stored, gone_out) = (ratio(self.stored), ratio(gone_out));
        if stored == 0 || gone_out == 0 { 1000 } else { (stored * 1000 / gone_out).clamp(250, 4000) }
    }

    /// Original to compressed size of what is out, as it was measured; where it was not, as it is with most.
    fn ratio_percent(&self, reference: [u32; ORDERS]) -> [u32; ORDERS] {
        let permille = self.stored_permille();
        let measured = |order: usize| {
            let [original, compressed] = self.compressed[order];
            // A thousandth is as good as nothing.
            let len_bytes = u128::from(compressed.max(original / 1000));
            (original > 0).then(|| (u128::from(original) * permille / 10 / len_bytes) as u32)
        };
        // What was not measured differs from the next smaller one that was (or larger, where none was) as it does in the table.
        let most = usize::from(UNIT.get());
        std::array::from_fn(|order| {
            let known = (0..=order.min(most)).rev().chain(order..=most).find_map(|near| Some((near, measured(near)?)));
            known.map_or(reference[order], |(near, percent)| match near == order || order > most {
                true => percent,
                false => (u64::from(percent) * u64::from(reference[order]) / u64::from(reference[near].max(1))) as u32,
            })
        })
    }
}

/// The file's part of a scenario.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    file: PathBuf,
}

/// See the module.
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

/// A page of a process.
type Page = (u32, PageNumber);

/// What is known of a page that was out of reach.
#[derive(Default)]
struct Known {
    /// Since when it is.
    armed_us: Option<u64>,
    /// When it was touched last, and how long it waits for that on average.
    touched_us: Option<u64>,
    wait_us: Option<u64>,
    /// How often it has come out of reach: what is expected while it is in reach holds until it does again.
    times: u32,
}

/// Which way a program goes through its memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Way {
    Up,
    Down,
}

/// What pages are touched together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Run {
    order: Order,
    way: Option<Way>,
}

/// What is to be done when its time has come.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// A page was touched: what was touched with it is known now.
    Touched(Page),
    /// A page that is in reach is touched, if it still is; see [`Known::times`].
    Unseen(Page, u32),
    /// A page that was in use when it was moved home is touched, where it lies now, if it still is in use.
    InUse(PageNumber),
    /// The next run of a cell is touched.
    Visit(Visit),
}

/// A touch of a cell on its way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Visit {
    process: u32,
    /// Heads of the runs that are left.
    heads: Vec<PageNumber>,
    order: Order,
    /// When it ends.
    end_us: u64,
}

/// Pages of a block that are in use until they leave the reach of the recorded limit.
#[derive(Clone, Default)]
struct InUse {
    pages: Bits,
    /// Those that are to be touched, as they were moved home.
    due: Bits,
}

/// Where `page` is in its block.
fn at(page: PageNumber) -> Range<usize> {
    page.index_in_block()..page.index_in_block() + 1
}

/// A run on its way.
struct Player<'a> {
    lab: &'a mut Lab,
    places: &'a Places,
    /// By place, what has content, and what is mapped.
    content: Box<[Bits]>,
    mapped: Box<[Bits]>,
    /// Processes that were recorded under a limit, what is known of what comes into their reach, and how often something has.
    limited: BTreeSet<u32>,
    stays: &'a Stays,
    stay: usize,
    /// By place.
    in_use: Box<[InUse]>,
    unmanaged: Unmanaged,
    /// By process, 2^what the pages of a cell are.
    shifts: BTreeMap<u32, u8>,
    known: BTreeMap<Page, Known>,
    /// By watched page.
    runs: BTreeMap<Page, Run>,
    /// By time, and as they came.
    due: BTreeMap<(u64, u64), Due>,
    dues: u64,
    /// Cells that were touched last, by their first page.
    recent: VecDeque<Page>,
    random: Random,
}

impl Replay {
    /// Pages of address space.
    pub fn pages(&self) -> u32 {
        (self.summary.places.end().0 + 1) * BLOCK_PAGES as u32
    }

    /// The most that had content at a time.
    pub fn peak_pages(&self) -> u32 {
        self.summary.peak_pages as u32
    }

    /// What things cost, where that is `table`, with its own content. That was compressed by lz4; what zstd makes of it
    /// differs from that as in the table.
    pub fn costs(&self, table: Costs) -> Costs {
        let by_lz4 = self.summary.ratio_percent(table.lz4.ratio_percent);
        let by_zstd = table.zstd.scaled_ratio(by_lz4, table.lz4.ratio_percent);
        Costs {
            lz4: CodecCosts { ratio_percent: by_lz4, ..table.lz4 },
            zstd: CodecCosts { ratio_percent: by_zstd, ..table.zstd },
            ..table
        }
    }

    /// Does it, on one CPU; what is not known is drawn from `seed` on.
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
            in_use: vec![InUse::default(); self.summary.places.end().index()].into(),
            unmanaged: Unmanaged::default(),
            shifts: BTreeMap::new(),
            known: BTreeMap::new(),
            runs: BTreeMap::new(),
            due: BTreeMap::new(),
            dues: 0,
            recent: VecDeque::new(),
            random: Random::new(seed),
        };
        let (mut took, mut clock_us) = (Took::default(), None);
        for (number, record) in (0..).zip(TraceReader::open(&self.file)?) {
            let record = record?;
            // The program's own time between events, as far as it goes forward.
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
            Event::Touch(page) => match self.find(process, page) {
                Some(here) => self.seen((process, page), here, time_us)?,
                None => self.fill(process, &page.folio(Order::ZERO))?,
            },
            Event::Arm(page) => {
                let known = self.known.entry((process, page)).or_default();
                known.armed_us = Some(time_us);
                known.times += 1;
            }
            Event::Start { .. } | Event::Compressed { .. } | Event::Stored { .. } | Event::Lost(_) => {}
            Event::End => self.end(process),
            Event::Limit(_) => {
                self.limited.insert(process);
            }
            Event::Stage(range) => self.go(process, &range),
            Event::Unmanaged(pages) => self.set_unmanaged(process, pages),
            Event::Watch(shift) => {
                self.shifts.insert(process, shift);
                let is_of_use = |page| is_watched(page, shift) || beside(page).any(|other| is_watched(other, shift));
                self.known.retain(|&(of, page), _| of != process || is_of_use(page));
            }
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
                for page in (range.start.0..range.end.0).map(PageNumber) {
                    if let Some(here) = self.find(process, page) {
                        self.come_back(process, page, here)?;
                    } else if range.end == range.start.offset(1) {
                        self.fill(process, &range)?;
                    }
                }
            }
            Event::Activate(page) => match self.find(process, page) {
                Some(here) => self.come_back(process, page, here)?,
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

    fn come_back(&mut self, process: u32, page: PageNumber, here: PageNumber) -> Result<(), LabError> {
        self.come(process, &page.folio(Order::ZERO));
        self.lab.touch(here, false)
    }

    /// Where a page lies, if it has content.
    fn find(&self, process: u32, page: PageNumber) -> Option<PageNumber> {
        let place = self.places.find(process, page.0 / BLOCK_PAGES as u64)?;
        is_set(&self.content[place.index()], page.index_in_block()).then(|| place.page(page.index_in_block()))
    }

    fn has(&self, process: u32, page: PageNumber) -> bool {
        self.find(process, page).is_some()
    }

    /// Pages came into reach: says which of them are in use until they leave it, if the process was recorded under a limit.
    fn come(&mut self, process: u32, range: &Range<PageNumber>) {
        if self.limited.contains(&process) {
            for (place, part) in self.places.parts(process, range) {
                let InUse { pages, due } = &mut self.in_use[place.index()];
                set(due, part.clone(), false);
                for at in part {
                    set(pages, at..at + 1, self.stays.were_in_use(self.stay));
                    self.stay += 1;
                }
            }
        }
    }

    /// They are out of it.
    fn go(&mut self, process: u32, range: &Range<PageNumber>) {
        if self.limited.contains(&process) {
            for (place, part) in self.places.parts(process, range) {
                let InUse { pages, due } = &mut self.in_use[place.index()];
                set(pages, part.clone(), false);
                set(due, part, false);
            }
        }
    }

    /// What was moved home just now and is in use will be touched, once.
    fn expect_moved_home(&mut self, now_us: u64) {
        if self.limited.is_empty() {
            return;
        }
        for range in self.lab.machine().take_moved_home() {
            for page in (range.start.0..range.end.0).map(PageNumber) {
                let InUse { pages, due } = &mut self.in_use[Place::of(page).index()];
                if set(pages, at(page), false) > 0 {
                    set(due, at(page), true);
                    let wait_us = self.random.below(2 * self.stays.at_home_us() + 1);
                    self.at(now_us + wait_us, Due::InUse(page));
                }
            }
        }
    }

    fn at(&mut self, time_us: u64, due: Due) {
        self.dues += 1;
        self.due.insert((time_us, self.dues), due);
    }

    /// Does what is due until then.
    fn do_until(&mut self, time_us: u64) -> Result<(), LabError> {
        while let Some(first) = self.due.first_entry().filter(|first| first.key().0 <= time_us) {
            let ((now_us, _), due) = first.remove_entry();
            match due {
                Due::Touched(page) => {
                    self.learn(page);
                    self.touch_cell(page, now_us)?;
                }
                Due::InUse(page) => {
                    if set(&mut self.in_use[Place::of(page).index()].due, at(page), false) > 0 {
                        self.lab.touch(page, false)?;
                    }
                }
                Due::Unseen(page, times) => {
                    let is_in_reach = self.known.get(&page).is_some_and(|known| known.times == times);
                    if is_in_reach && self.has(page.0, page.1) {
                        self.touch_cell(page, now_us)?;
                        self.expect(page, now_us);
                    }
                }
                Due::Visit(visit) => self.visit(visit, now_us)?,
            }
        }
        Ok(())
    }

    /// A page that was out of reach, and lies `here`, was touched.
    fn seen(&mut self, page: Page, here: PageNumber, now_us: u64) -> Result<(), LabError> {
        let shift = self.shifts.get(&page.0).copied().unwrap_or(0);
        if shift == 0 {
            return self.lab.touch(here, false);
        }
        let known = self.known.entry(page).or_default();
        known.touched_us = Some(now_us);
        if let Some(armed_us) = known.armed_us.take() {
            let waited_us = now_us.saturating_sub(armed_us);
            let mean = |wait_us| wait_us - (wait_us >> WAIT_SHIFT) + (waited_us >> WAIT_SHIFT);
            known.wait_us = Some(known.wait_us.map_or(waited_us, mean));
        }
        // One beside it is touched for what it tells of that.
        if is_watched(page.1, shift) {
            self.at(now_us + TOGETHER_US, Due::Touched(page));
            self.expect(page, now_us);
        }
        Ok(())
    }

    /// The next touch that nobody sees.
    fn expect(&mut self, page: Page, now_us: u64) {
        let Some(Known { wait_us: Some(wait_us), times, .. }) = self.known.get(&page) else { return };
        let (wait_us, times) = ((*wait_us).max(LEAST_WAIT_US), *times);
        let is_regular = self.run_around(page).way.is_some();
        let next_us = if is_regular { wait_us } else { self.random.exponential(wait_us).max(LEAST_WAIT_US) };
        self.at(now_us + next_us, Due::Unseen(page, times));
    }

    /// What the pages beside `page` tell, which was touched lately.
    fn learn(&mut self, page: Page) {
        let (process, number) = page;
        let Some(touched_us) = self.known.get(&page).and_then(|known| known.touched_us) else { return };
        let mut touches = vec![(touched_us, number)];
        let mut run = None;
        for (order, other) in Order::all().skip(1).zip(beside(number)) {
            let Some(known) = self.known.get(&(process, other)) else { break };
            let is_near = known.touched_us.is_some_and(|other_us| other_us.abs_diff(touched_us) <= TOGETHER_US);
            if is_near {
                touches.extend(known.touched_us.map(|other_us| (other_us, other)));
                run = Some(order);
            } else {
                // One that was in reach tells nothing.
                run = run.or(known.armed_us.map(|_| Order::ZERO));
                break;
            }
        }
        let Some(order) = run else { return };
        touches.sort_unstable();
        let way = match touches.len() > 2 {
            true if touches.is_sorted_by_key(|touch| touch.1) => Some(Way::Up),
            true if touches.iter().rev().is_sorted_by_key(|touch| touch.1) => Some(Way::Down),
            _ => None,
        };
        self.runs.insert(page, Run { order, way });
    }

    /// What is known of `page` and of what is nearest to it: what is in the middle, as some of it is chance.
    fn run_around(&self, page: Page) -> Run {
        let (process, _) = page;
        let before = self.runs.range((process, PageNumber(0))..page).rev().take(NEAREST / 2);
        let behind = self.runs.range(page..=(process, PageNumber(u64::MAX))).take(NEAREST / 2 + 1);
        let mut nearest: Vec<Run> = before.chain(behind).map(|(_, &run)| run).collect();
        nearest.sort_unstable();
        nearest.get(nearest.len() / 2).copied().unwrap_or(Run { order: UNIT, way: None })
    }

    /// A touch of a watched page is one of each page of its cell.
    fn touch_cell(&mut self, page: Page, now_us: u64) -> Result<(), LabError> {
        let (process, number) = page;
        let shift = self.shifts.get(&process).copied().unwrap_or(0);
        let Run { order, way } = self.run_around(page);
        let cell = number.0 >> shift << shift;
        let order = order.min(Order::new(shift).unwrap_or(order));
        let goes_on =
            |other: Option<u64>| other.is_some_and(|other| self.recent.contains(&(process, PageNumber(other))));
        let pages = 1 << shift;
        let way = way.or(match order == UNIT {
            true if goes_on(cell.checked_sub(pages)) => Some(Way::Up),
            true if goes_on(cell.checked_add(pages)) => Some(Way::Down),
            _ => None,
        });
        self.recent.push_back((process, PageNumber(cell)));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        // What is touched in short runs has neighbours that are not touched with it: cells nearby share each other's pages.
        let shares = way.is_none() && order < UNIT;
        let cells = if shares { self.sharing(process, number, shift) } else { vec![cell] };
        let own = cells.iter().position(|&other| other == cell).unwrap_or(0) as u64;
        let head = |run: u64| cells[((own + mix(run, 0)) % cells.len() as u64) as usize] + (run << order.get());
        let runs = (0..pages >> order.get()).map(|run| PageNumber(head(run)));
        let mut heads: Vec<PageNumber> =
            runs.filter(|&head| (0..order.pages()).any(|more| self.has(process, head.offset(more)))).collect();
        let mut end_us = now_us;
        match way {
            // From the last one on.
            Some(Way::Up) => heads.reverse(),
            Some(Way::Down) => {}
            None => {
                (1..heads.len()).rev().for_each(|at| heads.swap(at, self.random.below(at as u64 + 1) as usize));
                if order < UNIT {
                    end_us += self.known.get(&page).and_then(|known| known.wait_us).unwrap_or(0);
                }
            }
        }
        self.visit(Visit { process, heads, order, end_us }, now_us)
    }

    /// The first pages of the cells around a page that are watched: which share each other's pages.
    fn sharing(&self, process: u32, page: PageNumber, shift: u8) -> Vec<u64> {
        let first = page.0 >> shift & !(SHARING - 1);
        let is_there = |&cell: &u64| cell == page.0 >> shift || self.has(process, watched_page(cell, shift));
        (first..first + SHARING).filter(is_there).map(|cell| cell << shift).collect()
    }

    /// Touches what is due of a cell.
    fn visit(&mut self, mut visit: Visit, now_us: u64) -> Result<(), LabError> {
        while let Some(head) = visit.heads.pop() {
            for page in (head.0..head.offset(visit.order.pages()).0).map(PageNumber) {
                if let Some(here) = self.find(visit.process, page) {
                    self.lab.touch(here, false)?;
                }
            }
            let step_us = visit.end_us.saturating_sub(now_us) / (visit.heads.len() as u64 + 1);
            if step_us > 0 {
                if !visit.heads.is_empty() {
                    self.at(now_us + step_us, Due::Visit(visit));
                }
                break;
            }
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
        // What has grown is not told of.
        self.map(process, range, true);
        self.come(process, range);
        for (place, part) in self.places.parts(process, range) {
            set(&mut self.content[place.index()], part.clone(), true);
            self.lab.touch_all(place.pages(part), true)?;
        }
        Ok(())
    }

    fn forget(&mut self, process: u32, range: &Range<PageNumber>) {
        // What was out of reach there will be there anew, in reach.
        for (_, known) in self.known.range_mut((process, range.start)..(process, range.end)) {
            (known.armed_us, known.touched_us) = (None, None);
            known.times += 1;
        }
        self.go(process, range);
        for (place, part) in self.places.parts(process, range) {
            set(&mut self.content[place.index()], part.clone(), false);
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
        self.shifts.remove(&process);
        self.known.retain(|&(of, _), _| of != process);
        self.runs.retain(|&(of, _), _| of != process);
        for (place, part) in self.places.parts(process, &all) {
            (self.content[place.index()], self.mapped[place.index()]) = Default::default();
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
    use crate::trace::TraceWriter;

    const FIRST: u64 = 1 << 20;
    const PAGES: u64 = 1 << 13;
    const CHUNK_PAGES: u64 = 64;
    const CHUNKS: u64 = PAGES / CHUNK_PAGES;
    const SHIFT: u8 = 8;
    const PAGE: PageNumber = watched_page((FIRST >> SHIFT) + 1, SHIFT);

    /// Accesses behind the first one of each page, and faults from swap, of a program that fills its pages and goes on with `events`; and
    /// how many pages of the first half are in reach at the end.
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
    fn blocks_lie_side_by_side_where_they_were() {
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

    #[test]
    fn where_every_touch_is_told_each_is_one() {
        let touches = (0..PAGES * 2).map(|at| (at, Event::Touch(PageNumber(FIRST + at % PAGES))));
        let (accesses, faults, _) = replayed("each", 16, [(0, Event::Watch(0))].into_iter().chain(touches));
        assert_eq!(accesses, PAGES * 2);
        assert!(faults > 100, "{faults}");
    }

    #[test]
    fn what_fits_nowhere_goes_beyond_the_limit_as_it_has() {
        let beside = (0, Event::Unmanaged(40 << 8));
        let touches = (0..PAGES).map(|at| (at, Event::Touch(PageNumber(FIRST + at))));
        let (accesses, ..) = replayed("beyond", 16, [beside, (0, Event::Watch(0))].into_iter().chain(touches));
        assert_eq!(accesses, PAGES);
    }

    fn chunk(number: u64) -> Range<PageNumber> {
        PageNumber(FIRST + number * CHUNK_PAGES)..PageNumber(FIRST + (number + 1) * CHUNK_PAGES)
    }

    /// A run within a limit, in which some chunks were out of reach and these come and go, four times.
    fn limited(out: Range<u64>, come_and_go: Range<u64>) -> impl Iterator<Item = (u64, Event)> + Clone {
        let out = out.map(|number| (0, Event::Stage(chunk(number))));
        let laps = (0..4).flat_map(move |_| come_and_go.clone());
        let visits =
            laps.flat_map(|number| [(1000, Event::Refault(chunk(number))), (1000, Event::Stage(chunk(number)))]);
        let again = (0, Event::Fill(PageNumber(FIRST)..PageNumber(FIRST + PAGES / 2)));
        [(0, Event::Limit(16 << 8)), again].into_iter().chain(out).chain(visits)
    }

    #[test]
    fn what_was_recorded_under_a_limit_is_touched_as_it_was() {
        let (accesses, faults, _) = replayed("limited", 16, limited(0..CHUNKS, 0..CHUNKS));
        assert_eq!(accesses, PAGES / 2 + PAGES * 4);
        assert!(faults > 100, "{faults}");
        // It has room for all, unless others take some of it.
        let beside = |pages| {
            replayed("beside", 40, [(0, Event::Unmanaged(pages))].into_iter().chain(limited(0..CHUNKS, 0..CHUNKS))).1
        };
        assert_eq!(beside(0), 0);
        assert!(beside(24 << 8) > 100);
    }

    #[test]
    fn what_was_in_reach_under_a_limit_stays_so_in_a_larger_one() {
        // The second half of it comes and goes; the first lies idle, or was in reach when it ended.
        let half = CHUNKS / 2;
        let (.., idle_pages) = replayed("idle", 28, limited(0..CHUNKS, half..CHUNKS));
        let (.., used_pages) = replayed("used", 28, limited(half..CHUNKS, half..CHUNKS));
        assert!(idle_pages * 3 < used_pages * 2, "{idle_pages} and {used_pages} pages");
    }

    #[test]
    fn what_was_touched_at_home_was_in_use_and_what_had_gone_was_not() {
        let half = CHUNKS / 2;
        // The second half comes and goes; then the first is staged, and comes back.
        let faults = |name, comes_back: fn(PageNumber) -> Event| {
            let stages = (0..half).map(|number| (2000, Event::Stage(chunk(number))));
            let touches = (FIRST..FIRST + PAGES / 2).map(|page| (2000, comes_back(PageNumber(page))));
            replayed(name, 28, limited(half..CHUNKS, half..CHUNKS).chain(stages).chain(touches)).1
        };
        let from_home = faults("from-home", Event::Activate);
        let from_swap = faults("from-swap", |page| Event::Refault(page.folio(Order::ZERO)));
        // What is in use takes room from what comes and goes; what is not goes out once.
        assert!(from_swap * 3 < from_home, "{from_home} and {from_swap}");
    }

    #[test]
    fn what_came_along_is_not_touched() {
        let accesses = |along: Option<Event>| {
            let along = along.into_iter().map(|event| (2000, event));
            replayed("along", 40, limited(0..CHUNKS, 0..CHUNKS).chain(along)).0
        };
        assert_eq!(accesses(None), accesses(Some(Event::Along(chunk(0)))));
        assert_eq!(accesses(None) + CHUNK_PAGES, accesses(Some(Event::Refault(chunk(0)))));
    }

    #[test]
    fn what_is_out_compresses_as_it_did_then_and_not_as_what_went_out() {
        let faults = |stored: Option<Event>| {
            let compressed =
                Event::Compressed { order: UNIT, pieces: 100, len_bytes: 100 * UNIT.bytes() as u64 * 2 / 3 };
            let told = [Some(compressed), stored].into_iter().flatten().map(|event| (0, event));
            replayed("stored", 24, limited(0..CHUNKS, 0..CHUNKS).chain(told)).1
        };
        let stored = |len_bytes| Some(Event::Stored { pages: 100, len_bytes });
        let all_bytes = 100 * PAGE_BYTES as u64;
        assert_eq!(faults(None), faults(stored(all_bytes * 2 / 3)));
        let denser = faults(stored(all_bytes / 6));
        assert!(denser < faults(None), "{denser}");
    }

    #[test]
    fn a_touch_of_a_watched_page_is_one_of_its_cell() {
        let end = (1_000_000, Event::Compressed { order: Order::ZERO, pieces: 1, len_bytes: 1000 });
        for (events, cells) in [
            (vec![(1000, Event::Watch(SHIFT)), (1000, Event::Arm(PAGE)), end.clone()], 0),
            (vec![(1000, Event::Watch(SHIFT)), (1000, Event::Touch(PAGE)), end.clone()], 1),
            // What is beside it only tells of it.
            (vec![(1000, Event::Watch(SHIFT)), (1000, Event::Touch(PageNumber(PAGE.0 ^ 1))), end], 0),
        ] {
            assert_eq!(replayed("cell", 64, events).0, cells << SHIFT);
        }
    }

    #[test]
    fn what_is_touched_in_reach_is_made_up_for() {
        // Out of reach for 10 ms each time, and in reach for `pause_ms`.
        let accesses = |pause_ms: u64| {
            let cycle = move |at: u64| {
                let start_us = 1000 + at * (10 + pause_ms) * 1000;
                [(start_us, Event::Arm(PAGE)), (start_us + 10_000, Event::Touch(PAGE))]
            };
            replayed("unseen", 64, [(0, Event::Watch(SHIFT))].into_iter().chain((0..100).flat_map(cycle))).0 >> SHIFT
        };
        let [short, long] = [1, 40].map(accesses);
        assert!((100..125).contains(&short), "{short}");
        assert!((400..600).contains(&long), "{long}");
    }
}
