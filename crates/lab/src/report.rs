//! Reports: runs as one HTML page with tables and plots, without network access or scripts.

mod plots;

use crate::error::LabError;
use crate::outcome::{Outcome, SizeOutcome};
use crate::scenario::Scenario;
use crate::sweep::{Run, Settings, named};
use crate::workload::fallback_percent;
use foliomem_command::markup::{Attributes, Markup};
use foliomem_command::plot;
use foliomem_types::units::Order;

/// The style sheet. Colours follow the reader's; nothing in it needs escaping.
const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1340px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.6em 0; display: block; overflow-x: auto; }
th, td { padding: 0.15em 0.7em; text-align: right; border-bottom: 1px solid #8885; white-space: nowrap; }
th { font-weight: 600; }
th.name, td.name { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1em; }
";

/// A figure of a run.
struct Figure {
    name: &'static str,
    of: fn(&Outcome) -> Option<f64>,
    decimals: usize,
}

fn mib(pages: u64) -> Option<f64> {
    Some(Order::ZERO.bytes() as f64 / f64::from(1 << 20) * pages as f64)
}

/// Returns the percentage of large folios that were split at swap-out.
fn swap_out_fallback(outcome: &Outcome) -> Option<f64> {
    let large = outcome.sizes.iter().filter(|size| size.kib > Order::ZERO.kib());
    let (out, split) = large.fold((0, 0), |(out, split), size| (out + size.swpout, split + size.swpout_fallback));
    fallback_percent(out, split)
}

/// The figures of a run, in the table and in plots against varied settings.
const FIGURES: [Figure; 9] = [
    Figure { name: "fallback at swap-out, %", of: swap_out_fallback, decimals: 2 },
    Figure {
        name: "clusters scanned per allocation",
        of: |outcome| Some(outcome.clusters_scanned_per_alloc),
        decimals: 2,
    },
    Figure { name: "faults from swap", of: |outcome| Some(outcome.pgmajfault as f64), decimals: 0 },
    Figure { name: "swapped in, MiB", of: |outcome| mib(outcome.pswpin), decimals: 1 },
    Figure { name: "swapped out, MiB", of: |outcome| mib(outcome.pswpout), decimals: 1 },
    Figure { name: "peak memory, MiB", of: |outcome| mib(outcome.peak_pages), decimals: 1 },
    Figure { name: "peak swapped, MiB", of: |outcome| mib(outcome.peak_swapped_pages), decimals: 1 },
    Figure { name: "modelled time, s", of: |outcome| Some(outcome.modelled_elapsed_seconds), decimals: 3 },
    Figure { name: "modelled system time, s", of: |outcome| Some(outcome.modelled_sys_seconds), decimals: 3 },
];

/// Makes the page of some runs of the scenario `text` from the file `name`.
pub fn page(name: &str, text: &str, runs: &[Run]) -> Result<String, LabError> {
    let scenario = Scenario::parse(name, text)?;
    let varied = varied(runs);
    let title = format!("foliomem lab: {name}");
    let mut page = Markup::default();
    let attributes: Attributes = &[("xmlns", &"http://www.w3.org/1999/xhtml"), ("lang", &"en")];
    let mut common = Scenario::settings(name, text, runs.first().map_or(&[], |run| &run.set))?;
    common.retain(|(key, _)| !varied.contains(key));
    page.element("html", attributes, |html| {
        html.element("head", &[], |head| {
            head.void("meta", &[("charset", &"utf-8")]);
            head.leaf("title", &title);
            head.leaf("style", format_args!("{STYLE}{}", plot::STYLE));
        });
        html.element("body", &[], |body| {
            body.leaf("h1", &title);
            body.leaf("p", &scenario.about);
            body.leaf(
                "p",
                format_args!(
                    "{} runs by foliomem {}. Counts and ratios are the engine's own; times are modelled.",
                    runs.len(),
                    env!("CARGO_PKG_VERSION")
                ),
            );
            run_table(body, runs, &varied);
            plots::add(body, runs, &varied);
            settings_table(body, &common);
            body.leaf("h2", "Each run");
            (1..).zip(runs).for_each(|(number, run)| details(body, number, run));
        });
    });
    Ok(page.into_page())
}

/// Returns the settings that differ between runs.
fn varied(runs: &[Run]) -> Vec<String> {
    let Some(first) = runs.first() else { return Vec::new() };
    let differs = |key: &str| runs.iter().any(|run| value(run, key) != value(first, key));
    let mut keys: Vec<String> = Vec::new();
    for (key, _) in &first.set {
        if differs(key) && !keys.contains(key) {
            keys.push(key.clone());
        }
    }
    keys
}

/// Returns the value of a setting in a run; the last of several holds.
fn value<'a>(run: &'a Run, key: &str) -> &'a str {
    run.set.iter().rev().find(|(name, _)| name == key).map_or("", |(_, value)| value)
}

/// Returns the label of a run: its values of `keys`.
fn label(run: &Run, keys: &[String]) -> String {
    let settings: Settings = keys.iter().map(|key| (key.clone(), value(run, key).to_owned())).collect();
    named(&settings)
}

fn table(to: &mut Markup, head: &[String], rows: impl Iterator<Item = Vec<String>>) {
    to.element("table", &[], |table| {
        table.element("tr", &[], |row| head.iter().for_each(|name| row.leaf("th", name)));
        for cells in rows {
            table.element("tr", &[], |row| cells.iter().for_each(|cell| row.leaf("td", cell)));
        }
    });
}

/// Formats a number; `-` if there is none.
fn shown(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

fn run_table(body: &mut Markup, runs: &[Run], varied: &[String]) {
    body.leaf("h2", "Runs");
    let mut head = vec!["run".to_owned()];
    head.extend_from_slice(varied);
    head.extend(FIGURES.iter().map(|figure| figure.name.to_owned()));
    head.push("digest".to_owned());
    let cells = |(number, run): (usize, &Run)| {
        let settings = varied.iter().map(|key| value(run, key).to_owned());
        let figures = FIGURES.iter().map(|figure| shown((figure.of)(&run.outcome), figure.decimals));
        let digest = run.outcome.digest.clone();
        [number.to_string()].into_iter().chain(settings).chain(figures).chain([digest]).collect()
    };
    table(body, &head, (1..).zip(runs).map(cells));
}

fn settings_table(body: &mut Markup, common: &[(String, toml::Value)]) {
    body.leaf("h2", "Settings that all runs have");
    body.element("table", &[], |table| {
        for (key, value) in common {
            table.element("tr", &[], |row| {
                row.element("th", &[("class", &"name")], |cell| cell.text(key));
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                row.element("td", &[("class", &"name")], |cell| cell.text(text));
            });
        }
    });
}

/// Adds the complete outcome of a run.
fn details(body: &mut Markup, number: usize, run: &Run) {
    body.element("details", &[], |details| {
        details.leaf("summary", format_args!("Run {number}: {}", named(&run.set)));
        let outcome = &run.outcome;
        let head = ["size", "allocated", "not had", "swpin", "swpout", "fallback", "fallback, %"].map(str::to_owned);
        let size = |size: &SizeOutcome| {
            let counts =
                [size.anon_fault_alloc, size.anon_fault_fallback, size.swpin, size.swpout, size.swpout_fallback];
            let counts = counts.iter().map(ToString::to_string);
            [format!("{}K", size.kib)].into_iter().chain(counts).chain([shown(size.fallback_percent, 2)]).collect()
        };
        table(details, &head, outcome.sizes.iter().map(size));
        if outcome.rounds.len() > 1 {
            let head = ["round", "swpout", "fallback", "fallback, %"].map(str::to_owned);
            let rounds = (1..).zip(&outcome.rounds).map(|(number, round): (usize, _)| {
                let counts = [round.swpout, round.swpout_fallback].map(|count| count.to_string());
                [number.to_string()].into_iter().chain(counts).chain([shown(round.percent(), 2)]).collect()
            });
            table(details, &head, rounds);
        }
        let serde_json::Value::Object(fields) = serde_json::json!(outcome) else { return };
        let plain = fields.iter().filter(|(_, value)| !value.is_array());
        let text = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        table(details, &[], plain.map(|(name, value)| vec![name.clone(), text(value)]));
    });
}

#[cfg(test)]
mod tests;
