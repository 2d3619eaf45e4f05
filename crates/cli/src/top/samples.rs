//! Samples for tests: runs and processes that do not exist.

use crate::figures::{Figures, Rates};
use crate::sampler::{Name, ProcessSample, RunId, RunSample};
use foliomem_types::counters::Counters;
use std::sync::Arc;
use std::time::Duration;

fn rates(faults_per_s: f64) -> Option<Rates> {
    Some(Rates { faults_per_s, waiting_percent: faults_per_s / 100.0 })
}

/// Returns a run without processes. Its program is the pid in a word.
pub fn run(pid: u32, taken_bytes: u64, faults_per_s: f64) -> RunSample {
    RunSample {
        id: RunId(u64::from(pid)),
        pid,
        program: vec![format!("/usr/bin/program{pid}"), "--fast".to_owned()],
        limit_bytes: 512 << 20,
        needed_bytes: 2 * taken_bytes,
        elapsed: Duration::from_secs(3700),
        figures: Figures::new(taken_bytes, &Counters::default()),
        rates: rates(faults_per_s),
        processes: Vec::new(),
    }
}

/// Returns a process.
pub fn process(pid: u32, parent_pid: u32, taken_bytes: u64) -> ProcessSample {
    let name = Name { parent_pid, program: vec![format!("/bin/part{pid}")] };
    let figures = Figures::new(taken_bytes, &Counters::default());
    ProcessSample { pid, name: Arc::new(name), figures, rates: rates(0.0) }
}
