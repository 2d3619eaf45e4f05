//! The published results beside the lab's: one row for each of `seed_numbers.csv`.
//!
//! A row that the lab covers names two runs (a shipped scenario and what is set in it) and the figure to take from them.
//! Whether they agree is decided by a rule that belongs to the figure and is said with the row. A row that is not
//! covered says why, and nothing else.

use crate::error::LabError;
use crate::outcome::Outcome;
use crate::scenario::Scenario;
use crate::shipped;
use crate::sweep::{self, Progress};
use crate::workload::fallback_percent;
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

/// A shipped scenario and what is set in it.
type RunSpec = (&'static str, Vec<(&'static str, String)>);

/// Which figure of an outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Figure {
    /// Fallbacks of a round, in per cent: within [`ROUND_POINTS`] points of the published.
    RoundPercent(usize),
    /// Folios that went out in a round: the same number.
    RoundSwpout(usize),
    /// Of a size in KiB: folios that went out. Before and after differ by as much, within [`SWPOUT_POINTS`] points.
    Swpout(u32),
    /// Of a size: those that fell back. They change in the same direction, by a factor within [`CHANGE_FACTOR`] times.
    Fallback(u32),
    /// Of a size: both. The part that falls back changes likewise.
    Both(u32),
}

/// The test's first rounds differ by this much between strategies that share the published shape.
const ROUND_POINTS: f64 = 10.0;
const SWPOUT_POINTS: f64 = 5.0;
/// Fallbacks are of different machines and programs: only how they change can be compared.
const CHANGE_FACTOR: f64 = 4.0;
const HARDLY: f64 = 1.2;

enum Plan {
    Covered { before: RunSpec, after: RunSpec, figure: Figure },
    NotCovered(&'static str),
}

/// What is published.
pub fn published() -> Result<Vec<Published>, LabError> {
    csv::Reader::from_reader(PUBLISHED.as_bytes()).deserialize().map(|row| row.map_err(LabError::Published)).collect()
}

fn plan(row: &Published) -> Plan {
    let build = |scenario, size_mib: u32, strategy: &str| -> RunSpec {
        (scenario, vec![("swap.size_mib", size_mib.to_string()), ("swap.strategy", strategy.to_owned())])
    };
    let rows = |scenario, size_mib, before, after, figure| Plan::Covered {
        before: build(scenario, size_mib, before),
        after: build(scenario, size_mib, after),
        figure,
    };
    const LISTS: &str = "cluster-lists";
    const ONE: &str = "one-fragment";
    const NONFULL: &str = "nonfull-first";
    let round = || row.config.strip_prefix("round ").and_then(|number| number.parse::<usize>().ok());
    match (row.series.as_str(), row.table.as_str(), row.metric.as_str()) {
        ("mthp-swap-in-2024-09", "swap allocator test", metric) => {
            let Some(round) = round() else { return Plan::NotCovered("no such round") };
            let figure = if metric == "swpout" { Figure::RoundSwpout(round) } else { Figure::RoundPercent(round) };
            let run = |swap_in: &str| ("swap-allocator", vec![("swap.swap_in", swap_in.to_owned())]);
            Plan::Covered { before: run("page"), after: run("whole"), figure }
        }
        ("mthp-swap-in-2024-09", "hardware", _) => Plan::NotCovered("it is about a device that decompresses"),
        ("mthp-swap-in-2024-09", ..) => Plan::NotCovered("it needs real bytes: foliomem bench swap measures it"),
        ("swap-cluster-scan-2025-08", _, "sys time") => {
            Plan::NotCovered("CPUs that wait for each other's locks are not modelled; see the clusters scanned")
        }
        ("swap-cluster-scan-2025-08", "kernel build 64K", "swpout") => {
            rows("kernel-build-64k", 10240, LISTS, NONFULL, Figure::Swpout(64))
        }
        ("swap-cluster-scan-2025-08", "kernel build 64K", _) => {
            rows("kernel-build-64k", 10240, LISTS, NONFULL, Figure::Fallback(64))
        }
        ("swap-cluster-scan-2025-08", "patch 1" | "patch 2", _) => {
            let size_mib = if row.workload.contains("8G") { 8192 } else { 10240 };
            if row.workload.contains("not synchronous") {
                return Plan::NotCovered("the lab has no device that is not synchronous");
            }
            let (before, after) = if row.table == "patch 1" { (LISTS, ONE) } else { (ONE, NONFULL) };
            rows("kernel-build-64k", size_mib, before, after, Figure::Both(64))
        }
        ("swap-cluster-scan-2025-08", "all sizes", _) => {
            let size = row.config.split("kB").next().and_then(|kib| kib.parse().ok());
            let kib = size.unwrap_or(if row.config.starts_with("2M") { 2048 } else { 0 });
            rows("kernel-build-all-sizes", 10240, LISTS, NONFULL, Figure::Both(kib))
        }
        ("mthp-swap-out-2024-04", ..) => {
            Plan::NotCovered("its throughput is a matter of time, which the lab only models")
        }
        ("anon-folios-2023-09", ..) => Plan::NotCovered("it is about times of programs that do not swap"),
        ("compaction-2023-11", ..) => {
            Plan::NotCovered("the lab has no page cache, and memory that needs compaction, yet")
        }
        _ => Plan::NotCovered("the lab has no scenario for it"),
    }
}

fn parse(spec: &RunSpec) -> Result<Scenario, LabError> {
    let (name, settings) = spec;
    let Some(shipped) = shipped::find(name) else { unreachable!("{name} is shipped") };
    let settings: Vec<_> = settings.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    Scenario::parse_with(name, shipped.text, &settings)
}

/// Runs what the rows need, each once, by `threads` threads.
pub fn run(threads: usize, progress: Progress) -> Result<Vec<SeedRow>, LabError> {
    let rows = published()?;
    let plans: Vec<Plan> = rows.iter().map(plan).collect();
    let mut specs: Vec<&RunSpec> = Vec::new();
    for plan in &plans {
        if let Plan::Covered { before, after, .. } = plan {
            for spec in [before, after] {
                if !specs.contains(&spec) {
                    specs.push(spec);
                }
            }
        }
    }
    let scenarios = specs.iter().map(|spec| parse(spec)).collect::<Result<Vec<_>, _>>()?;
    let outcomes = sweep::run_all(&scenarios, threads, progress)?;
    let outcome = |spec: &RunSpec| specs.iter().position(|known| *known == spec).map(|at| &outcomes[at]);
    let row = |(published, plan): (Published, &Plan)| match plan {
        Plan::NotCovered(why) => {
            SeedRow { published, ours_before: None, ours_after: None, agrees: None, why: format!("not covered: {why}") }
        }
        Plan::Covered { before, after, figure } => {
            let (Some(before), Some(after)) = (outcome(before), outcome(after)) else { unreachable!("both have run") };
            compare(published, *figure, before, after)
        }
    };
    Ok(rows.into_iter().zip(&plans).map(row).collect())
}

/// Folios of a size that went out, and that fell back.
fn counts(outcome: &Outcome, kib: u32) -> (u64, u64) {
    let size = outcome.sizes.iter().find(|size| size.kib == kib);
    size.map_or((0, 0), |size| (size.swpout, size.swpout_fallback))
}

/// What of all falls back, in per cent; 0 where nothing does.
fn rate((swpout, fallback): (u64, u64)) -> f64 {
    fallback_percent(swpout, fallback).unwrap_or(0.0)
}

/// Whether something changes as the published does. Where that hardly does, the direction does not matter.
fn same_change(published: [f64; 2], ours: [f64; 2]) -> bool {
    let [before, after] = ours;
    if (published[0] > 0.0) != (before > 0.0) || (published[1] > 0.0) != (after > 0.0) {
        return false;
    }
    if published[1] == 0.0 {
        return true;
    }
    let change = |[before, after]: [f64; 2]| (after / before).ln();
    let (wanted, got) = (change(published), change(ours));
    let same_way = wanted.abs() < HARDLY.ln() || wanted.signum() == got.signum();
    same_way && (wanted - got).abs() <= CHANGE_FACTOR.ln()
}

fn compare(published: Published, figure: Figure, before: &Outcome, after: &Outcome) -> SeedRow {
    let number = |text: &str| text.parse::<f64>().unwrap_or(f64::NAN);
    let pair = |text: &str| {
        let mut numbers = text.split(';').map(|number| number.parse::<u64>().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    };
    let scanned = format!(
        "clusters scanned per allocation {:.2} -> {:.2}",
        before.clusters_scanned_per_alloc, after.clusters_scanned_per_alloc
    );
    let round = |outcome: &Outcome, number: usize| {
        let round = &outcome.rounds[number - 1];
        (round.swpout, round.swpout_fallback)
    };
    let (ours, agrees, why) = match figure {
        Figure::RoundPercent(of) => {
            let ours = [before, after].map(|outcome| rate(round(outcome, of)));
            let theirs = [number(&published.before), number(&published.after)];
            let agrees = ours.iter().zip(theirs).all(|(ours, theirs)| (ours - theirs).abs() <= ROUND_POINTS);
            (ours.map(|rate| format!("{rate:.2}")), agrees, format!("within {ROUND_POINTS} points"))
        }
        Figure::RoundSwpout(of) => {
            let ours = [before, after].map(|outcome| round(outcome, of).0.to_string());
            let agrees = ours == [published.before.clone(), published.after.clone()];
            (ours, agrees, "the same number".to_owned())
        }
        Figure::Swpout(kib) => {
            let ours = [before, after].map(|outcome| counts(outcome, kib).0);
            let change = |before: f64, after: f64| (after / before - 1.0) * 100.0;
            let wanted = change(number(&published.before), number(&published.after));
            let got = change(ours[0] as f64, ours[1] as f64);
            let why = format!("changes by {wanted:+.1}% and {got:+.1}%, within {SWPOUT_POINTS} points");
            (ours.map(|swpout| swpout.to_string()), (wanted - got).abs() <= SWPOUT_POINTS, why)
        }
        Figure::Fallback(kib) => {
            let ours = [before, after].map(|outcome| counts(outcome, kib));
            let theirs = [number(&published.before), number(&published.after)];
            let agrees = same_change(theirs, ours.map(|counts| counts.1 as f64));
            let why = format!("changed by as much within a factor of {CHANGE_FACTOR}; {scanned}");
            (ours.map(|counts| counts.1.to_string()), agrees, why)
        }
        Figure::Both(kib) => {
            let ours = [before, after].map(|outcome| counts(outcome, kib));
            let theirs = [pair(&published.before), pair(&published.after)].map(rate);
            let why = format!(
                "rates {:.2}% -> {:.2}%, ours {:.2}% -> {:.2}%, changed by as much within a factor of {CHANGE_FACTOR}; {scanned}",
                theirs[0],
                theirs[1],
                rate(ours[0]),
                rate(ours[1])
            );
            (ours.map(|(swpout, fallback)| format!("{swpout};{fallback}")), same_change(theirs, ours.map(rate)), why)
        }
    };
    let [ours_before, ours_after] = ours;
    SeedRow { published, ours_before: Some(ours_before), ours_after: Some(ours_after), agrees: Some(agrees), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_names_what_can_be_run_or_says_why_not() {
        let rows = published().unwrap();
        assert_eq!(rows.len(), 75);
        let mut covered = 0;
        for row in &rows {
            match plan(row) {
                Plan::Covered { before, after, figure } => {
                    covered += 1;
                    assert_ne!(before, after, "{row:?}");
                    let sizes = [before, after].map(|spec| parse(&spec).unwrap().machine.sizes_kib);
                    if let Figure::Swpout(kib) | Figure::Fallback(kib) | Figure::Both(kib) = figure {
                        let order = foliomem_core::units::Order::from_bytes(u64::from(kib) << 10).unwrap();
                        assert!(sizes.iter().all(|sizes| sizes.contains(order)), "{row:?}");
                    }
                }
                Plan::NotCovered(why) => assert!(!why.is_empty()),
            }
        }
        assert_eq!(covered, 28, "18 of the swap allocator test, 10 of the kernel build");
    }

    #[test]
    fn changes_are_the_same_where_direction_and_size_are() {
        assert!(same_change([9.0, 3.0], [20.0, 4.0]));
        assert!(!same_change([9.0, 3.0], [20.0, 21.0]), "the other way");
        assert!(!same_change([9.0, 3.0], [20.0, 1.0]), "five times as far");
        assert!(same_change([0.98, 0.99], [2.0, 1.9]), "hardly at all");
        assert!(same_change([9.0, 0.0], [1.0, 0.0]));
        assert!(!same_change([9.0, 0.0], [0.0, 0.0]), "nothing fell back before");
        assert!(!same_change([9.0, 0.0], [9.0, 1.0]));
    }
}
