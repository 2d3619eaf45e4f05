//! `foliomem doctor`: prints one line for each check, and how to fix what is missing.

use crate::supervise;
use foliomem_sys::system_checks::{self, Finding, State};

/// Prints all findings; returns the exit code, which is 0 only if `run` will work.
pub fn doctor() -> u8 {
    let mut findings = system_checks::check_all();
    findings.push(agent());
    for finding in &findings {
        let mark = match finding.state {
            State::Fine => "ok",
            State::Drawback => "note",
            State::Missing => "MISSING",
        };
        let remedy = if finding.remedy.is_empty() { String::new() } else { format!(" -> {}", finding.remedy) };
        println!("{mark:<8}{:<14}{}{remedy}", finding.what, finding.found);
    }
    u8::from(findings.iter().any(|finding| finding.state == State::Missing))
}

fn agent() -> Finding {
    match supervise::agent_path() {
        Ok(path) => {
            Finding { what: "agent", state: State::Fine, found: path.display().to_string(), remedy: String::new() }
        }
        Err(error) => Finding {
            what: "agent",
            state: State::Missing,
            found: error.to_string(),
            remedy: "build it with `cargo build --release`, which puts both into one directory".to_owned(),
        },
    }
}
