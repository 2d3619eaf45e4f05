//! Advice in words: a table with a bar for each limit, the least limits, and what to set.

use super::{Advice, Least, Point, Unknown};
use foliomem_types::size::{format_mib, format_short};
use foliomem_types::units::PAGE_BYTES;
use std::fmt::{self, Display, Formatter, Write};

/// Columns of the longest bar.
const BAR_COLUMNS: f64 = 32.0;
/// Number of threads from which waits are said to be spread.
const SEVERAL_THREADS: f64 = 1.5;
/// The slowdown whose limit is recommended.
const RECOMMENDED: f64 = 1.2;

impl Display for Advice {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        let recorded = self
            .recorded_limit_bytes
            .map_or("without a limit".to_owned(), |limit_bytes| format!("within {}", format_mib(limit_bytes)));
        write!(to, "needed {}; recorded {recorded} in {:.1} s", format_mib(self.need_bytes), self.recorded_seconds)?;
        match self.unlimited_seconds {
            Some(seconds) => writeln!(to, "; without a limit it would take {seconds:.1} s")?,
            None => writeln!(to)?,
        }
        self.table(to)?;
        for least in &self.least {
            writeln!(to, "{}", least_line(least))?;
        }
        self.notes(to)
    }
}

impl Advice {
    fn table(&self, to: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            to,
            "{:>7} {:>7} {:>9} {:>11} {:>11} {:>11} {:>9} {:>9}",
            "limit", "of need", "slowdown", "first touch", "from staged", "from swap", "MiB in", "MiB out"
        )?;
        let most = self.points.iter().filter_map(|point| point.slowdown).fold(1.0, f64::max);
        for point in &self.points {
            writeln!(to, "{}", self.row(point, most)?.trim_end())?;
        }
        Ok(())
    }

    fn row(&self, point: &Point, most: f64) -> Result<String, fmt::Error> {
        let percent = point.limit_bytes as f64 * 100.0 / self.need_bytes.max(1) as f64;
        let slowdown = point.slowdown.map_or("not known".to_owned(), |slowdown| format!("{slowdown:.2}x"));
        let mut row = format!("{:>7} {percent:>6.0}% {slowdown:>9}", format_short(point.limit_bytes));
        if let Some(work) = &point.work {
            let mib = |pages: u64| (pages * PAGE_BYTES as u64) >> 20;
            write!(
                row,
                " {:>11} {:>11} {:>11} {:>9} {:>9}",
                work.first_touch_faults,
                work.staged_faults,
                work.swap_in_faults,
                mib(work.pswpin),
                mib(work.pswpout)
            )?;
        }
        match (point.slowdown, point.unknown) {
            (Some(slowdown), _) => {
                // What exceeds no slowdown at all, as a part of the most that does.
                let part = if most > 1.0 { (slowdown - 1.0) / (most - 1.0) } else { 0.0 };
                write!(row, " |{}", "#".repeat((part * BAR_COLUMNS).round() as usize))?;
            }
            (None, Some(unknown)) => write!(row, " {}", unknown.why())?,
            (None, None) => {}
        }
        Ok(row)
    }

    fn notes(&self, to: &mut Formatter<'_>) -> fmt::Result {
        let recommended = self.least.iter().find(|least| least.slowdown == RECOMMENDED);
        if let Some(limit_bytes) = recommended.and_then(|least| least.limit_bytes) {
            writeln!(to, "set: foliomem run --limit {}M -- PROGRAM", limit_bytes >> 20)?;
        }
        let is_unknown = |unknown| self.points.iter().any(|point| point.unknown == Some(unknown));
        if is_unknown(Unknown::BelowRecording) {
            writeln!(
                to,
                "not known: what the program touches within less than it was recorded in; record with a smaller --limit"
            )?;
        }
        if is_unknown(Unknown::DoesNotFit) {
            writeln!(to, "does not compress: give the run a swap file (--swap FILE), or a larger limit")?;
        }
        if is_unknown(Unknown::NoTimes) {
            writeln!(to, "not known: times, because this machine could not be measured after the recording")?;
        }
        if self.lost_events > 0 {
            writeln!(to, "not known: {} events were lost; record again on a less busy machine", self.lost_events)?;
        }
        if self.managed_processes == 0 {
            writeln!(to, "the program never came near its limit: record with a smaller --limit")?;
        }
        if let Some(threads) = self.threads.filter(|&threads| threads > SEVERAL_THREADS) {
            writeln!(
                to,
                "{threads:.1} threads ran at a time: which of them waits for a fault is not known, so all are taken to"
            )?;
        }
        if let Some(leak) = &self.leak {
            let mib = |pages: u64| format_mib(pages * PAGE_BYTES as u64);
            writeln!(
                to,
                "leaks: it grows until its end, and of {} that came after a quarter of the time {} were never touched again",
                mib(leak.grown_pages),
                mib(leak.idle_pages)
            )?;
        }
        Ok(())
    }
}

fn least_line(least: &Least) -> String {
    let wanted = match least.slowdown {
        slowdown if slowdown < 2.0 => format!("at most {:.0}% slower", (slowdown - 1.0) * 100.0),
        slowdown => format!("at most {slowdown:.0}x as long"),
    };
    match least.limit_bytes {
        Some(limit_bytes) if least.may_be_less => {
            format!("{wanted}: {} or less; less is not known", format_mib(limit_bytes))
        }
        Some(limit_bytes) => format!("{wanted}: {}", format_mib(limit_bytes)),
        None => format!("{wanted}: not known"),
    }
}
