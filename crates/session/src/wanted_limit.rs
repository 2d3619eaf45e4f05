//! The limit that a user has set by hand: `foliomem ctl PID limit` leaves it, the supervisor
//! applies it.
//!
//! The supervisor lowers the limit in steps, so that the run can follow. After the last step it
//! publishes the wanted limit as applied. There is no lock: the wanted and the applied limit are
//! one word each, and the supervisor writes the limit itself again until it is the wanted one.

use crate::segment::Control;
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

/// A limit that is set while the run goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WantedLimit {
    /// This many bytes.
    Bytes(u64),
    /// 1/divisor of the most memory that the tree has needed so far; it grows with that.
    OfNeed(NonZeroU32),
}

/// In the word: the rest is a divisor.
const OF_NEED: u64 = 1 << 63;

impl WantedLimit {
    /// Encodes the limit; 0 is none.
    fn encode(self) -> u64 {
        match self {
            WantedLimit::Bytes(bytes) => bytes.clamp(1, OF_NEED - 1),
            WantedLimit::OfNeed(divisor) => OF_NEED | u64::from(divisor.get()),
        }
    }

    /// Decodes any word; `None` if nothing is wanted.
    fn decode(word: u64) -> Option<WantedLimit> {
        match word & OF_NEED {
            0 => (word != 0).then_some(WantedLimit::Bytes(word)),
            _ => NonZeroU32::new(word as u32).map(WantedLimit::OfNeed),
        }
    }
}

impl Control {
    /// Returns the limit that is wanted by hand, if there is one.
    pub fn wanted_limit(&self) -> Option<WantedLimit> {
        WantedLimit::decode(self.header.wanted_limit.load(Ordering::Relaxed))
    }

    /// Asks for another limit. `change` gets the limit that holds so far, in bytes, or the wanted
    /// one; it may run several times. Fails with the error of `change`, and changes nothing then.
    pub fn want_limit<E>(&self, change: impl Fn(u64) -> Result<WantedLimit, E>) -> Result<WantedLimit, E> {
        let word = &self.header.wanted_limit;
        let mut before = word.load(Ordering::Relaxed);
        loop {
            let so_far_bytes = match WantedLimit::decode(before) {
                Some(WantedLimit::Bytes(bytes)) => bytes,
                _ => self.limit_bytes(),
            };
            let wanted = change(so_far_bytes)?;
            match word.compare_exchange(before, wanted.encode(), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(wanted),
                Err(now) => before = now,
            }
        }
    }

    /// Notes that the limit is `wanted` from now on. Only the supervisor calls this.
    pub fn note_limit_applied(&self, wanted: WantedLimit) {
        self.header.applied_limit.store(wanted.encode(), Ordering::Relaxed);
    }

    /// Returns whether the supervisor has set the limit to `wanted`.
    pub fn is_limit_applied(&self, wanted: WantedLimit) -> bool {
        self.header.applied_limit.load(Ordering::Relaxed) == wanted.encode()
    }

    /// Has new processes prepare for a limit of up to `bytes`. Only the supervisor calls this.
    pub fn raise_max_limit_bytes(&self, bytes: u64) {
        self.header.settings.max_limit_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Lets the limit follow the need from now on. The need is at least the peak so far. Only the
    /// supervisor calls this.
    pub fn follow_need_from_now(&self, divisor: NonZeroU32) {
        let peak_bytes = self.header.needed_peak_bytes.load(Ordering::Relaxed);
        self.header.need_peak_bytes.fetch_max(peak_bytes, Ordering::Relaxed);
        self.header.settings.need_divisor.store(divisor.get(), Ordering::Relaxed);
    }

    /// Stops the limit from following the need. An agent that has just read the divisor may raise
    /// the limit once more. Only the supervisor calls this.
    pub fn stop_following_need(&self) {
        self.header.settings.need_divisor.store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};
    use proptest::prelude::*;

    fn control() -> &'static Control {
        let configuration = Configuration::plain(Limit::Bytes(1 << 30));
        Control::create(&configuration).unwrap().0
    }

    proptest! {
        #[test]
        fn any_word_is_a_limit_or_none(word: u64) {
            if let Some(wanted) = WantedLimit::decode(word) {
                prop_assert_eq!(WantedLimit::decode(wanted.encode()), Some(wanted));
            }
        }
    }

    #[test]
    fn relative_changes_of_many_at_once_all_count() {
        let control = control();
        let more = |so_far: u64| Ok::<_, ()>(WantedLimit::Bytes(so_far + 4096));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| assert!(control.want_limit(more).is_ok())));
            }
        });
        assert_eq!(control.wanted_limit(), Some(WantedLimit::Bytes((1 << 30) + 4000 * 4096)));
        assert_eq!(control.limit_bytes(), 1 << 30, "the supervisor applies it");
    }

    #[test]
    fn a_refused_change_changes_nothing() {
        let control = control();
        assert_eq!(control.want_limit(Err), Err(1 << 30));
        assert_eq!(control.wanted_limit(), None);
        let half = WantedLimit::OfNeed(NonZeroU32::new(2).unwrap());
        assert_eq!(control.want_limit(|_| Ok::<_, ()>(half)), Ok(half));
        assert!(control.wanted_limit() == Some(half) && !control.is_limit_applied(half));
        control.note_limit_applied(half);
        assert!(control.is_limit_applied(half));
    }

    #[test]
    fn a_limit_of_the_need_knows_the_peak_from_before() {
        let control = control();
        let me = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        me.measured_bytes.store(400 << 20, Ordering::Relaxed);
        control.sample_peaks();
        assert_eq!(control.need_peak_bytes(), 0);
        me.measured_bytes.store(100 << 20, Ordering::Relaxed);
        control.follow_need_from_now(NonZeroU32::new(2).unwrap());
        assert_eq!(control.need_peak_bytes(), 400 << 20);
        control.stop_following_need();
        me.measured_bytes.store(800 << 20, Ordering::Relaxed);
        control.sample_peaks();
        assert_eq!(control.peaks().needed_bytes, 800 << 20, "peaks are seen after that, too");
        assert_eq!(control.limit_bytes(), 1 << 30);
    }
}
