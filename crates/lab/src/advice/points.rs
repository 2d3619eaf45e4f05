//! Points: replays of a recorded run within several limits, and the least limits for some
//! slowdowns.

use super::{Predictor, Unknown, Work};
use crate::error::LabError;
use crate::scenario::{MIN_LIMIT_MIB, Scenario};
use crate::sweep::run_each;
use crate::workload::{Leak, Summary};
use foliomem_types::counters::FaultKind;
use foliomem_types::units::PAGE_BYTES;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Limits of the table, in per cent of the run's need: one limit that needs no reclaim, then a
/// geometric sequence down to an eighth.
const GRID_PERCENT: [u64; 11] = [120, 100, 84, 71, 59, 50, 42, 35, 25, 18, 13];
/// Slowdowns for which the least limit is found.
const WANTED: [f64; 3] = [1.05, 1.2, 2.0];
/// Tolerance as a shift: a limit at most 1/2^4 below the recorded one counts as equal, and a peak
/// at most 1/2^4 above its limit counts as within the limit.
const NEARLY_SHIFT: u32 = 4;
/// A limit that exceeds the need by 1/2^3 of the need makes no page non-resident.
const ROOMY_SHIFT: u32 = 3;
/// Resolution of the search for the least limit as a shift: 1/2^6 of the run's need.
const RESOLUTION_SHIFT: u32 = 6;
/// Pages in a MiB.
const MIB_PAGES: u64 = 256;

/// The prediction for a limit.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The limit.
    pub limit_bytes: u64,
    /// The time of the run as a multiple of its time without a limit, if it is known.
    pub slowdown: Option<f64>,
    /// The reason why the slowdown is not known.
    pub unknown: Option<Unknown>,
    /// The predicted work of the run, if it is known.
    pub work: Option<Work>,
}

/// The least limit for a slowdown.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Least {
    /// The slowdown.
    pub slowdown: f64,
    /// The least limit with which the run is no slower, of those that are known.
    pub limit_bytes: Option<u64>,
    /// Whether a smaller limit might suffice, because the slowdown within smaller limits is
    /// unknown.
    pub may_be_less: bool,
}

/// Advice about a recorded run.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The peak of the memory that the run needed.
    pub need_bytes: u64,
    /// The limit within which it was recorded.
    pub recorded_limit_bytes: Option<u64>,
    /// The duration of the recorded run.
    pub recorded_seconds: f64,
    /// The duration without a limit, if that is known.
    pub unlimited_seconds: Option<f64>,
    /// Threads that ran or waited at a time, on average.
    pub threads: Option<f64>,
    /// The faults and pages of the recorded run, as measured.
    pub recorded_work: Work,
    /// Number of processes of the run.
    pub processes: u32,
    /// Number of processes large enough to be managed.
    pub managed_processes: u32,
    /// Number of lost events.
    pub lost_events: u64,
    /// The table, from the largest limit to the smallest.
    pub points: Vec<Point>,
    /// The least limits.
    pub least: Vec<Least>,
    /// Memory that the run has leaked.
    pub leak: Option<Leak>,
}

/// Replays the trace at `path`, whose summary is `summary`, and advises. The table has the limits
/// `limits_mib`, or a grid if there are none.
///
/// # Errors
/// Fails if the trace cannot be read.
pub fn advise(path: &Path, summary: &Summary, limits_mib: &[u64], threads: usize) -> Result<Advice, LabError> {
    let text = summary.scenario(path);
    let sizes = [("machine.sizes_kib".to_owned(), default_sizes_kib())];
    let scenario = Scenario::parse_with(&path.display().to_string(), &text, &sizes)?;
    let recorded = &summary.recorded;
    let predictor = if summary.lost == 0 { Predictor::new(recorded) } else { Err(Unknown::LostEvents) };
    let need_mib = summary.peak_pages.div_ceil(MIB_PAGES);
    let mut points = Points {
        scenario,
        predictor: predictor.as_ref().map_err(|unknown| *unknown),
        recorded_mib: summary.limit_pages.map(|pages| pages / MIB_PAGES),
        need_mib,
        threads,
        known: BTreeMap::new(),
    };
    let grid: Vec<u64> =
        GRID_PERCENT.iter().map(|percent| (need_mib * percent / 100).max(MIN_LIMIT_MIB.into())).collect();
    // The least limits are found first: they must not depend on the limits that somebody asks for.
    let least = WANTED.iter().map(|&slowdown| points.least(slowdown, &grid, need_mib)).collect::<Result<_, _>>()?;
    let mut shown = if limits_mib.is_empty() { grid } else { limits_mib.to_vec() };
    points.look(&shown)?;
    shown.sort_unstable_by(|a, b| b.cmp(a));
    shown.dedup();
    Ok(Advice {
        need_bytes: summary.peak_pages * PAGE_BYTES as u64,
        recorded_limit_bytes: summary.limit_pages.map(|pages| pages * PAGE_BYTES as u64),
        recorded_seconds: recorded.elapsed_us as f64 / 1e6,
        unlimited_seconds: predictor.as_ref().ok().map(Predictor::base_seconds),
        threads: predictor.as_ref().ok().map(Predictor::threads),
        recorded_work: Work::of(recorded),
        processes: summary.processes,
        managed_processes: summary.managed_processes,
        lost_events: summary.lost,
        points: shown.iter().map(|&limit_mib| points.point(limit_mib)).collect(),
        least,
        leak: summary.leak,
    })
}

/// Returns the folio sizes of `run`, as the scenario has them.
fn default_sizes_kib() -> String {
    let sizes = foliomem_types::size::DEFAULT_SIZES.split(',').filter_map(|size| {
        let order = foliomem_types::size::parse_order(size).ok()?;
        Some(order.kib().to_string())
    });
    sizes.collect::<Vec<_>>().join("+")
}

/// The result of a replay within a limit.
#[derive(Clone, Copy, Debug)]
enum Replayed {
    /// The replay completed with this work.
    Done(Work),
    /// The memory did not fit.
    DoesNotFit(Work),
    /// The run was not replayed, because its touches within such a limit are unknown.
    BelowRecording,
}

/// Replays so far, by their limits.
struct Points<'a> {
    scenario: Scenario,
    predictor: Result<&'a Predictor, Unknown>,
    recorded_mib: Option<u64>,
    need_mib: u64,
    threads: usize,
    known: BTreeMap<u64, Replayed>,
}

impl Points<'_> {
    /// Replays the run within each of these limits.
    fn look(&mut self, limits_mib: &[u64]) -> Result<(), LabError> {
        let mut new: Vec<u64> = limits_mib.iter().copied().filter(|limit| !self.known.contains_key(limit)).collect();
        new.sort_unstable();
        new.dedup();
        let (below, new): (Vec<u64>, Vec<u64>) = new.into_iter().partition(|&limit_mib| self.is_below(limit_mib));
        self.known.extend(below.into_iter().map(|limit_mib| (limit_mib, Replayed::BelowRecording)));
        let scenarios: Vec<Scenario> = new.iter().map(|&limit_mib| self.scenario.within(limit_mib)).collect();
        let replayed = run_each(&scenarios, self.threads, &|_, _| (), replay);
        for (limit_mib, replayed) in new.into_iter().zip(replayed) {
            self.known.insert(limit_mib, replayed?);
        }
        Ok(())
    }

    /// Returns whether a limit evicts pages that were resident when the run was recorded.
    fn is_below(&self, limit_mib: u64) -> bool {
        let is_less = |recorded_mib: u64| limit_mib < recorded_mib - (recorded_mib >> NEARLY_SHIFT);
        self.recorded_mib.is_some_and(is_less) && limit_mib < self.need_mib + (self.need_mib >> ROOMY_SHIFT)
    }

    /// Returns the slowdown and the work within a limit that [`look`](Self::look) has handled, if
    /// known.
    fn slowdown(&self, limit_mib: u64) -> (Result<f64, Unknown>, Option<Work>) {
        let no_faults = |work: &Work| *work == Work::default();
        match self.known.get(&limit_mib) {
            Some(Replayed::Done(work)) if no_faults(work) && self.predictor.is_ok() => (Ok(1.0), Some(*work)),
            Some(Replayed::Done(work)) => (self.predictor.and_then(|predictor| predictor.slowdown(work)), Some(*work)),
            Some(Replayed::DoesNotFit(work)) => (Err(Unknown::DoesNotFit), Some(*work)),
            Some(Replayed::BelowRecording) | None => (Err(Unknown::BelowRecording), None),
        }
    }

    /// Returns the point of a limit. A smaller limit never counts as faster: where its replay was
    /// faster by chance, the result of the larger limit stands.
    fn point(&self, limit_mib: u64) -> Point {
        let (slowdown, work) = self.slowdown(limit_mib);
        let larger = self.known.range(limit_mib..).filter_map(|(&larger_mib, _)| self.slowdown(larger_mib).0.ok());
        Point {
            limit_bytes: limit_mib << 20,
            slowdown: slowdown.ok().map(|slowdown| larger.fold(slowdown, f64::max)),
            unknown: slowdown.err(),
            work,
        }
    }

    fn is_within(&self, limit_mib: u64, wanted: f64) -> bool {
        self.point(limit_mib).slowdown.is_some_and(|slowdown| slowdown <= wanted)
    }

    /// Finds the least limit for a slowdown, by bisection from the grid on.
    fn least(&mut self, wanted: f64, grid_mib: &[u64], need_mib: u64) -> Result<Least, LabError> {
        let mut none = Least { slowdown: wanted, limit_bytes: None, may_be_less: false };
        if self.predictor.is_err() {
            return Ok(none);
        }
        // The smallest limit that is known, and larger ones.
        let lowest_mib = self.recorded_mib.unwrap_or(u64::from(MIN_LIMIT_MIB)).min(need_mib);
        let limits: Vec<u64> =
            grid_mib.iter().copied().filter(|&limit| limit > lowest_mib).chain([lowest_mib]).collect();
        self.look(&limits)?;
        let within = |limit_mib: &u64| self.is_within(*limit_mib, wanted);
        let Some(at) = limits.iter().rposition(within) else { return Ok(none) };
        let mut least_mib = limits[at];
        match limits.get(at + 1) {
            Some(&too_small_mib) => {
                let mut too_small_mib = too_small_mib;
                while least_mib - too_small_mib > (need_mib >> RESOLUTION_SHIFT).max(1) {
                    let middle_mib = too_small_mib.midpoint(least_mib);
                    self.look(&[middle_mib])?;
                    if self.is_within(middle_mib, wanted) {
                        least_mib = middle_mib;
                    } else {
                        too_small_mib = middle_mib;
                    }
                }
            }
            None => none.may_be_less = lowest_mib > u64::from(MIN_LIMIT_MIB),
        }
        Ok(Least { limit_bytes: Some(least_mib << 20), ..none })
    }
}

/// Replays a run.
fn replay(scenario: &Scenario) -> Result<Replayed, LabError> {
    let mut lab = scenario.lab(None);
    match scenario.workload.run(&mut lab, scenario.seed.into()) {
        Ok(_) => {}
        Err(LabError::OutOfMemory { .. }) => return Ok(Replayed::DoesNotFit(Work::default())),
        Err(error) => return Err(error),
    }
    let vm = &lab.engine().counters().vm;
    let work = Work {
        first_touch_faults: lab.managed_faults(FaultKind::FirstTouch),
        staged_faults: lab.managed_faults(FaultKind::Staged),
        swap_in_faults: lab.managed_faults(FaultKind::SwapIn),
        pswpin: vm.pswpin.get(),
        pswpout: vm.pswpout.get(),
    };
    let (limit_pages, peak_pages) = (lab.machine().limit_pages(), lab.machine().peak_pages());
    let fits = peak_pages <= limit_pages + (limit_pages >> NEARLY_SHIFT);
    Ok(if fits { Replayed::Done(work) } else { Replayed::DoesNotFit(work) })
}
