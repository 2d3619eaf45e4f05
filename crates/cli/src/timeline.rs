//! The figures of a run over time, in a fixed number of points.
//!
//! Each point stands for an interval of the same length. When all points are used, pairs of points
//! are merged and the interval doubles. So a run of hours has as many points as a run of a minute.

use std::collections::VecDeque;
use std::time::Duration;

/// Maximum number of points: as many as a plot can show.
pub const MAX_POINTS: usize = 600;
/// The interval at first.
const FIRST_INTERVAL: Duration = Duration::from_millis(50);
/// Rates are averages over at least this time, because a thread that waits in one sample may run in
/// the next.
const RATE_TIME: Duration = Duration::from_secs(1);
/// Samples that a point is made of, once it stands for more than the first interval.
const SAMPLES: u32 = 8;
/// Changes of the limit in one direction with less time between them are one change.
const ONE_CHANGE: Duration = Duration::from_secs(1);
/// A step back of less than 1/2^2 of a change is part of it.
const STEP_BACK_SHIFT: u32 = 2;
/// Maximum number of changes that are kept.
const MAX_CHANGES: usize = 200;

/// The figures at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// Memory apart from the store, in bytes.
    pub resident_bytes: u64,
    /// Memory of the store, in bytes.
    pub stored_bytes: u64,
    /// Content of the swap file, in bytes.
    pub swap_file_bytes: u64,
    /// Faults so far.
    pub faults: u64,
    /// Time that was waited for memory so far.
    pub stall_ns: u64,
}

impl Sample {
    fn taken_bytes(&self) -> u64 {
        self.resident_bytes.saturating_add(self.stored_bytes)
    }

    /// Returns the sample that stands for this one and a later one: the memory of the larger one,
    /// and the counters of the later one.
    fn and(self, later: Sample) -> Sample {
        let larger = if later.taken_bytes() > self.taken_bytes() { later } else { self };
        Sample { faults: later.faults, stall_ns: later.stall_ns, ..larger }
    }
}

/// A point of the timeline.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Point {
    /// The start of its interval, in seconds.
    pub seconds: f64,
    /// The figures when most was taken.
    pub sample: Sample,
    /// Faults in a second, of the last second or longer.
    pub faults_per_s: f64,
    /// Which part of that time was waited for memory, in per cent.
    pub stall_percent: f64,
}

/// A change of the limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LimitChange {
    /// Start of the change, since the start of the run.
    pub from: Duration,
    /// End of the change, since the start of the run.
    pub to: Duration,
    /// The limit before, in bytes.
    pub before_bytes: u64,
    /// The limit after it, in bytes.
    pub after_bytes: u64,
}

/// The timeline of a run.
#[derive(Debug)]
pub struct Timeline {
    interval: Duration,
    /// The figures of each interval, and when they were last counted.
    points: Vec<Option<(Duration, Sample)>>,
    sampled: Option<Duration>,
    limit_bytes: Option<u64>,
    changes: Vec<LimitChange>,
    /// Changes beyond the maximum.
    more_changes: u64,
}

impl Timeline {
    /// Returns the timeline of a run that starts.
    pub fn new() -> Timeline {
        Timeline {
            interval: FIRST_INTERVAL,
            points: Vec::new(),
            sampled: None,
            limit_bytes: None,
            changes: Vec::new(),
            more_changes: 0,
        }
    }

    /// Returns whether a sample is due at `at` since the start.
    pub fn is_due(&self, at: Duration) -> bool {
        let pause = FIRST_INTERVAL.max(self.interval / SAMPLES);
        self.sampled.is_none_or(|sampled| at.saturating_sub(sampled) >= pause)
    }

    /// Adds the sample of time `at`, which is not before that of the last one.
    pub fn add(&mut self, at: Duration, sample: Sample) {
        self.sampled = Some(at);
        let mut place = self.place(at);
        while place >= MAX_POINTS {
            self.halve();
            place = self.place(at);
        }
        if self.points.len() <= place {
            self.points.resize(place + 1, None);
        }
        let so_far = &mut self.points[place];
        *so_far = Some((at, so_far.map_or(sample, |(_, so_far)| so_far.and(sample))));
    }

    /// Notes the limit of time `at`.
    pub fn note_limit(&mut self, at: Duration, limit_bytes: u64) {
        let before = self.limit_bytes.replace(limit_bytes);
        let Some(before_bytes) = before.filter(|&before_bytes| before_bytes != limit_bytes) else { return };
        if let Some(last) = self.changes.last_mut() {
            // A limit is lowered in steps, each below what the run takes at that time: one may be a
            // little above the one before.
            let is_same_way = (last.after_bytes > last.before_bytes) == (limit_bytes > last.after_bytes);
            let back_bytes = limit_bytes.abs_diff(last.after_bytes);
            let is_step_back = back_bytes < last.after_bytes.abs_diff(last.before_bytes) >> STEP_BACK_SHIFT;
            if (is_same_way || is_step_back) && at.saturating_sub(last.to) < ONE_CHANGE {
                (last.to, last.after_bytes) = (at, limit_bytes);
                return;
            }
        }
        if self.changes.len() < MAX_CHANGES {
            self.changes.push(LimitChange { from: at, to: at, before_bytes, after_bytes: limit_bytes });
        } else {
            self.more_changes += 1;
        }
    }

    /// Returns the changes of the limit, and how many more there were.
    pub fn changes(&self) -> (&[LimitChange], u64) {
        (&self.changes, self.more_changes)
    }

    /// Returns the interval that a point stands for.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Returns the points in order. Intervals without a sample have none.
    pub fn points(&self) -> Vec<Point> {
        // Earlier counters and their times: a rate is the difference to one of these.
        let mut earlier = VecDeque::from([(Duration::ZERO, Sample::default())]);
        let mut points = Vec::new();
        for (place, point) in self.points.iter().enumerate() {
            let Some((at, sample)) = *point else { continue };
            while earlier.get(1).is_some_and(|&(before, _)| at.saturating_sub(before) >= RATE_TIME) {
                earlier.pop_front();
            }
            let (since, before) = earlier.front().copied().unwrap_or_default();
            let seconds = at.saturating_sub(since).max(FIRST_INTERVAL).as_secs_f64();
            let faults = sample.faults.saturating_sub(before.faults) as f64;
            let stall_ns = sample.stall_ns.saturating_sub(before.stall_ns) as f64;
            points.push(Point {
                seconds: self.interval.as_secs_f64() * place as f64,
                sample,
                faults_per_s: faults / seconds,
                stall_percent: (stall_ns / 1e7 / seconds).min(100.0),
            });
            earlier.push_back((at, sample));
        }
        points
    }

    fn place(&self, at: Duration) -> usize {
        (at.as_nanos() / self.interval.as_nanos()) as usize
    }

    /// Makes one point of each two.
    fn halve(&mut self) {
        self.interval *= 2;
        let and = |(_, one): (Duration, Sample), (at, later): (Duration, Sample)| (at, one.and(later));
        let both = |two: &[Option<(Duration, Sample)>]| two.iter().copied().flatten().reduce(and);
        self.points = self.points.chunks(2).map(both).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(resident_bytes: u64, faults: u64) -> Sample {
        Sample { limit_bytes: 7, resident_bytes, faults, stall_ns: faults * 1000, ..Sample::default() }
    }

    #[test]
    fn a_run_of_hours_has_as_many_points_as_a_short_one() {
        let mut timeline = Timeline::new();
        let mut samples = 0;
        for ms in (0..20 * 3600 * 1000).step_by(10) {
            let at = Duration::from_millis(ms);
            if timeline.is_due(at) {
                samples += 1;
                timeline.add(at, sample(ms, ms));
            }
        }
        let points = timeline.points();
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&points.len()));
        assert!(samples < 30_000, "{samples} samples");
        assert!(points.windows(2).all(|two| two[0].sample.resident_bytes < two[1].sample.resident_bytes));
        assert!(points.iter().skip(1).all(|point| (999.9..1000.1).contains(&point.faults_per_s)));
    }

    proptest! {
        /// Joining points keeps the peak and the last counters.
        #[test]
        fn no_peak_is_lost(steps in prop::collection::vec((1u64..5000, 0u64..1000, 0u64..50), 1..2000)) {
            let (mut timeline, mut at, mut faults, mut peak) = (Timeline::new(), 0, 0, 0);
            for (ms, resident, more) in steps {
                at += ms;
                faults += more;
                peak = peak.max(resident);
                timeline.add(Duration::from_millis(at), sample(resident, faults));
            }
            let points = timeline.points();
            prop_assert!(points.len() <= MAX_POINTS);
            prop_assert_eq!(points.iter().map(|point| point.sample.resident_bytes).max(), Some(peak));
            prop_assert_eq!(points.last().unwrap().sample.faults, faults);
            prop_assert!(points.windows(2).all(|two| two[0].seconds < two[1].seconds));
        }
    }

    #[test]
    fn rates_are_of_a_second_or_more() {
        let mut timeline = Timeline::new();
        // All faults of each second come in its first 50 ms.
        (0..100).for_each(|step| timeline.add(FIRST_INTERVAL * step, sample(1, 100 * (1 + u64::from(step) / 20))));
        let points = timeline.points();
        let close = |one: f64, other: f64| assert!((one - other).abs() < 1e-3, "{one} {other}");
        close(points[0].faults_per_s, 2000.0);
        close(points[1].faults_per_s, 2000.0);
        points.iter().skip(20).for_each(|point| close(point.faults_per_s, 100.0));
        points.iter().skip(20).for_each(|point| close(point.stall_percent, 0.01));
    }

    #[test]
    fn steps_to_a_limit_are_one_change() {
        let mut timeline = Timeline::new();
        let mut note = |ms, limit_bytes| timeline.note_limit(Duration::from_millis(ms), limit_bytes);
        note(0, 1000);
        note(10, 1000);
        note(5000, 900);
        note(5010, 800);
        note(5020, 810);
        note(5900, 700);
        note(6000, 1200);
        note(9000, 1300);
        let (changes, more) = timeline.changes();
        let seen: Vec<_> =
            changes.iter().map(|one| (one.from.as_millis(), one.before_bytes, one.after_bytes)).collect();
        assert_eq!((seen, more), (vec![(5000, 1000, 700), (6000, 700, 1200), (9000, 1200, 1300)], 0));
        (0..500).for_each(|step| timeline.note_limit(Duration::from_secs(10 + 2 * step), 1400 + step));
        assert_eq!((timeline.changes().0.len(), timeline.changes().1), (MAX_CHANGES, 303));
    }
}
