//! `foliomem bench start`: times how long the shortest program takes, plain and in a run.
//!
//! A run adds its start to each program: the checks, the segment, the agent, its companion, and
//! their end. The two settings take turns, so other work on the machine meets both.

use crate::kernel::said;
use crate::{Error, median};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// The program, which ends at once.
const PROGRAM: &str = "true";
/// The limit of a run. The program needs much less.
const LIMIT: &str = "256M";

/// How the program is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// By this program.
    Plain,
    /// By `foliomem run`.
    Foliomem,
}

impl Setting {
    /// Both.
    const ALL: [Setting; 2] = [Setting::Plain, Setting::Foliomem];
}

/// One setting, measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// How the program was started.
    pub setting: Setting,
    /// Number of runs.
    pub runs: usize,
    /// Milliseconds from the start to the end, by the median of the runs.
    pub milliseconds: f64,
    /// Milliseconds of the fastest run, which other work on the machine disturbed least.
    pub fastest_milliseconds: f64,
}

/// Measures `runs` runs of each setting in turns.
///
/// # Errors
/// Fails if the program cannot be started, or does not succeed.
pub fn run(foliomem: &Path, runs: usize) -> Result<Vec<Row>, Error> {
    let mut times = Setting::ALL.map(|_| Vec::with_capacity(runs));
    for setting in Setting::ALL {
        // Reads the files from the disk.
        milliseconds(foliomem, setting)?;
    }
    for _ in 0..runs {
        for (setting, times) in Setting::ALL.into_iter().zip(&mut times) {
            times.push(milliseconds(foliomem, setting)?);
        }
    }
    let row = |(setting, times): (Setting, Vec<f64>)| Row {
        setting,
        runs,
        milliseconds: median(&times),
        fastest_milliseconds: times.into_iter().fold(f64::INFINITY, f64::min),
    };
    Ok(Setting::ALL.into_iter().zip(times).map(row).collect())
}

fn milliseconds(foliomem: &Path, setting: Setting) -> Result<f64, Error> {
    let mut command = command(foliomem, setting);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let shown = format!("{command:?}");
    let clock = Instant::now();
    let output = command.output().map_err(Error::doing(&shown))?;
    let time = clock.elapsed();
    if output.status.success() {
        Ok(time.as_secs_f64() * 1e3)
    } else {
        Err(Error::Command { command: shown, said: said(&output.status, &output.stderr) })
    }
}

fn command(foliomem: &Path, setting: Setting) -> Command {
    match setting {
        Setting::Plain => Command::new(PROGRAM),
        Setting::Foliomem => {
            let mut command = Command::new(foliomem);
            command.args(["run", "--quiet", "--limit", LIMIT, "--", PROGRAM]);
            command
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_settings_are_timed_and_a_failure_is_said() {
        // It takes the options of `run` for its own operands.
        let rows = run(Path::new("true"), 3).unwrap();
        assert_eq!(rows.iter().map(|row| (row.setting, row.runs)).collect::<Vec<_>>(), Setting::ALL.map(|of| (of, 3)));
        assert!(rows.iter().all(|row| 0.0 < row.fastest_milliseconds && row.fastest_milliseconds <= row.milliseconds));
        assert!(matches!(run(Path::new("false"), 3), Err(Error::Command { command, .. }) if command.contains("false")));
        assert!(matches!(run(Path::new("/nonexistent"), 3), Err(Error::Io { .. })));
    }
}
