//! `foliomem doctor`: prints one line for each check, and how to mend what is missing.

use crate::args::DoctorArgs;
use crate::checks::{self, State};
use crate::remedy::Place;

/// Prints all findings; returns the exit code, which is 0 only if `run` will work.
pub fn doctor(args: &DoctorArgs) -> u8 {
    let findings = checks::all();
    let place = args.on.unwrap_or_else(Place::detect);
    for finding in &findings {
        let mark = match finding.state {
            State::Fine => "ok",
            State::Drawback => "note",
            State::Missing => "MISSING",
        };
        println!("{mark:<8}{:<14}{}{}", finding.what, finding.found, finding.remedy(place));
    }
    u8::from(findings.iter().any(|finding| finding.state == State::Missing))
}
