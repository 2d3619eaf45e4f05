//! Measures how far programs that allocate and fill memory at full speed exceed a fixed limit.
//!
//! Each run is in a memory cgroup of its own. The run's limit is the group's limit less a margin,
//! or the limit that foliomem chooses (`--limit container`). The program needs about twice the
//! limit. Every 10 ms a [`sampler`](Group::anonymous) reads the tree's memory from outside:
//! anonymous memory, which includes the agent's store and tables, and shared memory. The group
//! counts a page that several processes share once, as the sum of proportional set sizes (PSS)
//! does. Unlike PSS, the group's counters need no walk of the page tables. Such a walk would
//! disturb the program, and count pages twice that move meanwhile.
//!
//! Every second run of a program takes place beside threads that keep all CPUs busy.
//!
//! A program that reads wrong content, or does not end, is an error.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::kernel::{Group, GroupMaker, Root, run as run_command};
use crate::running::Running;
use crate::scratch::Scratch;
use crate::{Error, MIB, python};

/// Source of the programs in C.
const GROWERS: &str = include_str!("limit/growers.c");
/// The numpy program: arrays of 8 MiB until `argv[1]` MiB are reached, then their sums.
const ARRAYS: &str = "import sys, numpy as np\n\
    arrays = [np.repeat(np.arange(1 << 17) + i, 8) for i in range(int(sys.argv[1]) // 8)]\n\
    assert all(int(a.sum()) == (1 << 19) * ((1 << 17) - 1) + (i << 20) for i, a in enumerate(arrays))\n";
/// Limits of the groups in MiB, in turns: from small containers to usual ones.
pub const GROUPS_MIB: [u64; 6] = [64, 256, 128, 512, 1024, 2048];
/// Smallest group for Java in MiB: a Java virtual machine has much memory that cannot be managed.
const JAVA_MIN_MIB: u64 = 256;
/// Interval of the samples.
const EVERY: Duration = Duration::from_millis(10);
/// Maximum margin.
const MAX_MARGIN_PERCENT: u64 = 90;
/// Longest run. A longer run hangs.
const HANGS: Duration = Duration::from_secs(600);

/// A program that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// Four threads allocate blocks of 48 bytes.
    SmallBlocks,
    /// Sixteen threads allocate blocks of 40,000 bytes.
    LargeBlocks,
    /// One mapping is filled.
    Array,
    /// Three children read an array that a fourth one writes.
    Forks,
    /// Four threads map memory by inline system calls.
    Inline,
    /// Memory is freed lazily and written again.
    Lazy,
    /// Python with numpy: `FOLIOMEM_PYTHON`, or `python3`.
    Numpy,
    /// A Java virtual machine that touches its heap at the start.
    Java,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 8] = [
        Self::SmallBlocks,
        Self::LargeBlocks,
        Self::Array,
        Self::Forks,
        Self::Inline,
        Self::Lazy,
        Self::Numpy,
        Self::Java,
    ];

    /// Returns the command of a program that needs about twice `limit` bytes.
    fn command(self, dir: &Path, limit: u64) -> Command {
        let need_mib = 2 * limit / MIB;
        let own = |mode: &str, mib: u64, rest: &[&str]| {
            let mut command = Command::new(dir.join("growers"));
            command.arg(mode).arg(mib.to_string()).args(rest);
            command
        };
        match self {
            Self::SmallBlocks => own("malloc", need_mib, &["48", "4"]),
            Self::LargeBlocks => own("malloc", need_mib, &["40000", "16"]),
            Self::Array => own("array", need_mib, &[]),
            Self::Forks => own("forks", limit / MIB, &[]),
            Self::Inline => own("inline", need_mib, &["4"]),
            Self::Lazy => own("lazy", need_mib, &[]),
            Self::Numpy => {
                let mut command = Command::new(python());
                command.args(["-c", ARRAYS]).arg(need_mib.to_string());
                command
            }
            Self::Java => {
                let mut command = Command::new("java");
                command.arg("-XX:+AlwaysPreTouch");
                command.args([format!("-Xms{need_mib}m"), format!("-Xmx{need_mib}m")]).arg("-version");
                command
            }
        }
    }

    /// Returns the reason why the program cannot run here, if there is one.
    fn is_missing(self) -> Option<String> {
        let (exe, arguments): (OsString, &[&str]) = match self {
            Self::Numpy => (python(), &["-c", "import numpy"]),
            Self::Java => ("java".into(), &["-version"]),
            _ => return None,
        };
        let error = run_command(Command::new(exe).args(arguments)).err()?;
        Some(format!("{self:?}: {error}"))
    }
}

/// How far foliomem's limit is below the cgroup's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Margin {
    /// By this percentage of the cgroup's limit.
    Percent(u64),
    /// As far as foliomem finds necessary: `--limit container`.
    Container,
}

impl FromStr for Margin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(percent @ 0..=MAX_MARGIN_PERCENT) => Ok(Self::Percent(percent)),
            _ if text == "container" => Ok(Self::Container),
            _ => Err(format!("give 0 to {MAX_MARGIN_PERCENT} per cent, or \"container\"")),
        }
    }
}

impl Margin {
    fn percent(self) -> Option<u64> {
        match self {
            Self::Percent(percent) => Some(percent),
            Self::Container => None,
        }
    }

    /// Returns the limit in bytes within a group of `group_bytes`.
    fn limit_bytes(self, group_bytes: u64) -> u64 {
        group_bytes / 100 * (100 - self.percent().unwrap_or(0))
    }

    /// Returns the value of foliomem's `--limit` for such a limit.
    fn argument(self, limit: u64) -> String {
        match self {
            Self::Percent(_) => format!("{}K", limit >> 10),
            Self::Container => "container".to_owned(),
        }
    }
}

/// One row of the benchmark: all runs of a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The program.
    pub program: Program,
    /// How far the limit is below the group's, in per cent of the group's; `None` if foliomem has
    /// chosen it.
    pub margin_percent: Option<u64>,
    /// The number of runs.
    pub runs: usize,
    /// How many of them the kernel killed at the group's limit.
    pub killed: usize,
    /// How far the tree exceeded its limit (the group's, if foliomem has chosen its own) in the
    /// worst sample of all runs, in per cent.
    pub peak_over_limit_percent_max: f64,
    /// Seconds of all runs.
    pub seconds: f64,
}

/// The selection of runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The `foliomem` executable.
    pub foliomem: PathBuf,
    /// The programs.
    pub programs: Vec<Program>,
    /// Runs of each program.
    pub runs: usize,
    /// How far the limit is below the group's.
    pub margin: Margin,
    /// Limits of the groups in MiB, which take turns.
    pub groups_mib: Vec<u64>,
}

/// The rows, and what could not be measured.
#[derive(Debug, Default)]
pub struct Report {
    /// One for each program.
    pub rows: Vec<Row>,
    /// The reasons.
    pub skipped: Vec<String>,
}

/// Runs the campaign and calls `progress` with each row.
///
/// # Errors
/// Fails if a step fails, if a program reads wrong content, or if it does not end.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Report, Error> {
    let work = Scratch::new("limit")?;
    let source = work.path().join("growers.c");
    std::fs::write(&source, GROWERS).map_err(Error::at(&source))?;
    run_command(Command::new("cc").args(["-O2", "-pthread", "-o"]).arg(work.path().join("growers")).arg(&source))?;
    let mut groups = GroupMaker::new(&Root::default())?;
    let mut report = Report::default();
    for &program in &options.programs {
        if let Some(why) = program.is_missing() {
            report.skipped.push(why);
            continue;
        }
        let min_mib = if program == Program::Java { JAVA_MIN_MIB } else { 0 };
        let sizes = options.groups_mib.iter().copied().filter(|&mib| mib >= min_mib).collect::<Vec<_>>();
        let margin_percent = options.margin.percent();
        let mut row =
            Row { program, margin_percent, runs: 0, killed: 0, peak_over_limit_percent_max: 0.0, seconds: 0.0 };
        for (number, mib) in sizes.iter().cycle().take(if sizes.is_empty() { 0 } else { options.runs }).enumerate() {
            let Some(group) = groups.make(mib * MIB)? else {
                report.skipped.push("no memory cgroup can be made here: needs root".to_owned());
                return Ok(report);
            };
            let others = if (number / sizes.len()).is_multiple_of(2) { Others::Idle } else { Others::Busy };
            row.add(&once(options, program, work.path(), &group, mib * MIB, others)?);
            group.remove();
        }
        progress(&row);
        report.rows.push(row);
    }
    groups.restore()?;
    Ok(report)
}

impl Row {
    fn add(&mut self, run: &Outcome) {
        self.runs += 1;
        self.killed += usize::from(run.end == End::Killed);
        self.peak_over_limit_percent_max = self.peak_over_limit_percent_max.max(run.over_percent);
        self.seconds += run.seconds;
    }
}

/// The load of the CPUs by other programs during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Others {
    /// Whatever the machine does by itself.
    Idle,
    /// Threads keep all CPUs busy.
    Busy,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The program verified all its memory.
    Right,
    /// The kernel killed a process at the group's limit.
    Killed,
}

/// The result of a run.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    end: End,
    over_percent: f64,
    seconds: f64,
}

/// Runs the program once in `group`, whose limit is `group_bytes`.
fn once(
    options: &Options,
    program: Program,
    dir: &Path,
    group: &Group,
    group_bytes: u64,
    others: Others,
) -> Result<Outcome, Error> {
    let limit = options.margin.limit_bytes(group_bytes);
    let grower = program.command(dir, limit);
    let mut command = Command::new(&options.foliomem);
    command.args(["run", "--limit", &options.margin.argument(limit), "--"]);
    command.arg(grower.get_program()).args(grower.get_args());
    let shown = format!("{program:?} with a limit of {} MiB", limit / MIB);
    let _busy = (others == Others::Busy).then(Busy::start);
    let clock = Instant::now();
    let mut running = Running::start(group.inside(&command), dir)?;
    let sampler = Sampler::start(group.clone());
    let is_right = running.wait(HANGS)?;
    let has_ended = running.ended()?;
    let seconds = clock.elapsed().as_secs_f64();
    let peak = sampler.stop();
    let end = match group.kills()? {
        _ if !has_ended => return Err(Error::WrongResult(format!("{shown}: no end after {} s", HANGS.as_secs()))),
        1.. => End::Killed,
        0 if is_right => End::Right,
        0 => return Err(Error::WrongResult(format!("{shown} failed: {}", last_words(dir)))),
    };
    let over_percent = (peak as f64 / limit as f64 - 1.0).max(0.0) * 100.0;
    if over_percent > ALLOWED_PERCENT || end == End::Killed {
        eprintln!("foliomem bench: {shown}: {over_percent:.1}% over it, {end:?}, CPUs {others:?}, {seconds:.1} s");
    }
    Ok(Outcome { end, over_percent, seconds })
}

/// An overrun of more than this, in per cent of the limit, is reported.
pub const ALLOWED_PERCENT: f64 = 2.0;

/// Returns what the program in `dir` printed last.
fn last_words(dir: &Path) -> String {
    let read = |name: &str| std::fs::read(dir.join(name)).unwrap_or_default();
    let text = [read("stdout"), read("stderr")].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(4)..].join(" / ")
}

/// Samples what a group takes until it is stopped.
struct Sampler {
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Sampler {
    fn start(group: Group) -> Self {
        let (stop, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, highest) = (Arc::clone(&stop), Arc::clone(&peak));
        let thread = std::thread::spawn(move || {
            // Relaxed: the flag and the number order nothing else; `join` orders the last sample.
            while !stopped.load(Ordering::Relaxed) {
                highest.fetch_max(group.anonymous().unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(EVERY);
            }
        });
        Self { stop, peak, thread }
    }

    /// Stops and returns the highest sample in bytes.
    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        // The thread does not panic; if it did, its samples until then would stand.
        let _ = self.thread.join();
        self.peak.load(Ordering::Relaxed)
    }
}

/// Threads that keep all CPUs busy until it is dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = |_| {
            let stop = Arc::clone(&stop);
            // Relaxed: the flag orders nothing else.
            std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        };
        let threads = (0..2 * cpus).map(spin).collect();
        Self { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It cannot panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_rows_keep_their_field_names() {
        let program = Program::SmallBlocks;
        let mut row = Row {
            program,
            margin_percent: Some(10),
            runs: 0,
            killed: 0,
            peak_over_limit_percent_max: 0.0,
            seconds: 0.0,
        };
        row.add(&Outcome { end: End::Right, over_percent: 1.5, seconds: 2.0 });
        row.add(&Outcome { end: End::Killed, over_percent: 0.5, seconds: 1.0 });
        let json = r#"{"program":"small-blocks","margin_percent":10,"runs":2,"killed":1,"peak_over_limit_percent_max":1.5,"seconds":3.0}"#;
        assert_eq!(serde_json::to_string(&row).unwrap(), json);
        row.margin_percent = Margin::Container.percent();
        let json = json.replace("\"margin_percent\":10", "\"margin_percent\":null");
        assert_eq!(serde_json::to_string(&row).unwrap(), json);
    }

    #[test]
    fn a_margin_is_a_share_or_left_to_foliomem() {
        assert_eq!("10".parse(), Ok(Margin::Percent(10)));
        assert_eq!("container".parse(), Ok(Margin::Container));
        assert!(["91", "-1", "10%", "", "Container"].iter().all(|text| text.parse::<Margin>().is_err()));
        let limit = Margin::Percent(50).limit_bytes(100 * MIB);
        assert_eq!(Margin::Percent(50).argument(limit), "51200K");
        assert_eq!(Margin::Container.argument(Margin::Container.limit_bytes(MIB)), "container");
    }

    #[test]
    fn the_need_is_twice_the_limit() {
        let command = Program::Array.command(Path::new("/dir"), 64 * MIB);
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["array", "128"]);
        assert_eq!(command.get_program(), "/dir/growers");
    }
}
