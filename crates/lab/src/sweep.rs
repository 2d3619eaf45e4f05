//! Sweeps: a scenario with each combination of settings, run on all cores.

use crate::costs::Costs;
use crate::error::LabError;
use crate::outcome::Outcome;
use crate::scenario::Scenario;
use crate::shipped;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Settings that replace those of the file, as keys and values.
pub type Settings = Vec<(String, String)>;

/// A finished run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The settings that replaced those of the file.
    pub set: Settings,
    /// The outcome.
    pub outcome: Outcome,
}

/// Reads a shipped scenario or a file; returns its name and its text.
pub fn read(name: &std::path::Path) -> Result<(String, String), LabError> {
    if let Some(shipped) = name.to_str().and_then(shipped::find) {
        return Ok((shipped.name.to_owned(), shipped.text.to_owned()));
    }
    let text = std::fs::read_to_string(name).map_err(|error| LabError::Unreadable(name.to_owned(), error))?;
    Ok((name.display().to_string(), text))
}

/// Formats settings for messages and tables.
pub fn named(settings: &[(String, String)]) -> String {
    let each: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
    each.join(" ")
}

/// Returns every combination of values; the value of the last key changes fastest.
fn combinations(varied: &[(String, Vec<String>)]) -> Vec<Settings> {
    varied.iter().fold(vec![Vec::new()], |before, (key, values)| {
        let extend = |settings: Settings| {
            values.iter().map(move |value| [settings.as_slice(), &[(key.clone(), value.clone())]].concat())
        };
        before.into_iter().flat_map(extend).collect()
    })
}

/// A callback after each run, with the number of finished runs and of all. Any thread may call it.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Runs all `scenarios` with `threads` threads. The outcomes, in the order of the scenarios, do not
/// depend on the number of threads.
pub fn run_all(scenarios: &[Scenario], threads: usize, progress: Progress) -> Result<Vec<Outcome>, LabError> {
    run_each(scenarios, threads, progress, |scenario| scenario.run(None)).into_iter().collect()
}

/// Calls `run` with each of `scenarios`, by `threads` threads. Returns what it returns, in order.
pub(crate) fn run_each<T: Send>(
    scenarios: &[Scenario],
    threads: usize,
    progress: Progress,
    run: impl Fn(&Scenario) -> T + Sync,
) -> Vec<T> {
    let (next, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let done: Vec<Mutex<Option<T>>> = scenarios.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, scenarios.len().max(1)) {
            scope.spawn(|| {
                while let Some((scenario, slot)) = {
                    let index = next.fetch_add(1, Relaxed);
                    scenarios.get(index).zip(done.get(index))
                } {
                    let outcome = run(scenario);
                    *slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(outcome);
                    progress(finished.fetch_add(1, Relaxed) + 1, scenarios.len());
                }
            });
        }
    });
    let outcome = |slot: Mutex<Option<_>>| slot.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.into_iter().filter_map(outcome).collect()
}

/// Returns the settings of each run of the scenario `text` from the file `name`, and the resulting
/// scenarios.
pub fn scenarios(
    name: &str,
    text: &str,
    varied: &[(String, Vec<String>)],
) -> Result<Vec<(Settings, Scenario)>, LabError> {
    let parse = |set: Settings| Ok((set.clone(), Scenario::parse_with(name, text, &set)?));
    combinations(varied).into_iter().map(parse).collect()
}

/// Runs the scenario `text` from the file `name` with each combination of settings and with these
/// costs.
pub fn sweep(
    name: &str,
    text: &str,
    varied: &[(String, Vec<String>)],
    costs: Costs,
    threads: usize,
    progress: Progress,
) -> Result<Vec<Run>, LabError> {
    let (settings, scenarios): (Vec<_>, Vec<_>) = scenarios(name, text, varied)?.into_iter().unzip();
    let scenarios: Vec<_> = scenarios.into_iter().map(|scenario| Scenario { costs, ..scenario }).collect();
    let outcomes = run_each(&scenarios, threads, progress, |scenario| scenario.run(None));
    let is_one = settings.len() == 1;
    let run = |(set, outcome): (Settings, Result<Outcome, LabError>)| match outcome {
        Ok(outcome) => Ok(Run { set, outcome }),
        Err(why) if is_one => Err(why),
        Err(why) => Err(LabError::Run { settings: named(&set), why: Box::new(why) }),
    };
    settings.into_iter().zip(outcomes).map(run).collect()
}
