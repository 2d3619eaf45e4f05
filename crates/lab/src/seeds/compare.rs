//! The comparison of the lab's figures with the published ones, with a rule for each kind of
//! figure.

use super::{Published, SeedRow};
use crate::outcome::Outcome;
use crate::workload::fallback_percent;

/// The figure to take from the runs. The first two runs are the ones before and after the change,
/// unless stated otherwise.
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
    /// CPU time of the system: all but the programs' own.
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

/// The runs' figure before and after, whether it agrees with the published one, and why.
type Compared = ([String; 2], bool, String);

/// Compares the figure of the runs with the published one.
pub fn compare(published: Published, figure: Figure, runs: &[&Outcome]) -> SeedRow {
    let comparison = Comparison {
        published: &published,
        theirs: [number(&published.before), number(&published.after)],
        runs,
        within: format!("changes as much within a factor of {CHANGE_FACTOR}"),
    };
    let ([ours_before, ours_after], agrees, why) = comparison.compare(figure);
    SeedRow { published, ours_before: Some(ours_before), ours_after: Some(ours_after), agrees: Some(agrees), why }
}

/// A published figure, and the runs to compare with it.
struct Comparison<'a> {
    published: &'a Published,
    /// The published figure before and after, if it is one number.
    theirs: [f64; 2],
    runs: &'a [&'a Outcome],
    /// The tolerance of changes, as text for the table.
    within: String,
}

impl Comparison<'_> {
    fn compare(&self, figure: Figure) -> Compared {
        match figure {
            Figure::RoundPercent(round) => self.round_percent(round),
            Figure::RoundSwpout(round) => self.round_swpout(round),
            Figure::Swpout(kib) => self.swpout(kib),
            Figure::Fallback(kib) => self.fallback(kib),
            Figure::Both(kib) => self.both(kib),
            Figure::Throughput => self.throughput(),
            Figure::SysTime => self.sys_time(),
            Figure::PageOutTime => self.modelled(|outcome| outcome.modelled_page_out_seconds * 1e3, 0),
            Figure::PageInTime => self.modelled(|outcome| outcome.modelled_page_in_seconds * 1e3, 0),
            Figure::Bandwidth => self.modelled(bandwidth, 0),
            Figure::Times => self.times(),
            Figure::Memory => self.memory(),
        }
    }

    /// Returns a figure of the runs before and after.
    fn ours<T>(&self, figure: impl Fn(&Outcome) -> T) -> [T; 2] {
        [figure(self.runs[0]), figure(self.runs[1])]
    }

    fn round_percent(&self, round: usize) -> Compared {
        let ours = self.ours(|outcome| rate(round_counts(outcome, round)));
        let agrees = ours.iter().zip(self.theirs).all(|(ours, theirs)| (ours - theirs).abs() <= ROUND_POINTS);
        (ours.map(|rate| format!("{rate:.2}")), agrees, format!("within {ROUND_POINTS} points"))
    }

    fn round_swpout(&self, round: usize) -> Compared {
        let ours = self.ours(|outcome| round_counts(outcome, round).0.to_string());
        let agrees = ours == [self.published.before.clone(), self.published.after.clone()];
        (ours, agrees, "the same number".to_owned())
    }

    fn swpout(&self, kib: u32) -> Compared {
        let ours = self.ours(|outcome| counts(outcome, kib).0);
        let changes = [self.theirs, ours.map(|count| count as f64)];
        let [wanted, got] = changes.map(|[before, after]| percent(after / before));
        let why = format!("changes by {wanted:+.1}% and {got:+.1}%, within {SWPOUT_POINTS} points");
        (ours.map(|swpout| swpout.to_string()), (wanted - got).abs() <= SWPOUT_POINTS, why)
    }

    fn fallback(&self, kib: u32) -> Compared {
        let ours = self.ours(|outcome| counts(outcome, kib).1);
        let agrees = same_change(self.theirs, ours.map(|count| count as f64));
        (ours.map(|count| count.to_string()), agrees, format!("{}; {}", self.within, self.scanned()))
    }

    fn both(&self, kib: u32) -> Compared {
        let ours = self.ours(|outcome| counts(outcome, kib));
        let theirs = [&self.published.before, &self.published.after].map(|text| {
            let counts = numbers(text, ';');
            rate((counts[0] as u64, counts.get(1).map_or(0, |&count| count as u64)))
        });
        let rates = ours.map(rate);
        let why = format!(
            "rates {:.2}% -> {:.2}%, ours {:.2}% -> {:.2}%, {} (all below {NEXT_TO_NOTHING_PERCENT}% is next to nothing, if as much \
             fell back before); {}",
            theirs[0],
            theirs[1],
            rates[0],
            rates[1],
            self.within,
            self.scanned()
        );
        (ours.map(|(swpout, fallback)| format!("{swpout};{fallback}")), same_rates(theirs, rates), why)
    }

    fn throughput(&self) -> Compared {
        let elapsed = |run: usize| self.runs[run].modelled_elapsed_seconds;
        let ours = [1, 2].map(|run| elapsed(0) / elapsed(run));
        let agrees = same_change(self.theirs.map(|percent| 1.0 + percent / 100.0), ours);
        let why = format!("modelled; after by before {}", self.within);
        (ours.map(|change| format!("{:.1}", percent(change))), agrees, why)
    }

    fn sys_time(&self) -> Compared {
        let (ours, agrees, why) = self.modelled(|outcome| outcome.modelled_sys_seconds, 2);
        let waits = self.ours(|outcome| outcome.modelled_wait_seconds);
        let scanned = self.scanned();
        (ours, agrees, format!("{why}; {scanned}, waiting for their lists {:.1} s -> {:.1} s", waits[0], waits[1]))
    }

    fn times(&self) -> Compared {
        let change = |figure: fn(&Outcome) -> f64| figure(self.runs[1]) / figure(self.runs[0]);
        let ours = [
            change(|outcome| outcome.modelled_elapsed_seconds),
            change(|outcome| outcome.modelled_sys_seconds),
            change(|outcome| outcome.modelled_cpu_seconds - outcome.modelled_sys_seconds),
        ];
        changes(self.published, &ours, &format!("modelled; each {}", self.within))
    }

    fn memory(&self) -> Compared {
        let peak = |outcome: &Outcome| outcome.peak_pages as f64;
        let ours: Vec<f64> = self.runs[1..].iter().map(|outcome| peak(outcome) / peak(self.runs[0])).collect();
        changes(self.published, &ours, &format!("each {}", self.within))
    }

    /// Compares a modelled figure, which is shown with this many decimals.
    fn modelled(&self, figure: fn(&Outcome) -> f64, decimals: usize) -> Compared {
        let ours = self.ours(figure);
        let changes = [self.theirs, ours].map(|[before, after]| percent(after / before));
        let why = format!("modelled; {:+.0}% and {:+.0}%, {}", changes[0], changes[1], self.within);
        (ours.map(|figure| format!("{figure:.decimals$}")), same_change(self.theirs, ours), why)
    }

    /// Returns words for the clusters that the allocator scanned.
    fn scanned(&self) -> String {
        let clusters = self.ours(|outcome| outcome.clusters_scanned_per_alloc);
        format!("clusters scanned per allocation {:.2} -> {:.2}", clusters[0], clusters[1])
    }
}

/// Returns the folios that were swapped out in a round, from 1, and those that fell back.
fn round_counts(outcome: &Outcome, number: usize) -> (u64, u64) {
    let round = &outcome.rounds[number - 1];
    (round.swpout, round.swpout_fallback)
}

/// Returns the bandwidth of swap-in in KB/s.
fn bandwidth(outcome: &Outcome) -> f64 {
    let kib: u64 = outcome.sizes.iter().map(|size| size.swpin * u64::from(size.kib)).sum();
    (kib << 10) as f64 / (outcome.modelled_page_in_seconds * 1e3)
}

/// Compares several changes, each in percent of the value before.
fn changes(published: &Published, ours: &[f64], why: &str) -> Compared {
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
