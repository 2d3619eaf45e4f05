//! The checks of `doctor`, and those that `run` makes before it starts a program: each tries what
//! the agent does (`foliomem_sys::system_checks`), names the cause where that fails, and the line
//! that mends it.
//!
//! - [`userfaultfd`]: the permission, and the kernel;
//! - [`resources`]: descriptors, processes, address space, `/proc`;
//! - [`calls`]: filters of system calls, and Yama.

mod calls;
mod resources;
mod userfaultfd;

use crate::remedy::Place;
use crate::supervise;
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
    /// What to do about it; empty where there is nothing to do.
    pub mend: String,
}

impl Finding {
    fn fine(what: &'static str, found: impl Into<String>) -> Finding {
        Finding { what, state: State::Fine, found: found.into(), mend: String::new() }
    }

    fn drawback(what: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Finding {
        Finding { what, state: State::Drawback, found: found.into(), mend: mend.into() }
    }

    fn missing(what: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Finding {
        Finding { what, state: State::Missing, found: found.into(), mend: mend.into() }
    }

    /// Returns the arrow and what to do, or nothing.
    pub fn remedy(&self) -> String {
        if self.mend.is_empty() { String::new() } else { format!(" -> {}", self.mend) }
    }
}

/// What a run needs and does not have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotAllowed(Vec<Finding>);

impl fmt::Display for NotAllowed {
    /// Writes a line for each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> =
            self.0.iter().map(|finding| format!("{}: {}{}", finding.what, finding.found, finding.remedy())).collect();
        f.write_str(&lines.join("\nfoliomem: "))
    }
}

impl std::error::Error for NotAllowed {}

/// Checks what a run cannot do without.
pub fn require() -> Result<(), NotAllowed> {
    let mut findings = required(Place::detect(), Amount::Needed);
    findings.retain(|finding| finding.state == State::Missing);
    if findings.is_empty() { Ok(()) } else { Err(NotAllowed(findings)) }
}

/// How much of a resource a check looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amount {
    /// The least that a run needs: each run checks it at its start.
    Needed,
    /// Enough for most programs.
    Good,
}

fn required(place: Place, amount: Amount) -> Vec<Finding> {
    let mut findings = userfaultfd::check(place);
    findings.extend([
        calls::shared_memory(place),
        calls::descriptors(place),
        calls::others(place),
        resources::proc(place),
        resources::open_files(place, amount),
        resources::processes(place, amount),
        resources::address_space(place),
    ]);
    findings
}

/// Makes every check, in the order in which they are printed. What to do is said for `place`.
pub fn all(place: Place) -> Vec<Finding> {
    let mut findings = required(place, Amount::Good);
    findings.extend([
        calls::fork(place),
        calls::io_uring(place),
        resources::overcommit(place),
        resources::mappings(place),
        resources::locked_memory(place),
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
            Finding::missing("agent", error.to_string(), "copy it there; `make build` of the sources makes both")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_that_is_not_fine_says_what_to_do() {
        for place in Place::ALL {
            let findings = all(place);
            assert!(findings.len() >= 12, "{findings:?}");
            for finding in findings {
                assert!(
                    !finding.found.is_empty() && (finding.state == State::Fine) == finding.mend.is_empty(),
                    "{finding:?}"
                );
            }
        }
    }

    #[test]
    fn the_first_user_namespace_has_all_users() {
        assert!(!maps_few_users("         0          0 4294967295\n") && !maps_few_users(""));
        assert!(maps_few_users("0 1000 1\n") && maps_few_users("0 0 4294967295\n1 1 1\n"));
    }

    #[test]
    fn what_is_missing_is_a_line_each() {
        let findings = vec![Finding::missing("a", "b", "c"), Finding::missing("d", "e", "f")];
        assert_eq!(NotAllowed(findings).to_string(), "a: b -> c\nfoliomem: d: e -> f");
    }
}
