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

use crate::access_child::{Run, Work, arguments};
use crate::corpus::CorpusFile;
use crate::kernel::{self, Group, run as run_command};
use crate::{Error, MIB, corpus, median};
use foliomem_types::units::PAGE_BYTES;

/// Memory need of the program, in MiB.
pub const NEED_MIB: u64 = 192;
/// Memory limits, in per cent of the need.
pub const LIMITS: [u64; 3] = [75, 50, 25];
/// Timed touches for each page of the need.
pub const TOUCHES_PER_PAGE: u64 = 2;
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
    /// The memory that the program touches.
    pub need_mib: u64,
    /// The threads that touch it, each a part of its own.
    pub threads: u64,
    /// The total memory of both, which is foliomem's limit.
    pub total_mib: u64,
    /// foliomem's folio sizes.
    pub setting: String,
    /// Median seconds under foliomem.
    pub seconds: f64,
    /// The time of a touch that 99% do not exceed, in microseconds; a median, as all figures here.
    pub touch_p99_us: f64,
    /// The time of a touch that 99.9% do not exceed, in microseconds.
    pub touch_p999_us: f64,
    /// Seconds under the kernel's faster setting. `None` if the kernel cannot be measured or every
    /// run was killed.
    pub kernel_seconds: Option<f64>,
    /// `touch_p99_us` under the kernel.
    pub kernel_touch_p99_us: Option<f64>,
    /// `touch_p999_us` under the kernel.
    pub kernel_touch_p999_us: Option<f64>,
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
    /// foliomem's settings, as indices of [`SETTINGS`].
    pub settings: Vec<usize>,
    /// Limits in per cent of the need.
    pub limits: Vec<u64>,
    /// The memory that the program touches.
    pub need_mib: u64,
    /// Timed touches for each of its pages.
    pub touches_per_page: u64,
    /// Numbers of threads.
    pub threads: Vec<u64>,
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
    let need_mib = options.need_mib;
    let touches = need_mib * (MIB / PAGE_BYTES as u64) * options.touches_per_page;
    let mut rows = Vec::new();
    for &pattern in &options.patterns {
        for &threads in &options.threads {
            for &limit_percent in &options.limits {
                let child = arguments(&Work { pattern, need_mib, threads, touches }, file.path());
                let rounds = Rounds::run(options, &child, need_mib * limit_percent / 100)?;
                let kernel = rounds.kernel_summary();
                for (&index, runs) in options.settings.iter().zip(&rounds.runs) {
                    let summary = Summary::of(runs);
                    let row = Row {
                        pattern,
                        limit_percent,
                        need_mib,
                        threads,
                        total_mib: rounds.total_mib,
                        setting: SETTINGS[index].0.to_owned(),
                        seconds: summary.seconds,
                        touch_p99_us: summary.touch_p99_us,
                        touch_p999_us: summary.touch_p999_us,
                        kernel_seconds: kernel.map(|kernel| kernel.seconds),
                        kernel_touch_p99_us: kernel.map(|kernel| kernel.touch_p99_us),
                        kernel_touch_p999_us: kernel.map(|kernel| kernel.touch_p999_us),
                    };
                    progress(&row);
                    rows.push(row);
                }
            }
        }
    }
    Ok(rows)
}

/// The medians of several runs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Summary {
    seconds: f64,
    touch_p99_us: f64,
    touch_p999_us: f64,
}

impl Summary {
    fn of(runs: &[Run]) -> Self {
        let median_of = |figure: fn(&Run) -> f64| median(&runs.iter().map(figure).collect::<Vec<_>>());
        Self {
            seconds: median_of(|run| run.seconds),
            touch_p99_us: median_of(|run| run.touch_p99_ns as f64 / 1e3),
            touch_p999_us: median_of(|run| run.touch_p999_ns as f64 / 1e3),
        }
    }
}

/// The runs of one pattern at one limit. All settings, the kernel's too, take turns, so that a busy
/// period of the machine affects all of them.
#[derive(Debug, Default)]
struct Rounds {
    /// Runs by setting.
    runs: Vec<Vec<Run>>,
    /// Runs by folio size. The kernel kills programs at the group limit although swap is free:
    /// those runs do not count.
    kernel_runs: [Vec<Run>; KERNEL_SIZES_KIB.len()],
    total_mib: u64,
}

impl Rounds {
    fn run(options: &Options, child: &[OsString], group_mib: u64) -> Result<Rounds, Error> {
        let runs = vec![Vec::new(); options.settings.len()];
        let mut rounds = Rounds { total_mib: group_mib, runs, ..Rounds::default() };
        for round in 0..options.runs {
            let peer = if options.kernel { rounds.kernel(options, child, group_mib)? } else { None };
            // All runs of foliomem have one limit.
            if let Some(peer) = peer.filter(|_| round == 0) {
                rounds.total_mib = peer.total_mib;
            }
            for (&index, all) in options.settings.iter().zip(&mut rounds.runs) {
                let (_, sizes) = SETTINGS[index];
                let mut command = Command::new(&options.foliomem);
                command.args(["run", "--quiet", "--limit", &format!("{}M", rounds.total_mib)]);
                command.args(sizes.into_iter().flat_map(|sizes| ["--sizes", sizes]));
                command.arg("--").arg(&options.child).args(child);
                all.push(measured(&mut command)?);
            }
        }
        Ok(rounds)
    }

    /// Runs each of the kernel's settings once and returns the faster run that ended.
    fn kernel(&mut self, options: &Options, child: &[OsString], group_mib: u64) -> Result<Option<Peer>, Error> {
        let mut best: Option<Peer> = None;
        for (size_kib, all) in KERNEL_SIZES_KIB.into_iter().zip(&mut self.kernel_runs) {
            let mut command = Command::new(&options.child);
            command.args(child);
            let run = |group: &Group| Ok(measured(&mut group.inside(&command)).ok());
            let Some((run, total_bytes)) = kernel::in_group(size_kib, group_mib * MIB, run)? else { return Ok(None) };
            let Some(run) = run else { continue };
            all.push(run);
            if best.is_none_or(|best| run.seconds < best.seconds) {
                best = Some(Peer { seconds: run.seconds, total_mib: total_bytes / MIB });
            }
        }
        Ok(best)
    }

    /// Returns the medians of the kernel's faster setting.
    fn kernel_summary(&self) -> Option<Summary> {
        let ended = self.kernel_runs.iter().filter(|runs| !runs.is_empty());
        ended.map(|runs| Summary::of(runs)).min_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }
}

/// One run under the kernel.
#[derive(Debug, Clone, Copy)]
struct Peer {
    seconds: f64,
    total_mib: u64,
}

/// Runs the child in `command` to its end and returns what it measured.
fn measured(command: &mut Command) -> Result<Run, Error> {
    let text = run_command(command)?;
    serde_json::from_str(text.trim()).map_err(|_| Error::parse("the measured program", &text))
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
        let run = |&seconds: &f64| Run { seconds, touch_p99_ns: 2000, touch_p999_ns: 9000 };
        let faster = |all: [&[f64]; 2]| {
            let kernel_runs = all.map(|seconds| seconds.iter().map(run).collect());
            Rounds { kernel_runs, ..Rounds::default() }.kernel_summary()
        };
        let known = |seconds| Some(Summary { seconds, touch_p99_us: 2.0, touch_p999_us: 9.0 });
        assert_eq!(faster([&[3.0, 1.0, 2.0], &[1.5, 9.0, 4.0]]), known(2.0));
        assert_eq!(faster([&[], &[1.5]]), known(1.5));
        assert_eq!(faster([&[], &[]]), None);
    }

    #[test]
    fn json_rows_keep_their_field_names() {
        let row = Row {
            pattern: Pattern::Zipf,
            limit_percent: 50,
            need_mib: 192,
            threads: 2,
            total_mib: 110,
            setting: "64K".to_owned(),
            seconds: 2.5,
            touch_p99_us: 3.5,
            touch_p999_us: 4.5,
            kernel_seconds: None,
            kernel_touch_p99_us: None,
            kernel_touch_p999_us: None,
        };
        let json = concat!(
            r#"{"pattern":"zipf","limit_percent":50,"need_mib":192,"threads":2,"total_mib":110,"setting":"64K","#,
            r#""seconds":2.5,"touch_p99_us":3.5,"touch_p999_us":4.5,"kernel_seconds":null,"#,
            r#""kernel_touch_p99_us":null,"kernel_touch_p999_us":null}"#
        );
        assert_eq!(serde_json::to_string(&row).unwrap(), json);
    }
}
