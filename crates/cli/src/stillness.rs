//! Notices that nothing happens in a run, whose supervisor then looks at it more rarely.
//!
//! A run without `--idle` that waits for input, or works on resident memory, would otherwise cost a
//! per cent of a CPU for looks that find nothing new.

use foliomem_session::segment::Control;
use foliomem_session::wanted_limit::WantedLimit;
use std::time::{Duration, Instant};

/// A run in which nothing has happened for this long is still.
const STILL_AFTER: Duration = Duration::from_secs(1);
/// Time between two looks at a run that is still. A limit that is set by hand then takes effect
/// after this time at the latest.
const STILL_INTERVAL: Duration = Duration::from_millis(200);
/// A run in which nothing has happened for this long is looked at more rarely.
const LONG_STILL_AFTER: Duration = Duration::from_secs(10);
/// Time between two looks at such a run.
const LONG_STILL_INTERVAL: Duration = Duration::from_millis(500);

/// What changes when something happens in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    /// Number of processes so far, and those that live.
    processes: (u32, usize),
    taken_bytes: u64,
    faults: u64,
    wanted_limit: Option<WantedLimit>,
}

/// Whether anything happens in a run.
#[derive(Debug)]
pub struct Stillness {
    seen: Option<Seen>,
    changed: Instant,
}

impl Stillness {
    /// Begins to look at a run that starts now.
    pub fn new() -> Stillness {
        Stillness { seen: None, changed: Instant::now() }
    }

    /// Looks at the run at the moment `now`. `unmanaged_bytes` is the size of its processes without
    /// the agent.
    pub fn look(&mut self, now: Instant, control: &Control, unmanaged_bytes: u64) {
        let living = control.living_processes();
        // The program may have overwritten any of these words.
        let add = u64::wrapping_add;
        let seen = Seen {
            processes: (control.processes_seen(), living.len()),
            taken_bytes: add(control.tree_measured_bytes(), unmanaged_bytes),
            faults: living.iter().map(|(_, slot)| slot.counters.vm.pgfault.get()).fold(0, add),
            wanted_limit: control.wanted_limit(),
        };
        if self.seen != Some(seen) {
            (self.seen, self.changed) = (Some(seen), now);
        }
    }

    /// Returns the time until the next look at the run if nothing has happened for a while before
    /// `now`.
    pub fn interval(&self, now: Instant) -> Option<Duration> {
        let still = now.saturating_duration_since(self.changed);
        let interval = if still >= LONG_STILL_AFTER { LONG_STILL_INTERVAL } else { STILL_INTERVAL };
        (still >= STILL_AFTER).then_some(interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};
    use std::sync::atomic::Ordering;

    #[test]
    fn a_run_is_still_until_something_happens() {
        let (control, _segment) = Control::create(&Configuration::plain(Limit::Bytes(1 << 30))).unwrap();
        let slot = control.claim_slot(rustix::process::getpid()).unwrap();
        let mut stillness = Stillness::new();
        let mut now = Instant::now();
        let mut is_still_after = |change: &dyn Fn() -> u64| {
            let unmanaged_bytes = change();
            now += STILL_AFTER * 2;
            stillness.look(now, control, unmanaged_bytes);
            let was_still = stillness.interval(now).is_some();
            now += STILL_AFTER;
            stillness.look(now, control, unmanaged_bytes);
            assert_eq!(stillness.interval(now), Some(STILL_INTERVAL), "nothing has happened since");
            assert_eq!(stillness.interval(now + LONG_STILL_AFTER), Some(LONG_STILL_INTERVAL));
            was_still
        };
        is_still_after(&|| 0);
        assert!(is_still_after(&|| 0));
        assert!(!is_still_after(&|| 4096), "a process without the agent has grown");
        let grow = || {
            control.process(slot).measured_bytes.store(1 << 20, Ordering::Relaxed);
            4096
        };
        assert!(!is_still_after(&grow));
        let fault = || {
            control.process(slot).counters.vm.pgfault.inc();
            4096
        };
        assert!(!is_still_after(&fault));
        let want_limit = || {
            control.want_limit(|_| Ok::<_, ()>(WantedLimit::Bytes(1 << 29))).unwrap();
            4096
        };
        assert!(!is_still_after(&want_limit));
    }
}
