//! Changes the limit of a run while it goes on: to what `foliomem ctl PID limit` wants, else to
//! what the cgroups leave.
//!
//! A limit is lowered in steps, each a little below the memory that the run takes. Otherwise a
//! message would say that the run exceeds a limit that was just lowered, and a hard limit would
//! stop the run.

use crate::cgroups::Cgroups;
use crate::container_limit::{CgroupsLimit, MIN_LIMIT_BYTES, warn_if_above};
use crate::knob::Machine;
use crate::settings::of_need;
use foliomem_session::segment::Control;
use foliomem_session::wanted_limit::WantedLimit;
use foliomem_types::settings::Limit;
use std::time::{Duration, Instant};

/// The limit is lowered to 1/2^6 below what the run takes.
const STEP_SHIFT: u32 = 6;
/// A run that does not follow for this long gets the true limit.
const MAX_STEPPING: Duration = Duration::from_secs(1);

/// The kind of run that counts as not following a lowered limit, and gets it without more steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Patience {
    /// A run above the limit: the kernel kills processes of a full cgroup.
    WhileAbove,
    /// A run above the limit that does not shrink.
    WhileStuck,
}

/// A run that takes more than its new limit.
#[derive(Clone, Copy, Debug)]
struct Above {
    since: Instant,
    taken_bytes: u64,
}

/// Keeps the limit of a run at what is wanted.
#[derive(Debug)]
pub struct LimitUpdater {
    groups: Cgroups,
    /// Follows the groups, until another limit is wanted by hand.
    cgroups_limit: Option<CgroupsLimit>,
    wanted: Option<WantedLimit>,
    is_applied: bool,
    above: Option<Above>,
}

impl LimitUpdater {
    /// Creates an updater for a run that starts with `limit`.
    pub fn new(limit: Limit, groups: Cgroups) -> LimitUpdater {
        let cgroups_limit = matches!(limit, Limit::Container { .. }).then(|| CgroupsLimit::new(groups.clone()));
        LimitUpdater { groups, cgroups_limit, wanted: None, is_applied: false, above: None }
    }

    /// Returns whether the limit depends on what others in the cgroups take, which may grow at any
    /// moment.
    pub fn follows_groups(&self) -> bool {
        self.cgroups_limit.is_some() && self.wanted.is_none()
    }

    /// Writes the present limit into the control segment.
    pub fn update(&mut self, control: &Control) {
        let wanted = control.wanted_limit();
        if wanted != self.wanted {
            (self.wanted, self.is_applied, self.above) = (wanted, false, None);
            wanted.into_iter().for_each(|wanted| self.begin(control, wanted));
        }
        match (wanted, &mut self.cgroups_limit) {
            (Some(wanted), _) => self.apply(control, wanted, control.tree_anon_bytes().0),
            (None, Some(cgroups_limit)) => {
                let taken_bytes = control.tree_anon_bytes().0;
                let target_bytes = cgroups_limit.target_bytes(taken_bytes);
                control.set_limit_bytes(self.step(taken_bytes, target_bytes, Patience::WhileAbove));
            }
            (None, None) => {}
        }
    }

    fn begin(&self, control: &Control, wanted: WantedLimit) {
        let machine = Machine::around(&self.groups);
        match wanted {
            WantedLimit::Bytes(bytes) => {
                warn_if_above(Limit::Bytes(bytes), machine, &self.groups);
                control.raise_max_limit_bytes(bytes);
                control.stop_following_need();
            }
            WantedLimit::OfNeed(divisor) => {
                let limit = of_need(divisor, machine.memory_bytes);
                control.raise_max_limit_bytes(limit.most_bytes());
                control.follow_need_from_now(divisor);
            }
        }
    }

    /// Brings the limit to the wanted one. The limit is written at every update, because an agent
    /// may still have raised it to a share of the need.
    fn apply(&mut self, control: &Control, wanted: WantedLimit, taken_bytes: u64) {
        let target_bytes = match wanted {
            // The program may have overwritten the word.
            WantedLimit::Bytes(bytes) => bytes.max(MIN_LIMIT_BYTES),
            WantedLimit::OfNeed(divisor) => {
                let limit = of_need(divisor, control.configuration().limit.most_bytes());
                let share_bytes = control.need_peak_bytes() / u64::from(divisor.get());
                share_bytes.clamp(limit.start_bytes(), limit.most_bytes())
            }
        };
        if self.is_applied {
            control.set_limit_bytes(target_bytes);
            return;
        }
        let limit_bytes = self.step(taken_bytes, target_bytes, Patience::WhileStuck);
        control.set_limit_bytes(limit_bytes);
        if limit_bytes == target_bytes {
            self.is_applied = true;
            control.note_limit_applied(wanted);
        }
    }

    /// Returns the next limit on the way down to `target_bytes`, for a run that takes
    /// `taken_bytes`.
    fn step(&mut self, taken_bytes: u64, target_bytes: u64, patience: Patience) -> u64 {
        if taken_bytes <= target_bytes {
            self.above = None;
            return target_bytes;
        }
        let now = Instant::now();
        let above = self.above.get_or_insert(Above { since: now, taken_bytes });
        let shrinks = taken_bytes < above.taken_bytes - (above.taken_bytes >> STEP_SHIFT);
        if patience == Patience::WhileStuck && shrinks {
            *above = Above { since: now, taken_bytes };
        }
        step_bytes(taken_bytes, target_bytes, now - above.since)
    }
}

/// Returns the next limit on the way down to `target_bytes`, for a run that takes `taken_bytes` and
/// has not followed for `stuck`.
fn step_bytes(taken_bytes: u64, target_bytes: u64, stuck: Duration) -> u64 {
    if stuck > MAX_STEPPING { target_bytes } else { target_bytes.max(taken_bytes - (taken_bytes >> STEP_SHIFT)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::settings::Configuration;
    use std::num::NonZeroU32;
    use std::path::Path;
    use std::sync::atomic::Ordering;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_limit_is_lowered_in_steps_but_not_forever() {
        let step = |taken, target, ms| step_bytes(taken, target, Duration::from_millis(ms));
        assert_eq!(step(6400, 3200, 0), 6300);
        assert_eq!(step(3210, 3200, 500), 3200);
        assert_eq!(step(6400, 3200, 1001), 3200);
        assert_eq!(step(100, 3200, 0), 3200);
    }

    #[test]
    fn a_limit_by_hand_is_applied_as_the_run_follows_and_holds() {
        let limit = Limit::Bytes(1 << 30);
        let configuration = Configuration::plain(limit);
        let (control, _fd) = Control::create(&configuration).unwrap();
        let me = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        let mut updater = LimitUpdater::new(limit, Cgroups::find(Path::new("/nonexistent")));
        let mut update = |taken_mib: u64| {
            me.anon_bytes.store(taken_mib * MIB, Ordering::Relaxed);
            me.measured_bytes.store(taken_mib * MIB, Ordering::Relaxed);
            control.sample_peaks();
            updater.update(control);
            control.limit_bytes() / MIB
        };
        assert_eq!(update(640), 1024, "nothing is wanted");
        let wanted = WantedLimit::Bytes(128 * MIB);
        control.want_limit(|_| Ok::<_, ()>(wanted)).unwrap();
        assert_eq!(update(640), 630);
        assert!(!control.is_limit_applied(wanted));
        assert_eq!((update(320), update(129)), (315, 128));
        assert!(control.is_limit_applied(wanted));
        assert_eq!(update(200), 128, "it is not raised again for a run that exceeds it");
        control.want_limit(|so_far| Ok::<_, ()>(WantedLimit::Bytes(so_far + 1024 * MIB))).unwrap();
        assert_eq!(update(200), 1152);
        assert_eq!(control.configuration().limit.most_bytes(), 1152 * MIB, "new processes reserve for it");
        let half = WantedLimit::OfNeed(NonZeroU32::new(2).unwrap());
        control.want_limit(|_| Ok::<_, ()>(half)).unwrap();
        assert_eq!((update(200), update(200)), (320, 320), "half of what was needed once");
        assert_eq!(update(800), 400);
        assert_eq!(update(100), 400);
        control.want_limit(|_| Ok::<_, ()>(WantedLimit::Bytes(1))).unwrap();
        assert_eq!(update(1), 16, "an overwritten word is no limit of nothing");
    }
}
