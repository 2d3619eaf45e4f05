//! The result of a run: a line for people, JSON with the kernel's names for programs.

use foliomem_session::segment::Control;
use foliomem_types::counters::{Counters, FaultKind, Histogram};
use foliomem_types::size::format_mib;
use foliomem_types::units::Order;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Peaks of a run in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peaks {
    /// Peak of the memory of the process tree.
    pub taken_bytes: u64,
    /// Peak of the memory that the tree would have taken without compression.
    pub needed_bytes: u64,
}

impl Peaks {
    /// Raises the peaks to the present sizes.
    pub fn sample(&mut self, control: &Control) {
        let ended_bytes = control.ended_peak_bytes();
        self.taken_bytes = self.taken_bytes.max(control.tree_measured_bytes()).max(ended_bytes);
        control.follow_need();
        // Where the limit follows the need, it has followed this very figure.
        let needed_bytes = match control.need_peak_bytes() {
            0 => control.tree_needed_bytes().max(ended_bytes),
            peak_bytes => peak_bytes,
        };
        self.needed_bytes = self.needed_bytes.max(needed_bytes);
    }
}

/// The report of a run that has ended.
pub struct Report {
    /// Control segment of the run.
    pub control: &'static Control,
    /// Limit at the end of the run, in bytes.
    pub limit_bytes: u64,
    /// Bytes of the swap file; 0 without one.
    pub swap_bytes: u64,
    /// Peaks of the run.
    pub peaks: Peaks,
    /// Duration of the run.
    pub elapsed: Duration,
}

impl Report {
    /// Returns the message of an agent that stopped the run, if one did.
    pub fn failure(&self) -> Option<String> {
        self.control.failure().map(|line| line.trim().to_owned())
    }

    /// Returns the summary in one line.
    pub fn summary(&self) -> String {
        let counters = self.control.sum();
        let lost_ns: u64 = FaultKind::ALL.iter().map(|&kind| counters.faults(kind).sum_ns.get()).sum();
        let limit = format_mib(self.limit_bytes);
        let Peaks { taken_bytes, needed_bytes } = self.peaks;
        let memory = if taken_bytes == 0 {
            format!("ended before its memory was measured, limit {limit}")
        } else {
            let ratio = needed_bytes as f64 / taken_bytes as f64;
            format!("peak {} of {limit}, needed {} ({ratio:.1}x)", format_mib(taken_bytes), format_mib(needed_bytes))
        };
        format!(
            "foliomem: {memory}; {} faults ({} from swap) took {:.2} s",
            counters.vm.pgfault.get(),
            counters.vm.pgmajfault.get(),
            Duration::from_nanos(lost_ns).as_secs_f64(),
        )
    }

    /// Returns all figures as JSON.
    pub fn json(&self) -> Value {
        let counters = self.control.sum();
        let mut map = Map::new();
        map.insert("version".to_owned(), json!(env!("CARGO_PKG_VERSION")));
        map.insert("limit_bytes".to_owned(), json!(self.limit_bytes));
        map.insert("swap_bytes".to_owned(), json!(self.swap_bytes));
        map.insert("peak_bytes".to_owned(), json!(self.peaks.taken_bytes));
        map.insert("need_peak_bytes".to_owned(), json!(self.peaks.needed_bytes));
        map.insert("limit_exceeded".to_owned(), json!(self.control.was_limit_exceeded()));
        map.insert("processes".to_owned(), json!(self.control.processes_seen()));
        map.insert("userfaultfds_unheld".to_owned(), json!(self.control.custody().unheld()));
        map.insert("elapsed_ns".to_owned(), json!(self.elapsed.as_nanos() as u64));
        for order in Order::all() {
            let name = format!("hugepages-{}kB", order.kib());
            map.insert(name, fields(counters.of(order).fields()));
        }
        map.insert("vmstat".to_owned(), fields(counters.vm.fields()));
        map.insert("mm_stat".to_owned(), fields(counters.store.fields()));
        map.insert("bd_stat".to_owned(), fields(counters.backing.fields()));
        map.insert("faults".to_owned(), faults(&counters));
        Value::Object(map)
    }
}

fn fields<'a>(fields: impl Iterator<Item = (&'static str, &'a foliomem_types::counters::Counter)>) -> Value {
    Value::Object(fields.map(|(name, counter)| (name.to_owned(), json!(counter.get()))).collect())
}

fn faults(counters: &Counters) -> Value {
    let kind = |kind: FaultKind| (kind.name().to_owned(), histogram(counters.faults(kind)));
    Value::Object(FaultKind::ALL.into_iter().map(kind).collect())
}

fn histogram(histogram: &Histogram) -> Value {
    json!({
        "count": histogram.count(),
        "p50_ns": histogram.quantile_ns(0.5),
        "p99_ns": histogram.quantile_ns(0.99),
        "max_ns": histogram.max_ns.get(),
        "total_ns": histogram.sum_ns.get(),
    })
}
