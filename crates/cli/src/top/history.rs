//! The figures of a run in the last minutes, for the plot.
//!
//! Each column of the plot stands for the same time. The columns begin at multiples of it, so a
//! column does not change any more once the next has begun.

use crate::sampler::RunSample;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Maximum number of points: ten minutes of two samples a second.
const MAX_POINTS: usize = 1200;
/// The times that a column may stand for, in seconds. The plot shows the first that has room for
/// all points.
const STEPS_S: [u64; 3] = [1, 2, 5];
/// A column without a point is like the one before if that is no longer ago than this: under load,
/// a sample may come late.
const MAX_GAP: Duration = Duration::from_secs(5);

/// The figures of a run at one moment.
#[derive(Clone, Copy, Debug)]
struct Point {
    at: Instant,
    resident_bytes: u64,
    stored_bytes: u64,
    faults_per_s: f64,
}

/// The points of a run, the oldest first.
#[derive(Debug)]
pub struct History {
    /// The time that columns are counted from.
    origin: Instant,
    points: VecDeque<Point>,
}

/// The values of one column.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlotColumn {
    /// What the run took apart from the store at the last point, in bytes.
    pub resident_bytes: u64,
    /// What the store took at the last point, in bytes.
    pub stored_bytes: u64,
    /// The mean rate of faults.
    pub faults_per_s: f64,
}

/// What the plot shows.
#[derive(PartialEq, Debug)]
pub struct Plot {
    /// The time that a column stands for.
    pub step: Duration,
    /// The columns, from left to right; the last is of now.
    pub columns: Vec<Option<PlotColumn>>,
}

impl History {
    /// Returns one without points.
    pub fn new(origin: Instant) -> History {
        History { origin, points: VecDeque::new() }
    }

    /// Adds a sample, which was taken at `now`.
    pub fn push(&mut self, sample: &RunSample, now: Instant) {
        let Some(rates) = sample.rates else { return };
        if self.points.len() == MAX_POINTS {
            self.points.pop_front();
        }
        let (resident_bytes, stored_bytes) = (sample.figures.resident_bytes(), sample.figures.stored_bytes);
        self.points.push_back(Point { at: now, resident_bytes, stored_bytes, faults_per_s: rates.faults_per_s });
    }

    /// Returns the plot in `width` columns.
    pub fn plot(&self, width: usize) -> Plot {
        let mut columns = vec![None; width];
        let (Some(first), Some(last)) = (self.points.front(), self.points.back()) else {
            return Plot { step: Duration::from_secs(STEPS_S[0]), columns };
        };
        let has_room = |step_s: &u64| self.index(last, *step_s) - self.index(first, *step_s) < width as u64;
        let step_s = STEPS_S.into_iter().find(has_room).unwrap_or(STEPS_S[STEPS_S.len() - 1]);
        let end = self.index(last, step_s);
        let mut counts = vec![0u32; width];
        for point in &self.points {
            let Some(at) = (width as u64).checked_sub(end - self.index(point, step_s) + 1) else { continue };
            let (at, count) = (at as usize, &mut counts[at as usize]);
            let before = columns[at].map_or(0.0, |column: PlotColumn| column.faults_per_s);
            *count += 1;
            columns[at] = Some(PlotColumn {
                resident_bytes: point.resident_bytes,
                stored_bytes: point.stored_bytes,
                faults_per_s: before + (point.faults_per_s - before) / f64::from(*count),
            });
        }
        fill_gaps(&mut columns, MAX_GAP.as_secs() / step_s);
        Plot { step: Duration::from_secs(step_s), columns }
    }

    fn index(&self, point: &Point, step_s: u64) -> u64 {
        point.at.saturating_duration_since(self.origin).as_secs() / step_s
    }
}

/// Fills up to `most` columns between two that have values.
fn fill_gaps(columns: &mut [Option<PlotColumn>], most: u64) {
    let mut before = 0;
    for at in 1..columns.len() {
        if columns[at].is_none() {
            continue;
        }
        if columns[before].is_some() && (at - before) as u64 <= most {
            let value = columns[before];
            columns[before..at].fill(value);
        }
        before = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples;

    fn history(points: &[(u64, f64)]) -> History {
        let origin = Instant::now();
        let mut history = History::new(origin);
        for &(at_ms, faults_per_s) in points {
            let sample = samples::run(1, 100 + at_ms, faults_per_s);
            history.push(&sample, origin + Duration::from_millis(at_ms));
        }
        history
    }

    fn faults(plot: &Plot) -> Vec<Option<f64>> {
        plot.columns.iter().map(|column| column.map(|column| column.faults_per_s)).collect()
    }

    #[test]
    fn a_column_has_the_last_size_and_the_mean_rate_of_its_time() {
        let plot = history(&[(1000, 10.0), (1500, 30.0), (2100, 5.0)]).plot(4);
        assert_eq!(plot.step, Duration::from_secs(1));
        assert_eq!(faults(&plot), [None, None, Some(20.0), Some(5.0)]);
        assert_eq!(plot.columns[2].unwrap().resident_bytes, 1600);
    }

    #[test]
    fn columns_stand_for_more_time_when_there_are_more_points() {
        let points: Vec<_> = (0..20).map(|second| (second * 1000, second as f64)).collect();
        assert_eq!(history(&points[..4]).plot(4).step.as_secs(), 1);
        assert_eq!(history(&points[..5]).plot(4).step.as_secs(), 2);
        assert_eq!(history(&points[..9]).plot(4).step.as_secs(), 5);
        let plot = history(&points).plot(3);
        assert_eq!(faults(&plot), [Some(7.0), Some(12.0), Some(17.0)], "older points fall out");
    }

    #[test]
    fn a_late_sample_leaves_no_gap_but_a_pause_does() {
        assert_eq!(faults(&history(&[(0, 1.0), (3000, 2.0)]).plot(4)), [Some(1.0), Some(1.0), Some(1.0), Some(2.0)]);
        let plot = history(&[(0, 1.0), (7000, 2.0)]).plot(8);
        assert_eq!(plot.columns.iter().flatten().count(), 2);
    }

    #[test]
    fn there_are_never_more_points_than_fit() {
        let points: Vec<_> = (0..MAX_POINTS as u64 + 10).map(|half| (half * 500, 0.0)).collect();
        assert_eq!(history(&points).points.len(), MAX_POINTS);
        assert_eq!(history(&[]).plot(3).columns, [None; 3]);
        assert_eq!(history(&points).plot(0).columns, []);
    }
}
