//! The figures of a run as OpenMetrics text, for Prometheus and others.
//!
//! The names are stable: `docs/reference/metrics.md` has them. All samples have the labels `pid`
//! and `program` of the run, so a scraper can tell runs apart. Few processes have samples of their
//! own: a build has thousands.

use crate::figures::Figures;
use foliomem_session::segment::Control;
use foliomem_types::counters::{Counter, Counters, FaultKind};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write;
use std::path::Path;

/// The media type of the text.
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Maximum number of processes that have samples of their own: the largest.
const MAX_PROCESSES: usize = 16;
/// Maximum length of the label `program`, in characters.
const MAX_PROGRAM: usize = 64;
/// Prefix of the counters' names that are gauges, as in the kernel.
const GAUGE_PREFIX: &str = "nr_";

/// The run that the text describes.
pub struct Metrics {
    control: &'static Control,
    /// The labels of every sample.
    labels: String,
}

/// Text that is being written.
struct Page<'a> {
    text: String,
    labels: &'a str,
}

impl Page<'_> {
    /// Begins a metric.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# TYPE foliomem_{name} {kind}\n# HELP foliomem_{name} {help}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.text, "foliomem_{name}{{{}{labels}}} {value}", self.labels);
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    /// Adds counters under the names that the kernel has for them.
    fn counters<'c>(&mut self, prefix: &str, fields: impl Iterator<Item = (&'static str, &'c Counter)>) {
        for (field, counter) in fields {
            let (name, help) = (format!("{prefix}_{field}"), format!("{field} of {prefix} in the statistics."));
            if field.starts_with(GAUGE_PREFIX) {
                self.gauge(&name, &help, counter.get());
            } else {
                self.family(&name, "counter", &help);
                self.sample(&format!("{name}_total"), "", counter.get());
            }
        }
    }

    fn faults(&mut self, counters: &Counters) {
        self.family("fault_seconds", "summary", "Time that threads waited for faults, by what the faults needed.");
        for kind in FaultKind::ALL {
            let (histogram, label) = (counters.faults(kind), format!(",kind=\"{}\"", kind.name()));
            self.sample("fault_seconds_count", &label, histogram.count());
            self.sample("fault_seconds_sum", &label, histogram.sum_ns.get() as f64 / 1e9);
        }
    }
}

impl Metrics {
    /// Returns the metrics of a run of `program`.
    pub fn new(control: &'static Control, program: &OsStr) -> Metrics {
        let name = Path::new(program).file_name().unwrap_or(program).to_string_lossy();
        let labels = format!("pid=\"{}\",program=\"{}\"", std::process::id(), label(&name));
        Metrics { control, labels }
    }

    /// Returns the text, with the present figures.
    pub fn text(&self) -> String {
        let (control, counters) = (self.control, self.control.sum());
        let figures = Figures::of_run(control);
        let mut page = Page { text: String::new(), labels: &self.labels };
        page.family("run", "info", "Version of foliomem.");
        page.sample("run_info", concat!(",version=\"", env!("CARGO_PKG_VERSION"), "\""), 1);
        page.gauge("limit_bytes", "The limit.", control.limit_bytes());
        page.gauge("taken_bytes", "What the run takes, the compressed store included.", figures.taken_bytes);
        page.gauge("needed_bytes", "What the run would take without compression.", control.tree_needed_bytes());
        page.gauge("resident_bytes", "What the run takes apart from the store.", figures.resident_bytes());
        page.gauge("stored_bytes", "What the compressed store takes.", figures.stored_bytes);
        page.gauge("content_bytes", "Uncompressed size of what store and swap file have.", figures.content_bytes);
        page.gauge("swap_file_bytes", "What lies in the swap file.", figures.swap_file_bytes);
        page.gauge(
            "limit_exceeded",
            "1 if the limit could not be held at some time.",
            control.was_limit_exceeded().into(),
        );
        let mut processes = sizes_by_pid(control.process_sizes());
        page.gauge("processes", "Processes that live.", processes.len() as u64);
        page.faults(&counters);
        page.family("memory_stall_seconds", "counter", "Time that the run waited for memory.");
        page.sample("memory_stall_seconds_total", "", control.memory_stall().stall_ns as f64 / 1e9);
        page.counters("vmstat", counters.vm.fields());
        page.counters("bd_stat", counters.backing.fields().filter(|(name, _)| *name != "bd_count"));
        page.family("process_taken_bytes", "gauge", "What the largest processes take.");
        processes.sort_unstable_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        for (pid, bytes) in processes.into_iter().take(MAX_PROCESSES) {
            page.sample("process_taken_bytes", &format!(",process=\"{pid}\""), bytes);
        }
        page.text + "# EOF\n"
    }
}

/// Returns the sizes of processes: one that executes another program has two slots for a moment.
fn sizes_by_pid(sizes: Vec<(u32, u64)>) -> Vec<(u32, u64)> {
    let mut by_pid = BTreeMap::new();
    for (pid, bytes) in sizes {
        let sum = by_pid.entry(pid).or_insert(0u64);
        *sum = sum.saturating_add(bytes);
    }
    by_pid.into_iter().collect()
}

/// Returns a value of a label: short, and with what the format needs before some characters.
fn label(text: &str) -> String {
    let letters = text.chars().take(MAX_PROGRAM).map(|letter| match letter {
        '\\' => "\\\\".to_owned(),
        '"' => "\\\"".to_owned(),
        '\n' => "\\n".to_owned(),
        other => other.to_string(),
    });
    letters.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_two_slots_is_one() {
        assert_eq!(sizes_by_pid(vec![(7, 1), (5, 2), (7, u64::MAX)]), [(5, 2), (7, u64::MAX)]);
    }

    #[test]
    fn a_label_is_short_and_escaped() {
        assert_eq!(label("a\"b\\c\nd é"), "a\\\"b\\\\c\\nd é");
        assert_eq!(label(&"x".repeat(1000)).len(), MAX_PROGRAM);
    }
}
