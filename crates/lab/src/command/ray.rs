//! Runs the lab on the machines of a Ray cluster.
//!
//! Ray's interface is Python, so this module starts `python3 -m foliomem_lab` (or
//! `FOLIOMEM_PYTHON`), which sends this very binary and the scenario to the workers: one version of
//! the engine performs all runs, and nothing needs to be installed there. The request goes to
//! Python's stdin, the runs come from its stdout, both as JSON. Its stderr goes to the user.

use crate::command::error::CommandError;
use foliomem_lab::costs::CostTable;
use foliomem_lab::sweep::{Run, Settings, scenarios};
use std::ffi::OsString;
use std::io::Write;
use std::process::{Child, Command, Stdio};

fn start(address: &str) -> Result<Child, CommandError> {
    let python = std::env::var_os("FOLIOMEM_PYTHON").unwrap_or_else(|| OsString::from("python3"));
    // This names the running program, even if another file has replaced it on disk.
    let this = format!("/proc/{}/exe", std::process::id());
    let mut command = Command::new(&python);
    command.args(["-m", "foliomem_lab", address]).arg(this).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().map_err(|error| CommandError::NoPython { python: python.display().to_string(), error })
}

/// Runs the scenario of `text`, from the file `name`, with each combination of settings, on the
/// cluster at `address`, with the costs of `costs`.
pub fn sweep(
    address: &str,
    name: &str,
    text: &str,
    vary: &[(String, Vec<String>)],
    costs: &CostTable,
) -> Result<Vec<Run>, CommandError> {
    // An invalid setting fails here, before Python starts.
    let combinations: Vec<Settings> = scenarios(name, text, vary)?.into_iter().map(|(settings, _)| settings).collect();
    let failed = |why: String| CommandError::Ray { address: address.to_owned(), why };
    let mut python = start(address)?;
    let request =
        serde_json::json!({ "scenario": text, "costs": costs.to_toml(), "combinations": combinations }).to_string();
    let sent = python.stdin.take().map(|mut stdin| stdin.write_all(request.as_bytes()));
    let done = python.wait_with_output().map_err(|error| failed(error.to_string()))?;
    if !done.status.success() {
        return Err(failed(format!("Python has ended with {}, see above", done.status)));
    }
    if let Some(Err(error)) = sent {
        return Err(failed(format!("the request was not read: {error}")));
    }
    // If the cluster vanishes, Ray ends its users silently.
    if done.stdout.is_empty() {
        return Err(failed("Python has ended without an answer: has the cluster been stopped?".to_owned()));
    }
    let runs: Vec<Run> = serde_json::from_slice(&done.stdout).map_err(|error| {
        failed(format!("what came back is no list of runs ({error}): is foliomem_lab of this version?"))
    })?;
    let settings: Vec<&Settings> = runs.iter().map(|run| &run.set).collect();
    if settings != combinations.iter().collect::<Vec<_>>() {
        return Err(failed("other runs came back than were asked for: is foliomem_lab of this version?".to_owned()));
    }
    Ok(runs)
}
