//! The published results beside the lab's, one row for each of `seed_numbers.csv`.
//!
//! A covered row names its runs (a shipped scenario and settings) and the figure to take from them
//! (`plan`). A rule of the figure, which the row states, decides whether they agree (`compare`). A
//! row that is not covered states why.

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
    /// The series of patches.
    pub series: String,
    /// The table in the series.
    pub table: String,
    /// The workload.
    pub workload: String,
    /// The configuration.
    pub config: String,
    /// The metric.
    pub metric: String,
    /// The value without the patches.
    pub before: String,
    /// The value with the patches.
    pub after: String,
    /// The unit of both values.
    pub unit: String,
}

/// A published result with the lab's.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SeedRow {
    /// The published result.
    #[serde(flatten)]
    pub published: Published,
    /// The lab's value without the patches, if the row is covered.
    pub ours_before: Option<String>,
    /// The lab's value with the patches, if the row is covered.
    pub ours_after: Option<String>,
    /// Whether direction and size of the effect agree.
    pub agrees: Option<bool>,
    /// The rule of comparison, or why there is none.
    pub why: String,
}

/// Returns the published results.
pub fn published() -> Result<Vec<Published>, LabError> {
    csv::Reader::from_reader(PUBLISHED.as_bytes()).deserialize().map(|row| row.map_err(LabError::Published)).collect()
}

impl Published {
    /// Returns whether a field that describes the result contains `text`.
    fn mentions(&self, text: &str) -> bool {
        [&self.series, &self.table, &self.workload, &self.config, &self.metric].iter().any(|field| field.contains(text))
    }
}

/// Runs everything that the rows containing `only` need, each run once, with `threads` threads.
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
