//! Notices that a process is asleep: its monitor then only asks for the process's CPU time
//! and for the tree's room, most of the time.
//!
//! Near its limit a process is sampled every few milliseconds, because it may grow at memory speed.
//! A process whose threads all wait cannot grow. It is asleep if no sample has found a change for a
//! while, and it has used no CPU time since. Other processes that share its memory may run
//! meanwhile, so it is sampled from time to time even then.
//!
//! Only the monitor uses this. There is no lock.

use std::time::Duration;

/// A process that has used no CPU time for this long is asleep.
const ASLEEP_AFTER_NS: u64 = 1_000_000_000;
/// Maximum time between two samples of a process that is asleep.
const SAMPLE_INTERVAL_NS: u64 = 200_000_000;
/// Minimum and maximum time between two looks at a process that is asleep: when it wakes, it may
/// grow at memory speed for as long. The longer it has been asleep, the longer the time.
const MIN_LOOK_INTERVAL_NS: u64 = 16_000_000;
const MAX_LOOK_INTERVAL_NS: u64 = 50_000_000;
/// The share of its sleep that is the time between two looks.
const LOOK_SHARE: u64 = 64;
/// The time between two looks at a process that must be looked at often.
const OFTEN_INTERVAL_NS: u64 = 4_000_000;

/// How often a process that is asleep must be looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Looks {
    /// It is not managed, so that no notice tells that it grows, or other processes of the tree
    /// change their size and may need its memory.
    Often,
    /// The longer it has been asleep, the more rarely.
    Rarely,
}

/// What the monitor knows of the sleep of its process.
#[derive(Debug, Default)]
pub(crate) struct Asleep {
    /// The CPU time that the process had used at the first sample of its sleep.
    cpu_time: Option<Duration>,
    /// When that was.
    since_ns: u64,
    /// The last sample.
    sampled_ns: u64,
    /// The tree's room then.
    room_pages: i64,
    /// The time until the next sample that it asked for.
    pause_ns: u64,
}

impl Asleep {
    /// Notes a sample, which has found nothing to do and no change for a while, and asks for the
    /// next one after `pause`.
    pub fn note_quiet(&mut self, now_ns: u64, cpu_time: Option<Duration>, room_pages: i64, pause: Duration) {
        if cpu_time != self.cpu_time {
            (self.cpu_time, self.since_ns) = (cpu_time, now_ns);
        }
        (self.sampled_ns, self.room_pages, self.pause_ns) = (now_ns, room_pages, pause.as_nanos() as u64);
    }

    /// Notes that the process is awake, or must be sampled for another reason.
    pub fn end(&mut self) {
        self.cpu_time = None;
    }

    /// Returns whether the process is still asleep, so that it needs no sample now. `cpu_time` is
    /// called only if nothing else shows that it needs one.
    pub fn lasts(&self, now_ns: u64, room_pages: i64, cpu_time: impl FnOnce() -> Option<Duration>) -> bool {
        self.cpu_time.is_some()
            && now_ns >= self.since_ns + ASLEEP_AFTER_NS
            && now_ns < self.sampled_ns + SAMPLE_INTERVAL_NS
            && room_pages >= self.room_pages
            && cpu_time() == self.cpu_time
    }

    /// Returns the time of the next look at a process that is asleep.
    pub fn next_look_ns(&self, now_ns: u64, looks: Looks) -> u64 {
        let interval_ns = match looks {
            Looks::Often => OFTEN_INTERVAL_NS,
            Looks::Rarely => ((now_ns - self.since_ns) / LOOK_SHARE).clamp(MIN_LOOK_INTERVAL_NS, MAX_LOOK_INTERVAL_NS),
        };
        now_ns + interval_ns.max(self.pause_ns)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const USED: Option<Duration> = Some(Duration::from_millis(7));

    /// Samples each 4 ms for `ms` ms. Returns when it ends.
    fn sampled(asleep: &mut Asleep, from_ns: u64, ms: u64, cpu_time: Option<Duration>) -> u64 {
        for at in (0..=ms).step_by(4) {
            asleep.note_quiet(from_ns + at * MS, cpu_time, 100, Duration::from_millis(2));
        }
        from_ns + ms * MS
    }

    fn is_asleep(asleep: &Asleep, now_ns: u64, cpu_time: Option<Duration>, room_pages: i64) -> bool {
        asleep.lasts(now_ns, room_pages, || cpu_time)
    }

    #[test]
    fn a_process_without_cpu_time_is_asleep_after_a_second() {
        let mut asleep = Asleep::default();
        let now_ns = sampled(&mut asleep, 0, 996, USED);
        assert!(!is_asleep(&asleep, now_ns + MS, USED, 100));
        let now_ns = sampled(&mut asleep, now_ns, 8, USED);
        assert!(is_asleep(&asleep, now_ns + MS, USED, 100));
        assert_eq!(asleep.next_look_ns(now_ns, Looks::Rarely), now_ns + 16 * MS);
        assert_eq!(asleep.next_look_ns(now_ns, Looks::Often), now_ns + 4 * MS);
        asleep.note_quiet(now_ns, USED, 100, Duration::from_millis(70));
        assert!(is_asleep(&asleep, now_ns, USED, 100));
        assert_eq!(
            asleep.next_look_ns(now_ns, Looks::Often),
            now_ns + 70 * MS,
            "looks are no more frequent than samples"
        );
        let now_ns = sampled(&mut asleep, now_ns, 10_000, USED);
        assert!(is_asleep(&asleep, now_ns, USED, 100));
        assert_eq!(asleep.next_look_ns(now_ns, Looks::Rarely), now_ns + 50 * MS);
    }

    #[test]
    fn cpu_time_less_room_and_time_need_a_sample() {
        let mut asleep = Asleep::default();
        let now_ns = sampled(&mut asleep, 0, 2000, USED);
        assert!(is_asleep(&asleep, now_ns + MS, USED, 101), "another process has shrunk");
        assert!(!is_asleep(&asleep, now_ns + MS, USED, 99), "another process has grown");
        assert!(!is_asleep(&asleep, now_ns + MS, USED.map(|used| used + Duration::from_nanos(1)), 100));
        assert!(!is_asleep(&asleep, now_ns + 200 * MS, USED, 100), "the sample is old");
        asleep.end();
        assert!(!is_asleep(&asleep, now_ns + MS, USED, 100));
    }

    #[test]
    fn a_process_that_woke_is_sampled_for_a_second() {
        let mut asleep = Asleep::default();
        let now_ns = sampled(&mut asleep, 0, 2000, USED);
        let woken = USED.map(|used| used + Duration::from_micros(1));
        let now_ns = sampled(&mut asleep, now_ns, 500, woken);
        assert!(!is_asleep(&asleep, now_ns + MS, woken, 100));
    }

    #[test]
    fn a_process_whose_cpu_time_is_unknown_is_sampled() {
        let mut asleep = Asleep::default();
        let now_ns = sampled(&mut asleep, 0, 2000, None);
        assert!(!is_asleep(&asleep, now_ns + MS, None, 100));
    }
}
