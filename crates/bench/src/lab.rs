//! `foliomem bench lab`: measures the speed and the memory of the lab's simulations.
//!
//! Each case runs in a process of its own, in several rounds, and the median of their CPU time
//! counts. *Page events* are swapped-in and swapped-out pages. Memory is the peak of the process
//! beyond its memory at the start, without its executable's pages, divided by the simulated pages
//! in memory and swapped out: most of it is the engine's.

use crate::rounds::{Rounds, serve};
use crate::scratch::ScratchFile;
use crate::{Error, cpu_time, median};
use foliomem_lab::random::Random;
use foliomem_lab::scenario::Scenario;
use foliomem_lab::shipped;
use foliomem_lab::workload::Summary;
use foliomem_trace::{Event, PageNumber, Record, TraceWriter};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;

/// First argument of the process that measures one case.
const CHILD_ARG: &str = "--foliomem-lab-child";

/// A shipped scenario with settings under which it takes some seconds.
struct Case {
    scenario: &'static str,
    set: &'static [(&'static str, &'static str)],
}

/// The shipped cases: an eighth of `usemem`, as `lab seeds` runs it; the whole swap allocator test;
/// a twelfth of a build, in a small tree.
const CASES: [Case; 3] = [
    Case {
        scenario: "usemem",
        set: &[("machine.limit_mib", "5120"), ("swap.size_mib", "4480"), ("workload.usemem.task_mib", "128")],
    },
    Case { scenario: "swap-allocator", set: &[] },
    Case {
        scenario: "kernel-build-64k",
        set: &[("workload.kernel-build.units", "200"), ("workload.kernel-build.tree_mib", "64")],
    },
];
/// Name of the case that replays a recorded run.
const REPLAY: &str = "replay";
/// Settings of the replay. The limit is three quarters of the recorded need: half would not hold
/// it, because of how well it compresses.
const REPLAY_SET: &[(&str, &str)] = &[("machine.limit_mib", "96"), ("machine.sizes_kib", "16+32+64")];
/// Pages that the recorded program fills.
const REPLAY_PAGES: u64 = 128 << 8;
/// Touches that the recorded program makes.
const REPLAY_TOUCHES: u32 = 400_000;

/// One case, measured: medians over rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Name of the case.
    pub scenario: String,
    /// Number of pages swapped in or out.
    pub page_events: u64,
    /// CPU seconds of one run, with its set-up.
    pub seconds: f64,
    /// Page events for each CPU second.
    pub events_per_s: f64,
    /// Bytes of memory for each simulated page.
    pub bytes_per_page: f64,
}

/// The result of one round; [`Row`] explains the fields.
#[derive(Debug, Serialize, Deserialize)]
struct Round {
    page_events: u64,
    seconds: f64,
    bytes_per_page: f64,
}

/// Measures `runs` runs of each case and calls `progress` with each row.
///
/// # Errors
/// Fails if a process fails.
pub fn run(runs: usize, progress: &mut dyn FnMut(&Row)) -> Result<Vec<Row>, Error> {
    let own = std::env::current_exe().map_err(Error::doing("the path of this program"))?;
    let trace = ScratchFile::new("lab", write_trace)?;
    let mut rows = Vec::new();
    for name in CASES.iter().map(|case| case.scenario).chain([REPLAY]) {
        let mut child = Rounds::start(Command::new(&own).args([CHILD_ARG, name]).arg(trace.path()))?;
        let rounds = (0..runs.max(1)).map(|_| child.next()).collect::<Result<Vec<Round>, _>>()?;
        let over = |figure: fn(&Round) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
        let (page_events, seconds) = (rounds[0].page_events, over(|round| round.seconds));
        let row = Row {
            scenario: name.to_owned(),
            page_events,
            seconds,
            events_per_s: page_events as f64 / seconds,
            bytes_per_page: over(|round| round.bytes_per_page),
        };
        progress(&row);
        rows.push(row);
    }
    Ok(rows)
}

/// Call this first in `main`: if this process was started to measure one case, it measures and
/// exits.
pub fn enter_if_asked() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(CHILD_ARG) {
        return;
    }
    let (name, trace) = (arguments.next().unwrap_or_default(), arguments.next().unwrap_or_default());
    let measured = scenario(&name, Path::new(&trace)).and_then(|scenario| {
        let before = Memory::now()?;
        serve(|| round(&scenario, before))
    });
    if let Err(error) = &measured {
        eprintln!("{error}");
    }
    std::process::exit(i32::from(measured.is_err()));
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::WrongResult(error.to_string())
}

/// Returns the shipped scenario `name`, or the replay of `trace`.
fn scenario(name: &str, trace: &Path) -> Result<Scenario, Error> {
    let (text, set) = match CASES.iter().find(|case| case.scenario == name) {
        Some(case) => (shipped::find(name).map(|shipped| shipped.text.to_owned()), case.set),
        None => (Some(Summary::of(trace).map_err(failed)?.scenario(trace)), REPLAY_SET),
    };
    let text = text.ok_or_else(|| failed(format!("{name} is not shipped")))?;
    let set: Vec<_> = set.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    Scenario::parse_with(name, &text, &set).map_err(failed)
}

fn round(scenario: &Scenario, before: Memory) -> Result<Round, Error> {
    let started = cpu_time::thread();
    let outcome = scenario.run(None).map_err(failed)?;
    let seconds = (cpu_time::thread() - started).as_secs_f64();
    let pages = outcome.peak_pages + outcome.peak_swapped_pages;
    let now = Memory::now()?;
    let grown_kib = now.most_kib.saturating_sub(before.all_kib + now.files_kib - before.files_kib);
    let bytes_per_page = (grown_kib << 10) as f64 / pages.max(1) as f64;
    Ok(Round { page_events: outcome.page_events, seconds, bytes_per_page })
}

/// Memory of this process: resident now, its peak, and the file pages among the resident ones.
#[derive(Clone, Copy, Debug)]
struct Memory {
    all_kib: u64,
    most_kib: u64,
    files_kib: u64,
}

impl Memory {
    fn now() -> Result<Memory, Error> {
        let path = Path::new("/proc/self/status");
        let text = std::fs::read_to_string(path).map_err(Error::at(path))?;
        let kib = |field| {
            let value =
                text.lines().find_map(|line| line.strip_prefix(field)?.trim().strip_suffix(" kB")?.parse().ok());
            value.ok_or_else(|| Error::parse(field, &text))
        };
        Ok(Memory { all_kib: kib("VmRSS:")?, most_kib: kib("VmHWM:")?, files_kib: kib("RssFile:")? })
    }
}

/// Writes the trace of a program that fills memory and touches its pages at random.
fn write_trace(path: &Path) -> std::io::Result<()> {
    let first = PageNumber(1 << 20);
    let all = first..PageNumber(first.0 + REPLAY_PAGES);
    let mut random = Random::new(1);
    let touches = (0..REPLAY_TOUCHES).map(|_| {
        let page = PageNumber(first.0 + random.below(REPLAY_PAGES));
        Event::Refault(page..page.offset(1))
    });
    let begin = [Event::Start { pid: 1 }, Event::Map(all.clone()), Event::Fill(all)];
    let mut writer = TraceWriter::create(path)?;
    for (event, time_us) in begin.into_iter().chain(touches).zip((0..).step_by(1000)) {
        writer.write(&Record { process: 0, time_us, event })?;
    }
    writer.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_parses_and_the_trace_replays() {
        let trace = ScratchFile::new("lab", write_trace).unwrap();
        for case in CASES {
            scenario(case.scenario, trace.path()).unwrap();
        }
        let replayed = round(&scenario(REPLAY, trace.path()).unwrap(), Memory::now().unwrap()).unwrap();
        assert!(replayed.page_events > u64::from(REPLAY_TOUCHES) / 4, "{replayed:?}");
        let path = trace.path().to_owned();
        drop(trace);
        assert!(!path.exists());
    }
}
