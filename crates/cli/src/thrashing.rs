//! Decides from samples whether a run thrashes, and says what would help.
//!
//! A sample counts two kinds of threads of the run: *waiting* threads, whose page faults foliomem
//! serves by swapping memory in, and *running* threads, which run or are runnable. Sleeping threads
//! are not counted. The *share* of a sample is waiting / (waiting + running), and 0 if all threads
//! sleep. A sample stands for the time since the sample before.
//!
//! A run *thrashes* if the average share of the last 3 seconds has been more than a half for a
//! second. So a burst of a second is no thrashing, nor is a server that mostly sleeps.

use foliomem_session::tree_usage::MemoryStall;
use foliomem_types::size::format_mib;
use std::collections::VecDeque;
use std::time::Duration;

/// The window of the average share.
const WINDOW: Duration = Duration::from_secs(3);
/// A run thrashes above this share.
const MAX_SHARE: f64 = 0.5;
/// A run thrashes once its share was above [`MAX_SHARE`] for this long.
const ONSET: Duration = Duration::from_secs(1);
/// A run has recovered while its share is below this.
const CALM_SHARE: f64 = 0.25;
/// A second warning about thrashing is printed only after the run has recovered for this long.
const RECOVERY: Duration = Duration::from_secs(60);
/// Maximum time that one sample stands for: the supervisor may have been stopped.
const MAX_SAMPLE: Duration = Duration::from_secs(1);
/// The end of a run names the limit if the run has waited for more than this share of its time, and
/// for as long as [`WINDOW`].
const MIN_SHARE_OF_RUN: f64 = 0.2;
/// A suggested limit exceeds the need by 1/2^3, because management, which costs time, begins near
/// the limit.
const MARGIN_SHIFT: u32 = 3;

/// The threads of a run at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Threads {
    /// Those that wait for memory.
    pub waiting: u32,
    /// Those that run or are runnable.
    pub running: u32,
}

impl std::iter::Sum for Threads {
    fn sum<I: Iterator<Item = Threads>>(all: I) -> Threads {
        all.fold(Threads::default(), |sum, one| Threads {
            waiting: sum.waiting + one.waiting,
            running: sum.running + one.running,
        })
    }
}

impl Threads {
    fn share(self) -> f64 {
        let awake = f64::from(self.waiting) + f64::from(self.running);
        if awake == 0.0 { 0.0 } else { f64::from(self.waiting) / awake }
    }
}

/// A sample.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// The time of the sample, since the start of the run.
    at: Duration,
    /// The part of the sample's time that the run waited for memory.
    stall: Duration,
}

/// Whether the warning about thrashing has been printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not yet. If the share is too large, it has been so since this time.
    Ready { above_since: Option<Duration> },
    /// Already. If the share is small, it has been so since this time.
    Said { calm_since: Option<Duration> },
}

/// The samples of a run.
#[derive(Debug)]
pub struct Samples {
    last: Duration,
    window: VecDeque<Sample>,
    state: State,
    stall: Duration,
    thrashing: u64,
}

impl Samples {
    /// Creates the empty samples of a run that starts.
    pub fn new() -> Samples {
        let (window, state) = (VecDeque::new(), State::Ready { above_since: None });
        Samples { last: Duration::ZERO, window, state, stall: Duration::ZERO, thrashing: 0 }
    }

    /// Adds the sample of time `at` since the start. Returns the share of the window if the run has
    /// begun to thrash.
    pub fn add(&mut self, at: Duration, threads: Threads) -> Option<f64> {
        let time = at.saturating_sub(self.last).min(MAX_SAMPLE);
        self.last = at;
        let stall = time.mul_f64(threads.share());
        self.stall += stall;
        self.window.push_back(Sample { at, stall });
        while self.window.front().is_some_and(|sample| at.saturating_sub(sample.at) >= WINDOW) {
            self.window.pop_front();
        }
        let stall: Duration = self.window.iter().map(|sample| sample.stall).sum();
        let share = stall.as_secs_f64() / WINDOW.as_secs_f64();
        // Returns the time since which a condition holds; `None` if it does not hold.
        let since = |holds: bool, before: Option<Duration>| holds.then(|| before.unwrap_or(at));
        let has_lasted = |since: Option<Duration>, time| since.is_some_and(|since| at.saturating_sub(since) >= time);
        match &mut self.state {
            State::Ready { above_since } => {
                *above_since = since(share > MAX_SHARE, *above_since);
                if has_lasted(*above_since, ONSET) {
                    self.state = State::Said { calm_since: None };
                    self.thrashing += 1;
                    return Some(share);
                }
            }
            State::Said { calm_since } => {
                *calm_since = since(share < CALM_SHARE, *calm_since);
                if has_lasted(*calm_since, RECOVERY) {
                    self.state = State::Ready { above_since: None };
                }
            }
        }
        None
    }

    /// Returns how much the run has waited so far.
    pub fn stall(&self) -> MemoryStall {
        MemoryStall { stall_ns: self.stall.as_nanos() as u64, thrashing: self.thrashing }
    }
}

/// Returns the part of its time that a run has waited for memory, in per cent.
pub fn stall_percent(stall: MemoryStall, elapsed: Duration) -> f64 {
    if elapsed.is_zero() {
        return 0.0;
    }
    let stall = Duration::from_nanos(stall.stall_ns);
    100.0 * stall.as_secs_f64().min(elapsed.as_secs_f64()) / elapsed.as_secs_f64()
}

/// The need of a run, and its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    /// Peak of the tree's need, uncompressed, in bytes.
    pub needed_bytes: u64,
    /// The limit of the run, in bytes.
    pub limit_bytes: u64,
}

impl Need {
    /// Returns the limit in bytes under which nothing of the present need would be swapped out;
    /// `None` if the run's limit is as large already.
    pub fn sufficient_bytes(self) -> Option<u64> {
        let bytes = self.needed_bytes.saturating_add(self.needed_bytes >> MARGIN_SHIFT);
        let whole_mib = bytes.checked_next_multiple_of(1 << 20)?;
        (whole_mib > self.limit_bytes).then_some(whole_mib)
    }
}

/// How a user can change the limit of a run while it goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remedy {
    /// With `ctl`, and the pid of the supervisor.
    Ctl(u32),
    /// By the limit of a cgroup, which the run follows.
    Group,
}

/// Returns the message line about a run that has begun to thrash.
pub fn onset(share: f64, need: Need, remedy: Remedy) -> String {
    let line = format!(
        "thrashing: the program has waited for memory {:.0}% of the last {} s; it needs {} so far, and its limit is {}",
        100.0 * share,
        WINDOW.as_secs(),
        format_mib(need.needed_bytes),
        format_mib(need.limit_bytes)
    );
    let Some(bytes) = need.sufficient_bytes() else { return line };
    let remedy = match remedy {
        Remedy::Ctl(pid) => format!("foliomem ctl {pid} limit {}M", bytes >> 20),
        Remedy::Group => "raise the limit of the cgroup".to_owned(),
    };
    format!("{line}; {}: {remedy}", sufficient(bytes))
}

/// Returns why a run of this duration was slow, if waiting for memory is why.
pub fn why(stall: MemoryStall, elapsed: Duration, need: Need) -> Option<String> {
    let percent = stall_percent(stall, elapsed);
    let is_long = Duration::from_nanos(stall.stall_ns) >= WINDOW && percent > 100.0 * MIN_SHARE_OF_RUN;
    if stall.thrashing == 0 && !is_long {
        return None;
    }
    let [needed, limit] = [need.needed_bytes, need.limit_bytes].map(format_mib);
    let waiting = format!("{percent:.0}% of the time waiting for memory; it needs {needed}");
    Some(match need.sufficient_bytes() {
        Some(bytes) => format!("limit {limit} too small: {waiting}; {}", sufficient(bytes)),
        // The limit has been raised meanwhile.
        None => format!("{waiting}, and its limit was {limit} in the end"),
    })
}

fn sufficient(bytes: u64) -> String {
    format!("nothing would be swapped out in a limit of {}", format_mib(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const STEP_MS: u64 = 50;

    /// Adds samples of `threads` for `ms` milliseconds. Returns the times, in milliseconds, at
    /// which a warning about thrashing was due.
    fn sample(samples: &mut Samples, ms: u64, threads: Threads) -> Vec<u64> {
        let start_ms = samples.last.as_millis() as u64;
        let said = (1..=ms / STEP_MS).map(|step| start_ms + step * STEP_MS).filter(|&at_ms| {
            let said = samples.add(Duration::from_millis(at_ms), threads);
            said.inspect(|share| assert!(*share > MAX_SHARE && *share <= 1.0)).is_some()
        });
        said.collect()
    }

    const WAITING: Threads = Threads { waiting: 4, running: 0 };
    const MOSTLY_WAITING: Threads = Threads { waiting: 3, running: 1 };
    const RUNNING: Threads = Threads { waiting: 0, running: 4 };
    const ASLEEP: Threads = Threads { waiting: 0, running: 0 };

    #[test]
    fn thrashing_is_said_once_within_five_seconds() {
        let mut samples = Samples::new();
        let said = sample(&mut samples, 60_000, MOSTLY_WAITING);
        assert_eq!((said.len(), said[0]), (1, 3050), "a second after the last 3 s have more than a half");
        assert_eq!(samples.stall(), MemoryStall { stall_ns: 45_000_000_000, thrashing: 1 });
    }

    #[test]
    fn a_burst_and_a_program_that_mostly_sleeps_do_not_thrash() {
        let mut samples = Samples::new();
        for _ in 0..10 {
            assert_eq!(sample(&mut samples, 1450, WAITING), [] as [u64; 0]);
            assert_eq!(sample(&mut samples, 1600, ASLEEP), [] as [u64; 0]);
        }
        assert_eq!(sample(&mut samples, 60_000, Threads { waiting: 1, running: 1 }), [] as [u64; 0]);
        assert_eq!(samples.stall().thrashing, 0);
    }

    #[test]
    fn thrashing_is_said_again_after_a_minute_of_calm() {
        let mut samples = Samples::new();
        assert_eq!(sample(&mut samples, 5000, WAITING).len(), 1);
        sample(&mut samples, 30_000, RUNNING);
        assert_eq!(sample(&mut samples, 10_000, WAITING).len(), 0);
        sample(&mut samples, 60_000, RUNNING);
        assert_eq!(sample(&mut samples, 10_000, WAITING).len(), 0, "not before the window was calm for a minute");
        sample(&mut samples, 64_000, RUNNING);
        assert_eq!(sample(&mut samples, 10_000, WAITING).len(), 1);
        assert_eq!(samples.stall().thrashing, 2);
    }

    #[test]
    fn a_sample_after_a_stop_stands_for_a_second() {
        let mut samples = Samples::new();
        samples.add(Duration::from_secs(1), RUNNING);
        assert_eq!(samples.add(Duration::from_secs(1000), WAITING), None);
        assert_eq!(samples.stall().stall_ns, 1_000_000_000);
    }

    proptest! {
        /// The sum and the window are those of a naive model that keeps all samples.
        #[test]
        fn samples_agree_with_a_model(steps in prop::collection::vec((1u64..400, 0u32..4, 0u32..4), 1..200)) {
            let (mut samples, mut all, mut at_ms) = (Samples::new(), Vec::new(), 0);
            for (ms, waiting, running) in steps {
                at_ms += ms;
                let share = if waiting + running == 0 { 0.0 } else { f64::from(waiting) / f64::from(waiting + running) };
                all.push((at_ms, ms as f64 * share));
                let said = samples.add(Duration::from_millis(at_ms), Threads { waiting, running });
                let window_ms: f64 = all.iter().filter(|(at, _)| at_ms - at < 3000).map(|(_, stall_ms)| stall_ms).sum();
                let sum_ms: f64 = all.iter().map(|(_, stall_ms)| stall_ms).sum();
                prop_assert!((samples.stall().stall_ns as f64 / 1e6 - sum_ms).abs() < 0.01);
                if let Some(share) = said {
                    prop_assert!((share - window_ms / 3000.0).abs() < 1e-6 && window_ms > 1499.9 && at_ms >= 2500);
                }
                prop_assert!(samples.window.len() <= all.len());
            }
        }
    }

    #[test]
    fn messages_name_need_limit_and_remedy() {
        let need = Need { needed_bytes: 197 * MIB, limit_bytes: 64 * MIB };
        assert_eq!(
            onset(0.814, need, Remedy::Ctl(12)),
            "thrashing: the program has waited for memory 81% of the last 3 s; it needs 197 MiB so far, and its limit is \
             64 MiB; nothing would be swapped out in a limit of 222 MiB: foliomem ctl 12 limit 222M"
        );
        assert!(onset(0.6, need, Remedy::Group).ends_with(": raise the limit of the cgroup"));
        let roomy = Need { limit_bytes: 1 << 30, ..need };
        assert!(onset(0.6, roomy, Remedy::Ctl(12)).ends_with("it needs 197 MiB so far, and its limit is 1024 MiB"));
        let stall = MemoryStall { stall_ns: 34_000_000_000, thrashing: 0 };
        assert_eq!(
            why(stall, Duration::from_secs(100), need).unwrap(),
            "limit 64 MiB too small: 34% of the time waiting for memory; it needs 197 MiB; nothing would be swapped out in \
             a limit of 222 MiB"
        );
        let raised = why(stall, Duration::from_secs(100), roomy).unwrap();
        assert!(raised.ends_with("it needs 197 MiB, and its limit was 1024 MiB in the end"), "{raised}");
        assert_eq!(why(stall, Duration::from_secs(1000), need), None, "3%");
        assert_eq!(why(MemoryStall { stall_ns: 2_000_000_000, ..stall }, Duration::from_secs(4), need), None, "short");
        assert!(why(MemoryStall { thrashing: 1, ..stall }, Duration::from_secs(1000), need).is_some());
    }
}
