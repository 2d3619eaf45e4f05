//! Compares what `foliomem advise` predicts with what real programs take.
//!
//! Each program is recorded once within the smallest of three limits, which are shares of what it
//! needs. Then it runs within each of them and within a limit that leaves all of it resident, in
//! turns. The slowdown is the time within a limit divided by the time within the roomy limit.
//!
//! The programs are those of the end-to-end tests: numpy, `g++`, `SQLite`, redis and Java.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::kernel::read;
use crate::redis::Client;
use crate::running::Running;
use crate::scratch::Scratch;
use crate::{Error, MIB, corpus, median, python};

/// The limits, in per cent of the need.
pub const LIMITS_PERCENT: [u64; 3] = [75, 50, 35];
/// A limit that leaves everything resident, as a multiple of the program's need.
const ROOMY: u64 = 3;
/// A limit that nothing here needs: 64 GiB.
const UNLIMITED: u64 = 1 << 36;
/// The smallest limit of a run.
const MIN_LIMIT: u64 = 32 * MIB;
/// Longest run. A longer run hangs.
const HANGS: Duration = Duration::from_secs(600);
/// Number of keys in redis, and bytes of each value.
const KEYS: usize = 40_000;
const VALUE: usize = 4096;
/// How often all keys of redis are read.
const READS: usize = 3;

/// A program to record and run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// Python with numpy: `FOLIOMEM_PYTHON`, or `python3`.
    Numpy,
    /// g++.
    Compile,
    /// `SQLite`, in Python.
    Sqlite,
    /// redis-server.
    Redis,
    /// A Java heap.
    Java,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 5] = [Self::Numpy, Self::Compile, Self::Sqlite, Self::Redis, Self::Java];

    /// Writes the program's input into `dir`. Returns its command, and arguments with which it only
    /// shows that it is there.
    fn prepare(self, dir: &Path) -> Result<(OsString, Vec<String>, &'static [&'static str]), Error> {
        let put = |name: &str, text: &str| std::fs::write(dir.join(name), text).map_err(Error::at(&dir.join(name)));
        let (exe, arguments, check): (OsString, &str, &[&str]) = match self {
            Self::Numpy => {
                put("array.py", include_str!("../../../tests/e2e/programs/big_array.py"))?;
                (python(), "array.py 384", &["-c", "import numpy"])
            }
            Self::Compile => {
                put("template.cpp", include_str!("../../../tests/e2e/programs/template.cpp"))?;
                ("g++".into(), "-O2 -c template.cpp -o template.o", &["--version"])
            }
            Self::Sqlite => {
                put("database.py", include_str!("../../../tests/e2e/programs/database.py"))?;
                (python(), "database.py 120", &["-c", "import sqlite3"])
            }
            Self::Redis => {
                let arguments = "--port 0 --unixsocket redis.sock --save  --appendonly no --disable-thp no";
                ("redis-server".into(), arguments, &["--version"])
            }
            Self::Java => {
                put("Heap.java", include_str!("../../../tests/e2e/programs/Heap.java"))?;
                ("java".into(), "-XX:+UseSerialGC -Xmx1g Heap.java 400", &["-version"])
            }
        };
        Ok((exe, arguments.split(' ').map(str::to_owned).collect(), check))
    }
}

/// What was predicted and measured of a program within a limit.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The program.
    pub program: Program,
    /// The limit.
    pub limit_mib: u64,
    /// The limit in per cent of the need.
    pub limit_percent: u64,
    /// The predicted slowdown, if it is known.
    pub predicted: Option<f64>,
    /// The measured slowdown, by the medians of the runs.
    pub measured: f64,
    /// How far the prediction is off, in per cent of the measured slowdown.
    pub error_percent: Option<f64>,
    /// Predicted faults on swapped-out pages.
    pub predicted_swap_ins: Option<u64>,
    /// Measured faults on swapped-out pages, the median.
    pub measured_swap_ins: f64,
    /// Median seconds of the runs.
    pub seconds: f64,
    /// Median seconds of the runs within the roomy limit.
    pub roomy_seconds: f64,
    /// Number of runs within each limit.
    pub runs: usize,
}

/// The selection of runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `foliomem` executable.
    pub foliomem: PathBuf,
    /// The programs.
    pub programs: Vec<Program>,
    /// Runs within each limit.
    pub runs: usize,
}

/// The result of the benchmark.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// All rows.
    pub rows: Vec<Row>,
    /// The programs that could not be run and the reasons.
    pub skipped: Vec<String>,
}

/// The part of the advice that is compared.
#[derive(Deserialize)]
struct Advice {
    points: Vec<Point>,
}

#[derive(Deserialize)]
struct Point {
    limit_bytes: u64,
    slowdown: Option<f64>,
    work: Option<Work>,
}

#[derive(Deserialize)]
struct Work {
    swap_in_faults: u64,
}

/// The part of the statistics of a run that is compared.
#[derive(Deserialize)]
struct Stats {
    need_peak_bytes: u64,
    vmstat: Vmstat,
}

#[derive(Deserialize)]
struct Vmstat {
    pgmajfault: u64,
}

/// Runs the benchmark and calls `progress` with each row.
///
/// # Errors
/// Fails if foliomem or a program fails. A missing program is skipped.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Report, Error> {
    let mut report = Report::default();
    let foliomem = options.foliomem.canonicalize().map_err(Error::at(&options.foliomem))?;
    let values = if options.programs.contains(&Program::Redis) { corpus::build(KEYS * VALUE) } else { Vec::new() };
    for &program in &options.programs {
        let dir = Scratch::new("advise")?;
        let (exe, arguments, check) = program.prepare(dir.path())?;
        let works = Command::new(&exe).args(check).output().is_ok_and(|output| output.status.success());
        if !works {
            let (exe, check) = (exe.display(), check.join(" "));
            report.skipped.push(format!("{program:?}: `{exe} {check}` does not work here"));
            continue;
        }
        let bench = Bench { program, dir: dir.path(), foliomem: &foliomem, exe, arguments, values: &values };
        for row in bench.rows(options.runs.max(1))? {
            progress(&row);
            report.rows.push(row);
        }
    }
    Ok(report)
}

/// The runs within one limit.
#[derive(Default)]
struct Measured {
    seconds: Vec<f64>,
    swap_ins: Vec<f64>,
}

/// A program that is ready to run in its own directory.
struct Bench<'a> {
    program: Program,
    dir: &'a Path,
    foliomem: &'a Path,
    exe: OsString,
    arguments: Vec<String>,
    values: &'a [u8],
}

impl Bench<'_> {
    fn rows(&self, runs: usize) -> Result<Vec<Row>, Error> {
        let (_, stats) = self.within(UNLIMITED)?;
        let need = stats.need_peak_bytes;
        let limits = LIMITS_PERCENT.map(|percent| (need * percent / 100).max(MIN_LIMIT) / MIB * MIB);
        let advice = self.advise(&limits)?;
        let mut roomy_seconds = Vec::new();
        let mut measured = LIMITS_PERCENT.map(|_| Measured::default());
        for _ in 0..runs {
            roomy_seconds.push(self.within(need * ROOMY)?.0);
            for (&limit, measured) in limits.iter().zip(&mut measured) {
                let (took, stats) = self.within(limit)?;
                measured.seconds.push(took);
                measured.swap_ins.push(stats.vmstat.pgmajfault as f64);
            }
        }
        let roomy_seconds = median(&roomy_seconds);
        let row = |((&limit, limit_percent), runs_there): ((&u64, u64), &Measured)| {
            let point = advice.points.iter().find(|point| point.limit_bytes == limit);
            let predicted = point.and_then(|point| point.slowdown);
            let seconds = median(&runs_there.seconds);
            let measured = seconds / roomy_seconds;
            Row {
                program: self.program,
                limit_mib: limit / MIB,
                limit_percent,
                predicted,
                measured,
                error_percent: predicted.map(|predicted| (predicted / measured - 1.0) * 100.0),
                predicted_swap_ins: point.and_then(|point| Some(point.work.as_ref()?.swap_in_faults)),
                measured_swap_ins: median(&runs_there.swap_ins),
                seconds,
                roomy_seconds,
                runs,
            }
        };
        Ok(limits.iter().zip(LIMITS_PERCENT).zip(&measured).map(row).collect())
    }

    /// Records the program within the smallest limit, and returns the advice for all.
    fn advise(&self, limits: &[u64]) -> Result<Advice, Error> {
        let json = self.dir.join("advice.json");
        let list: Vec<String> = limits.iter().map(|limit| format!("{}M", limit / MIB)).collect();
        let smallest = limits.iter().min().copied().unwrap_or(MIN_LIMIT);
        let mut command = Command::new(self.foliomem);
        command.args(["advise", "--quiet", "--limit", &format!("{}M", smallest / MIB), "--at", &list.join(",")]);
        command.arg("--json").arg(&json).arg("--").arg(&self.exe).args(&self.arguments);
        self.once(command)?;
        parsed(&json)
    }

    /// Runs the program within a limit. Returns its seconds and its statistics.
    fn within(&self, limit: u64) -> Result<(f64, Stats), Error> {
        let stats = self.dir.join("stats.json");
        let mut command = Command::new(self.foliomem);
        command.args(["run", "--quiet", "--limit", &format!("{}K", limit / 1024), "--stats"]).arg(&stats);
        command.arg("--").arg(&self.exe).args(&self.arguments);
        let seconds = self.once(command)?;
        Ok((seconds, parsed(&stats)?))
    }

    /// Runs a command to its end; returns its seconds.
    fn once(&self, command: Command) -> Result<f64, Error> {
        let shown = format!("{command:?}");
        let clock = Instant::now();
        let mut running = Running::start(command, self.dir)?;
        if self.program == Program::Redis {
            self.drive_redis(&mut running)?;
        }
        let succeeded = running.wait(HANGS)?;
        let seconds = clock.elapsed().as_secs_f64();
        if succeeded {
            return Ok(seconds);
        }
        let stderr = std::fs::read(self.dir.join("stderr")).unwrap_or_default();
        let said = String::from_utf8_lossy(&stderr).trim().lines().last().unwrap_or("no message").to_owned();
        Err(Error::Command { command: shown, said })
    }

    /// Loads a running server, reads everything back, and ends it.
    fn drive_redis(&self, server: &mut Running) -> Result<(), Error> {
        let socket = self.dir.join("redis.sock");
        let patience = Instant::now();
        let mut client = loop {
            match Client::connect(&socket) {
                Ok(client) => break client,
                Err(error) if server.ended()? || patience.elapsed() > Duration::from_secs(30) => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let value = |i: usize| &self.values[i * VALUE..(i + 1) * VALUE];
        client.fill(KEYS, value)?;
        for _ in 0..READS {
            let right = client.count_right(KEYS, |i, got| got == value(i))?;
            if right != KEYS {
                return Err(Error::WrongResult(format!("redis returned {right} of {KEYS} values as they were")));
            }
        }
        client.shut_down()
    }
}

fn parsed<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, Error> {
    let text = read(path)?;
    serde_json::from_str(&text).map_err(|_| Error::parse(path.display().to_string(), &text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_and_the_statistics_are_read() {
        let advice = r#"{"need_bytes":9,"points":[{"limit_bytes":7,"slowdown":null,"unknown":"no-costs","work":null},
            {"limit_bytes":8,"slowdown":1.5,"unknown":null,"work":{"swap_in_faults":3,"pswpin":4}}]}"#;
        let advice: Advice = serde_json::from_str(advice).unwrap();
        assert_eq!(advice.points[1].work.as_ref().unwrap().swap_in_faults, 3);
        let stats: Stats =
            serde_json::from_str(r#"{"need_peak_bytes":5,"vmstat":{"pgmajfault":6,"pgfault":7}}"#).unwrap();
        assert_eq!((stats.need_peak_bytes, stats.vmstat.pgmajfault), (5, 6));
    }

    #[test]
    fn every_program_has_its_input() {
        let dir = Scratch::new("advise-inputs").unwrap();
        for program in Program::ALL {
            let (_, arguments, _) = program.prepare(dir.path()).unwrap();
            let files = std::fs::read_dir(dir.path()).unwrap().flatten().map(|file| file.file_name());
            let files: Vec<_> = files.filter_map(|name| name.into_string().ok()).collect();
            assert!(
                program == Program::Redis || arguments.iter().any(|argument| files.contains(argument)),
                "{program:?}"
            );
        }
    }
}
