//! Times access patterns by folio size, next to the kernel's zram swap.
//!
//! A program touches pages of its memory in one pattern, under a memory limit that is a share of
//! its need. foliomem runs with its default sizes, which adapt to the pattern, and with each fixed
//! size. The kernel runs with single pages and with 64K mTHP; the faster setting counts. The
//! comparison is at equal *total* memory, as in [`crate::programs`]: the kernel's group gets the
//! share, foliomem gets the share plus zram's memory at its peak.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::access_child::{Run, arguments};
use crate::corpus::CorpusFile;
use crate::kernel::{self, Group, run as run_command};
use crate::{Error, MIB, corpus, median};

/// Memory need of the program, in MiB.
pub const NEED_MIB: u64 = 192;
/// Memory limits, in per cent of the need.
pub const LIMITS: [u64; 3] = [75, 50, 25];
/// Timed touches for each page of the need.
const TOUCHES_PER_PAGE: u64 = 2;
/// Bytes of real data that fill the pages.
const CORPUS_BYTES: usize = 48 << 20;
/// Folio sizes of the kernel's runs, in KiB.
const KERNEL_SIZES_KIB: [u64; 2] = [4, 64];

/// The order of the touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// One page after the other.
    Sequential,
    /// Every 17th page; each sweep begins one page further.
    Strided,
    /// Few pages often: Zipf's law with a skew of 0.99. Popular pages are not neighbours.
    Zipf,
    /// Uniformly at random.
    Random,
}

impl Pattern {
    /// All patterns.
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

/// foliomem's settings: the default, then fixed sizes as arguments of `--sizes`.
pub const SETTINGS: [(&str, Option<&str>); 6] = [
    ("default", None),
    ("4K", Some("none")),
    ("16K", Some("16K")),
    ("64K", Some("64K")),
    ("256K", Some("256K")),
    ("2M", Some("2M")),
];

/// One row of the benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The pattern.
    pub pattern: Pattern,
    /// The kernel's limit in per cent of the need.
    pub limit_percent: u64,
    /// The total memory of both, which is foliomem's limit.
    pub total_mib: u64,
    /// foliomem's folio sizes.
    pub setting: String,
    /// Median seconds under foliomem.
    pub seconds: f64,
    /// Median seconds under the kernel's faster setting. `None` if the kernel cannot be measured or
    /// every run was killed.
    pub kernel_seconds: Option<f64>,
}

/// The selection of runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The `foliomem` executable.
    pub foliomem: PathBuf,
    /// The `foliomem-bench-access` executable, which is measured.
    pub child: PathBuf,
    /// The patterns.
    pub patterns: Vec<Pattern>,
    /// Limits in per cent of the need.
    pub limits: Vec<u64>,
    /// Whether to run the kernel. Without the kernel, foliomem gets the share alone.
    pub kernel: bool,
    /// Runs of each setting; the median counts.
    pub runs: usize,
}

/// Runs the benchmark and calls `progress` with each row.
///
/// # Errors
/// Fails if a step fails, if a program reads wrong content, or if the machine's settings cannot be
/// restored.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Vec<Row>, Error> {
    let file = CorpusFile::new(&corpus::build(CORPUS_BYTES))?;
    let mut rows = Vec::new();
    for &pattern in &options.patterns {
        for &limit_percent in &options.limits {
            let touches = NEED_MIB * 256 * TOUCHES_PER_PAGE;
            let child = arguments(pattern, NEED_MIB, touches, file.path());
            let rounds = Rounds::run(options, &child, NEED_MIB * limit_percent / 100)?;
            for ((setting, _), seconds) in SETTINGS.into_iter().zip(&rounds.seconds) {
                let kernel_seconds = rounds.kernel_seconds();
                let seconds = median(seconds);
                let (setting, total_mib) = (setting.to_owned(), rounds.total_mib);
                let row = Row { pattern, limit_percent, total_mib, setting, seconds, kernel_seconds };
                progress(&row);
                rows.push(row);
            }
        }
    }
    Ok(rows)
}

/// The runs of one pattern at one limit. All settings, the kernel's too, take turns, so that a busy
/// period of the machine affects all of them.
#[derive(Debug, Default)]
struct Rounds {
    /// Seconds by setting.
    seconds: [Vec<f64>; SETTINGS.len()],
    /// Seconds by folio size. The kernel kills programs at the group limit although swap is free:
    /// those runs do not count.
    kernel_seconds: [Vec<f64>; KERNEL_SIZES_KIB.len()],
    total_mib: u64,
}

impl Rounds {
    fn run(options: &Options, child: &[OsString], group_mib: u64) -> Result<Rounds, Error> {
        let mut rounds = Rounds { total_mib: group_mib, ..Rounds::default() };
        for round in 0..options.runs {
            let peer = if options.kernel { rounds.kernel(options, child, group_mib)? } else { None };
            // All runs of foliomem have one limit.
            if let Some(peer) = peer.filter(|_| round == 0) {
                rounds.total_mib = peer.total_mib;
            }
            for ((_, sizes), all) in SETTINGS.into_iter().zip(&mut rounds.seconds) {
                let mut command = Command::new(&options.foliomem);
                command.args(["run", "--quiet", "--limit", &format!("{}M", rounds.total_mib)]);
                command.args(sizes.into_iter().flat_map(|sizes| ["--sizes", sizes]));
                command.arg("--").arg(&options.child).args(child);
                all.push(seconds(&mut command)?);
            }
        }
        Ok(rounds)
    }

    /// Runs each of the kernel's settings once and returns the faster run that ended.
    fn kernel(&mut self, options: &Options, child: &[OsString], group_mib: u64) -> Result<Option<Peer>, Error> {
        let mut best: Option<Peer> = None;
        for (size_kib, all) in KERNEL_SIZES_KIB.into_iter().zip(&mut self.kernel_seconds) {
            let mut command = Command::new(&options.child);
            command.args(child);
            let run = |group: &Group| Ok(seconds(&mut group.inside(&command)).ok());
            let Some((run, total_bytes)) = kernel::in_group(size_kib, group_mib * MIB, run)? else { return Ok(None) };
            let Some(seconds) = run else { continue };
            all.push(seconds);
            if best.is_none_or(|best| seconds < best.seconds) {
                best = Some(Peer { seconds, total_mib: total_bytes / MIB });
            }
        }
        Ok(best)
    }

    /// Returns the median of the kernel's faster setting.
    fn kernel_seconds(&self) -> Option<f64> {
        let ended = self.kernel_seconds.iter().filter(|all| !all.is_empty());
        ended.map(|all| median(all)).min_by(f64::total_cmp)
    }
}

/// One run under the kernel.
#[derive(Debug, Clone, Copy)]
struct Peer {
    seconds: f64,
    total_mib: u64,
}

/// Runs the child in `command` to its end and returns its seconds.
fn seconds(command: &mut Command) -> Result<f64, Error> {
    let text = run_command(command)?;
    let run: Run = serde_json::from_str(text.trim()).map_err(|_| Error::parse("the measured program", &text))?;
    Ok(run.seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_parse_back_from_their_names() {
        for pattern in Pattern::ALL {
            assert_eq!(pattern.to_string().parse::<Pattern>().unwrap(), pattern);
            assert_eq!(serde_json::json!(pattern), serde_json::json!(pattern.to_string()));
        }
        assert!("every second".parse::<Pattern>().is_err());
    }

    #[test]
    fn the_kernel_figure_is_the_faster_median_or_none_if_all_runs_were_killed() {
        let rounds = |kernel_seconds| Rounds { kernel_seconds, ..Rounds::default() };
        assert_eq!(rounds([vec![3.0, 1.0, 2.0], vec![1.5, 9.0, 4.0]]).kernel_seconds(), Some(2.0));
        assert_eq!(rounds([vec![], vec![1.5]]).kernel_seconds(), Some(1.5));
        assert_eq!(rounds([vec![], vec![]]).kernel_seconds(), None);
    }

    #[test]
    fn json_rows_keep_their_field_names() {
        let (pattern, setting) = (Pattern::Zipf, "64K".to_owned());
        let row = Row { pattern, limit_percent: 50, total_mib: 110, setting, seconds: 2.5, kernel_seconds: None };
        let json = r#"{"pattern":"zipf","limit_percent":50,"total_mib":110,"setting":"64K","seconds":2.5,"kernel_seconds":null}"#;
        assert_eq!(serde_json::to_string(&row).unwrap(), json);
    }
}
