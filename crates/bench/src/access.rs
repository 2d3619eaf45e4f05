//! Access patterns: which folio sizes pay for which, and how the kernel's zram swap does.
//!
//! A program touches pages of its memory in one pattern at a memory limit of a share of what it needs. foliomem runs with
//! its default sizes, where it finds out by itself what pays, and with each fixed size; the kernel with single pages
//! and with 64K mTHP, of which the faster counts. The comparison is at equal *total* memory, as in
//! [`crate::programs`]: the kernel's group gets the share, foliomem the share and what zram took at its peak.

use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;

use serde::Serialize;

use crate::access_child::{Run, arguments};
use crate::corpus::CorpusFile;
use crate::kernel::{self, Group, run as run_command};
use crate::{Error, MIB, corpus, median};

/// What the program needs.
pub const NEED_MIB: u64 = 192;
/// Limits, per cent of the need.
pub const LIMITS: [u64; 3] = [75, 50, 25];
/// Touches that are timed, for each page of the need.
const TOUCHES_PER_PAGE: u64 = 2;
/// Real data the pages are made of.
const CORPUS_BYTES: usize = 48 << 20;
/// Folio sizes of the kernel's runs, in KiB.
const KERNEL_SIZES_KIB: [u64; 2] = [4, 64];

/// In which order pages are touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// One after the other.
    Sequential,
    /// Every 17th, from the next beginning each time.
    Strided,
    /// Few pages often: Zipf's law with a skew of 0.99; popular pages are no neighbours.
    Zipf,
    /// Uniformly at random.
    Random,
}

impl Pattern {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sequential, Self::Strided, Self::Zipf, Self::Random];
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sequential => "sequential",
            Self::Strided => "strided",
            Self::Zipf => "zipf",
            Self::Random => "random",
        })
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|pattern| pattern.to_string() == name);
        found.ok_or_else(|| Error::parse("a pattern (sequential, strided, zipf or random)", name))
    }
}

/// foliomem's settings: the default, then fixed sizes, as `--sizes` takes them.
pub const SETTINGS: [(&str, Option<&str>); 6] = [
    ("default", None),
    ("4K", Some("none")),
    ("16K", Some("16K")),
    ("64K", Some("64K")),
    ("256K", Some("256K")),
    ("2M", Some("2M")),
];

/// One line of the benchmark.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The pattern.
    pub pattern: Pattern,
    /// The kernel's limit in per cent of the need.
    pub limit_percent: u64,
    /// What both had in total: foliomem's limit.
    pub total_mib: u64,
    /// foliomem's folio sizes.
    pub setting: &'static str,
    /// Seconds under foliomem, median.
    pub seconds: f64,
    /// Seconds under the kernel's faster setting, median; none where it cannot be measured, or was killed each time.
    pub kernel_seconds: Option<f64>,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// The `foliomem` executable, which must begin with [`crate::enter_if_asked`].
    pub foliomem: PathBuf,
    /// The patterns.
    pub patterns: Vec<Pattern>,
    /// Limits in per cent of the need.
    pub limits: Vec<u64>,
    /// Whether to run the kernel. Without it foliomem gets the share alone.
    pub kernel: bool,
    /// Runs of each, of which the median counts.
    pub runs: usize,
}

/// Runs the benchmark; `progress` sees each row when it is made.
///
/// # Errors
/// A step failed, a program read something else than it had written, or the machine's settings could not be restored.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Vec<Row>, Error> {
    let file = CorpusFile::new(&corpus::build(CORPUS_BYTES))?;
    let mut rows = Vec::new();
    for &pattern in &options.patterns {
        for &limit_percent in &options.limits {
            let group_mib = NEED_MIB * limit_percent / 100;
            let touches = NEED_MIB * 256 * TOUCHES_PER_PAGE;
            let child = arguments(pattern, NEED_MIB, touches, file.path());
            let kernel = if options.kernel { kernel(options, &child, group_mib)? } else { None };
            let total_mib = kernel.map_or(group_mib, |peer| peer.total_mib);
            for (setting, sizes) in SETTINGS {
                let mut command = Command::new(&options.foliomem);
                command.args(["run", "--quiet", "--limit", &format!("{total_mib}M")]);
                command.args(sizes.into_iter().flat_map(|sizes| ["--sizes", sizes]));
                command.arg("--").arg(&options.foliomem).args(&child);
                let runs = (0..options.runs).map(|_| seconds(&mut command)).collect::<Result<Vec<_>, _>>()?;
                let kernel_seconds = kernel.map(|peer| peer.seconds);
                let row = Row { pattern, limit_percent, total_mib, setting, seconds: median(&runs), kernel_seconds };
                progress(&row);
                rows.push(row);
            }
        }
    }
    Ok(rows)
}

/// The kernel's faster setting.
#[derive(Debug, Clone, Copy)]
struct Peer {
    seconds: f64,
    total_mib: u64,
}

fn kernel(options: &Options, child: &[std::ffi::OsString], group_mib: u64) -> Result<Option<Peer>, Error> {
    let mut best: Option<Peer> = None;
    for size_kib in KERNEL_SIZES_KIB {
        let mut ended = Vec::new();
        for _ in 0..options.runs {
            let mut command = Command::new(&options.foliomem);
            command.args(child);
            let run = |group: &Group| Ok(seconds(&mut group.inside(&command)).ok());
            let Some((run, total)) = kernel::in_group(size_kib, group_mib * MIB, run)? else { return Ok(None) };
            // The kernel's group limit kills programs though swap is free: those runs do not count.
            ended.extend(run.map(|seconds| (seconds, total)));
        }
        let figure = |of: fn(&(f64, u64)) -> f64| median(&ended.iter().map(of).collect::<Vec<_>>());
        let (seconds, bytes) = (figure(|run| run.0), figure(|run| run.1 as f64));
        if !ended.is_empty() && best.is_none_or(|best| seconds < best.seconds) {
            best = Some(Peer { seconds, total_mib: bytes as u64 / MIB });
        }
    }
    Ok(best)
}

/// Runs the child in `command` to its end.
fn seconds(command: &mut Command) -> Result<f64, Error> {
    let text = run_command(command)?;
    let run: Run = serde_json::from_str(text.trim()).map_err(|_| Error::parse("the measured program", &text))?;
    Ok(run.seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_called_what_they_are_written_as() {
        for pattern in Pattern::ALL {
            assert_eq!(pattern.to_string().parse::<Pattern>().unwrap(), pattern);
            assert_eq!(serde_json::json!(pattern), serde_json::json!(pattern.to_string()));
        }
        assert!("every second".parse::<Pattern>().is_err());
    }

    #[test]
    fn rows_have_the_names_the_readers_of_json_expect() {
        let (pattern, setting) = (Pattern::Zipf, "64K");
        let row = Row { pattern, limit_percent: 50, total_mib: 110, setting, seconds: 2.5, kernel_seconds: None };
        let json = r#"{"pattern":"zipf","limit_percent":50,"total_mib":110,"setting":"64K","seconds":2.5,"kernel_seconds":null}"#;
        assert_eq!(serde_json::to_string(&row).unwrap(), json);
    }
}
