//! The result of a run: a line for people, JSON with the kernel's names for programs.

use crate::thrashing::{self, Need, stall_percent};
use foliomem_session::process_table::ProcessSlot;
use foliomem_session::segment::Control;
use foliomem_session::swap_file::Medium;
use foliomem_session::tree_usage::Peaks;
use foliomem_types::counters::{Counters, FaultKind, Histogram};
use foliomem_types::size::format_mib;
use foliomem_types::units::{CLUSTER_BYTES, Order};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The figures of a run, while it goes on or once it has ended.
pub struct Report {
    /// Control segment of the run.
    control: &'static Control,
    /// Memory that the tree takes and needs now, in bytes.
    taken_bytes: u64,
    needed_bytes: u64,
    /// Peaks of the run, which are no less than that.
    peaks: Peaks,
    /// Duration of the run so far.
    elapsed: Duration,
}

impl Report {
    /// Returns the figures of now.
    pub fn of(control: &'static Control) -> Report {
        let (taken_bytes, needed_bytes) = (control.tree_measured_bytes(), control.tree_needed_bytes());
        let peaks = control.peaks_with(taken_bytes, needed_bytes);
        Report { control, taken_bytes, needed_bytes, peaks, elapsed: control.elapsed() }
    }

    /// Returns the message of an agent that stopped the run, if one did.
    pub fn failure(&self) -> Option<String> {
        self.control.failure().map(|line| line.trim().to_owned())
    }

    /// Returns the summary in one line.
    pub fn summary(&self) -> String {
        let counters = self.control.sum();
        let lost_ns: u64 = FaultKind::ALL.iter().map(|&kind| counters.faults(kind).sum_ns.get()).sum();
        let limit = format_mib(self.control.limit_bytes());
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

    /// Returns why the run was slow, if waiting for memory is why.
    pub fn why(&self) -> Option<String> {
        thrashing::why(self.control.memory_stall(), self.elapsed, Need::of(self.control))
    }

    /// Returns all figures as JSON, and what is true at the moment.
    pub fn status_json(&self) -> Value {
        let mut value = self.json();
        let processes = self.control.living_processes();
        if let Value::Object(map) = &mut value {
            map.insert("taken_bytes".to_owned(), json!(self.taken_bytes));
            map.insert("needed_bytes".to_owned(), json!(self.needed_bytes));
            let each = processes.iter().map(|(pid, slot)| process_json(*pid, slot));
            map.insert("living".to_owned(), each.collect());
        }
        value
    }

    /// Returns the figures of the moment in lines for people.
    pub fn status(&self) -> String {
        let mut text = format!(
            "limit   {}\ntaken   {}, at most {}\nneeded  {}, at most {}\n",
            format_mib(self.control.limit_bytes()),
            format_mib(self.taken_bytes),
            format_mib(self.peaks.taken_bytes),
            format_mib(self.needed_bytes),
            format_mib(self.peaks.needed_bytes),
        );
        for (pid, slot) in self.control.living_processes() {
            let out = slot.counters.store.orig_data_size.get();
            let (taken, out) = (format_mib(slot.measured_bytes()), format_mib(out));
            text.push_str(&format!("{pid:<7} takes {taken}, has {out} swapped out\n"));
        }
        text
    }

    /// Returns all figures as JSON.
    pub fn json(&self) -> Value {
        let counters = self.control.sum();
        let mut map = Map::new();
        map.insert("version".to_owned(), json!(env!("CARGO_PKG_VERSION")));
        map.insert("limit_bytes".to_owned(), json!(self.control.limit_bytes()));
        let swap = self.control.swap();
        let swap_bytes = match swap.medium() {
            Medium::Disk => u64::from(swap.clusters()) * CLUSTER_BYTES,
            Medium::Memory => 0,
        };
        map.insert("swap_bytes".to_owned(), json!(swap_bytes));
        map.insert("shared_store_bytes".to_owned(), json!(self.control.shared_store_bytes()));
        map.insert("peak_bytes".to_owned(), json!(self.peaks.taken_bytes));
        map.insert("need_peak_bytes".to_owned(), json!(self.peaks.needed_bytes));
        map.insert("limit_exceeded".to_owned(), json!(self.control.was_limit_exceeded()));
        map.insert("processes".to_owned(), json!(self.control.processes_seen()));
        map.insert("userfaultfds_unheld".to_owned(), json!(self.control.custody().unheld()));
        map.insert("elapsed_ns".to_owned(), json!(self.elapsed.as_nanos() as u64));
        let stall = self.control.memory_stall();
        map.insert("memory_stall_ns".to_owned(), json!(stall.stall_ns));
        map.insert("memory_stall_percent".to_owned(), json!(stall_percent(stall, self.elapsed)));
        map.insert("thrashing".to_owned(), json!(stall.thrashing));
        map.insert("turns".to_owned(), json!(self.control.turns()));
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

/// The memory that one process takes, and that it has swapped out.
fn process_json(pid: u32, slot: &ProcessSlot) -> Value {
    json!({
        "pid": pid,
        "taken_bytes": slot.measured_bytes(),
        "swapped_out_bytes": slot.counters.store.orig_data_size.get(),
        "store_bytes": slot.counters.store.mem_used_total.get(),
    })
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
