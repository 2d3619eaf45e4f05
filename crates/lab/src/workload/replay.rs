//! A recorded run ([`crate::trace`]) once more: what it mapped, touched first and dropped is done as it was; what is known of
//! watched units stands for the units around them.
//!
//! - Of each aligned *cell* of 2^shift units one was watched. A touch of some of its pages is one of the same pages of each
//!   unit of the cell that has content.
//! - In which order is guessed. Several pages of a unit upwards, or a unit right behind the one touched before, is a
//!   program that goes through its memory: upwards or downwards. Otherwise the order is random.
//! - What one page was touched for between two looks of the watcher is one touch, and all touches only read.
//! - Pages of all processes lie in one address space. Blocks of 2 MiB that were used are side by side where they were.
//!   Memory that was moved, or was shared with a parent, counts as touched anew.

use super::{MIB, Round, Rounds};
use crate::costs::{CodecCosts, Costs};
use crate::error::LabError;
use crate::lab::Lab;
use crate::random::Random;
use crate::schedule::Took;
use crate::trace::{Record, TraceReader};
use foliomem_core::trace::{Event, UNIT, unit_of};
use foliomem_core::units::{BLOCK_PAGES, CpuNumber, ORDERS, Order, PageNumber};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A block of a process, by its number and the block's.
type Block = (u32, u64);

/// One bit for each page of a block.
type Bits = [u64; BLOCK_PAGES / 64];

/// Blocks that a run uses, at most: 1 TiB.
const MOST_BLOCKS: usize = (1 << 28) / BLOCK_PAGES;
/// Touches of a unit so long one behind the other are one burst.
const BURST_US: u64 = 300;
/// Events between two looks at how much is out.
const NOTE_EVERY: u64 = 4096;

/// What a trace comes to.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The most pages that had content at a time.
    pub peak_pages: u64,
    /// Processes that were large enough to be looked at, and all.
    pub managed_processes: u32,
    /// See `managed_processes`.
    pub processes: u32,
    /// Touches of watched pages.
    pub touches: u64,
    /// Events that are missing.
    pub lost: u64,
    /// Original bytes and compressed ones, by order.
    compressed: [[u64; 2]; ORDERS],
    /// Where each block that was used lies.
    places: BTreeMap<Block, u32>,
}

fn set(bits: &mut Bits, pages: Range<usize>, on: bool) -> u32 {
    let mut changed = 0;
    for page in pages {
        let (word, mask) = (&mut bits[page / 64], 1 << (page % 64));
        changed += u32::from((*word & mask != 0) != on);
        *word = if on { *word | mask } else { *word & !mask };
    }
    changed
}

fn is_set(bits: &Bits, page: usize) -> bool {
    bits[page / 64] & 1 << (page % 64) != 0
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

/// Takes out the blocks of a process.
fn take(blocks: &mut BTreeMap<Block, Bits>, process: u32) -> Vec<(Block, Bits)> {
    let taken: Vec<(Block, Bits)> =
        blocks.range((process, 0)..=(process, u64::MAX)).map(|(&block, &bits)| (block, bits)).collect();
    for (block, _) in &taken {
        blocks.remove(block);
    }
    taken
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

    /// The blocks of a process that has ended.
    fn take(&mut self, process: u32) -> Vec<(Block, Bits)> {
        let taken = take(&mut self.blocks, process);
        let pages = taken.iter().flat_map(|(_, bits)| bits).map(|word| u64::from(word.count_ones()));
        self.pages -= pages.sum::<u64>();
        taken
    }

    fn has(&self, process: u32, page: PageNumber) -> bool {
        let bits = self.blocks.get(&(process, page.0 / BLOCK_PAGES as u64));
        bits.is_some_and(|bits| is_set(bits, page.index_in_block()))
    }
}

impl Summary {
    /// Reads a trace through.
    pub fn of(path: &Path) -> Result<Summary, LabError> {
        let mut summary = Summary::default();
        let mut content = Content::default();
        let (mut managed, mut used) = (BTreeSet::new(), BTreeSet::new());
        for record in TraceReader::open(path)? {
            let Record { process, event, .. } = record?;
            let mut fill = |range: &Range<PageNumber>| {
                // Most touches are of what is there.
                if range.end == range.start.offset(1) && content.has(process, range.start) {
                    return Ok(());
                }
                // A trace of a living process has no more pages than it had memory; a bad one is not to take all of ours.
                let blocks = blocks(range);
                if (blocks.end - blocks.start) as usize + used.len() > MOST_BLOCKS {
                    return Err(LabError::TraceTooLarge(path.to_owned()));
                }
                used.extend(blocks.map(|block| (process, block)));
                content.change(process, range, true);
                Ok(())
            };
            match event {
                Event::Start { .. } => summary.processes += 1,
                Event::End => drop(content.take(process)),
                Event::Map(_) => {
                    managed.insert(process);
                }
                Event::Watch(_) => {}
                Event::Unmap(range) | Event::Discard(range) => content.change(process, &range, false),
                Event::Remap(from, to) => {
                    fill(&(to..PageNumber(to.0 + (from.end.0 - from.start.0))))?;
                    content.change(process, &from, false);
                }
                Event::Fill(range) => fill(&range)?,
                Event::Touch(page) | Event::Refault(page) => {
                    summary.touches += 1;
                    fill(&page.folio(Order::ZERO))?;
                }
                Event::Compressed(order, len_bytes) => {
                    let [original, compressed] = &mut summary.compressed[order.index()];
                    *original += order.bytes() as u64;
                    *compressed += u64::from(len_bytes);
                }
                Event::Lost(events) => summary.lost += events,
            }
            summary.peak_pages = summary.peak_pages.max(content.pages);
        }
        summary.managed_processes = managed.len() as u32;
        let mut before: Option<(Block, u32)> = None;
        for block in used {
            // Of what was not side by side nothing is.
            let place = match before {
                Some(((process, number), place)) if block == (process, number + 1) => place + 1,
                Some((_, place)) => place + 2,
                None => 1,
            };
            before = Some((block, place));
            summary.places.insert(block, place);
        }
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

    /// Original to compressed size, as it was measured; where it was not, as it is with most.
    fn ratio_percent(&self, reference: [u32; ORDERS]) -> [u32; ORDERS] {
        let measured = |order: usize| {
            let [original, compressed] = self.compressed[order];
            // A thousandth is as good as nothing.
            (original > 0).then(|| (original * 100 / compressed.max(original / 1000)) as u32)
        };
        let most = usize::from(UNIT.get());
        std::array::from_fn(|order| measured(order.min(most)).unwrap_or(reference[order]))
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

/// Touches of watched pages in one unit, shortly one behind the other.
struct Burst {
    process: u32,
    unit: u64,
    /// In the unit.
    pages: Vec<u32>,
    last_us: u64,
}

/// A run on its way.
struct Player<'a> {
    lab: &'a mut Lab,
    places: &'a BTreeMap<Block, u32>,
    content: Content,
    /// What is mapped, by block.
    mapped: BTreeMap<Block, Bits>,
    /// By process, what is watched.
    shifts: BTreeMap<u32, u8>,
    /// Those that may go on, the oldest first.
    bursts: VecDeque<Burst>,
    /// Room of those that have ended, and for the units of a cell.
    spare: Vec<Vec<u32>>,
    units: Vec<u64>,
    /// The cell that was touched last.
    last: Option<(u32, u64)>,
    random: Random,
}

impl Replay {
    /// Pages of address space.
    pub fn pages(&self) -> u32 {
        self.summary.places.values().next_back().map_or(1, |last| last + 2) * BLOCK_PAGES as u32
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
        lab.read_ahead();
        let mut player = Player {
            lab,
            places: &self.summary.places,
            content: Content::default(),
            mapped: BTreeMap::new(),
            shifts: BTreeMap::new(),
            bursts: VecDeque::new(),
            spare: Vec::new(),
            units: Vec::new(),
            last: None,
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
            let spent_ns = player.lab.machine().spent_ns();
            took.elapsed_ns += spent_ns;
            took.cpu_ns += spent_ns;
            if number % NOTE_EVERY == 0 {
                player.lab.note_swapped();
            }
        }
        player.end_bursts(u64::MAX)?;
        player.lab.note_swapped();
        rounds.end(player.lab);
        Ok((rounds.rounds, took))
    }
}

impl Player<'_> {
    fn play(&mut self, Record { process, event, time_us }: Record) -> Result<(), LabError> {
        self.end_bursts(time_us.saturating_sub(BURST_US))?;
        match event {
            Event::Touch(page) if self.content.has(process, page) => {
                let unit = unit_of(page);
                let index = (page.0 % u64::from(UNIT.pages())) as u32;
                match self.bursts.iter_mut().find(|burst| (burst.process, burst.unit) == (process, unit)) {
                    Some(burst) => {
                        burst.pages.push(index);
                        burst.last_us = time_us;
                    }
                    None => {
                        let mut pages = self.spare.pop().unwrap_or_default();
                        pages.push(index);
                        self.bursts.push_back(Burst { process, unit, pages, last_us: time_us });
                    }
                }
            }
            Event::Start { .. } | Event::Compressed(..) | Event::Lost(_) => {}
            Event::End => self.end(process),
            Event::Watch(shift) => {
                // What was seen before it stands for other cells.
                self.end_bursts(u64::MAX)?;
                self.shifts.insert(process, shift);
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
            Event::Refault(page) if self.content.has(process, page) => self.touch(process, page)?,
            Event::Touch(page) | Event::Refault(page) => self.fill(process, &page.folio(Order::ZERO))?,
        }
        Ok(())
    }

    /// The blocks that a range has pages in and that are ever used: their number, where each lies, and which pages.
    fn placed(&self, process: u32, pages: &Range<PageNumber>) -> impl Iterator<Item = (u64, PageNumber, Range<usize>)> {
        let (blocks, pages) = (blocks(pages), pages.clone());
        let places = self.places.range((process, blocks.start)..(process, blocks.end));
        places.map(move |(&(_, block), &place)| {
            (block, PageNumber(u64::from(place) * BLOCK_PAGES as u64), part(&pages, block))
        })
    }

    fn touch(&mut self, process: u32, page: PageNumber) -> Result<(), LabError> {
        let place = self.placed(process, &page.folio(Order::ZERO)).next();
        place.map_or(Ok(()), |(_, place, part)| self.lab.touch(place.offset(part.start as u32), false))
    }

    /// Does what bursts stand for that have not gone on since `before_us`: as they began, up to one that goes on.
    fn end_bursts(&mut self, before_us: u64) -> Result<(), LabError> {
        while self.bursts.front().is_some_and(|burst| burst.last_us < before_us) {
            let Some(burst) = self.bursts.pop_front() else { unreachable!("there is a first one") };
            self.end_burst(burst)?;
        }
        Ok(())
    }

    /// A burst stands for the same in every unit of its cell.
    fn end_burst(&mut self, Burst { process, unit, mut pages, .. }: Burst) -> Result<(), LabError> {
        let shift = self.shifts.get(&process).copied().unwrap_or(0);
        let cell = unit >> shift;
        let near = |other: Option<u64>| other.is_some_and(|other| self.last == Some((process, other)));
        let mut units = std::mem::take(&mut self.units);
        units.extend(cell << shift..(cell + 1) << shift);
        if pages.len() > 1 && pages.is_sorted() || near(cell.checked_sub(1)) {
        } else if pages.len() > 1 && pages.iter().rev().is_sorted() || near(cell.checked_add(1)) {
            units.reverse();
        } else {
            for at in (1..units.len()).rev() {
                units.swap(at, self.random.below(at as u64 + 1) as usize);
            }
        }
        self.last = Some((process, cell));
        let mut known = None;
        for unit in units.drain(..) {
            let first = PageNumber(unit << UNIT.get());
            let (block, at) = ((process, first.0 / BLOCK_PAGES as u64), first.index_in_block());
            // Units of a cell lie side by side.
            let (_, found) = match known {
                Some(known @ (of, _)) if of == block => known,
                _ => *known.insert((block, self.content.blocks.get(&block).zip(self.places.get(&block)))),
            };
            let Some((bits, &place)) = found else { continue };
            let place = PageNumber(u64::from(place) * BLOCK_PAGES as u64).offset(at as u32);
            for &page in pages.iter().filter(|&&page| is_set(bits, at + page as usize)) {
                self.lab.touch(place.offset(page), false)?;
            }
        }
        self.units = units;
        pages.clear();
        self.spare.push(pages);
        Ok(())
    }

    fn map(&mut self, process: u32, range: &Range<PageNumber>, on: bool) {
        for (block, place, part) in self.placed(process, range).collect::<Vec<_>>() {
            let bits = self.mapped.entry((process, block)).or_default();
            if set(bits, part, on) > 0 {
                let mut at = 0;
                let runs = std::iter::from_fn(|| {
                    let start = (at..BLOCK_PAGES).find(|&page| is_set(bits, page))?;
                    at = (start..BLOCK_PAGES).find(|&page| !is_set(bits, page)).unwrap_or(BLOCK_PAGES);
                    Some(place.offset(start as u32)..place.offset(at as u32))
                });
                self.lab.machine().map_anew(place..place.offset(BLOCK_PAGES as u32), runs);
            }
        }
    }

    fn fill(&mut self, process: u32, range: &Range<PageNumber>) -> Result<(), LabError> {
        // What has grown is not told of.
        self.map(process, range, true);
        self.content.change(process, range, true);
        for (_, place, part) in self.placed(process, range).collect::<Vec<_>>() {
            self.lab.touch_all(place.offset(part.start as u32)..place.offset(part.end as u32), true)?;
        }
        Ok(())
    }

    fn forget(&mut self, process: u32, range: &Range<PageNumber>) {
        self.content.change(process, range, false);
        for (_, place, part) in self.placed(process, range).collect::<Vec<_>>() {
            self.lab.forget(place.offset(part.start as u32)..place.offset(part.end as u32));
        }
    }

    fn end(&mut self, process: u32) {
        self.content.take(process);
        self.shifts.remove(&process);
        take(&mut self.mapped, process);
        for (_, place, _) in self.placed(process, &(PageNumber(0)..PageNumber(u64::MAX))).collect::<Vec<_>>() {
            let pages = place..place.offset(BLOCK_PAGES as u32);
            self.lab.forget(pages.clone());
            self.lab.machine().map_anew(pages, std::iter::empty());
        }
    }
}
