//! The replay workload: it repeats the mappings, touches and drops of a recorded run
//! ([`foliomem_trace`]).
//!
//! - The trace has every touch of pages that the limit had made non-resident, and everything read
//!   ahead. It has no touches of resident pages. But the run staged each page before it evicted
//!   it, and so learned whether the page was still in use ([`residency`]). When the replay stages
//!   a page that was in use, it touches the page after a delay that is typical of the run, once
//!   for each time that the page became resident in the run. These touches only read.
//! - Other pages that were resident in the run but are not in the replay are touched by chance in
//!   their place ([`chance`]).
//! - A trace without a limit has every touch.
//! - Memory compresses as it did in the run ([`crate::density`]).
//! - Unmanaged memory takes its part of the room.
//! - Pages of all processes lie in one address space. Used blocks of 2 MiB that were adjacent are
//!   adjacent here. Memory that was moved, or shared with a parent, counts as touched for the first
//!   time.

mod chance;
mod growth;
mod memory;
mod places;
mod player;
mod recorded;
mod residency;
mod summary;

pub use self::growth::Leak;
pub use self::recorded::{FaultSum, Recorded};
pub use self::summary::Summary;

use self::player::Player;
use super::{Round, Rounds};
use crate::costs::Costs;
use crate::density::Density;
use crate::error::LabError;
use crate::lab::Lab;
use crate::schedule::Took;
use foliomem_trace::TraceReader;
use foliomem_types::units::{BLOCK_PAGES, CpuNumber};
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Number of events between two counts of the swapped-out pages.
const NOTE_EVERY: u64 = 4096;

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

impl Replay {
    /// Returns the pages of address space.
    pub fn pages(&self) -> u32 {
        (self.summary.places.end().index() + 1) as u32 * BLOCK_PAGES as u32
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
        let mut player = Player::new(lab, &self.summary, seed);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;
    use foliomem_trace::{Record, TraceWriter};
    use foliomem_types::trace_event::Event;
    use foliomem_types::units::{Order, PAGE_BYTES, PageNumber};
    use std::ops::Range;

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
