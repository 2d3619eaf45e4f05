//! `foliomem ps`: lists the runs of this user; of all users for root.

use crate::args::PsArgs;
use crate::columns::{Column, Entry};
use crate::sampler::{Detail, RunSample, Sampler};
use rustix::termios::tcgetwinsize;
use serde_json::Value;
use std::time::Duration;

/// Time between the two samples from which rates are computed. A supervisor samples 20 times in it.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// Width of the table, in columns, if no terminal tells its width.
const COLUMNS: usize = 80;

/// Prints the list.
pub fn ps(args: &PsArgs) -> u8 {
    let runs = Sampler::new(Detail::Runs, None).sample_twice(INTERVAL);
    warn_if_none(&runs);
    if args.json {
        println!("{:#}", runs.iter().map(RunSample::json).collect::<Value>());
    } else {
        print!("{}", table(runs.iter().map(|run| line(&run.entry())), width()));
    }
    0
}

/// Says on stderr that there are no runs.
pub fn warn_if_none(runs: &[RunSample]) {
    if runs.is_empty() {
        eprintln!("foliomem: {}", no_runs());
    }
}

/// Returns the message that is printed if there are no runs.
pub fn no_runs() -> String {
    let whose = if rustix::process::geteuid().is_root() { "" } else { " of this user" };
    format!("there are no runs{whose}")
}

impl RunSample {
    /// Returns what a line of the table says about the run.
    pub fn entry(&self) -> Entry<'_> {
        let (figures, rates, program) = (&self.figures, self.rates, &self.program);
        Entry { pid: self.pid, limit_bytes: Some(self.limit_bytes), figures, rates, program }
    }
}

fn line(entry: &Entry) -> String {
    Column::ALL.iter().map(|column| column.cell(entry)).collect()
}

/// Returns the table, in lines of at most `width` columns.
pub fn table(lines: impl Iterator<Item = String>, width: usize) -> String {
    let head = Column::ALL.iter().map(|column| column.title()).collect();
    let cut = |line: String| line.chars().take(width).collect::<String>();
    std::iter::once(head).chain(lines).map(|line| cut(line) + "\n").collect()
}

/// Returns the width of the terminal, or [`COLUMNS`] if there is no terminal.
pub fn width() -> usize {
    let size = tcgetwinsize(std::io::stdout()).ok();
    size.map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0).unwrap_or(COLUMNS)
}
