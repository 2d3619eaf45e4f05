//! The page of a run: one HTML file without scripts that needs no network.
//!
//! Figures of the statistics are `data` elements whose `title` is their path in the JSON of
//! `--stats`, and whose `value` is exactly what stands there.

use crate::run_report::Processes;
use crate::timeline::{Point, Timeline};
use foliomem_command::markup::Markup;
use foliomem_command::plot::{self, Axis, Plot, Series};
use foliomem_types::counters::{BackingCounters, Counter, FaultKind, SizeCounters, StoreCounters, VmCounters};
use foliomem_types::size::format_mib;
use foliomem_types::units::Order;
use serde_json::Value;
use std::fmt::Display;
use std::time::Duration;

/// The style sheet. Colours follow the reader's; nothing in it needs escaping.
const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 62em; margin: 1.5em auto; padding: 0 1em; overflow-wrap: break-word; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; }
h2 { font-size: 1.2em; margin: 1.6em 0 0.3em; }
p { margin: 0.4em 0; }
small, .note { color: color-mix(in srgb, currentColor 70%, transparent); }
.note small { color: inherit; }
small { display: block; font-weight: 400; font-size: 0.85em; }
code { font-size: 0.95em; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 0.6em; }
dl div { border: 1px solid #8886; border-radius: 0.5em; padding: 0.5em 0.7em; }
dt { font-size: 0.85em; }
dd { margin: 0; font-size: 1.3em; font-weight: 600; }
dd small { font-size: 0.6em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.6em 0; }
th, td { padding: 0.2em 0.9em 0.2em 0; text-align: right; border-bottom: 1px solid #8885; vertical-align: top; }
td { white-space: nowrap; }
th { font-weight: 600; }
th.name, td.name { text-align: left; white-space: normal; min-width: 9em; }
.list td:first-child, .list th:first-child { text-align: left; }
.zero { opacity: 0.6; }
.plots { display: flex; flex-wrap: wrap; gap: 1em; }
figure { width: 100%; }
.plots figure { flex: 1 1 22em; width: auto; }
.plots svg text { font-size: 16px; }
@media screen and (max-width: 600px) {
  body { font-size: 15px; }
  table { font-size: 0.8em; }
  .plots svg text { font-size: 18px; }
  th, td { padding-right: 0.45em; }
  .sizes { font-size: 0.7em; }
  .kinds tr { display: grid; grid-template-columns: repeat(5, 1fr); border-bottom: 1px solid #8885; }
  .kinds th, .kinds td { border: none; }
  .kinds .name { grid-column: 1 / -1; }
}
@media print { body { margin: 0; max-width: none; font-size: 11px; } figure, tr, dl div { break-inside: avoid; } h2 { break-after: avoid; } }
";
/// A run that waited for memory for less than this percentage of its time hardly waited.
const LITTLE_PERCENT: f64 = 5.0;

/// The figures and events of a run that has ended.
pub struct Gathered<'a> {
    /// The name of the program.
    pub name: &'a str,
    /// The program and its arguments.
    pub command: &'a str,
    /// The exit code.
    pub code: u8,
    /// The summary.
    pub summary: String,
    /// Why the run was slow, if waiting for memory is why.
    pub why: Option<String>,
    /// The statistics.
    pub figures: &'a Value,
    /// The figures over time.
    pub timeline: &'a Timeline,
    /// The processes.
    pub processes: &'a Processes,
    /// The lines that were printed, and when.
    pub said: &'a [(Duration, String)],
}

/// Returns the page.
pub fn page(run: &Gathered<'_>) -> String {
    let title = format!("foliomem: {}", run.name);
    let mut page = Markup::default();
    page.element("html", &[("xmlns", &"http://www.w3.org/1999/xhtml"), ("lang", &"en")], |html| {
        html.element("head", &[], |head| {
            head.void("meta", &[("charset", &"utf-8")]);
            head.void("meta", &[("name", &"viewport"), ("content", &"width=device-width, initial-scale=1")]);
            head.leaf("title", &title);
            head.leaf("style", format_args!("{}{STYLE}", plot::STYLE));
        });
        html.element("body", &[], |body| {
            body.leaf("h1", &title);
            body.element("p", &[], |line| line.leaf("code", run.command));
            body.leaf("p", run.summary.trim_start_matches("foliomem: "));
            overview(body, run);
            advice(body, run);
            memory(body, run.timeline);
            waiting(body, run);
            sizes(body, run);
            processes(body, run.processes);
            said(body, run.said);
            counters(body, run);
            let version = run.figures["version"].as_str().unwrap_or_default();
            body.element("p", &[("class", &"note")], |note| {
                note.text(format_args!("Written by foliomem {version} at the end of the run. 1 MiB is 1024 KiB."));
            });
        });
    });
    page.into_page()
}

/// How a figure is shown.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Count,
    Nanoseconds,
    Percent,
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Unit::Bytes => format_mib(value as u64),
            Unit::Count => grouped(value as u64),
            Unit::Nanoseconds => duration(value),
            Unit::Percent => format!("{value:.1}%"),
        }
    }
}

/// Returns a number with narrow spaces between groups of three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

fn duration(ns: f64) -> String {
    match ns {
        short if short < 1e3 => format!("{short:.0} ns"),
        us if us < 1e6 => format!("{:.1} us", us / 1e3),
        ms if ms < 1e9 => format!("{:.1} ms", ms / 1e6),
        seconds if seconds < 600e9 => format!("{:.2} s", seconds / 1e9),
        minutes => format!("{:.1} min", minutes / 60e9),
    }
}

/// Returns the figure of a path such as `vmstat.pgfault`.
fn figure<'a>(figures: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(figures, |value, key| &value[key])
}

/// Adds a figure of the statistics.
fn datum(to: &mut Markup, figures: &Value, path: &str, unit: Unit) {
    let value = figure(figures, path);
    let text = unit.show(value.as_f64().unwrap_or(0.0));
    to.element("data", &[("title", &path), ("value", value)], |data| data.text(text));
}

fn overview(body: &mut Markup, run: &Gathered<'_>) {
    let cards = [
        ("duration", "elapsed_ns", Unit::Nanoseconds, "from the program's start"),
        ("limit", "limit_bytes", Unit::Bytes, "in the end"),
        ("peak", "peak_bytes", Unit::Bytes, "the most that all processes took"),
        ("need", "need_peak_bytes", Unit::Bytes, "the same without compression"),
        ("waiting for memory", "memory_stall_percent", Unit::Percent, "of the time"),
        ("page faults", "vmstat.pgfault", Unit::Count, "that foliomem served"),
        ("from swap", "vmstat.pgmajfault", Unit::Count, "faults that had to decompress or read"),
        ("processes", "processes", Unit::Count, "that joined the run"),
    ];
    body.element("dl", &[], |list| {
        for (name, path, unit, meaning) in cards {
            list.element("div", &[], |card| {
                card.leaf("dt", name);
                card.element("dd", &[], |value| {
                    datum(value, run.figures, path, unit);
                    value.leaf("small", meaning);
                });
            });
        }
        list.element("div", &[], |card| {
            card.leaf("dt", "exit code");
            card.element("dd", &[], |value| {
                value.text(run.code);
                value.leaf("small", "of the program, or 128 and its signal");
            });
        });
    });
}

fn advice(body: &mut Markup, run: &Gathered<'_>) {
    body.leaf("h2", "Advice");
    body.element("ul", &[], |list| sentences(run).iter().for_each(|line| list.leaf("li", line)));
}

/// Returns what the figures say about the limit. Nothing is predicted that was not measured.
fn sentences(run: &Gathered<'_>) -> Vec<String> {
    let number = |path: &str| figure(run.figures, path).as_f64().unwrap_or(0.0);
    let record = "Which time the run takes in another limit was not measured: 'foliomem record' and 'foliomem lab replay' \
                  predict its faults for many limits from one run.";
    let mut lines = Vec::new();
    let percent = number("memory_stall_percent");
    if let Some(why) = &run.why {
        lines.push(format!("{}{}.", why[..1].to_uppercase(), &why[1..]));
    } else if number("vmstat.pswpout") == 0.0 {
        let need = format_mib(number("need_peak_bytes") as u64);
        lines.push(format!(
            "Nothing was swapped out: the run needed {need}. Half of that (--limit need/2) is worth a try."
        ));
    } else if percent < LITTLE_PERCENT {
        lines.push(format!("The run waited for memory {percent:.1}% of its time: a smaller limit is worth a try."));
    } else {
        lines.push(format!("The run waited for memory {percent:.1}% of its time: a larger limit makes it faster."));
    }
    if run.figures["limit_exceeded"] == true {
        lines.push(
            "The limit could not be held at some time: the lines that foliomem printed, below, say why.".to_owned(),
        );
    }
    if number("vmstat.pgsteal_direct") > number("vmstat.pgsteal_kswapd") {
        let line = "Faults freed more memory themselves (pgsteal_direct) than the background did (pgsteal_kswapd): another \
                    CPU, or --codec lz4, makes them wait less.";
        lines.push(line.to_owned());
    }
    lines.push(record.to_owned());
    lines
}

fn memory(body: &mut Markup, timeline: &Timeline) {
    body.leaf("h2", "Memory over time");
    let points = timeline.points();
    if points.is_empty() {
        return body.leaf("p", "The run ended before its memory was measured.");
    }
    let mib = |name: &str, bytes: fn(&Point) -> u64| Series {
        name: name.to_owned(),
        values: points.iter().map(|point| Some(bytes(point) as f64 / f64::from(1 << 20))).collect(),
    };
    let mut series = vec![
        mib("resident", |point| point.sample.resident_bytes),
        mib("stored (compressed)", |point| point.sample.stored_bytes),
        mib("limit", |point| point.sample.limit_bytes),
    ];
    if points.iter().any(|point| point.sample.swap_file_bytes > 0) {
        series.push(mib("in the swap file", |point| point.sample.swap_file_bytes));
    }
    time_plot(body, &points, "memory, MiB", series, 2);
    let interval = timeline.interval().as_secs_f64();
    note(
        body,
        format_args!(
            "Resident memory and the compressed store above it are what the limit counts. Each point is the \
             moment of {interval} s at which both took most."
        ),
    );
    let (changes, more) = timeline.changes();
    if changes.is_empty() {
        return note(body, "The limit did not change.");
    }
    body.leaf("h3", "Changes of the limit");
    let rows = changes.iter().map(|change| {
        let at = |time: Duration| duration(time.as_nanos() as f64);
        [at(change.from), at(change.to), format_mib(change.before_bytes), format_mib(change.after_bytes)]
    });
    table(body, &["begun after", "done after", "from", "to"], rows);
    if more > 0 {
        note(body, format_args!("There were {more} more changes."));
    }
}

fn time_plot(body: &mut Markup, points: &[Point], title: &str, series: Vec<Series>, stacked: usize) {
    let seconds = points.iter().map(|point| point.seconds).collect();
    let (title, axis_name) = (title.to_owned(), "time since the start".to_owned());
    Plot { title, axis_name, axis: Axis::Time { seconds, stacked }, series }.draw(body);
}

fn note(body: &mut Markup, text: impl Display) {
    body.element("p", &[("class", &"note")], |note| note.text(text));
}

fn table<const N: usize>(body: &mut Markup, head: &[&str; N], rows: impl Iterator<Item = [String; N]>) {
    wide(body, "list", |table| {
        table.element("tr", &[], |row| head.iter().for_each(|name| row.leaf("th", name)));
        for cells in rows {
            table.element("tr", &[], |row| cells.iter().for_each(|cell| row.leaf("td", cell)));
        }
    });
}

/// Adds a table that scrolls by itself on a narrow screen.
fn wide(body: &mut Markup, class: &str, rows: impl FnOnce(&mut Markup)) {
    body.element("div", &[("class", &"wide")], |inside| inside.element("table", &[("class", &class)], rows));
}

/// Adds the first cell of a row: a name as in the statistics, and what it means.
fn name(row: &mut Markup, name: &str, meaning: &str) {
    row.element("th", &[("class", &"name")], |cell| {
        cell.leaf("code", name);
        cell.leaf("small", plain(meaning));
    });
}

/// Returns a meaning as plain text.
fn plain(meaning: &str) -> String {
    meaning.trim().replace('`', "")
}

/// Adds the name of a counter, which may be broken at each `_`.
fn breakable(cell: &mut Markup, name: &str) {
    cell.element("code", &[], |code| {
        for part in name.split_inclusive('_') {
            code.text(part);
            code.void("wbr", &[]);
        }
    });
}

const fn meaning_of(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::FirstTouch => "new memory, filled with zeros",
        FaultKind::Staged => "staged memory was mapped back without decompressing (second chance)",
        FaultKind::SwapIn => "content was decompressed, or read from the swap file",
        FaultKind::Spurious => "another thread had served it",
        FaultKind::Copy => "a write after a fork waited for room for the copy",
    }
}

fn waiting(body: &mut Markup, run: &Gathered<'_>) {
    body.leaf("h2", "What took the time");
    let points = run.timeline.points();
    if !points.is_empty() {
        let series = |name: &str, value: fn(&Point) -> f64| {
            vec![Series { name: name.to_owned(), values: points.iter().map(|point| Some(value(point))).collect() }]
        };
        body.element("div", &[("class", &"plots")], |plots| {
            time_plot(plots, &points, "waiting for memory, % of the time", series("waiting", |p| p.stall_percent), 1);
            time_plot(plots, &points, "page faults in a second", series("faults", |p| p.faults_per_s), 0);
        });
        note(
            body,
            "Waiting: of the threads that do not sleep, the share that waits for a page fault while memory is swapped in. Both \
             are of the last second, or of the time of a point.",
        );
    }
    body.leaf("h3", "Page faults by what they needed");
    wide(body, "kinds", |table| {
        table.element("tr", &[], |row| {
            row.element("th", &[("class", &"name")], |cell| cell.text("kind"));
            ["faults", "p50", "p99", "max", "all"].iter().for_each(|name| row.leaf("th", name));
        });
        for kind in FaultKind::ALL {
            table.element("tr", &[], |row| {
                name(row, kind.name(), meaning_of(kind));
                let cells = ["count", "p50_ns", "p99_ns", "max_ns", "total_ns"];
                for cell in cells {
                    let unit = if cell == "count" { Unit::Count } else { Unit::Nanoseconds };
                    let path = format!("faults.{}.{cell}", kind.name());
                    row.element("td", &[], |inside| datum(inside, run.figures, &path, unit));
                }
            });
        }
    });
    note(
        body,
        "p50 and p99: half and 99% of the faults took no longer, right within 25%. All: added over faults and threads. Times \
         are those of the agent; what the kernel takes to stop and wake a thread comes on top.",
    );
}

/// The columns of the table of sizes.
const SIZE_COLUMNS: [&str; 6] =
    ["anon_fault_alloc", "anon_fault_fallback", "swpout", "swpin", "swpin_fallback", "split"];

fn sizes(body: &mut Markup, run: &Gathered<'_>) {
    body.leaf("h2", "Folios by size");
    wide(body, "sizes", |table| {
        table.element("tr", &[], |row| {
            row.leaf("th", "size");
            SIZE_COLUMNS.iter().for_each(|column| row.element("th", &[], |cell| breakable(cell, column)));
        });
        for order in Order::all() {
            let path = |column: &str| format!("hugepages-{}kB.{column}", order.kib());
            let is_used = SIZE_COLUMNS.iter().any(|column| figure(run.figures, &path(column)) != 0);
            let class = if is_used { "used" } else { "zero" };
            table.element("tr", &[("class", &class)], |row| {
                row.leaf("td", format_args!("{} KiB", order.kib()));
                for column in SIZE_COLUMNS {
                    row.element("td", &[], |cell| datum(cell, run.figures, &path(column), Unit::Count));
                }
            });
        }
    });
    let counters = SizeCounters::default();
    let meanings = counters.fields().zip(SizeCounters::MEANINGS);
    body.element("ul", &[("class", &"note")], |list| {
        for ((column, _), meaning) in meanings.filter(|((column, _), _)| SIZE_COLUMNS.contains(column)) {
            list.element("li", &[], |item| {
                item.leaf("code", column);
                item.leaf("small", plain(meaning));
            });
        }
    });
}

fn processes(body: &mut Markup, processes: &Processes) {
    body.leaf("h2", "Processes");
    let largest = processes.largest();
    if largest.is_empty() {
        return body.leaf("p", "No process was measured.");
    }
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    let rows = largest.into_iter().map(|(pid, process)| {
        [
            format!("{} ({pid})", process.name),
            format_mib(process.taken_bytes),
            format_mib(process.swapped_out_bytes),
            grouped(process.faults),
            format!("{} to {}", seconds(process.seen.0), seconds(process.seen.1)),
        ]
    });
    table(body, &["name (pid)", "took at most", "swapped out at most", "faults", "seen"], rows);
    let more = if processes.is_incomplete() { " Smaller ones were left out." } else { "" };
    note(
        body,
        format_args!("What a process took has its part of the store; what was swapped out is uncompressed.{more}"),
    );
}

fn said(body: &mut Markup, said: &[(Duration, String)]) {
    if said.is_empty() {
        return;
    }
    body.leaf("h2", "What foliomem printed");
    body.element("ul", &[], |list| {
        for (at, line) in said {
            list.leaf("li", format_args!("after {:.1} s: {line}", at.as_secs_f64()));
        }
    });
}

fn counters(body: &mut Markup, run: &Gathered<'_>) {
    let (vm, store, backing) = (VmCounters::default(), StoreCounters::default(), BackingCounters::default());
    body.leaf("h2", "All counters");
    note(body, "By the kernel's names. A gauge has the value of the end, when most processes have none.");
    group(body, run, "vmstat", vm.fields().zip(VmCounters::MEANINGS));
    group(body, run, "mm_stat", store.fields().zip(StoreCounters::MEANINGS));
    group(body, run, "bd_stat", backing.fields().zip(BackingCounters::MEANINGS));
}

fn group<'c>(
    body: &mut Markup,
    run: &Gathered<'_>,
    group: &str,
    fields: impl Iterator<Item = ((&'static str, &'c Counter), &'c &'static str)>,
) {
    body.element("h3", &[], |head| head.leaf("code", group));
    wide(body, "counters", |table| {
        for ((field, _), meaning) in fields {
            let path = format!("{group}.{field}");
            let is_zero = figure(run.figures, &path) == 0;
            let class = if is_zero { "zero" } else { "used" };
            let unit = if is_bytes(field) { Unit::Bytes } else { Unit::Count };
            table.element("tr", &[("class", &class)], |row| {
                name(row, field, meaning);
                row.element("td", &[], |cell| datum(cell, run.figures, &path, unit));
            });
        }
    });
}

/// Returns whether a counter is in bytes.
fn is_bytes(field: &str) -> bool {
    ["_size", "_total", "_max", "_saved"].iter().any(|end| field.ends_with(end))
}
