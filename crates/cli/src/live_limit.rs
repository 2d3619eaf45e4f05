//! Changes the limit of a run, for `foliomem ctl PID limit` and `foliomem top`, and waits until it
//! holds.
//!
//! The wanted limit is left in the control segment. The supervisor applies it, and the agents
//! reclaim down to it.

use crate::cgroups::Cgroups;
use crate::container_limit::{CONTAINER, MIN_LIMIT_BYTES};
use crate::error::{BadValue, CliError};
use crate::knob::Machine;
use crate::settings::parse_limit;
use foliomem_session::segment::Control;
use foliomem_session::wanted_limit::WantedLimit;
use foliomem_types::settings::Limit;
use foliomem_types::size::{format_mib, parse_bytes};
use std::path::Path;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Interval at which the sizes of the run are read.
const PAUSE: Duration = Duration::from_millis(5);
/// The supervisor checks for a wanted limit every half second at least. If it applies none for
/// this long, it is stopped or gone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A run that does not shrink by 1/2^6 in this time does not reach its limit.
const STUCK_TIMEOUT: Duration = Duration::from_secs(5);
const STUCK_SHIFT: u32 = 6;
/// The limit holds while the run is no further beyond it than this share (1/2^5), which reclaim
/// needs to free more.
const TOLERANCE_SHIFT: u32 = 5;

/// The reason why a changed limit does not hold.
#[derive(Debug, Error)]
pub enum LimitError {
    /// The run has ended.
    #[error("the run of process {0} ended before its limit was changed")]
    Ended(u32),
    /// The supervisor has not applied the limit.
    #[error(
        "the foliomem that runs process {0} does not answer, because it is stopped or gets no CPU: it changes the limit \
         when it goes on"
    )]
    NoAnswer(u32),
    /// Another command has changed the limit meanwhile.
    #[error("the limit of the run of process {0} was changed again meanwhile, to {1}")]
    ChangedAgain(u32, String),
    /// The run takes more than the new limit.
    #[error("the limit of {limit} does not hold yet: after {seconds:.1} s the run takes {taken}: {cause}; {remedy}")]
    NotHeld {
        /// The limit.
        limit: String,
        /// Memory that the run takes.
        taken: String,
        /// The time since the change.
        seconds: f64,
        /// The reason.
        cause: &'static str,
        /// The remedy for the user.
        remedy: &'static str,
    },
}

/// A change of a limit, as people write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    To(WantedLimit),
    More(u64),
    Less(u64),
}

impl Change {
    fn parse(text: &str, machine: &Machine) -> Result<Change, BadValue> {
        let size = |text| Ok::<_, BadValue>(parse_bytes(text, None)?);
        match text.strip_prefix('+').map(size).or_else(|| text.strip_prefix('-').map(size)) {
            Some(bytes) => bytes.map(if text.starts_with('+') { Change::More } else { Change::Less }),
            None if text == CONTAINER => Err(BadValue::ContainerByHand),
            None => Ok(Change::To(match parse_limit(text, machine)? {
                Limit::OfNeed { divisor, .. } => WantedLimit::OfNeed(divisor),
                limit => WantedLimit::Bytes(limit.start_bytes()),
            })),
        }
    }

    /// Returns the limit after the change, which was given as `text`.
    fn apply(self, so_far_bytes: u64, text: &str) -> Result<WantedLimit, BadValue> {
        let bytes = match self {
            Change::To(wanted) => return Ok(wanted),
            Change::More(bytes) => so_far_bytes.saturating_add(bytes),
            Change::Less(bytes) => so_far_bytes.saturating_sub(bytes),
        };
        if bytes < MIN_LIMIT_BYTES {
            let given = format!("{} {text}", format_mib(so_far_bytes));
            let least_mib = MIN_LIMIT_BYTES >> 20;
            return Err(BadValue::LimitTooSmall { given, bytes, least_mib, meant: String::new() });
        }
        Ok(WantedLimit::Bytes(bytes))
    }
}

/// Changes the limit of the run of process `pid` as `text` says, and waits no longer than `timeout`
/// until it holds.
pub fn change(control: &Control, pid: u32, text: &str, timeout: Duration) -> Result<(), CliError> {
    let bad = |source| CliError::Setting { name: "limit", origin: "command line".to_owned(), source: Box::new(source) };
    let waiting = ask(control, pid, text).map_err(bad)?;
    if !timeout.is_zero() {
        let taken_bytes = waiting.wait(timeout)?;
        println!("limit   {}\ntaken   {}", format_mib(control.limit_bytes()), format_mib(taken_bytes));
    }
    Ok(())
}

/// Asks for the limit that `text` says, of the run of process `pid`.
pub fn ask<'a>(control: &'a Control, pid: u32, text: &str) -> Result<Waiting<'a>, BadValue> {
    let machine = Machine::around(&Cgroups::find(Path::new("/")));
    let change = Change::parse(text, &machine)?;
    let before_bytes = control.limit_bytes();
    let wanted = control.want_limit(|so_far_bytes| change.apply(so_far_bytes, text))?;
    Ok(Waiting { control, pid, wanted, before_bytes })
}

/// A change that can be waited for.
pub struct Waiting<'a> {
    control: &'a Control,
    pid: u32,
    wanted: WantedLimit,
    /// The limit before.
    before_bytes: u64,
}

impl Waiting<'_> {
    /// Waits until the limit holds. Returns what the run takes then, in bytes.
    pub fn wait(&self, timeout: Duration) -> Result<u64, LimitError> {
        let (control, started) = (self.control, Instant::now());
        let mut shrunk = (started, u64::MAX);
        loop {
            if control.has_ended() {
                return Err(LimitError::Ended(self.pid));
            }
            if control.wanted_limit() != Some(self.wanted) {
                let other = control.wanted_limit().map_or(CONTAINER.to_owned(), show);
                return Err(LimitError::ChangedAgain(self.pid, other));
            }
            let is_applied = control.is_limit_applied(self.wanted);
            let (now, taken_bytes, limit_bytes) = (Instant::now(), control.tree_anon_bytes().0, control.limit_bytes());
            if is_applied && taken_bytes <= limit_bytes + (limit_bytes >> TOLERANCE_SHIFT) {
                return Ok(taken_bytes);
            }
            if taken_bytes < shrunk.1 - (shrunk.1 >> STUCK_SHIFT) {
                shrunk = (now, taken_bytes);
            }
            let waited = now - started;
            let has_answer = is_applied || limit_bytes != self.before_bytes;
            if !has_answer && waited > ANSWER_TIMEOUT.min(timeout) {
                return Err(LimitError::NoAnswer(self.pid));
            }
            if waited > timeout || is_applied && now - shrunk.0 > STUCK_TIMEOUT {
                return Err(self.not_held(taken_bytes, waited));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn not_held(&self, taken_bytes: u64, waited: Duration) -> LimitError {
        let [cause, remedy] = self.control.tree_excess().explain();
        let (limit, taken) = (show(self.wanted), format_mib(taken_bytes));
        LimitError::NotHeld { limit, taken, seconds: waited.as_secs_f64(), cause, remedy }
    }
}

fn show(wanted: WantedLimit) -> String {
    match wanted {
        WantedLimit::Bytes(bytes) => format_mib(bytes),
        WantedLimit::OfNeed(divisor) => format!("need/{divisor}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    const MIB: u64 = 1 << 20;
    const MACHINE: Machine = Machine { memory_bytes: 1 << 30, container: None };

    fn changed(text: &str) -> Result<WantedLimit, String> {
        let change = Change::parse(text, &MACHINE).and_then(|change| change.apply(100 * MIB, text));
        change.map_err(|error| error.to_string())
    }

    #[test]
    fn a_limit_is_a_size_a_change_or_a_share_of_the_need() {
        assert_eq!(changed("64M"), Ok(WantedLimit::Bytes(64 * MIB)));
        assert_eq!(changed("50%"), Ok(WantedLimit::Bytes(512 * MIB)));
        assert_eq!(changed("+1.5G"), Ok(WantedLimit::Bytes(1636 * MIB)));
        assert_eq!(changed("-84M"), Ok(WantedLimit::Bytes(16 * MIB)));
        assert_eq!(changed("need/4"), Ok(WantedLimit::OfNeed(NonZeroU32::new(4).unwrap())));
    }

    #[test]
    fn a_bad_limit_is_refused_with_what_to_give() {
        for (text, said) in [
            ("-85M", "100 MiB -85M is 15728640 bytes, too small for a limit: at least 16 MiB"),
            ("-1T", "is 0 bytes, too small"),
            ("8M", "too small for a limit"),
            ("+much", "\"much\" is not a size"),
            ("--5M", "is not a size"),
            ("+5%", "a share of memory is not possible here"),
            ("", "is not a size"),
            ("need/0", "is no share"),
            ("container", "container is a limit for the start of a run"),
        ] {
            let error = changed(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
