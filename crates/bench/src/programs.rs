//! Times real programs without a limit, under the kernel's limit with zram swap, and under
//! foliomem's limit, at [equal total](crate::equal_total) memory.
//!
//! The results are the numpy program's checksum, each value in redis, the compiler's object files
//! byte by byte.
//!
//! - *numpy*: [`ARRAYS`], 1 GiB of arrays and their temporaries.
//! - *redis*: 100,000 values of 4 KiB from the [`crate::corpus`] are loaded; redis-benchmark gets
//!   200,000 and sets 20,000 random ones; all are read back. redis-benchmark alone would store
//!   *one* value under every key. No real data set does that, and a codec that sees several values
//!   at a time compresses it to nothing. Every setting has `disable-thp no`, because redis would
//!   otherwise turn the kernel's mTHP off for itself.
//! - *compile*: `g++ -O2` of a generated file of templates, [`TEMPLATES`].
//! - *make*: `make -j8` of eight such files, shorter ones. Eight compilers at once need much more
//!   memory than two do.

use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::equal_total::{self, Answer, Driven, GroupLimit, Limited, Patience, Subject, Words};
use crate::kernel::run as run_command;
use crate::redis::Client;
use crate::running::Running;
use crate::{Error, MIB, corpus, python};

/// The numpy program.
pub const ARRAYS: &str = include_str!("programs/arrays.py");
/// The head of the C++ program. [`INSTANCES`] uses of its templates follow.
pub const TEMPLATES: &str = include_str!("programs/templates.cpp");
/// Uses of the templates: about 20 s and half a GiB for the compiler.
const INSTANCES: usize = 10;
/// Uses of the templates in each of the files that make compiles: some seconds and 300 MiB each.
const INSTANCES_OF_PART: usize = 4;
/// The rules for make. The object files, one after the other, are the result.
const RULES: &str = "objects: $(patsubst %.cpp,%.o,$(sort $(wildcard part*.cpp)))
\tcat $^ > $@
%.o: %.cpp
\tg++ -O2 -c $< -o $@
";
/// Names of the files that make compiles.
const PARTS: [&str; 8] =
    ["part1.cpp", "part2.cpp", "part3.cpp", "part4.cpp", "part5.cpp", "part6.cpp", "part7.cpp", "part8.cpp"];
/// Number of keys in redis.
const KEYS: usize = 100_000;
/// Bytes of each value in redis.
const VALUE: usize = 4096;
/// Get requests of redis-benchmark.
const GETS: usize = 200_000;
/// Set requests of redis-benchmark.
const SETS: usize = 20_000;
/// The server's arguments.
const REDIS_ARGUMENTS: [&str; 12] = [
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
/// The kernel's limit for numpy in bytes; the project's goals are set for this limit.
const NUMPY_LIMIT: u64 = 300 * MIB;
/// The kernel's limit for the other programs, in per cent of their peak without a limit. About half
/// of the peak must be swapped.
const LIMIT_PERCENT: u64 = 45;
/// Timeout of a run.
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
    /// Eight g++ at once.
    Make,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 4] = [Self::Numpy, Self::Redis, Self::Compile, Self::Make];
}

/// One row of the benchmark.
pub type Row = equal_total::Row<Program>;
/// The result of the benchmark.
pub type Report = equal_total::Report<Program>;

/// The selection of runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The programs.
    pub programs: Vec<Program>,
    /// The settings.
    pub settings: equal_total::Options,
}

/// Runs the benchmark and calls `progress` with each row.
///
/// # Errors
/// Fails if the machine cannot be set up. A missing program is skipped; a failing one is a row that
/// is not ok.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Report, Error> {
    let mut report = Report::default();
    let settings = options.settings.resolved()?;
    let values = if options.programs.contains(&Program::Redis) { corpus::build(KEYS * VALUE) } else { Vec::new() };
    for &program in &options.programs {
        equal_total::compare(subject(program, &values), &settings, progress, &mut report)?;
    }
    Ok(report)
}

/// Describes a program. `values` are those that redis is filled with.
fn subject(program: Program, values: &[u8]) -> Subject<'_, Program> {
    let patience = Patience { least: HANGS, times_first: 0.0 };
    let percent = GroupLimit::Percent(LIMIT_PERCENT);
    match program {
        Program::Numpy => {
            let python = python();
            Subject {
                name: program,
                files: vec![("arrays.py", ARRAYS.to_owned())],
                preparations: vec![Words::new(&python, &["-c", "import numpy"])],
                command: Words::new(&python, &["arrays.py"]),
                leaves: &[],
                answer: Answer::File("stdout"),
                limited: Limited::Yes,
                group_limit: GroupLimit::Bytes(NUMPY_LIMIT),
                patience,
            }
        }
        Program::Redis => {
            let load = Load { values, payload: payload() };
            Subject {
                name: program,
                files: vec![],
                preparations: ["redis-server", "redis-benchmark"].map(|exe| Words::new(exe, &["--version"])).to_vec(),
                command: Words::new("redis-server", &REDIS_ARGUMENTS),
                leaves: &["redis.sock"],
                answer: Answer::Driver(Box::new(move |server, dir, hangs| load.drive(server, dir, hangs))),
                limited: Limited::Yes,
                group_limit: percent,
                patience,
            }
        }
        Program::Compile => Subject {
            name: program,
            files: vec![("templates.cpp", cpp(1..=INSTANCES))],
            preparations: vec![Words::new("g++", &["--version"])],
            command: Words::new("g++", &["-O2", "-c", "templates.cpp", "-o", "templates.o"]),
            leaves: &["templates.o"],
            answer: Answer::File("templates.o"),
            limited: Limited::Yes,
            group_limit: percent,
            patience,
        },
        Program::Make => Subject {
            name: program,
            files: parts().chain([("Makefile", RULES.to_owned())]).collect(),
            preparations: ["make", "g++"].map(|exe| Words::new(exe, &["--version"])).to_vec(),
            // With -B, make compiles again what the run before has compiled.
            command: Words::new("make", &["-s", "-B", "-j8"]),
            leaves: &["objects"],
            answer: Answer::File("objects"),
            limited: Limited::Yes,
            group_limit: percent,
            patience,
        },
    }
}

/// The requests to redis.
struct Load<'a> {
    /// The values to load, [`VALUE`] bytes each.
    values: &'a [u8],
    /// The value that redis-benchmark sets keys to.
    payload: Vec<u8>,
}

impl Load<'_> {
    /// Loads, benchmarks and reads back a running server, then ends it. If the server fails, there
    /// is no answer, but also no error.
    fn drive(&self, server: &mut Running, dir: &Path, hangs: Duration) -> Result<Driven, Error> {
        let socket = dir.join("redis.sock");
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
                        .arg(hangs.as_secs().to_string())
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
                server.wait(hangs)?.then(|| right.to_string().into_bytes()).filter(|_| right == KEYS)
            }
            Err(error) => {
                eprintln!("foliomem bench: {error}");
                None
            }
        };
        Ok((seconds, answer))
    }
}

/// Returns names and sources of the files that make compiles.
fn parts() -> impl Iterator<Item = (&'static str, String)> {
    let first = |part: usize| 1 + part * INSTANCES_OF_PART;
    PARTS.into_iter().enumerate().map(move |(part, name)| (name, cpp(first(part)..=first(part + 1) - 1)))
}

/// Returns the source of a C++ program with these uses of the templates.
fn cpp(instances: RangeInclusive<usize>) -> String {
    let uses: String = instances.map(|i| format!("  out += work<{i}>(s);\n")).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::equal_total::Setting;

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
    fn the_generated_program_uses_each_instance_once() {
        let text = cpp(1..=INSTANCES);
        assert_eq!(text.matches("out += work<").count(), INSTANCES);
        assert!(text.ends_with("}\n"));
    }

    #[test]
    fn each_file_that_make_compiles_is_another_one() {
        let all: String = parts().map(|(_, text)| text).collect();
        for instance in 1..=PARTS.len() * INSTANCES_OF_PART {
            assert_eq!(all.matches(&format!("out += work<{instance}>")).count(), 1);
        }
    }
}
