//! The columns of `foliomem ps` and `foliomem top`: their titles, their cells, and sorting by them.

use crate::figures::{Figures, Rates};
use foliomem_types::size::format_short;
use std::cmp::Ordering;

/// A column. All columns but the last hold numbers, which are aligned right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Column {
    /// The pid: of a run, that of its supervisor.
    Pid,
    /// The limit.
    Limit,
    /// Memory that is taken apart from the store.
    Resident,
    /// Memory that the store takes.
    Stored,
    /// How well content compresses.
    Ratio,
    /// Content of the swap file.
    Swap,
    /// The rate of faults.
    Faults,
    /// The time that threads wait for faults, or that the process is held.
    Wait,
    /// The program and its arguments.
    Program,
}

/// The run or the process of a line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// The pid.
    pub pid: u32,
    /// The limit, in bytes; a process has none of its own.
    pub limit_bytes: Option<u64>,
    /// The figures.
    pub figures: &'a Figures,
    /// The rates, if they are known.
    pub rates: Option<Rates>,
    /// The program and its arguments.
    pub program: &'a [String],
}

impl Entry<'_> {
    /// Returns whether this is a process that is held.
    fn is_held(&self) -> bool {
        self.limit_bytes.is_none() && self.figures.held_processes > 0
    }
}

impl Column {
    /// The columns, from left to right.
    pub const ALL: [Column; 9] = [
        Column::Pid,
        Column::Limit,
        Column::Resident,
        Column::Stored,
        Column::Ratio,
        Column::Swap,
        Column::Faults,
        Column::Wait,
        Column::Program,
    ];

    /// Returns the title, right-aligned in the width of the column. The first character of each
    /// column but the first is a space.
    pub fn title(self) -> &'static str {
        match self {
            Column::Pid => "    PID",
            Column::Limit => "  LIMIT",
            Column::Resident => " RESIDENT",
            Column::Stored => " STORED",
            Column::Ratio => " RATIO",
            Column::Swap => "   SWAP",
            Column::Faults => " FAULTS/S",
            Column::Wait => " WAIT%",
            Column::Program => "  PROGRAM",
        }
    }

    /// Returns what the column says about `entry`, as wide as the title or, of the program, as it
    /// is.
    pub fn cell(self, entry: &Entry) -> String {
        let text = match self {
            Column::Pid => entry.pid.to_string(),
            Column::Limit => entry.limit_bytes.map_or(String::new(), format_short),
            Column::Resident => format_short(entry.figures.resident_bytes()),
            Column::Stored => format_short(entry.figures.stored_bytes),
            Column::Ratio => entry.figures.ratio().map_or("-".to_owned(), |ratio| format!("{ratio:.1}")),
            Column::Swap => format_short(entry.figures.swap_file_bytes),
            Column::Faults => rate(entry.rates.map(|rates| rates.faults_per_s)),
            Column::Wait if entry.is_held() => "held".to_owned(),
            Column::Wait => rate(entry.rates.map(|rates| rates.waiting_percent)),
            Column::Program => return format!("  {}", printable(&short(entry.program))),
        };
        format!("{text:>width$}", width = self.title().len())
    }

    /// Compares two entries by this column. An unknown value comes first.
    pub fn compare(self, one: &Entry, other: &Entry) -> Ordering {
        match self {
            Column::Program => short(one.program).cmp(&short(other.program)),
            number => number.number(one).total_cmp(&number.number(other)),
        }
    }

    fn number(self, entry: &Entry) -> f64 {
        const UNKNOWN: f64 = -1.0;
        match self {
            Column::Pid => f64::from(entry.pid),
            Column::Limit => entry.limit_bytes.map_or(UNKNOWN, |bytes| bytes as f64),
            Column::Resident => entry.figures.resident_bytes() as f64,
            Column::Stored => entry.figures.stored_bytes as f64,
            Column::Ratio => entry.figures.ratio().unwrap_or(UNKNOWN),
            Column::Swap => entry.figures.swap_file_bytes as f64,
            Column::Faults => entry.rates.map_or(UNKNOWN, |rates| rates.faults_per_s),
            Column::Wait => entry.rates.map_or(UNKNOWN, |rates| rates.waiting_percent),
            Column::Program => UNKNOWN,
        }
    }
}

fn rate(rate: Option<f64>) -> String {
    rate.map_or("-".to_owned(), |rate| format!("{rate:.0}"))
}

/// Returns a program without its directory, and its arguments.
pub fn short(program: &[String]) -> String {
    let name = |word: &String| word.rsplit('/').next().unwrap_or_default().to_owned();
    let words = program.first().map(name).into_iter().chain(program.iter().skip(1).cloned());
    words.collect::<Vec<_>>().join(" ")
}

/// Replaces what a terminal would take for a command, or would not show.
pub fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_cannot_write_to_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\nc\u{9b}d é"), "a?[31mb?c?d é");
    }

    #[test]
    fn a_program_is_shown_without_its_directory() {
        assert_eq!(short(&["/usr/bin/python3".to_owned(), "/tmp/a.py".to_owned()]), "python3 /tmp/a.py");
        assert_eq!(short(&[]), "");
    }
}
