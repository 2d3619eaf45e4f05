//! `cargo xtask bench-docs`: measures with a `foliomem bench` command and keeps what it prints, so
//! that the tables of `docs/benchmarks.md` follow from it.

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};

/// The usage of the command.
pub const USAGE: &str = "cargo xtask bench-docs MACHINE [--table NAME] -- COMMAND [OPTIONS]";

/// A measurement, and the table that it becomes.
#[derive(PartialEq, Eq, Debug)]
pub struct Request<'a> {
    /// The kind of machine, as `docs/benchmarks.md` names it.
    machine: &'a str,
    /// Name of the table.
    table: &'a str,
    /// The arguments of `foliomem bench`.
    arguments: &'a [&'a str],
}

impl<'a> Request<'a> {
    /// Parses the words after `bench-docs`. A table without a name is called as the command.
    #[must_use]
    pub fn parse(words: &'a [&'a str]) -> Option<Request<'a>> {
        let at = words.iter().position(|&word| word == "--")?;
        let (head, arguments) = (&words[..at], &words[at + 1..]);
        let command = *arguments.first()?;
        match *head {
            [machine] => Some(Request { machine, table: command, arguments }),
            [machine, "--table", table] => Some(Request { machine, table, arguments }),
            _ => None,
        }
    }

    /// Returns the name of the file: the table, and the machine in lower case.
    fn file(&self) -> String {
        format!("{}.{}.json", self.table, self.machine.to_lowercase().replace(' ', "-"))
    }
}

/// Builds the workspace at `root`, measures, and keeps the result.
///
/// # Errors
/// Fails if the build or the measurement fails, or if the result cannot be written.
pub fn run(root: &Path, request: &Request) -> Result<(), String> {
    output(Command::new("make").arg("--silent").arg("programs").current_dir(root))?;
    let program = root.join("target/release/foliomem");
    let load = read("/proc/loadavg")?;
    let load: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).ok_or("/proc/loadavg: no number")?;
    let printed = output(Command::new(&program).arg("bench").args(request.arguments).arg("--json"))?;
    let rows: Value = serde_json::from_str(&printed).map_err(|error| format!("{}: {error}", program.display()))?;
    let date = output(Command::new("date").args(["--utc", "+%F"]))?;
    let commit = commit(root)?;
    let kept = json!({
        "machine": request.machine, "system": system()?, "date": date.trim(), "commit": commit, "load": load,
        "arguments": request.arguments, "rows": rows,
    });
    let path = root.join("docs/benchmarks").join(request.file());
    std::fs::write(&path, format!("{kept:#}\n")).map_err(|error| format!("{}: {error}", path.display()))
}

/// Returns the name of the built commit, with `-dirty` if the sources differ from it.
fn commit(root: &Path) -> Result<String, String> {
    let git = |arguments: &[&str]| output(Command::new("git").current_dir(root).args(arguments));
    let changed = git(&["status", "--porcelain", "--", "crates", "Cargo.toml", "Cargo.lock"])?;
    let mark = if changed.is_empty() { "" } else { "-dirty" };
    Ok(format!("{}{mark}", git(&["rev-parse", "--short", "HEAD"])?.trim()))
}

/// Returns a description of the machine: CPUs, memory and kernel.
fn system() -> Result<String, String> {
    let (cpus, memory, kernel) = (read("/proc/cpuinfo")?, read("/proc/meminfo")?, read("/proc/sys/kernel/osrelease")?);
    Ok(describe(&cpus, &memory, kernel.trim()))
}

fn describe(cpuinfo: &str, meminfo: &str, kernel: &str) -> String {
    let models: Vec<&str> = cpuinfo.lines().filter_map(|line| value(line, "model name")).collect();
    let model = models.first().copied().unwrap_or("unknown CPU");
    let memory = meminfo.lines().find_map(|line| value(line, "MemTotal")?.strip_suffix(" kB")?.parse::<u64>().ok());
    let memory = memory.map_or_else(|| "unknown memory".to_owned(), |kib| format!("{} MiB", kib / 1024));
    format!("{} × {model}, {memory}, Linux {kernel}", models.len().max(1))
}

/// Returns the value of a line `key : value`.
fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (found, value) = line.split_once(':')?;
    (found.trim() == key).then(|| value.trim())
}

fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

/// Returns what a command prints. Its errors go to stderr.
fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command.stderr(Stdio::inherit()).output().map_err(|error| format!("{name}: {error}"))?;
    if !done.status.success() {
        return Err(format!("{name}: {}", done.status));
    }
    String::from_utf8(done.stdout).map_err(|error| format!("{name}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_machine_table_and_command() {
        let request = Request::parse(&["EPYC 5 us", "--", "swap", "--sizes", "4K"]).unwrap();
        assert_eq!(request, Request { machine: "EPYC 5 us", table: "swap", arguments: &["swap", "--sizes", "4K"] });
        assert_eq!(request.file(), "swap.epyc-5-us.json");
        let request = Request::parse(&["Xeon", "--table", "codecs", "--", "swap"]).unwrap();
        assert_eq!(request.file(), "codecs.xeon.json");
        for wrong in [&["Xeon", "swap"][..], &["--", "swap"], &["Xeon", "--"], &["Xeon", "--table", "--", "swap"]] {
            assert_eq!(Request::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_machine_describes_itself() {
        let cpus = "processor\t: 0\nmodel name\t: AMD EPYC\nprocessor\t: 1\nmodel name\t: AMD EPYC\n";
        let described = describe(cpus, "MemTotal:       24000000 kB\n", "6.18.5");
        assert_eq!(described, "2 × AMD EPYC, 23437 MiB, Linux 6.18.5");
        assert_eq!(describe("", "", "6.8"), "1 × unknown CPU, unknown memory, Linux 6.8");
    }
}
