//! Times real programs without a limit, under the kernel's limit with zram swap, and under
//! foliomem's limit.
//!
//! The comparison is at equal *total* memory. A run under the kernel's limit M costs M plus zram's
//! memory at its peak (`mem_used_max`). foliomem's limit, which covers everything, is that sum for
//! the kernel's *faster* setting. M is raised until the program survives in one of the settings.
//!
//! Every run's result is compared with that of the first run without a limit: the numpy program's
//! checksum, each value in redis, the compiler's object file byte by byte.
//!
//! - *numpy*: [`ARRAYS`], 1 GiB of arrays and their temporaries.
//! - *redis*: 100,000 values of 4 KiB from the [`crate::corpus`] are loaded; redis-benchmark gets
//!   200,000 and sets 20,000 random ones; all are read back. redis-benchmark alone would store
//!   *one* value under every key. No real data set does that, and a codec that sees several values
//!   at a time compresses it to nothing. Every setting has `disable-thp no`, because redis would
//!   otherwise turn the kernel's mTHP off for itself.
//! - *compile*: `g++ -O2` of a generated file of templates, [`TEMPLATES`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::kernel::{self, Group, read, run as run_command};
use crate::redis::Client;
use crate::running::{Running, WorkDir};
use crate::tree::Sampler;
use crate::{Error, MIB, corpus, median};

/// The numpy program.
pub const ARRAYS: &str = include_str!("programs/arrays.py");
/// The head of the C++ program. [`INSTANCES`] uses of its templates follow.
pub const TEMPLATES: &str = include_str!("programs/templates.cpp");
/// Uses of the templates: about 20 s and half a GiB for the compiler.
const INSTANCES: usize = 10;
/// Number of keys in redis.
const KEYS: usize = 100_000;
/// Bytes of each value in redis.
const VALUE: usize = 4096;
/// Get requests of redis-benchmark.
const GETS: usize = 200_000;
/// Set requests of redis-benchmark.
const SETS: usize = 20_000;
/// The kernel's limit for numpy in bytes; the project's goals are set for this limit.
const NUMPY_LIMIT: u64 = 300 * MIB;
/// The kernel's limit for the other programs, in per cent of their peak without a limit. About half
/// of the peak must be swapped.
const LIMIT_PERCENT: u64 = 45;
/// Maximum number of times that the kernel's limit grows by a quarter. If the kernel kills a
/// program in every run of both settings, there is nothing to compare with.
const RAISES: usize = 3;
/// Seconds of a first run beyond which the setting is not run again: noise of a second does not
/// matter then.
const LONG: f64 = 45.0;
/// Timeout of a run. A run that takes longer counts as hanging: it is ended, with a wrong result.
const HANGS: Duration = Duration::from_secs(900);

/// A program to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// Python with numpy: `FOLIOMEM_PYTHON`, or `python3`.
    Numpy,
    /// redis-server, driven by redis-benchmark.
    Redis,
    /// g++.
    Compile,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 3] = [Self::Numpy, Self::Redis, Self::Compile];
}

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

/// One row of the benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The program.
    pub program: Program,
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

/// The selection of runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The `foliomem` executable. Without it, only the kernel's settings are run.
    pub foliomem: Option<PathBuf>,
    /// The programs.
    pub programs: Vec<Program>,
    /// Whether to run the kernel's settings. Without them, foliomem gets the limit that the
    /// kernel's group would have.
    pub kernel: bool,
    /// Runs of each setting; long ones run once.
    pub runs: usize,
}

impl Options {
    /// Selects all programs and settings, with three runs each.
    #[must_use]
    pub fn new(foliomem: Option<PathBuf>) -> Self {
        Self { foliomem, programs: Program::ALL.to_vec(), kernel: true, runs: 3 }
    }
}

/// The result of the benchmark.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// All rows, in the order of [`Program`] and [`Setting`].
    pub rows: Vec<Row>,
    /// The settings that could not be run and the reasons, one line each.
    pub skipped: Vec<String>,
}

/// Runs the benchmark and calls `progress` with each row.
///
/// # Errors
/// Fails if the machine cannot be set up. A missing program is skipped; a failing one is a row that
/// is not ok.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Report, Error> {
    let mut report = Report::default();
    let mut options = options.clone();
    if let Some(exe) = &mut options.foliomem {
        // The programs run in directories of their own, so the path must be absolute.
        *exe = exe.canonicalize().map_err(Error::at(exe))?;
    }
    let values = if options.programs.contains(&Program::Redis) { corpus::build(KEYS * VALUE) } else { Vec::new() };
    for &program in &options.programs {
        let dir = WorkDir::new("programs")?;
        match Bench::prepare(program, &dir.0, &values)? {
            Ok(bench) => bench.settings(&options, progress, &mut report)?,
            Err(why) => report.skipped.push(why),
        }
    }
    Ok(report)
}

/// One run of a program.
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

/// A program that is ready to run in its own directory.
struct Bench<'a> {
    program: Program,
    dir: &'a Path,
    command: (OsString, Vec<OsString>),
    values: &'a [u8],
    /// The value that redis-benchmark sets keys to.
    payload: Vec<u8>,
}

/// The rows of a program, which are reported one by one.
struct Rows<'a> {
    program: Program,
    /// The result of the first run without a limit.
    answer: Vec<u8>,
    progress: &'a mut dyn FnMut(&Row),
    report: &'a mut Report,
}

impl Rows<'_> {
    /// Adds and returns the row of the runs of a setting.
    fn add(&mut self, setting: Setting, limit: Option<u64>, runs: &[Outcome]) -> Row {
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

impl<'a> Bench<'a> {
    /// Writes the program's input, or returns the reason why the program cannot run here.
    fn prepare(program: Program, dir: &'a Path, values: &'a [u8]) -> Result<Result<Self, String>, Error> {
        let put = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).map_err(Error::at(&path))
        };
        let works = |exe: &OsString, args: &[&str]| {
            Command::new(exe).args(args).output().is_ok_and(|output| output.status.success())
        };
        let (exe, args, check): (OsString, &[&str], &[&str]) = match program {
            Program::Numpy => {
                put("arrays.py", ARRAYS)?;
                let python = std::env::var_os("FOLIOMEM_PYTHON").unwrap_or_else(|| "python3".into());
                (python, &["arrays.py"], &["-c", "import numpy"])
            }
            Program::Redis => {
                let args = &[
                    "--port",
                    "0",
                    "--unixsocket",
                    "redis.sock",
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                    "--daemonize",
                    "no",
                    "--disable-thp",
                    "no",
                ];
                ("redis-server".into(), args, &["--version"])
            }
            Program::Compile => {
                put("templates.cpp", &cpp())?;
                ("g++".into(), &["-O2", "-c", "templates.cpp", "-o", "templates.o"], &["--version"])
            }
        };
        let benchmark = program != Program::Redis || works(&"redis-benchmark".into(), &["--version"]);
        if !works(&exe, check) || !benchmark {
            return Ok(Err(format!("{program:?}: `{} {}` does not work here", exe.display(), check.join(" "))));
        }
        let command = (exe, args.iter().map(OsString::from).collect());
        Ok(Ok(Self { program, dir, command, values, payload: payload() }))
    }

    /// Runs all settings of this program.
    fn settings(&self, options: &Options, progress: &mut dyn FnMut(&Row), report: &mut Report) -> Result<(), Error> {
        let first = self.once(Launch::Plain)?;
        let Some(answer) = first.answer.clone() else {
            report.skipped.push(format!("{:?}: fails without any limit; see its own message", self.program));
            return Ok(());
        };
        let need = first.peak;
        let limit = if self.program == Program::Numpy { NUMPY_LIMIT } else { need * LIMIT_PERCENT / 100 };
        let ample = need * 3 + 1024 * MIB;
        let mut rows = Rows { program: self.program, answer, progress, report };
        let (plain, unpressed) = self.without_pressure(options, first, ample)?;
        rows.add(Setting::None, None, &plain);
        let best = self.kernel_settings(options, limit, &mut rows)?;
        if let Some(exe) = &options.foliomem {
            let limit = best.map_or(limit, |row| (row.total_peak_mib * MIB as f64) as u64);
            let runs = repeat(options.runs, || self.once(Launch::Foliomem { exe, limit }))?;
            rows.add(Setting::Foliomem, Some(limit), &runs);
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

    /// Runs the kernel's settings, with a limit that rises from `limit` until the program survives.
    /// Returns the row of the faster setting.
    fn kernel_settings(&self, options: &Options, limit: u64, rows: &mut Rows) -> Result<Option<Row>, Error> {
        let mut best: Option<Row> = None;
        let mut settings = if options.kernel { vec![(Setting::Kernel4k, 4), (Setting::Kernel64k, 64)] } else { vec![] };
        let mut group_limit = limit;
        for _ in 0..=RAISES {
            let mut impossible = Vec::new();
            for &(setting, size_kib) in &settings {
                let Some(runs) = self.under_kernel(size_kib, group_limit, options.runs)? else {
                    let why = "needs root, zram, a memory cgroup and mTHP";
                    rows.report.skipped.push(format!("{:?} {setting:?}: {why}", self.program));
                    impossible.push(setting);
                    continue;
                };
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
        for stale in ["stats.json", "templates.o", "redis.sock"] {
            // The file usually does not exist.
            let _ = std::fs::remove_file(self.dir.join(stale));
        }
        let clock = Instant::now();
        let mut running = Running::start(self.launched(launch, &stats), self.dir)?;
        let sampler = matches!(launch, Launch::Plain).then(|| Sampler::start(running.id()));
        let (seconds, answer) = match self.program {
            Program::Redis => self.drive_redis(&mut running)?,
            Program::Numpy | Program::Compile => {
                let ok = running.wait(HANGS)?;
                let seconds = clock.elapsed().as_secs_f64();
                let file = if self.program == Program::Numpy { "stdout" } else { "templates.o" };
                (seconds, std::fs::read(self.dir.join(file)).ok().filter(|_| ok))
            }
        };
        if answer.is_none() {
            let stderr = std::fs::read(self.dir.join("stderr")).unwrap_or_default();
            let text = String::from_utf8_lossy(&stderr);
            eprintln!(
                "foliomem bench: {:?} failed: {}",
                self.program,
                text.trim().lines().last().unwrap_or("no message")
            );
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
        let mut plain = Command::new(&self.command.0);
        plain.args(&self.command.1);
        match launch {
            Launch::Plain => plain,
            Launch::Group(group) => group.inside(&plain),
            Launch::Foliomem { exe, limit } => {
                let mut command = Command::new(exe);
                command.args(["run", "--quiet", "--limit", &format!("{}K", limit / 1024), "--stats"]).arg(stats);
                command.arg("--").arg(&self.command.0).args(&self.command.1);
                command
            }
        }
    }

    /// Loads, benchmarks and reads back a running server, then ends it. If the server fails, there
    /// is no answer, but also no error.
    fn drive_redis(&self, server: &mut Running) -> Result<(f64, Option<Vec<u8>>), Error> {
        let socket = self.dir.join("redis.sock");
        let patience = Instant::now();
        let mut client = loop {
            match Client::connect(&socket) {
                Ok(client) => break client,
                Err(_) if server.ended()? || patience.elapsed() > Duration::from_secs(30) => return Ok((0.0, None)),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let clock = Instant::now();
        let value = |i: usize| &self.values[i * VALUE..(i + 1) * VALUE];
        let driven = client.fill(KEYS, value).and_then(|()| {
            for (test, requests) in [("get", GETS), ("set", SETS)] {
                run_command(
                    Command::new("timeout")
                        .arg(HANGS.as_secs().to_string())
                        .arg("redis-benchmark")
                        .arg("-s")
                        .arg(&socket)
                        .args(["-q", "-t", test, "-d", &VALUE.to_string()])
                        .args(["-r", &KEYS.to_string(), "-n", &requests.to_string()]),
                )?;
            }
            client.count_right(KEYS, |i, got| got == value(i) || got == self.payload)
        });
        let seconds = clock.elapsed().as_secs_f64();
        let answer = match driven {
            Ok(right) => {
                client.shut_down()?;
                server.wait(HANGS)?.then(|| right.to_string().into_bytes()).filter(|_| right == KEYS)
            }
            Err(error) => {
                eprintln!("foliomem bench: {error}");
                None
            }
        };
        Ok((seconds, answer))
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

/// Returns the source of the C++ program.
fn cpp() -> String {
    let uses: String = (1..=INSTANCES).map(|i| format!("  out += work<{i}>(s);\n")).collect();
    format!("{TEMPLATES}\nstd::string all(long s) {{\n  std::string out;\n{uses}  return out;\n}}\n")
}

/// Returns the value that redis-benchmark sets keys to (its `genBenchmarkRandomData`, which is
/// deterministic).
fn payload() -> Vec<u8> {
    let mut state: u32 = 1234;
    let next = |_| {
        state = state.wrapping_mul(1_103_515_245).wrapping_add(12345);
        b'0' + ((state >> 16) & 63) as u8
    };
    (0..VALUE).map(next).collect()
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

    #[test]
    fn json_rows_keep_their_field_names() {
        let row = Row {
            program: Program::Compile,
            setting: Setting::Kernel64k,
            limit_mib: None,
            total_peak_mib: 740.0,
            seconds: 34.0,
            result_ok: true,
            right_runs: 3,
            runs: 3,
        };
        let json = r#"{"program":"compile","setting":"kernel-64k","limit_mib":null,"total_peak_mib":740.0,"seconds":34.0,"result_ok":true,"right_runs":3,"runs":3}"#;
        assert_eq!(serde_json::to_string(&row).unwrap(), json);
        assert_eq!(serde_json::to_string(&Setting::FoliomemUnpressed).unwrap(), r#""foliomem-unpressed""#);
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
    fn the_generated_program_uses_each_instance_once() {
        let text = cpp();
        assert_eq!(text.matches("out += work<").count(), INSTANCES);
        assert!(text.ends_with("}\n"));
    }
}
