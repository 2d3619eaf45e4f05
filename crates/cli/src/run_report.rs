//! `foliomem run --report`: gathers what happened in a run, for one page that is written at its
//! end.
//!
//! The gathered data has a fixed maximum size, whatever the duration of the run and its number of
//! processes.

use crate::error::CliError;
use crate::figures::Figures;
use crate::process_name::name_of;
use crate::report::Report;
use crate::run_page::{Gathered, page};
use crate::timeline::{Sample, Timeline};
use foliomem_session::segment::Control;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Maximum number of processes that are kept: the largest.
const MAX_PROCESSES: usize = 64;
/// Maximum number of printed lines that are kept: the first.
const MAX_SAID: usize = 50;
/// Maximum length of the shown command, in characters.
const MAX_COMMAND: usize = 4096;
/// A process's name is read again when it has grown by 1/2^3: it may execute another program.
const GROWN_SHIFT: u32 = 3;

/// The file of the page. It is opened before the program starts, so that an unwritable file is
/// refused at once, not hours later.
pub struct ReportFile {
    path: String,
    file: File,
}

impl ReportFile {
    /// Opens the file.
    pub fn open(path: &str) -> Result<ReportFile, CliError> {
        let file = File::create(path).map_err(|error| CliError::Report(path.to_owned(), error))?;
        Ok(ReportFile { path: path.to_owned(), file })
    }
}

/// The peaks of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProcessFigures {
    /// The name.
    pub name: String,
    /// The times of the first and the last look at the process, since the start of the run.
    pub seen: (Duration, Duration),
    /// The most that it took, its part of the store included, in bytes.
    pub taken_bytes: u64,
    /// The most of it that was swapped out, uncompressed, in bytes.
    pub swapped_out_bytes: u64,
    /// Faults that foliomem has served.
    pub faults: u64,
    /// The size at which the name was read, in bytes.
    named_bytes: u64,
}

/// The processes of a run, by pid.
#[derive(Debug, Default)]
pub struct Processes {
    by_pid: BTreeMap<u32, ProcessFigures>,
    /// How many small ones were left out.
    left_out: u64,
}

impl Processes {
    fn look(&mut self, at: Duration, control: &Control) {
        for (pid, slot) in control.living_processes() {
            let (store, vm) = (&slot.counters.store, &slot.counters.vm);
            let out_bytes = store.orig_data_size.get();
            self.note(pid, at, [slot.measured_bytes(), out_bytes, vm.pgfault.get()], || name_of(pid));
        }
    }

    /// Notes the present figures of a process: what it takes and what of it is swapped out, in
    /// bytes, and its faults.
    fn note(&mut self, pid: u32, at: Duration, figures: [u64; 3], name: impl Fn() -> Option<String>) {
        let [taken_bytes, out_bytes, faults] = figures;
        let new = ProcessFigures {
            name: String::new(),
            seen: (at, at),
            taken_bytes: 0,
            swapped_out_bytes: 0,
            faults: 0,
            named_bytes: 0,
        };
        let process = self.by_pid.entry(pid).or_insert(new);
        process.seen.1 = at;
        process.taken_bytes = process.taken_bytes.max(taken_bytes);
        process.swapped_out_bytes = process.swapped_out_bytes.max(out_bytes);
        process.faults = process.faults.max(faults);
        let has_grown = taken_bytes > process.named_bytes.saturating_add(process.named_bytes >> GROWN_SHIFT);
        if process.name.is_empty() || has_grown {
            name().into_iter().for_each(|name| process.name = name);
            process.named_bytes = taken_bytes;
        }
        if self.by_pid.len() > MAX_PROCESSES {
            let smallest = self.by_pid.iter().min_by_key(|(_, process)| (process.taken_bytes, process.seen.1));
            let smallest = smallest.map(|(&pid, _)| pid);
            smallest.into_iter().for_each(|pid| drop(self.by_pid.remove(&pid)));
            self.left_out += 1;
        }
    }

    /// Returns the largest processes with their pids, the largest first.
    pub fn largest(&self) -> Vec<(u32, &ProcessFigures)> {
        let mut all: Vec<_> = self.by_pid.iter().map(|(&pid, process)| (pid, process)).collect();
        all.sort_by_key(|(_, process)| std::cmp::Reverse(process.taken_bytes));
        all
    }

    /// Returns whether small processes were left out.
    pub fn is_incomplete(&self) -> bool {
        self.left_out > 0
    }
}

fn shortened(command: &str) -> String {
    let mut text: String = command.chars().take(MAX_COMMAND).collect();
    if text.len() < command.len() {
        text.push('\u{2026}');
    }
    text
}

/// Gathers what happens in a run.
pub struct RunReport {
    target: ReportFile,
    name: String,
    command: String,
    timeline: Timeline,
    processes: Processes,
    /// The lines that were printed, and when.
    said: Vec<(Duration, String)>,
}

impl RunReport {
    /// Starts to gather for the run of a command.
    pub fn new(target: ReportFile, command: &[String]) -> RunReport {
        let program = command.first().map_or("", String::as_str);
        let name = Path::new(program).file_name().map_or(program.into(), |name| name.to_string_lossy());
        let (name, command) = (shortened(&name), shortened(&command.join(" ")));
        let (timeline, processes) = (Timeline::new(), Processes::default());
        RunReport { target, name, command, timeline, processes, said: Vec::new() }
    }

    /// Takes a sample if one is due.
    pub fn look(&mut self, control: &Control) {
        let at = control.elapsed();
        self.timeline.note_limit(at, control.limit_bytes());
        // After the end of the last process there is nothing to see.
        if !self.timeline.is_due(at) || control.living_processes().is_empty() {
            return;
        }
        let figures = Figures::of_run(control);
        let sample = Sample {
            limit_bytes: control.limit_bytes(),
            resident_bytes: figures.resident_bytes(),
            stored_bytes: figures.stored_bytes,
            swap_file_bytes: figures.swap_file_bytes,
            faults: figures.faults,
            stall_ns: control.memory_stall().stall_ns,
        };
        self.timeline.add(at, sample);
        self.processes.look(at, control);
    }

    /// Notes a line that was printed.
    pub fn note_said(&mut self, control: &Control, line: &str) {
        if self.said.len() < MAX_SAID {
            self.said.push((control.elapsed(), line.trim().to_owned()));
        }
    }

    /// Writes the page of the run, which has ended with `code` and these statistics.
    pub fn finish(mut self, report: &Report, figures: &Value, code: u8) -> Result<(), CliError> {
        let gathered = Gathered {
            name: &self.name,
            command: &self.command,
            code,
            summary: report.summary(),
            why: report.why(),
            figures,
            timeline: &self.timeline,
            processes: &self.processes,
            said: &self.said,
        };
        let written = self.target.file.write_all(page(&gathered).as_bytes());
        written.map_err(|error| CliError::Report(self.target.path, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};

    #[test]
    fn the_largest_of_many_processes_are_kept() {
        let mut processes = Processes::default();
        for pid in 0..5000u32 {
            let (at, bytes) = (Duration::from_millis(pid.into()), u64::from(pid % 1000) + 1);
            processes.note(pid, at, [bytes, 2 * bytes, 1], || Some(format!("p{pid}")));
        }
        let largest = processes.largest();
        assert_eq!(largest.len(), MAX_PROCESSES);
        assert!(processes.is_incomplete() && largest.iter().all(|(pid, _)| pid % 1000 >= 980));
        assert!(largest.windows(2).all(|two| two[0].1.taken_bytes >= two[1].1.taken_bytes));
    }

    #[test]
    fn the_page_of_a_run_of_days_is_small() {
        let (control, _segment) = Control::create(&Configuration::plain(Limit::Bytes(1 << 30))).unwrap();
        let path = std::env::temp_dir().join(format!("foliomem-report-{}.html", std::process::id()));
        let target = ReportFile::open(path.to_str().unwrap()).unwrap();
        let mut report = RunReport::new(target, &["/bin/<prog>".to_owned(), "x&\"".repeat(1 << 16)]);
        for second in 0..100_000u64 {
            let at = Duration::from_secs(second);
            let noise = second.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
            report.timeline.note_limit(at, noise);
            report.timeline.add(
                at,
                Sample {
                    limit_bytes: noise,
                    resident_bytes: noise / 3,
                    stored_bytes: noise / 5,
                    swap_file_bytes: noise / 7,
                    faults: second * 1000 + noise % 1000,
                    stall_ns: second * 300_000_000,
                },
            );
            report.note_said(control, &"&".repeat(400));
            report.processes.note(second as u32, at, [noise, noise, noise], || Some("a<b".repeat(5)));
        }
        let end = Report::of(control);
        report.finish(&end, &end.json(), 0).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!((100_000..500_000).contains(&text.len()), "{} bytes", text.len());
        assert!(text.contains("<h1>foliomem: &lt;prog&gt;</h1>") && text.contains("\u{2026}</code>"));
    }

    #[test]
    fn a_process_has_the_name_that_it_had_when_it_was_large() {
        let mut processes = Processes::default();
        let mut note = |bytes, out_bytes, name: &str| {
            processes.note(5, Duration::from_secs(bytes), [bytes, out_bytes, bytes], || Some(name.to_owned()));
        };
        note(1, 0, "sh");
        note(100, 50, "python3");
        note(101, 20, "late");
        let (_, process) = processes.largest()[0];
        assert_eq!((process.name.as_str(), process.taken_bytes, process.swapped_out_bytes), ("python3", 101, 50));
        assert_eq!(process.seen, (Duration::from_secs(1), Duration::from_secs(101)));
    }
}
