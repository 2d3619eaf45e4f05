//! Many runs at once: a scenario with each combination of settings, on the cores there are.

use crate::costs::Costs;
use crate::error::LabError;
use crate::outcome::Outcome;
use crate::scenario::Scenario;
use crate::shipped;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Settings in the place of those of the file: key and value of each.
pub type Settings = Vec<(String, String)>;

/// One of them, done.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// What replaced settings of the file.
    pub set: Settings,
    /// What it came to.
    pub outcome: Outcome,
}

/// What of a shipped scenario, or of a file, is to be run: its name and its text.
pub fn read(name: &std::path::Path) -> Result<(String, String), LabError> {
    if let Some(shipped) = name.to_str().and_then(shipped::find) {
        return Ok((shipped.name.to_owned(), shipped.text.to_owned()));
    }
    let text = std::fs::read_to_string(name).map_err(|error| LabError::Unreadable(name.to_owned(), error))?;
    Ok((name.display().to_string(), text))
}

/// Settings as they stand in messages and tables.
pub fn named(settings: &[(String, String)]) -> String {
    let each: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
    each.join(" ")
}

/// Every combination of values, the last key's changing fastest.
fn combinations(varied: &[(String, Vec<String>)]) -> Vec<Settings> {
    varied.iter().fold(vec![Vec::new()], |before, (key, values)| {
        let extend = |settings: Settings| {
            values.iter().map(move |value| [settings.as_slice(), &[(key.clone(), value.clone())]].concat())
        };
        before.into_iter().flat_map(extend).collect()
    })
}

/// Told after each run how many are done, of how many: by any thread.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Runs all of `scenarios` by `threads` threads. The outcomes, in the order of the scenarios, do not depend on how many
/// threads there are.
pub fn run_all(scenarios: &[Scenario], threads: usize, progress: Progress) -> Result<Vec<Outcome>, LabError> {
    run_each(scenarios, threads, progress).into_iter().collect()
}

fn run_each(scenarios: &[Scenario], threads: usize, progress: Progress) -> Vec<Result<Outcome, LabError>> {
    let (next, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let done: Vec<Mutex<Option<Result<Outcome, LabError>>>> = scenarios.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, scenarios.len().max(1)) {
            scope.spawn(|| {
                while let Some((scenario, slot)) = {
                    let index = next.fetch_add(1, Relaxed);
                    scenarios.get(index).zip(done.get(index))
                } {
                    let outcome = scenario.run(None);
                    *slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(outcome);
                    progress(finished.fetch_add(1, Relaxed) + 1, scenarios.len());
                }
            });
        }
    });
    let outcome = |slot: Mutex<Option<_>>| slot.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.into_iter().filter_map(outcome).collect()
}

/// The settings of each run of the scenario of `text`, from the file `name`, and the scenarios they make of it.
pub fn scenarios(
    name: &str,
    text: &str,
    varied: &[(String, Vec<String>)],
) -> Result<Vec<(Settings, Scenario)>, LabError> {
    let parse = |set: Settings| Ok((set.clone(), Scenario::parse_with(name, text, &set)?));
    combinations(varied).into_iter().map(parse).collect()
}

/// Runs the scenario of `text`, from the file `name`, with each combination of settings, where things cost what `costs`
/// says.
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
    let outcomes = run_each(&scenarios, threads, progress);
    let is_one = settings.len() == 1;
    let run = |(set, outcome): (Settings, Result<Outcome, LabError>)| match outcome {
        Ok(outcome) => Ok(Run { set, outcome }),
        Err(why) if is_one => Err(why),
        Err(why) => Err(LabError::Run { settings: named(&set), why: Box::new(why) }),
    };
    settings.into_iter().zip(outcomes).map(run).collect()
}
