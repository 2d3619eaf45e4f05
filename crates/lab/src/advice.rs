//! Advice: how much slower a recorded program would be within other limits.
//!
//! The replay shows which faults a run within a limit has. The recorded run shows the cost of these
//! faults: it has fault histograms, and a short measurement of a fault that does nothing. A
//! slowdown that neither source determines stays unknown ([`Unknown`]).
//!
//! The time without a limit is the time of the recorded run minus the time of its faults and the
//! time that its threads waited for a CPU. They wait for other programs, and for the companion,
//! in proportion to the CPU time that these use. Only waits for the companion are a cost of the
//! limit. Each fault takes the average time of its kind plus a round trip: the part of the fault
//! before the agent reads the message and after it wakes the thread. The time that the kernel
//! itself would need for new pages is no cost of faults. Threads that run concurrently also wait
//! concurrently, so waits are divided by the number of threads. A predicted run is never shorter
//! than its CPU time divided by the number of CPUs.

mod points;
mod text;

pub use self::points::{Advice, Least, Point, advise};

use crate::workload::Recorded;
use foliomem_types::counters::FaultKind;
use serde::Serialize;

/// Minimum number of faults of a kind for which their average time counts as the cost.
const MIN_MEASURED_FAULTS: u64 = 20;
/// Maximum time that faults of a kind without a known cost may take, in per cent of the time
/// without a limit, if each costs as much as a fault of the dearest kind.
const MAX_UNMEASURED_PERCENT: f64 = 2.0;
/// Minimum time of the run without its faults, as a part of its recorded time: noise must not
/// reduce that time to nothing.
const MIN_BASE: f64 = 0.01;
/// The kinds of faults that a replay has.
const KINDS: [FaultKind; 3] = [FaultKind::FirstTouch, FaultKind::Staged, FaultKind::SwapIn];

/// The work of a run within a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Work {
    /// First touches that foliomem serves.
    pub first_touch_faults: u64,
    /// Touches of staged pages.
    pub staged_faults: u64,
    /// Touches of swapped-out pages.
    pub swap_in_faults: u64,
    /// Pages swapped in.
    pub pswpin: u64,
    /// Pages swapped out.
    pub pswpout: u64,
}

impl Work {
    /// Returns the work of a recorded run.
    pub fn of(recorded: &Recorded) -> Work {
        Work {
            first_touch_faults: recorded.faults(FaultKind::FirstTouch).faults,
            staged_faults: recorded.faults(FaultKind::Staged).faults,
            swap_in_faults: recorded.faults(FaultKind::SwapIn).faults,
            pswpin: recorded.swpin_pages,
            pswpout: recorded.swpout_pages,
        }
    }

    fn faults(&self, kind: FaultKind) -> u64 {
        match kind {
            FaultKind::FirstTouch => self.first_touch_faults,
            FaultKind::Staged => self.staged_faults,
            FaultKind::SwapIn => self.swap_in_faults,
            FaultKind::Spurious | FaultKind::Copy => 0,
        }
    }

    fn all_faults(&self) -> u64 {
        KINDS.iter().map(|&kind| self.faults(kind)).sum()
    }

    fn moved_pages(&self) -> u64 {
        self.pswpin + self.pswpout
    }
}

/// The reason why the slowdown within a limit is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unknown {
    /// The run was recorded within a larger limit, so its touches within this one are unknown.
    BelowRecording,
    /// The memory does not compress into the limit.
    DoesNotFit,
    /// The recorded run had too few faults of a kind to tell what they cost.
    NoCosts,
    /// The trace has no times: this machine could not be measured when it was recorded.
    NoTimes,
    /// Events of the recording were lost.
    LostEvents,
}

impl Unknown {
    /// Returns the reason in words.
    pub fn why(self) -> &'static str {
        match self {
            Unknown::BelowRecording => "recorded within more",
            Unknown::DoesNotFit => "does not compress into it",
            Unknown::NoCosts => "too few such faults were recorded to tell what they cost",
            Unknown::NoTimes => "the trace has no times",
            Unknown::LostEvents => "events were lost",
        }
    }
}

/// The costs of faults, derived from a recorded run.
#[derive(Clone, Debug)]
pub struct Predictor {
    recorded: Recorded,
    /// Average cost of a fault by kind, in nanoseconds, where it is known. The cost of a swap-in
    /// does not include its pages.
    cost_ns: [Option<f64>; KINDS.len()],
    /// Average cost of a page that is swapped in, in nanoseconds.
    swpin_page_ns: f64,
    /// Threads that run or wait at a time, on average; at least 1.
    threads: f64,
    /// Time of the run without faults, in nanoseconds.
    base_ns: f64,
}

impl Predictor {
    /// Makes a predictor from the measured times of a run.
    ///
    /// # Errors
    /// Fails if the trace has no times.
    pub fn new(recorded: &Recorded) -> Result<Predictor, Unknown> {
        if recorded.elapsed_us == 0 || recorded.round_trip_ns == 0 {
            return Err(Unknown::NoTimes);
        }
        let elapsed_ns = recorded.elapsed_us as f64 * 1e3;
        let program_ns = recorded.program_cpu_us as f64 * 1e3;
        let waited_ns: f64 = FaultKind::ALL.iter().map(|&kind| recorded.faults(kind).waited_ns as f64).sum();
        let delayed_ns = recorded.program_delay_us as f64 * 1e3;
        let threads = ((program_ns + delayed_ns + waited_ns) / elapsed_ns).max(1.0);
        let (cost_ns, swpin_page_ns) = costs(recorded);
        let round_trips_ns = round_trips_ns(recorded, &Work::of(recorded));
        // The program computed at least for its CPU time minus its share of the round trips, which
        // is no user time.
        let computed_ns = (program_ns - round_trips_ns / 2.0).max(recorded.program_user_us as f64 * 1e3) / threads;
        // The time that threads waited for a CPU, and that their handlers waited for other
        // programs.
        let held_up_ns = delayed_ns + recorded.companion_delay_us as f64 * 1e3 * others_share(recorded);
        let lost_ns = held_up_ns + waited_ns + round_trips_ns - kernel_ns(recorded);
        let without_faults_ns = elapsed_ns - lost_ns / threads;
        let base_ns = without_faults_ns.max(computed_ns).max(elapsed_ns * MIN_BASE);
        Ok(Predictor { recorded: recorded.clone(), cost_ns, swpin_page_ns, threads, base_ns })
    }

    /// Returns the time of the run without a limit, in seconds.
    pub fn base_seconds(&self) -> f64 {
        self.base_ns / 1e9
    }

    /// Returns the threads that run or wait at a time, on average.
    pub fn threads(&self) -> f64 {
        self.threads
    }

    /// Returns the time of a run with this work as a multiple of its time without a limit.
    ///
    /// # Errors
    /// Fails if the recorded run does not tell what these faults cost.
    pub fn slowdown(&self, work: &Work) -> Result<f64, Unknown> {
        let dearest_ns = self.cost_ns.iter().flatten().fold(self.recorded.round_trip_ns as f64, |a, &b| a.max(b));
        let is_unmeasured = |(kind, cost_ns): (FaultKind, Option<f64>)| {
            let might_take_ns = work.faults(kind) as f64 * dearest_ns / self.threads;
            cost_ns.is_none() && might_take_ns * 100.0 > MAX_UNMEASURED_PERCENT * self.base_ns
        };
        if KINDS.into_iter().zip(self.cost_ns).any(is_unmeasured) {
            return Err(Unknown::NoCosts);
        }
        let waiting_ns = self.base_ns + self.waits_ns(work, dearest_ns) / self.threads;
        let working_ns = self.all_work_ns(work) / self.recorded.cpus.max(1) as f64;
        Ok((waiting_ns.max(working_ns) / self.base_ns).max(1.0))
    }

    /// Returns the time that faults take; those without a cost take `unmeasured_ns` each.
    fn waits_ns(&self, work: &Work, unmeasured_ns: f64) -> f64 {
        let wait_ns =
            |(kind, cost_ns): (FaultKind, Option<f64>)| work.faults(kind) as f64 * cost_ns.unwrap_or(unmeasured_ns);
        let faults_ns: f64 = KINDS.into_iter().zip(self.cost_ns).map(wait_ns).sum();
        faults_ns + work.pswpin as f64 * self.swpin_page_ns + work.moved_pages() as f64 * self.delay_page_ns()
    }

    /// Returns for each page that is swapped in or out how long threads of the program wait for a
    /// CPU that the companion uses.
    fn delay_page_ns(&self) -> f64 {
        let delayed_ns = self.recorded.program_delay_us as f64 * 1e3 * (1.0 - others_share(&self.recorded));
        delayed_ns / Work::of(&self.recorded).moved_pages().max(1) as f64
    }

    /// Returns the CPU time of the program and of foliomem.
    fn all_work_ns(&self, work: &Work) -> f64 {
        let recorded = Work::of(&self.recorded);
        let program_ns = self.recorded.program_cpu_us as f64 * 1e3 - round_trips_ns(&self.recorded, &recorded) / 2.0;
        let per_page_ns = self.recorded.companion_cpu_us as f64 * 1e3 / recorded.moved_pages().max(1) as f64;
        program_ns.max(0.0) + round_trips_ns(&self.recorded, work) + work.moved_pages() as f64 * per_page_ns
    }
}

/// Returns the share of other programs in the CPU time that the machine used during the run.
fn others_share(recorded: &Recorded) -> f64 {
    let own_us = recorded.program_cpu_us + recorded.companion_cpu_us;
    recorded.others_cpu_us as f64 / (recorded.others_cpu_us + own_us).max(1) as f64
}

/// Returns the time that the kernel would have needed to populate the memory of first touches: at
/// most the time that these faults took.
fn kernel_ns(recorded: &Recorded) -> f64 {
    let populated_ns = recorded.allocated_pages as f64 * recorded.populate_page_ns as f64;
    populated_ns.min(recorded.faults(FaultKind::FirstTouch).waited_ns as f64)
}

fn round_trips_ns(recorded: &Recorded, work: &Work) -> f64 {
    work.all_faults() as f64 * recorded.round_trip_ns as f64
}

/// Returns the average cost of a fault of each kind (`None` if the run had too few of that kind),
/// and the average cost of a swapped-in page.
fn costs(recorded: &Recorded) -> ([Option<f64>; KINDS.len()], f64) {
    // Handlers that waited for other programs needed longer for each fault, by this factor.
    let delayed_us = recorded.companion_delay_us as f64 * others_share(recorded);
    let stretch = 1.0 + delayed_us / recorded.companion_cpu_us.max(1) as f64;
    let served_ns = |kind: FaultKind| recorded.faults(kind).waited_ns as f64 / stretch;
    let is_known = |kind: FaultKind| recorded.faults(kind).faults >= MIN_MEASURED_FAULTS;
    let each_ns = |kind: FaultKind, served_ns: f64| served_ns.max(0.0) / recorded.faults(kind).faults.max(1) as f64;
    // A swap-in costs as much as a second chance, plus the decompression of its own pages and of
    // pages read ahead.
    let staged_ns =
        if is_known(FaultKind::Staged) { each_ns(FaultKind::Staged, served_ns(FaultKind::Staged)) } else { 0.0 };
    let swap_in_ns = each_ns(FaultKind::SwapIn, served_ns(FaultKind::SwapIn));
    let swap_in_alone_ns = if recorded.swpin_pages > 0 { swap_in_ns.min(staged_ns) } else { swap_in_ns };
    let for_pages_ns = (swap_in_ns - swap_in_alone_ns) * recorded.faults(FaultKind::SwapIn).faults as f64;
    let cost_ns = KINDS.map(|kind| {
        let served_ns = match kind {
            FaultKind::FirstTouch => each_ns(kind, served_ns(kind) - kernel_ns(recorded)),
            FaultKind::SwapIn => swap_in_alone_ns,
            _ => each_ns(kind, served_ns(kind)),
        };
        is_known(kind).then_some(served_ns + recorded.round_trip_ns as f64)
    });
    (cost_ns, for_pages_ns / recorded.swpin_pages.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::trace_event::Event;
    use proptest::prelude::*;

    /// Returns a run of 10 s with 100,000 swap-ins of 40 us and 10,000 second chances of 5 us, and
    /// round trips of 10 us.
    fn recorded(program_cpu_us: u64) -> Recorded {
        let mut recorded = Recorded::default();
        let kinds = [(FaultKind::SwapIn, 100_000, 40_000), (FaultKind::Staged, 10_000, 5_000)];
        for (kind, faults, each_ns) in kinds {
            recorded.note(&Event::Faults { kind, faults, waited_ns: faults * each_ns });
        }
        recorded.note(&Event::Took { elapsed_us: 10_000_000, program_cpu_us, companion_cpu_us: 3_000_000 });
        recorded.note(&Event::Moved { allocated_pages: 0, swpin_pages: 100_000, swpout_pages: 100_000 });
        recorded.note(&Event::Machine { cpus: 2, round_trip_ns: 10_000, populate_page_ns: 500 });
        recorded
    }

    fn work(staged_faults: u64, swap_in_faults: u64) -> Work {
        Work { staged_faults, swap_in_faults, pswpin: swap_in_faults, pswpout: swap_in_faults, ..Work::default() }
    }

    #[test]
    fn the_time_without_faults_is_what_remains() {
        let predictor = Predictor::new(&recorded(5_000_000)).unwrap();
        // 10 s without 100,000 times 50 us and 10,000 times 15 us.
        assert!((predictor.base_seconds() - 4.85).abs() < 1e-9, "{}", predictor.base_seconds());
        assert!((predictor.slowdown(&work(0, 0)).unwrap() - 1.0).abs() < 1e-9);
        let same = predictor.slowdown(&work(10_000, 100_000)).unwrap();
        assert!((same - 10.0 / 4.85).abs() < 1e-9, "{same}");
        let half = predictor.slowdown(&work(0, 50_000)).unwrap();
        assert!((half - (4.85 + 2.5) / 4.85).abs() < 1e-9, "{half}");
    }

    #[test]
    fn a_program_computed_for_its_cpu_time() {
        // 9 s of CPU time, 0.55 s of which are the program's side of faults.
        let predictor = Predictor::new(&recorded(9_000_000)).unwrap();
        assert!(predictor.threads() > 1.3, "{}", predictor.threads());
        let base = predictor.base_seconds();
        assert!((base - 8.45 / predictor.threads()).abs() < 1e-9, "{base}");
    }

    #[test]
    fn threads_wait_side_by_side() {
        let slowdown = |cpu_us| Predictor::new(&recorded(cpu_us)).unwrap().slowdown(&work(0, 100_000)).unwrap();
        assert!(slowdown(26_000_000) < slowdown(5_000_000));
    }

    #[test]
    fn a_run_takes_as_long_as_all_of_its_work() {
        let mut busy = recorded(5_000_000);
        busy.note(&Event::Took { elapsed_us: 10_000_000, program_cpu_us: 5_000_000, companion_cpu_us: 40_000_000 });
        let predictor = Predictor::new(&busy).unwrap();
        // 200 us of the companion for each page moved, on two CPUs.
        let slowdown = predictor.slowdown(&work(0, 100_000)).unwrap();
        let seconds = slowdown * predictor.base_seconds();
        assert!((seconds - (5.0 - 0.55 + 1.0 + 40.0) / 2.0).abs() < 0.01, "{seconds}");
    }

    #[test]
    fn what_was_not_measured_is_not_known() {
        let predictor = Predictor::new(&recorded(5_000_000)).unwrap();
        let first_touches = |first_touch_faults| Work { first_touch_faults, ..Work::default() };
        assert_eq!(predictor.slowdown(&first_touches(100_000)), Err(Unknown::NoCosts));
        assert!(predictor.slowdown(&first_touches(100)).is_ok(), "too few to matter");
        assert_eq!(Predictor::new(&Recorded::default()).unwrap_err(), Unknown::NoTimes);
    }

    #[test]
    fn first_touches_cost_what_the_kernel_would_not_take() {
        let mut run = recorded(5_000_000);
        run.note(&Event::Faults { kind: FaultKind::FirstTouch, faults: 1000, waited_ns: 20_000_000 });
        assert_eq!(costs(&run).0[0], Some(30_000.0));
        run.note(&Event::Moved { allocated_pages: 16_000, swpin_pages: 0, swpout_pages: 0 });
        assert_eq!(costs(&run).0[0], Some(22_000.0));
    }

    #[test]
    fn a_swap_in_costs_by_its_pages() {
        let predictor = Predictor::new(&recorded(5_000_000)).unwrap();
        let seconds = |work: Work| predictor.slowdown(&work).unwrap() * predictor.base_seconds();
        let one_page_each = seconds(work(0, 10_000));
        let four_pages_each = seconds(Work { pswpin: 40_000, ..work(0, 10_000) });
        // 35 us a page: 40 us, less the 5 us of a second chance.
        assert!((four_pages_each - one_page_each - 30_000.0 * 35e-6).abs() < 1e-6, "{one_page_each} {four_pages_each}");
    }

    #[test]
    fn the_load_of_other_programs_does_not_count() {
        let quiet = Predictor::new(&recorded(5_000_000)).unwrap();
        let mut loaded = recorded(5_000_000);
        for (kind, faults, each_ns) in [(FaultKind::SwapIn, 100_000, 80_000), (FaultKind::Staged, 10_000, 10_000)] {
            loaded.note(&Event::Faults { kind, faults, waited_ns: faults * each_ns });
        }
        loaded.note(&Event::Took { elapsed_us: 40_000_000, program_cpu_us: 5_000_000, companion_cpu_us: 3_000_000 });
        // Two CPUs were busy all the time.
        let others_cpu_us = 2 * 40_000_000 - 8_000_000;
        loaded.note(&Event::Delayed { program_us: 20_000_000, companion_us: 3_000_000, others_cpu_us });
        let loaded = Predictor::new(&loaded).unwrap();
        let [quiet, loaded] = [quiet, loaded].map(|predictor| predictor.slowdown(&work(5000, 50_000)).unwrap());
        assert!((quiet / loaded - 1.0).abs() < 0.5, "{quiet} and {loaded}");
    }

    #[test]
    fn what_the_companion_takes_from_the_program_counts() {
        let mut run = recorded(4_000_000);
        run.note(&Event::Delayed { program_us: 1_000_000, companion_us: 3_000_000, others_cpu_us: 0 });
        let predictor = Predictor::new(&run).unwrap();
        // 10 s without faults as above, and without a second in which the program waited for a CPU.
        assert!((predictor.base_seconds() - 3.85).abs() < 1e-9, "{}", predictor.base_seconds());
        let seconds = |work| predictor.slowdown(&work).unwrap() * predictor.base_seconds();
        assert!((seconds(work(10_000, 100_000)) - 10.0).abs() < 1e-9, "handlers waited for no other program");
        assert!((seconds(work(0, 50_000)) - (3.85 + 2.5 + 0.5)).abs() < 1e-9);
    }

    #[test]
    fn a_program_takes_at_least_its_user_time() {
        let mut run = recorded(9_000_000);
        run.note(&Event::Computed { user_us: 8_800_000 });
        let predictor = Predictor::new(&run).unwrap();
        assert!((predictor.base_seconds() - 8.8 / predictor.threads()).abs() < 1e-9, "{}", predictor.base_seconds());
    }

    proptest! {
        #[test]
        fn more_faults_are_never_faster(
            cpu_us in 0u64..40_000_000, home in 0u64..1_000_000, swap_in in 0u64..1_000_000, more in 0u64..1_000_000
        ) {
            let predictor = Predictor::new(&recorded(cpu_us)).unwrap();
            let [fewer, more] = [work(home, swap_in), work(home + more, swap_in + more)];
            let [fewer, more] = [fewer, more].map(|work| predictor.slowdown(&work).unwrap());
            prop_assert!(1.0 <= fewer && fewer <= more && more.is_finite(), "{} and {}", fewer, more);
        }
    }
}
