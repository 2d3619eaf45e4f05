//! The summary of a trace, which is read before the replay: how much memory the run had, where its
//! blocks lie, which pages were in use, and how well memory compressed.

use super::growth::{Growth, Leak};
use super::memory::{PagesWithContent, Unmanaged};
use super::places::{Block, Places, blocks};
use super::recorded::Recorded;
use super::residency::{Origin, Residency, Stays};
use crate::density::{FirstPiece, UNIT, order_of};
use crate::error::LabError;
use crate::workload::MIB;
use foliomem_trace::{Record, TraceReader};
use foliomem_types::trace_event::Event;
use foliomem_types::units::{BLOCK_PAGES, Order, PageNumber};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

/// Maximum number of blocks of a run: 1 TiB.
const MAX_BLOCKS: usize = (1 << 28) / BLOCK_PAGES;

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
    /// Memory that the run has leaked.
    pub leak: Option<Leak>,
    /// The totals of the whole run.
    pub recorded: Recorded,
    /// The place of each used block.
    pub(super) places: Places,
    /// The residency periods of processes recorded under a limit.
    pub(super) stays: Stays,
    /// The first piece of each unit of the address space that was compressed.
    pub(super) first_pieces: Vec<FirstPiece>,
}

impl Summary {
    /// Reads a trace and summarises it.
    pub fn of(path: &Path) -> Result<Summary, LabError> {
        let mut survey = Survey::new(path);
        for record in TraceReader::open(path)? {
            survey.note(record?)?;
        }
        Ok(survey.finish())
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

/// A summary in the making, with the state of the processes at the last event.
struct Survey<'a> {
    path: &'a Path,
    summary: Summary,
    content: PagesWithContent,
    unmanaged: Unmanaged,
    residency: Residency,
    growth: Growth,
    /// The order and the length in bytes of the first piece of each unit of a process's memory.
    compressed: BTreeMap<(u32, u64), (Order, u32)>,
    /// The processes that were managed, and all blocks that ever had content.
    managed: BTreeSet<u32>,
    used: BTreeSet<Block>,
}

impl Survey<'_> {
    fn new(path: &Path) -> Survey<'_> {
        Survey {
            path,
            summary: Summary::default(),
            content: PagesWithContent::default(),
            unmanaged: Unmanaged::default(),
            residency: Residency::default(),
            growth: Growth::default(),
            compressed: BTreeMap::new(),
            managed: BTreeSet::new(),
            used: BTreeSet::new(),
        }
    }

    /// Takes the next event into account.
    fn note(&mut self, Record { process, event, time_us }: Record) -> Result<(), LabError> {
        self.growth.note(process, &event, time_us);
        match event {
            Event::Start { .. } => self.summary.processes += 1,
            Event::End => {
                self.content.end(process);
                self.unmanaged.set(process, 0);
                self.residency.end(process);
            }
            Event::Limit(pages) => {
                self.summary.limit_pages = self.summary.limit_pages.max(Some(pages));
                self.residency.begin(process);
            }
            Event::Unmanaged(pages) => self.set_unmanaged(process, pages)?,
            Event::Map(_) => {
                self.managed.insert(process);
            }
            Event::Stage(range) => self.residency.go(process, &range, time_us),
            Event::Unmap(range) | Event::Discard(range) => self.content.remove(process, &range),
            Event::Remap(from, to) => {
                let target = to..PageNumber(to.0 + (from.end.0 - from.start.0));
                self.fill(process, &target)?;
                self.content.remove(process, &from);
                self.residency.come(process, &target, time_us, Origin::Elsewhere);
            }
            Event::Fill(range) => {
                self.fill(process, &range)?;
                self.residency.come(process, &range, time_us, Origin::Elsewhere);
            }
            Event::Activate(page) => {
                self.summary.touches += 1;
                self.fill(process, &page.folio(Order::ZERO))?;
                self.residency.come(process, &page.folio(Order::ZERO), time_us, Origin::Staged);
            }
            Event::Refault(range) => {
                self.summary.touches += 1;
                if range.end == range.start.offset(1) {
                    self.fill(process, &range)?;
                }
                self.come_back(process, &range, time_us);
            }
            Event::Along(range) => self.come_back(process, &range, time_us),
            Event::Compressed { pages, len_bytes } => {
                for unit in pages.start.0 >> UNIT.get()..pages.end.0.div_ceil(UNIT.pages().into()) {
                    self.compressed.entry((process, unit)).or_insert((order_of(&pages), len_bytes));
                }
            }
            Event::Lost(events) => self.summary.lost += events,
            Event::Faults { .. }
            | Event::Took { .. }
            | Event::Computed { .. }
            | Event::Delayed { .. }
            | Event::Moved { .. }
            | Event::Machine { .. } => {
                self.summary.recorded.note(&event);
            }
        }
        self.summary.peak_pages = self.summary.peak_pages.max(self.content.pages() + self.unmanaged.pages());
        Ok(())
    }

    /// Records that a range has content. Fails if the run then has more memory than a real process
    /// could have: a bad trace must not exhaust the memory of the lab.
    fn fill(&mut self, process: u32, range: &Range<PageNumber>) -> Result<(), LabError> {
        // Most touches are of pages with content.
        if range.end == range.start.offset(1) && self.content.has(process, range.start) {
            return Ok(());
        }
        let blocks = blocks(range);
        if (blocks.end - blocks.start) as usize + self.used.len() > MAX_BLOCKS {
            return Err(LabError::TraceTooLarge(self.path.to_owned()));
        }
        self.used.extend(blocks.map(|block| (process, block)));
        self.content.add(process, range);
        Ok(())
    }

    /// Records that the pages of a range that have content are resident again.
    fn come_back(&mut self, process: u32, range: &Range<PageNumber>, time_us: u64) {
        let runs = self.content.runs(process, range);
        runs.for_each(|run| self.residency.come(process, &run, time_us, Origin::Elsewhere));
    }

    fn set_unmanaged(&mut self, process: u32, pages: u32) -> Result<(), LabError> {
        self.unmanaged.set(process, pages);
        if self.unmanaged.pages() > (MAX_BLOCKS * BLOCK_PAGES) as u64 {
            return Err(LabError::TraceTooLarge(self.path.to_owned()));
        }
        Ok(())
    }

    fn finish(self) -> Summary {
        let places = Places::of(self.used);
        let first_piece = |((process, unit), (order, len_bytes))| {
            let unit = PageNumber(unit << UNIT.get());
            let place = places.find(process, unit.0 / BLOCK_PAGES as u64)?;
            Some(FirstPiece { unit: place.page(unit.index_in_block()), order, len_bytes })
        };
        let first_pieces = self.compressed.into_iter().filter_map(first_piece).collect();
        let (managed_processes, stays) = (self.managed.len() as u32, self.residency.stays());
        Summary { managed_processes, leak: self.growth.leak(), stays, first_pieces, places, ..self.summary }
    }
}
