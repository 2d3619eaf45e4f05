//! The published results beside the lab's: one row for each of `seed_numbers.csv`.
//!
//! A row that the lab covers names runs (a shipped scenario and what is set in it) and the figure to take from them (`plan`).
//! Whether they agree is decided by a rule that belongs to the figure and is said with the row (`compare`). A row that is
//! not covered says why, and nothing else.

mod compare;
mod plan;
mod vm_scalability;

use crate::error::LabError;
use crate::outcome::Outcome;
use crate::sweep::{self, Progress};
use plan::{Plan, RunSpec};
use serde::{Deserialize, Serialize};

const PUBLISHED: &str = include_str!("seed_numbers.csv");

/// A published result.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct Published {
    /// Series of patches.
    pub series: String,
    /// Table in it.
    pub table: String,
    /// What ran.
    pub workload: String,
    /// How.
    pub config: String,
    /// What was measured.
    pub metric: String,
    /// Without the patches.
    pub before: String,
    /// With them.
    pub after: String,
    /// Of both.
    pub unit: String,
}

/// A published result, and the lab's.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SeedRow {
    /// What was published.
    #[serde(flatten)]
    pub published: Published,
    /// The lab's figures in the same form, where it covers the row.
    pub ours_before: Option<String>,
    /// See `ours_before`.
    pub ours_after: Option<String>,
    /// Whether direction and size of the effect are the same.
    pub agrees: Option<bool>,
    /// By which rule, or why there is nothing to compare.
    pub why: String,
}

/// What is published.
pub fn published() -> Result<Vec<Published>, LabError> {
    csv::Reader::from_reader(PUBLISHED.as_bytes()).deserialize().map(|row| row.map_err(LabError::Published)).collect()
}

impl Published {
    /// Whether `text` stands in what says what it is about.
    fn mentions(&self, text: &str) -> bool {
        [&self.series, &self.table, &self.workload, &self.config, &self.metric].iter().any(|field| field.contains(text))
    }
}

/// Runs what the rows need that mention `only`, each once, by `threads` threads.
pub fn run(only: &str, threads: usize, progress: Progress) -> Result<Vec<SeedRow>, LabError> {
    let rows: Vec<Published> = published()?.into_iter().filter(|row| row.mentions(only)).collect();
    let plans: Vec<Plan> = rows.iter().map(plan::plan).collect();
    let mut specs: Vec<&RunSpec> = Vec::new();
    for spec in plans.iter().flat_map(Plan::runs) {
        if !specs.contains(&spec) {
            specs.push(spec);
        }
    }
    let scenarios = specs.iter().map(|spec| plan::parse(spec)).collect::<Result<Vec<_>, _>>()?;
    let outcomes = sweep::run_all(&scenarios, threads, progress)?;
    let outcomes_of = |runs: &[RunSpec]| -> Vec<&Outcome> {
        let at = |run| specs.iter().position(|&known| known == run);
        runs.iter().filter_map(|run| at(run).map(|at| &outcomes[at])).collect()
    };
    let row = |(published, plan): (Published, &Plan)| match plan {
        Plan::NotCovered(why) => {
            SeedRow { published, ours_before: None, ours_after: None, agrees: None, why: format!("not covered: {why}") }
        }
        Plan::Covered { runs, figure } => compare::compare(published, *figure, &outcomes_of(runs)),
        Plan::Variants(runs) => vm_scalability::compare(published, &outcomes_of(runs)),
    };
    Ok(rows.into_iter().zip(&plans).map(row).collect())
}
