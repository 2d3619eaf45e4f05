//! What the commands `foliomem`, `foliomem-lab` and `foliomem-bench` share: the way they refuse a
//! command line, the programs that lie beside each other, and pages with plots.
#![forbid(unsafe_code)]

#[cfg(feature = "docs")]
pub mod docs;
pub mod markup;
pub mod plot;

use clap::error::{ContextKind, ContextValue};
use std::convert::Infallible;
use std::ffi::OsStr;
use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use thiserror::Error;

/// Exit code of a wrong command line.
pub const WRONG_COMMAND_LINE: u8 = 2;

/// Exit code of a command that failed.
const EXIT_FAILED: u8 = 125;

/// The reason why a program beside this one cannot be started.
#[derive(Debug, Error)]
pub enum BesideError {
    /// The path of this program is unknown.
    #[error("cannot find the executable of foliomem: {0}")]
    NoPath(std::io::Error),
    /// The program is not installed.
    #[error("{name} is missing: {path} must lie beside foliomem; it is built by `cargo build --release -p {name}`")]
    Missing {
        /// Name of the program.
        name: &'static str,
        /// Path at which it is expected.
        path: PathBuf,
    },
    /// The program cannot be executed.
    #[error("cannot start {0}: {1}")]
    NotStarted(PathBuf, std::io::Error),
}

/// Returns the path of the program `name`, which lies beside this one.
///
/// # Errors
/// Fails if the program is not there.
pub fn beside(name: &'static str) -> Result<PathBuf, BesideError> {
    let path = std::env::current_exe().map_err(BesideError::NoPath)?.with_file_name(name);
    if path.is_file() { Ok(path) } else { Err(BesideError::Missing { name, path }) }
}

/// Replaces this process by the program `name`, which lies beside this one.
///
/// # Errors
/// Fails if the program cannot be started; otherwise it does not return.
pub fn become_beside(
    name: &'static str,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Infallible, BesideError> {
    let path = beside(name)?;
    let error = Command::new(&path).args(arguments).exec();
    Err(BesideError::NotStarted(path, error))
}

/// Returns the name that people who wrote `word` probably meant.
#[must_use]
pub fn similar<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// The least similarity of a suggestion, as in clap.
    const MIN_SIMILARITY: f64 = 0.7;
    let rated = names.map(|name| (strsim::jaro(word, name), name)).filter(|(rating, _)| *rating > MIN_SIMILARITY);
    rated.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}

/// Prints help as it is, and an error of the command line in one line. `help` is the command that
/// prints help.
#[must_use]
pub fn complain(error: &clap::Error, help: &str) -> ExitCode {
    if !error.use_stderr() {
        print!("{error}");
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let what: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let what = what.join(" ");
    let what = what.strip_prefix("error: ").unwrap_or(&what);
    let hint = suggestion(error).map_or_else(String::new, |name| format!(": did you mean {name}?"));
    eprintln!("foliomem: {what}{hint} (see {help})");
    ExitCode::from(WRONG_COMMAND_LINE)
}

/// Prints the error of a command, and returns the exit code of the program.
#[must_use]
pub fn finish(done: Result<u8, impl Display>) -> ExitCode {
    done.map_or_else(
        |error| {
            eprintln!("foliomem: {error}");
            ExitCode::from(EXIT_FAILED)
        },
        ExitCode::from,
    )
}

/// Returns the option or the command that clap suggests.
fn suggestion(error: &clap::Error) -> Option<&str> {
    let suggested = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    suggested.into_iter().find_map(|kind| match error.get(kind)? {
        ContextValue::String(name) => Some(name.as_str()),
        ContextValue::Strings(names) => names.first().map(String::as_str),
        _ => None,
    })
}
