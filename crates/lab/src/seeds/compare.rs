//! The comparison of the lab's figures with the published ones, with a rule for each kind of
//! figure.

use super::{Published, SeedRow};
use crate::outcome::Outcome;
use crate::workload::fallback_percent;

/// The figure to take from the runs. The first two runs are before and after unless stated
/// otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Figure {
    /// Fallbacks of a round in percent; they agree within [`ROUND_POINTS`] points.
    RoundPercent(usize),
    /// Folios swapped out in a round; the numbers must be equal.
    RoundSwpout(usize),
    /// Folios of a size in KiB swapped out. The relative changes agree within [`SWPOUT_POINTS`]
    /// points.
    Swpout(u32),
    /// Folios of a size that fell back. For this and all following figures, direction and factor of
    /// the change agree within [`CHANGE_FACTOR`].
    Fallback(u32),
    /// Both counts of a size; the fallback rates are compared.
    Both(u32),
    /// Speeds of the second and third run relative to the first.
    Throughput,
    /// CPU time in which programs did not compute.
    SysTime,
    /// [`Outcome::modelled_page_out_seconds`].
    PageOutTime,
    /// [`Outcome::modelled_page_in_seconds`].
    PageInTime,
    /// Bandwidth of swap-in.
    Bandwidth,
    /// Changes of real, system and user time.
    Times,
    /// Memory of the second and further runs relative to the first.
    Memory,
}

/// Tolerance in percentage points: the test's first rounds differ by this much between strategies
/// of the published shape.
const ROUND_POINTS: f64 = 10.0;
/// Tolerance of the relative change of swap-outs, in percentage points.
const SWPOUT_POINTS: f64 = 5.0;
/// Tolerance of changes as a factor: figures come from different machines and programs, so only
/// their changes are comparable.
const CHANGE_FACTOR: f64 = 4.0;
/// Factor below which a change counts as none.
const HARDLY: f64 = 1.2;

/// Returns the folios of a size that were swapped out, and that fell back.
fn counts(outcome: &Outcome, kib: u32) -> (u64, u64) {
    let size = outcome.sizes.iter().find(|size| size.kib == kib);
    size.map_or((0, 0), |size| (size.swpout, size.swpout_fallback))
}

/// Returns the percentage of fallbacks; 0 if there are none.
fn rate((swpout, fallback): (u64, u64)) -> f64 {
    fallback_percent(swpout, fallback).unwrap_or(0.0)
}

/// Rate of fallbacks that counts as none, in percent.
const NEXT_TO_NOTHING_PERCENT: f64 = 2.0;

/// Returns whether rates of fallbacks, in percent, change like the published ones. If next to
/// nothing is left of both, the exact rest does not matter.
fn same_rates(published: [f64; 2], ours: [f64; 2]) -> bool {
    let vanish = |[before, after]: [f64; 2]| before > NEXT_TO_NOTHING_PERCENT && after < NEXT_TO_NOTHING_PERCENT;
    if vanish(published) && vanish(ours) {
        return (published[0] / ours[0]).ln().abs() <= CHANGE_FACTOR.ln();
    }
    same_change(published, ours)
}

/// Returns whether a figure changes like the published one. If that one hardly changes, the
/// direction does not matter.
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
    let same_way = wanted.abs() < HARDLY.ln() || wanted.signum() * got >= HARDLY.ln();
    same_way && (wanted - got).abs() <= CHANGE_FACTOR.ln()
}

fn number(text: &str) -> f64 {
    text.parse().unwrap_or(f64::NAN)
}

/// Parses numbers separated by `between`.
fn numbers(text: &str, between: char) -> Vec<f64> {
    text.split(between).map(number).collect()
}

fn percent(change: f64) -> f64 {
    (change - 1.0) * 100.0
}

/// Formats changes as they are published: "-2.8/-23.0/-0.3".
fn percents(changes: &[f64]) -> String {
    changes.iter().map(|&change| format!("{:.1}", percent(change))).collect::<Vec<_>>().join("/")
}

/// Compares the figure of the runs with the published one.
pub fn compare(published: Published, figure: Figure, runs: &[&Outcome]) -> SeedRow {
    let both = |figure: fn(&Outcome) -> f64| [figure(runs[0]), figure(runs[1])];
    let theirs = [number(&published.before), number(&published.after)];
    let within = format!("changes as much within a factor of {CHANGE_FACTOR}");
    let clusters = both(|outcome| outcome.clusters_scanned_per_alloc);
    let scanned = format!("clusters scanned per allocation {:.2} -> {:.2}", clusters[0], clusters[1]);
    let modelled = |ours: [f64; 2], decimals: usize| {
        let changes = [theirs, ours].map(|[before, after]| percent(after / before));
        let why = format!("modelled; {:+.0}% and {:+.0}%, {within}", changes[0], changes[1]);
        (ours.map(|figure| format!("{figure:.decimals$}")), same_change(theirs, ours), why)
    };
    let round = |outcome: &Outcome, number: usize| {
        let round = &outcome.rounds[number - 1];
        (round.swpout, round.swpout_fallback)
    };
    let (ours, agrees, why) = match figure {
        Figure::RoundPercent(of) => {
            let ours = [runs[0], runs[1]].map(|outcome| rate(round(outcome, of)));
            let agrees = ours.iter().zip(theirs).all(|(ours, theirs)| (ours - theirs).abs() <= ROUND_POINTS);
            (ours.map(|rate| format!("{rate:.2}")), agrees, format!("within {ROUND_POINTS} points"))
        }
        Figure::RoundSwpout(of) => {
            let ours = [runs[0], runs[1]].map(|outcome| round(outcome, of).0.to_string());
            let agrees = ours == [published.before.clone(), published.after.clone()];
            (ours, agrees, "the same number".to_owned())
        }
        Figure::Swpout(kib) => {
            let ours = [runs[0], runs[1]].map(|outcome| counts(outcome, kib).0);
            let [wanted, got] = [theirs, ours.map(|count| count as f64)].map(|[before, after]| percent(after / before));
            let why = format!("changes by {wanted:+.1}% and {got:+.1}%, within {SWPOUT_POINTS} points");
            (ours.map(|swpout| swpout.to_string()), (wanted - got).abs() <= SWPOUT_POINTS, why)
        }
        Figure::Fallback(kib) => {
            let ours = [runs[0], runs[1]].map(|outcome| counts(outcome, kib).1);
            let agrees = same_change(theirs, ours.map(|count| count as f64));
            (ours.map(|count| count.to_string()), agrees, format!("{within}; {scanned}"))
        }
        Figure::Both(kib) => {
            let ours = [runs[0], runs[1]].map(|outcome| counts(outcome, kib));
            let theirs = [&published.before, &published.after].map(|text| {
                let counts = numbers(text, ';');
                rate((counts[0] as u64, counts.get(1).map_or(0, |&count| count as u64)))
            });
            let rates = ours.map(rate);
            let why = format!(
                "rates {:.2}% -> {:.2}%, ours {:.2}% -> {:.2}%, {within} (all below {NEXT_TO_NOTHING_PERCENT}% is next to nothing, if \
                 as much fell back before); {scanned}",
                theirs[0], theirs[1], rates[0], rates[1]
            );
            (ours.map(|(swpout, fallback)| format!("{swpout};{fallback}")), same_rates(theirs, rates), why)
        }
        Figure::Throughput => {
            let speed = |run: usize| runs[0].modelled_elapsed_seconds / runs[run].modelled_elapsed_seconds;
            let ours = [speed(1), speed(2)];
            let agrees = same_change(theirs.map(|percent| 1.0 + percent / 100.0), ours);
            (
                ours.map(|change| format!("{:.1}", percent(change))),
                agrees,
                format!("modelled; after by before {within}"),
            )
        }
        Figure::SysTime => {
            let (ours, agrees, why) = modelled(both(|outcome| outcome.modelled_sys_seconds), 2);
            let waits = both(|outcome| outcome.modelled_wait_seconds);
            (ours, agrees, format!("{why}; {scanned}, waiting for their lists {:.1} s -> {:.1} s", waits[0], waits[1]))
        }
        Figure::PageOutTime => modelled(both(|outcome| outcome.modelled_page_out_seconds * 1e3), 0),
        Figure::PageInTime => modelled(both(|outcome| outcome.modelled_page_in_seconds * 1e3), 0),
        Figure::Bandwidth => {
            let bandwidth = |outcome: &Outcome| {
                let kib: u64 = outcome.sizes.iter().map(|size| size.swpin * u64::from(size.kib)).sum();
                (kib << 10) as f64 / (outcome.modelled_page_in_seconds * 1e3)
            };
            modelled(both(bandwidth), 0)
        }
        Figure::Times => {
            let time = |figure: fn(&Outcome) -> f64| figure(runs[1]) / figure(runs[0]);
            let user = |outcome: &Outcome| outcome.modelled_cpu_seconds - outcome.modelled_sys_seconds;
            let real = |outcome: &Outcome| outcome.modelled_elapsed_seconds;
            let ours = [time(real), time(|outcome| outcome.modelled_sys_seconds), time(user)];
            changes(&published, &ours, &format!("modelled; each {within}"))
        }
        Figure::Memory => {
            let peak = |outcome: &Outcome| outcome.peak_pages as f64;
            let ours: Vec<f64> = runs[1..].iter().map(|outcome| peak(outcome) / peak(runs[0])).collect();
            changes(&published, &ours, &format!("each {within}"))
        }
    };
    let [ours_before, ours_after] = ours;
    SeedRow { published, ours_before: Some(ours_before), ours_after: Some(ours_after), agrees: Some(agrees), why }
}

/// Compares several changes, each in percent of the value before.
fn changes(published: &Published, ours: &[f64], why: &str) -> ([String; 2], bool, String) {
    let theirs = numbers(&published.after, '/');
    let alike = |(theirs, &ours): (&f64, &f64)| same_change([1.0, 1.0 + theirs / 100.0], [1.0, ours]);
    let agrees = theirs.len() == ours.len() && theirs.iter().zip(ours).all(alike);
    (["0".to_owned(), percents(ours)], agrees, why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_agree_in_direction_and_size() {
        assert!(same_change([9.0, 3.0], [20.0, 4.0]));
        assert!(!same_change([9.0, 3.0], [20.0, 21.0]), "the direction differs");
        assert!(!same_change([9.0, 3.0], [20.0, 1.0]), "the change is five times as large");
        assert!(!same_change([9.0, 3.0], [20.0, 19.0]), "the direction agrees, but there is hardly a change");
        assert!(same_change([0.98, 0.99], [2.0, 1.9]), "both hardly change");
        assert!(same_change([9.0, 0.0], [1.0, 0.0]));
        assert!(!same_change([9.0, 0.0], [0.0, 0.0]), "nothing fell back before");
        assert!(!same_change([9.0, 0.0], [9.0, 1.0]));
    }

    #[test]
    fn vanishing_rates_agree_if_they_started_alike() {
        assert!(same_rates([99.2, 1.2], [88.3, 0.0]));
        assert!(!same_rates([99.2, 1.2], [88.3, 55.3]), "half of the rate is left");
        assert!(!same_rates([99.2, 1.2], [0.0, 0.0]), "nothing fell back before");
        assert!(!same_rates([15.6, 0.03], [3.0, 0.0]), "a fifth as much fell back before");
        assert!(same_rates([9.6, 3.6], [6.4, 2.4]) && !same_rates([9.6, 3.6], [6.4, 0.6]));
    }
}
