//! The checks of `doctor`, and those that `run` makes before it starts a program: each tries what
//! the agent does (`foliomem_sys::system_checks`), names the cause where that fails, and the line
//! that mends it.
//!
//! - [`userfaultfd`]: the permission, and the kernel;
//! - [`resources`]: descriptors, processes, address space, `/proc`;
//! - [`calls`]: filters of system calls, and Yama.
//!
//! A run pays for its checks each time, so they make no child where the calling process can try,
//! and look for a cause only where something is missing.

mod calls;
mod resources;
mod userfaultfd;

use crate::remedy::{Cause, Place};
use crate::supervise;
use foliomem_sys::system_checks::steps::{self, By};
use rustix::io::Errno;
use std::fmt;
use std::fs;

/// How a check came out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// As it should be.
    Fine,
    /// `run` works, with a drawback.
    Drawback,
    /// `run` does not work.
    Missing,
}

/// One check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Name of what was checked.
    pub what: &'static str,
    /// How it came out.
    pub state: State,
    /// What was found.
    pub found: String,
    /// Why; `None` if it is fine.
    pub cause: Option<Cause>,
}

impl Finding {
    fn fine(what: &'static str, found: impl Into<String>) -> Finding {
        Finding { what, state: State::Fine, found: found.into(), cause: None }
    }

    fn drawback(what: &'static str, found: impl Into<String>, cause: Cause) -> Finding {
        Finding { what, state: State::Drawback, found: found.into(), cause: Some(cause) }
    }

    fn missing(what: &'static str, found: impl Into<String>, cause: Cause) -> Finding {
        Finding { what, state: State::Missing, found: found.into(), cause: Some(cause) }
    }

    /// Returns the arrow and what to do at `place`, or nothing.
    pub fn remedy(&self, place: Place) -> String {
        self.cause.as_ref().map_or_else(String::new, |cause| format!(" -> {}", place.remedy(cause)))
    }
}

/// The failed checks that a run needs, and the place where foliomem runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotAllowed(Vec<Finding>, Place);

impl fmt::Display for NotAllowed {
    /// Writes a line for each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotAllowed(findings, place) = self;
        let line = |finding: &Finding| format!("{}: {}{}", finding.what, finding.found, finding.remedy(*place));
        f.write_str(&findings.iter().map(line).collect::<Vec<_>>().join("\nfoliomem: "))
    }
}

impl std::error::Error for NotAllowed {}

/// Checks what a run cannot do without. The calling process has one thread.
///
/// Where a filter may kill the caller of a system call, one child makes all checks. If that child
/// is killed, or if a check fails in it, each check runs in a child of its own, so that the cause
/// is known.
pub fn require() -> Result<(), NotAllowed> {
    let by = By::expendable();
    if by == By::Child {
        let checked = steps::run(by, |steps| {
            steps.take(0, || if missing(By::Caller).is_empty() { Ok(()) } else { Err(Errno::PERM) });
        });
        if checked.is_ok_and(|[step]| step.is_done()) {
            return Ok(());
        }
    }
    let missing = missing(by);
    if missing.is_empty() { Ok(()) } else { Err(NotAllowed(missing, Place::detect())) }
}

fn missing(by: By) -> Vec<Finding> {
    let mut findings = required(Amount::Needed, by);
    findings.retain(|finding| finding.state == State::Missing);
    findings
}

/// How much a check looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amount {
    /// The least that a run needs: each run checks it at its start.
    Needed,
    /// Enough for most programs, and all that makes a run better.
    Good,
}

fn required(amount: Amount, by: By) -> Vec<Finding> {
    let mut findings = userfaultfd::check(by);
    findings.extend([
        calls::shared_memory(by),
        calls::descriptors(amount, by),
        calls::memory_users(by),
        calls::others(by),
        resources::proc(amount, by),
        resources::open_files(amount, by),
        resources::processes(amount, by),
        resources::address_space(by),
    ]);
    findings
}

/// Makes every check, in the order in which they are printed.
pub fn all() -> Vec<Finding> {
    let by = By::expendable();
    let mut findings = required(Amount::Good, by);
    findings.extend([
        calls::fork(by),
        calls::io_uring(by),
        resources::overcommit(),
        resources::mappings(),
        resources::locked_memory(),
        agent(),
    ]);
    findings
}

/// Returns whether this process is in another user namespace than the first, which alone has all
/// users.
fn is_nested() -> bool {
    maps_few_users(&fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

/// Tells by the text of `/proc/self/uid_map`.
fn maps_few_users(uid_map: &str) -> bool {
    let fields: Vec<_> = uid_map.split_ascii_whitespace().collect();
    !fields.is_empty() && fields != ["0", "0", "4294967295"]
}

fn agent() -> Finding {
    match supervise::agent_path() {
        Ok(path) => Finding::fine("agent", path.display().to_string()),
        Err(error) => {
            let mend = Cause::Other("copy it there; `make build` of the sources makes both");
            Finding::missing("agent", error.to_string(), mend)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_that_is_not_fine_has_a_cause() {
        let findings = all();
        assert!(findings.len() >= 13, "{findings:?}");
        for finding in findings {
            let is_fine = finding.state == State::Fine;
            assert!(!finding.found.is_empty() && is_fine == finding.cause.is_none(), "{finding:?}");
        }
    }

    #[test]
    fn the_first_user_namespace_has_all_users() {
        assert!(!maps_few_users("         0          0 4294967295\n") && !maps_few_users(""));
        assert!(maps_few_users("0 1000 1\n") && maps_few_users("0 0 4294967295\n1 1 1\n"));
    }

    #[test]
    fn what_is_missing_is_a_line_each() {
        let findings = ["a", "b"].map(|what| Finding::missing(what, "x", Cause::Processes)).to_vec();
        let said = |place| NotAllowed(findings.clone(), place).to_string();
        assert_eq!(said(Place::Host), "a: x -> ulimit -u unlimited\nfoliomem: b: x -> ulimit -u unlimited");
        assert!(said(Place::Systemd).starts_with("a: x -> LimitNPROC=infinity\n"));
    }
}
