//! Compares the kernel's memory limit with foliomem's at equal *total* memory, for one program.
//!
//! A run under the kernel's limit M costs M plus zram's memory at its peak (`mem_used_max`).
//! foliomem's limit, which covers everything, is that sum for the kernel's *faster* setting. M is
//! raised until the program survives in one of the settings. If it survives in none, foliomem gets
//! the first M.
//!
//! Every run's result is compared with that of the first run without a limit.

use std::ffi::OsString;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::kernel::{self, Group, read, run as run_command};
use crate::running::Running;
use crate::scratch::Scratch;
use crate::tree::Sampler;
use crate::{Error, MIB, median};

/// Maximum number of times that the kernel's limit grows by a quarter. If the kernel kills a
/// program in every run of both settings, there is nothing to compare with.
const RAISES: usize = 3;
/// Seconds of a first run beyond which the setting is not run again: noise of a second does not
/// matter then.
const LONG: f64 = 45.0;
/// Smallest limit that foliomem accepts, in bytes.
const MIN_LIMIT: u64 = 16 * MIB;

/// The memory limit of a run and its enforcer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// No limit, the machine as found.
    None,
    /// A cgroup with zram swap, single pages only.
    #[serde(rename = "kernel-4k")]
    Kernel4k,
    /// A cgroup with zram swap, 64K mTHP.
    #[serde(rename = "kernel-64k")]
    Kernel64k,
    /// foliomem, with the total of the kernel's faster setting as the limit.
    Foliomem,
    /// foliomem with a limit far above the need.
    FoliomemUnpressed,
}

/// One row of the benchmark. `P` names the program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row<P> {
    /// The program.
    pub program: P,
    /// The setting of the run.
    pub setting: Setting,
    /// The limit: the cgroup's for the kernel, `--limit` for foliomem.
    pub limit_mib: Option<f64>,
    /// Peak of the total: anonymous memory (none), group and zram (kernel), foliomem's own count
    /// (foliomem). 0 if a run failed before the peak was known.
    pub total_peak_mib: f64,
    /// Median wall clock seconds over the runs that ended well. If no run did (the kernel may kill
    /// a program at its limit), the seconds until the failure, which are not comparable with
    /// anything.
    pub seconds: f64,
    /// Whether every run's result equals that of the first run without a limit.
    pub result_ok: bool,
    /// Number of runs with that result.
    pub right_runs: usize,
    /// Number of runs.
    pub runs: usize,
}

/// The settings that are run.
#[derive(Debug, Clone)]
pub struct Options {
    /// The `foliomem` executable. Without it, only the kernel's settings are run.
    pub foliomem: Option<PathBuf>,
    /// Whether to run the kernel's settings. Without them, foliomem gets the limit that the
    /// kernel's group would have.
    pub kernel: bool,
    /// Runs of each setting; long ones run once.
    pub runs: usize,
}

impl Options {
    /// Returns the options with an absolute path of `foliomem`: programs run in directories of
    /// their own.
    pub(crate) fn resolved(&self) -> Result<Self, Error> {
        let mut options = self.clone();
        if let Some(exe) = &mut options.foliomem {
            *exe = exe.canonicalize().map_err(Error::at(exe))?;
        }
        Ok(options)
    }
}

/// The result of the benchmark.
#[derive(Debug, Serialize)]
pub struct Report<P> {
    /// All rows, by program, then by [`Setting`].
    pub rows: Vec<Row<P>>,
    /// The settings that could not be run and the reasons, one line each.
    pub skipped: Vec<String>,
}

impl<P> Default for Report<P> {
    fn default() -> Self {
        Self { rows: Vec::new(), skipped: Vec::new() }
    }
}

/// The words of a command: the executable and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Words(pub(crate) OsString, pub(crate) Vec<OsString>);

impl Words {
    /// Joins an executable and its arguments.
    pub(crate) fn new(exe: impl Into<OsString>, arguments: &[&str]) -> Self {
        Self(exe.into(), arguments.iter().map(OsString::from).collect())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.0);
        command.args(&self.1);
        command
    }
}

/// The memory limit of the kernel's group.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GroupLimit {
    /// This number of bytes.
    Bytes(u64),
    /// This percentage of the peak without a limit.
    Percent(u64),
}

impl GroupLimit {
    /// Returns the limit in bytes of a program that needs `need` bytes.
    fn bytes(self, need: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (need * percent / 100).max(MIN_LIMIT),
        }
    }
}

/// Whether foliomem limits the memory of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limited {
    /// All settings are compared.
    Yes,
    /// Most of the memory is shared memory, which foliomem does not limit: it only runs without
    /// pressure.
    No,
}

/// The timeout of a run. A run that takes longer counts as hanging: it is ended, with a wrong
/// result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Shortest timeout, and the one of the first run.
    pub(crate) least: Duration,
    /// The timeout as a multiple of the first run.
    pub(crate) times_first: f64,
}

impl Patience {
    /// Returns the timeout after a first run of `seconds`.
    fn after(self, seconds: f64) -> Duration {
        self.least.max(Duration::from_secs_f64(seconds * self.times_first))
    }
}

/// The seconds that a program worked, and its result; `None` if it failed.
pub(crate) type Driven = (f64, Option<Vec<u8>>);

/// Works with a started program until its end. The arguments are the program, its directory and
/// its timeout.
pub(crate) type Driver<'a> = Box<dyn Fn(&mut Running, &Path, Duration) -> Result<Driven, Error> + 'a>;

/// How a program's result is obtained.
pub(crate) enum Answer<'a> {
    /// The content of this file after the program's success.
    File(&'static str),
    /// A driver obtains it.
    Driver(Driver<'a>),
}

/// A program to compare.
pub(crate) struct Subject<'a, P> {
    /// The name in rows and messages.
    pub(crate) name: P,
    /// The files to write before the first run, with their contents.
    pub(crate) files: Vec<(&'static str, String)>,
    /// Commands that must succeed before the first run, such as a compiler's. If one fails, the
    /// program is skipped.
    pub(crate) preparations: Vec<Words>,
    /// The command without a limit.
    pub(crate) command: Words,
    /// The files that a run leaves, and that the next one must not find.
    pub(crate) leaves: &'static [&'static str],
    /// How the result is obtained.
    pub(crate) answer: Answer<'a>,
    /// Whether foliomem limits its memory.
    pub(crate) limited: Limited,
    /// The limit of the kernel's group.
    pub(crate) group_limit: GroupLimit,
    /// The timeout of a run.
    pub(crate) patience: Patience,
}

/// One run of a program.
#[derive(Debug)]
struct Outcome {
    seconds: f64,
    /// The program's result; `None` if it failed.
    answer: Option<Vec<u8>>,
    /// Peak of the total memory in bytes.
    peak: u64,
}

/// The way to start a program.
#[derive(Clone, Copy)]
enum Launch<'a> {
    Plain,
    Group(&'a Group),
    Foliomem { exe: &'a Path, limit: u64 },
}

/// The rows of a program, which are reported one by one.
struct Rows<'a, P> {
    program: P,
    /// The result of the first run without a limit.
    answer: Vec<u8>,
    progress: &'a mut dyn FnMut(&Row<P>),
    report: &'a mut Report<P>,
}

impl<P: Copy> Rows<'_, P> {
    /// Adds and returns the row of the runs of a setting.
    fn add(&mut self, setting: Setting, limit: Option<u64>, runs: &[Outcome]) -> Row<P> {
        // The time of a run that died early does not count.
        let ended: Vec<&Outcome> = runs.iter().filter(|r| r.answer.is_some()).collect();
        let counted = if ended.is_empty() { runs.iter().collect() } else { ended };
        let figure = |of: &dyn Fn(&Outcome) -> f64| median(&counted.iter().map(|r| of(r)).collect::<Vec<_>>());
        let right_runs = runs.iter().filter(|r| r.answer.as_ref() == Some(&self.answer)).count();
        let row = Row {
            program: self.program,
            setting,
            limit_mib: limit.map(mib),
            total_peak_mib: figure(&|r| mib(r.peak)),
            seconds: figure(&|r| r.seconds),
            result_ok: right_runs == runs.len(),
            right_runs,
            runs: runs.len(),
        };
        (self.progress)(&row);
        self.report.rows.push(row.clone());
        row
    }
}

/// Runs all settings of `subject`. A program that cannot run here is skipped, with the reason in
/// the report; a failing one is a row that is not ok.
///
/// # Errors
/// Fails if the machine cannot be set up.
pub(crate) fn compare<P: Copy + Debug>(
    subject: Subject<P>,
    options: &Options,
    progress: &mut dyn FnMut(&Row<P>),
    report: &mut Report<P>,
) -> Result<(), Error> {
    let dir = Scratch::new("programs")?;
    match Bench::prepare(subject, dir.path())? {
        Ok(bench) => bench.settings(options, progress, report),
        Err(why) => {
            report.skipped.push(why);
            Ok(())
        }
    }
}

/// A program that is ready to run in its own directory.
struct Bench<'a, P> {
    subject: Subject<'a, P>,
    dir: &'a Path,
    /// The timeout of a run.
    hangs: Duration,
}

impl<'a, P: Copy + Debug> Bench<'a, P> {
    /// Writes the program's input, or returns the reason why the program cannot run here.
    fn prepare(subject: Subject<'a, P>, dir: &'a Path) -> Result<Result<Self, String>, Error> {
        for (name, text) in &subject.files {
            let path = dir.join(name);
            std::fs::write(&path, text).map_err(Error::at(&path))?;
        }
        for words in &subject.preparations {
            if let Err(error) = run_command(words.command().current_dir(dir)) {
                return Ok(Err(format!("{:?} is not measured: {error}", subject.name)));
            }
        }
        let hangs = subject.patience.least;
        Ok(Ok(Self { subject, dir, hangs }))
    }

    /// Runs all settings of this program.
    fn settings(
        mut self,
        options: &Options,
        progress: &mut dyn FnMut(&Row<P>),
        report: &mut Report<P>,
    ) -> Result<(), Error> {
        let name = self.subject.name;
        let first = self.once(Launch::Plain)?;
        let Some(answer) = first.answer.clone() else {
            report.skipped.push(format!("{name:?}: fails without any limit; see its own message"));
            return Ok(());
        };
        self.hangs = self.subject.patience.after(first.seconds);
        let need = first.peak;
        let limit = self.subject.group_limit.bytes(need);
        let ample = need * 3 + 1024 * MIB;
        let mut rows = Rows { program: name, answer, progress, report };
        let (plain, unpressed) = self.without_pressure(options, first, ample)?;
        rows.add(Setting::None, None, &plain);
        if self.subject.limited == Limited::Yes {
            self.under_pressure(options, limit, &mut rows)?;
        } else {
            rows.report.skipped.push(format!("{name:?} within a limit: most of its memory is shared memory"));
        }
        if options.foliomem.is_some() {
            rows.add(Setting::FoliomemUnpressed, Some(ample), &unpressed);
        }
        Ok(())
    }

    /// Runs without a limit, `first` being the first run, and under foliomem with the limit
    /// `ample`; returns both. The settings take turns, so that a slow minute of the machine affects
    /// both: they are compared to a few per cent.
    fn without_pressure(
        &self,
        options: &Options,
        first: Outcome,
        ample: u64,
    ) -> Result<(Vec<Outcome>, Vec<Outcome>), Error> {
        let count = repeats(options.runs, first.seconds);
        let (mut plain, mut unpressed) = (vec![first], Vec::new());
        for i in 0..count {
            if i > 0 {
                plain.push(self.once(Launch::Plain)?);
            }
            if let Some(exe) = &options.foliomem {
                unpressed.push(self.once(Launch::Foliomem { exe, limit: ample })?);
            }
        }
        Ok((plain, unpressed))
    }

    /// Runs the kernel's settings, and foliomem with an equal total.
    fn under_pressure(&self, options: &Options, limit: u64, rows: &mut Rows<P>) -> Result<(), Error> {
        let best = self.kernel_settings(options, limit, rows)?;
        if let Some(exe) = &options.foliomem {
            let limit = best.map_or(limit, |row| (row.total_peak_mib * MIB as f64) as u64);
            let runs = repeat(options.runs, || self.once(Launch::Foliomem { exe, limit }))?;
            rows.add(Setting::Foliomem, Some(limit), &runs);
        }
        Ok(())
    }

    /// Runs the kernel's settings, with a limit that rises from `limit` until the program survives.
    /// A setting whose first run hangs is not tried again. Returns the row of the faster setting.
    fn kernel_settings(&self, options: &Options, limit: u64, rows: &mut Rows<P>) -> Result<Option<Row<P>>, Error> {
        let mut best: Option<Row<P>> = None;
        let mut settings = if options.kernel { vec![(Setting::Kernel4k, 4), (Setting::Kernel64k, 64)] } else { vec![] };
        let mut group_limit = limit;
        for _ in 0..=RAISES {
            let mut impossible = Vec::new();
            for &(setting, size_kib) in &settings {
                let Some(runs) = self.under_kernel(size_kib, group_limit, options.runs)? else {
                    let why = "needs root, zram, a memory cgroup and mTHP";
                    rows.report.skipped.push(format!("{:?} {setting:?}: {why}", rows.program));
                    impossible.push(setting);
                    continue;
                };
                if runs.iter().any(|run| run.has_hung(self.hangs)) {
                    impossible.push(setting);
                }
                let row = rows.add(setting, Some(group_limit), &runs);
                if row.right_runs > 0 && best.as_ref().is_none_or(|b| row.seconds < b.seconds) {
                    best = Some(row);
                }
            }
            settings.retain(|(setting, _)| !impossible.contains(setting));
            if best.is_some() || settings.is_empty() {
                break;
            }
            group_limit += group_limit / 4;
        }
        Ok(best)
    }

    /// Runs under the kernel's limit. Returns `None` if that is impossible here.
    fn under_kernel(&self, size_kib: u64, limit: u64, runs: usize) -> Result<Option<Vec<Outcome>>, Error> {
        let mut possible = true;
        let outcomes = repeat(runs, || {
            let failed = Outcome { seconds: f64::MAX, answer: None, peak: 0 };
            let Some((outcome, peak)) = kernel::in_group(size_kib, limit, |group| self.once(Launch::Group(group)))?
            else {
                possible = false;
                return Ok(failed);
            };
            Ok(Outcome { peak, ..outcome })
        })?;
        Ok(possible.then_some(outcomes))
    }

    /// Runs the program once.
    fn once(&self, launch: Launch) -> Result<Outcome, Error> {
        let stats = self.dir.join("stats.json");
        for stale in self.subject.leaves.iter().chain(&["stats.json"]) {
            // The file usually does not exist.
            let _ = std::fs::remove_file(self.dir.join(stale));
        }
        let clock = Instant::now();
        let mut running = Running::start(self.launched(launch, &stats), self.dir)?;
        let sampler = matches!(launch, Launch::Plain).then(|| Sampler::start(running.id()));
        let (seconds, answer) = match &self.subject.answer {
            Answer::Driver(drive) => drive(&mut running, self.dir, self.hangs)?,
            Answer::File(name) => {
                let ok = running.wait(self.hangs)?;
                (clock.elapsed().as_secs_f64(), std::fs::read(self.dir.join(name)).ok().filter(|_| ok))
            }
        };
        if answer.is_none() {
            let stderr = std::fs::read(self.dir.join("stderr")).unwrap_or_default();
            let text = String::from_utf8_lossy(&stderr);
            let last = text.trim().lines().last().unwrap_or("no message");
            eprintln!("foliomem bench: {:?} failed after {seconds:.1} s: {last}", self.subject.name);
        }
        let peak = match launch {
            Launch::Plain => sampler.map_or(0, Sampler::stop),
            Launch::Group(_) => 0,
            Launch::Foliomem { .. } => peak_bytes(&stats).unwrap_or(0),
        };
        Ok(Outcome { seconds, answer, peak })
    }

    /// Returns the command that starts the program under `launch`.
    fn launched(&self, launch: Launch, stats: &Path) -> Command {
        let Words(exe, arguments) = &self.subject.command;
        match launch {
            Launch::Plain => self.subject.command.command(),
            Launch::Group(group) => group.inside(&self.subject.command.command()),
            Launch::Foliomem { exe: foliomem, limit } => {
                let mut command = Command::new(foliomem);
                command.args(["run", "--quiet", "--limit", &format!("{}K", limit / 1024), "--stats"]).arg(stats);
                command.arg("--").arg(exe).args(arguments);
                command
            }
        }
    }
}

impl Outcome {
    /// Returns whether the run was ended by its timeout `hangs`.
    fn has_hung(&self, hangs: Duration) -> bool {
        self.answer.is_none() && self.seconds >= hangs.as_secs_f64()
    }
}

/// Repeats `once` as often as its duration allows.
fn repeat(runs: usize, mut once: impl FnMut() -> Result<Outcome, Error>) -> Result<Vec<Outcome>, Error> {
    let mut outcomes = vec![once()?];
    while outcomes.len() < repeats(runs, outcomes[0].seconds) {
        outcomes.push(once()?);
    }
    Ok(outcomes)
}

/// Returns the number of runs of a setting whose first run took `seconds`.
fn repeats(runs: usize, seconds: f64) -> usize {
    if seconds > LONG { 1 } else { runs.max(1) }
}

/// Returns foliomem's own count of the peak of its process tree.
fn peak_bytes(stats: &Path) -> Option<u64> {
    let json: serde_json::Value = serde_json::from_str(&read(stats).ok()?).ok()?;
    json.get("peak_bytes")?.as_u64()
}

fn mib(bytes: u64) -> f64 {
    (bytes as f64 / MIB as f64 * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that prints `text` and ends with `status`.
    fn shell(text: &str, status: u8) -> Subject<'static, &'static str> {
        Subject {
            name: "shell",
            files: vec![("script", format!("echo {text}; exit {status}\n"))],
            preparations: vec![Words::new("sh", &["-n", "script"])],
            command: Words::new("sh", &["script"]),
            leaves: &[],
            answer: Answer::File("stdout"),
            limited: Limited::Yes,
            group_limit: GroupLimit::Percent(50),
            patience: Patience { least: Duration::from_secs(60), times_first: 10.0 },
        }
    }

    fn compared(subject: Subject<&'static str>) -> Report<&'static str> {
        let options = Options { foliomem: None, kernel: false, runs: 2 };
        let mut report = Report::default();
        compare(subject, &options, &mut |_| {}, &mut report).unwrap();
        report
    }

    #[test]
    fn a_program_has_a_row_for_its_runs() {
        let report = compared(shell("42", 0));
        let [row] = &report.rows[..] else { panic!("{report:?}") };
        assert_eq!((row.program, row.setting, row.right_runs, row.runs), ("shell", Setting::None, 2, 2));
        assert!(row.result_ok && report.skipped.is_empty(), "{report:?}");
    }

    #[test]
    fn a_program_that_cannot_run_here_is_skipped_with_the_reason() {
        let report = compared(shell("42", 3));
        assert!(report.rows.is_empty() && report.skipped[0].contains("fails without any limit"), "{report:?}");
        let missing = Words::new("no-such-interpreter", &["--version"]);
        let report = compared(Subject { preparations: vec![missing], ..shell("42", 0) });
        assert!(report.rows.is_empty() && report.skipped[0].contains("no-such-interpreter"), "{report:?}");
    }

    #[test]
    fn slow_settings_run_once() {
        let mut count = 0;
        let run = |seconds| Outcome { seconds, answer: None, peak: 0 };
        assert_eq!(repeat(3, || Ok(run(LONG + 1.0))).unwrap().len(), 1);
        assert_eq!(
            repeat(3, || {
                count += 1;
                Ok(run(1.0))
            })
            .unwrap()
            .len(),
            3
        );
        assert_eq!(count, 3);
    }

    #[test]
    fn only_a_run_that_its_timeout_ended_has_hung() {
        let patience = Patience { least: Duration::from_secs(120), times_first: 10.0 };
        assert_eq!(patience.after(3.0).as_secs(), 120);
        assert_eq!(patience.after(20.0).as_secs(), 200);
        let run = |seconds, answer| Outcome { seconds, answer, peak: 0 };
        let hangs = patience.after(3.0);
        assert!(run(120.1, None).has_hung(hangs));
        assert!(!run(2.0, None).has_hung(hangs) && !run(120.1, Some(vec![])).has_hung(hangs));
    }

    #[test]
    fn a_limit_is_a_share_of_the_need_that_foliomem_accepts() {
        assert_eq!(GroupLimit::Percent(50).bytes(200 * MIB), 100 * MIB);
        assert_eq!(GroupLimit::Percent(50).bytes(20 * MIB), MIN_LIMIT);
        assert_eq!(GroupLimit::Bytes(300 * MIB).bytes(MIB), 300 * MIB);
    }
}
