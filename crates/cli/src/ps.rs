//! `foliomem ps`: lists the runs of this user; of all users for root.

use crate::args::{Args, Command, PsArgs};
use crate::figures::{Figures, Rates};
use clap::Parser;
use foliomem_session::find_run::Runs;
use foliomem_session::segment::Control;
use foliomem_types::size::format_short;
use rustix::termios::tcgetwinsize;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

/// Time between the two looks that rates are of: the supervisors sample 20 times in it.
const INTERVAL: Duration = Duration::from_millis(200);
/// Width of the table, in columns, where no terminal has another.
const COLUMNS: usize = 80;

/// A run in the list.
pub struct Row {
    /// The pid of its supervisor.
    pub pid: u32,
    /// The program and its arguments.
    pub program: Vec<String>,
    control: &'static Control,
    /// The figures at the last look.
    pub figures: Figures,
    /// The rates of the time between the last two looks.
    pub rates: Rates,
}

/// Prints the list.
pub fn ps(args: &PsArgs) -> u8 {
    let rows = rows(&mut Runs::default());
    if rows.is_empty() {
        let whose = if rustix::process::geteuid().is_root() { "" } else { " of this user" };
        eprintln!("foliomem: there are no runs{whose}");
    }
    if args.json {
        println!("{:#}", rows.iter().map(Row::json).collect::<Value>());
    } else {
        print!("{}", table(&rows, width()));
    }
    0
}

/// Looks at all runs twice. Runs that end meanwhile are left out.
fn rows(runs: &mut Runs) -> Vec<Row> {
    let before: Vec<_> =
        runs.look().into_iter().map(|(pid, control)| (pid, control, Figures::of_run(control))).collect();
    if before.is_empty() {
        return Vec::new();
    }
    std::thread::sleep(INTERVAL);
    let row = |(pid, control, earlier): (u32, &'static Control, Figures)| {
        let figures = Figures::of_run(control);
        let program = program_of(pid)?;
        let row = Row { pid, program, control, figures, rates: figures.since(&earlier) };
        // The figures of a run that has ended since are those of its end, or of no process.
        (!control.has_ended()).then_some(row)
    };
    before.into_iter().filter_map(row).collect()
}

/// Returns the program that supervisor `pid` runs, with its arguments; `None` if the supervisor has
/// ended.
fn program_of(pid: u32) -> Option<Vec<String>> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok().filter(|line| !line.is_empty())?;
    let words = line.strip_suffix(b"\0").unwrap_or(&line).split(|&byte| byte == 0);
    let words: Vec<OsString> = words.map(|word| OsString::from_vec(word.to_vec())).collect();
    let program = match Args::try_parse_from(&words).map(|args| args.command) {
        Ok(Command::Run(run)) => run.program,
        Ok(Command::Record(record)) => record.run.program,
        // It has the options of another version.
        _ => words,
    };
    Some(program.iter().map(|word| word.to_string_lossy().into_owned()).collect())
}

impl Row {
    fn json(&self) -> Value {
        let Figures { taken_bytes, stored_bytes, content_bytes, swap_file_bytes, .. } = self.figures;
        json!({
            "pid": self.pid,
            "program": self.program.join(" "),
            "processes": self.control.living_processes().len(),
            "limit_bytes": self.control.limit_bytes(),
            "taken_bytes": taken_bytes,
            "needed_bytes": self.control.tree_needed_bytes(),
            "resident_bytes": self.figures.resident_bytes(),
            "stored_bytes": stored_bytes,
            "content_bytes": content_bytes,
            "ratio": self.figures.ratio(),
            "swap_file_bytes": swap_file_bytes,
            "faults_per_s": self.rates.faults_per_s,
            "waiting_percent": self.rates.waiting_percent,
        })
    }

    fn line(&self) -> String {
        let figures = &self.figures;
        format!(
            "{:>7} {:>6} {:>8} {:>6} {:>5} {:>6} {:>8.0} {:>5.0}  ",
            self.pid,
            format_short(self.control.limit_bytes()),
            format_short(figures.resident_bytes()),
            format_short(figures.stored_bytes),
            figures.ratio().map_or("-".to_owned(), |ratio| format!("{ratio:.1}")),
            format_short(figures.swap_file_bytes),
            self.rates.faults_per_s,
            self.rates.waiting_percent,
        )
    }
}

/// Returns the table, in lines of at most `width` columns.
fn table(rows: &[Row], width: usize) -> String {
    let head = "    PID  LIMIT RESIDENT STORED RATIO   SWAP FAULTS/S WAIT%  PROGRAM".to_owned();
    let lines = rows.iter().map(|row| row.line() + &printable(&short(&row.program)));
    let cut = |line: String| line.chars().take(width).collect::<String>();
    std::iter::once(head).chain(lines).map(|line| cut(line) + "\n").collect()
}

/// Returns a program without its directory, and its arguments.
fn short(program: &[String]) -> String {
    let name = |word: &String| word.rsplit('/').next().unwrap_or_default().to_owned();
    let words = program.first().map(name).into_iter().chain(program.iter().skip(1).cloned());
    words.collect::<Vec<_>>().join(" ")
}

/// Replaces what a terminal would take for a command, or would not show.
fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

/// Returns the width of the terminal; that of most terminals if there is none.
fn width() -> usize {
    let size = tcgetwinsize(std::io::stdout()).ok();
    size.map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0).unwrap_or(COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_cannot_write_to_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\nc\u{9b}d é"), "a?[31mb?c?d é");
    }

    #[test]
    fn a_process_that_is_no_run_is_shown_as_it_is() {
        let own = program_of(std::process::id()).unwrap();
        assert!(own[0].contains("/foliomem") && short(&own).starts_with("foliomem"), "{own:?}");
        assert_eq!(program_of(u32::MAX), None);
    }
}
