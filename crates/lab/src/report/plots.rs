//! The plots of a page: figures against each varied setting, and runs side by side by round and by
//! folio size.

use super::{FIGURES, Figure, label, mib, value};
use crate::outcome::{Outcome, SizeOutcome};
use crate::sweep::Run;
use foliomem_command::markup::Markup;
use foliomem_command::plot::{Axis, MAX_SERIES, Plot, Series};
use foliomem_types::units::Order;

/// Adds all plots.
pub fn add(body: &mut Markup, runs: &[Run], varied: &[String]) {
    for key in varied {
        section(body, &format!("Against {key}"), against(runs, varied, key));
    }
    section(body, "By round", by_round(runs, varied));
    section(body, "By folio size", by_size(runs, varied));
}

fn section(body: &mut Markup, title: &str, plots: Vec<Plot>) {
    if plots.is_empty() {
        return;
    }
    body.leaf("h2", title);
    body.element("div", &[("class", &"plots")], |div| plots.iter().for_each(|plot| plot.draw(div)));
}

/// Distributes series over as many plots as needed to distinguish them.
fn split(series: Vec<Series>, plot: impl Fn(Vec<Series>) -> Plot) -> Vec<Plot> {
    let mut series = series.into_iter().peekable();
    let mut plots = Vec::new();
    while series.peek().is_some() {
        plots.push(plot(series.by_ref().take(MAX_SERIES).collect()));
    }
    plots
}

fn in_order(values: impl Iterator<Item = String>) -> Vec<String> {
    values.fold(Vec::new(), |mut found, value| {
        if !found.contains(&value) {
            found.push(value);
        }
        found
    })
}

/// Plots every figure against the setting `key`, with one series for each combination of the
/// others.
fn against(runs: &[Run], varied: &[String], key: &str) -> Vec<Plot> {
    let others: Vec<String> = varied.iter().filter(|other| *other != key).cloned().collect();
    let places = in_order(runs.iter().map(|run| value(run, key).to_owned()));
    let names = in_order(runs.iter().map(|run| label(run, &others)));
    let axis = || match places.iter().map(|place| place.parse().ok()).collect() {
        Some(numbers) => Axis::Numbers(numbers),
        None => Axis::Names(places.clone()),
    };
    let plots = |figure: &Figure| {
        let at = |name: &str, place: &String| {
            let run = runs.iter().find(|run| value(run, key) == place && label(run, &others) == name)?;
            (figure.of)(&run.outcome)
        };
        let series = names.iter().map(|name| {
            let values = places.iter().map(|place| at(name, place)).collect();
            Series { name: if others.is_empty() { figure.name.to_owned() } else { name.clone() }, values }
        });
        let series: Vec<Series> = series.filter(|series: &Series| series.values.iter().any(Option::is_some)).collect();
        let plot = |series| Plot { title: figure.name.to_owned(), axis_name: key.to_owned(), axis: axis(), series };
        split(series, plot)
    };
    FIGURES.iter().flat_map(plots).collect()
}

/// Returns the name of a run beside others: its varied settings, or its number.
fn name(number: usize, run: &Run, varied: &[String]) -> String {
    if varied.is_empty() { format!("run {number}") } else { label(run, varied) }
}

fn by_round(runs: &[Run], varied: &[String]) -> Vec<Plot> {
    let rounds = runs.iter().map(|run| run.outcome.rounds.len()).max().unwrap_or(0);
    if rounds < 2 {
        return Vec::new();
    }
    let series = (1..).zip(runs).map(|(number, run)| Series {
        name: name(number, run, varied),
        values: (0..rounds).map(|round| run.outcome.rounds.get(round)?.percent()).collect(),
    });
    split(series.collect(), |series| Plot {
        title: "fallback at swap-out, %".to_owned(),
        axis_name: "round".to_owned(),
        axis: Axis::Numbers((1..=rounds).map(|round| round as f64).collect()),
        series,
    })
}

/// Returns memory in MiB, not folios: one folio of 2 MiB equals 512 of 4 KiB.
fn moved_mib(size: &SizeOutcome, folios: u64) -> Option<f64> {
    mib(folios * u64::from(size.kib / Order::ZERO.kib()))
}

type SizeFigure = (&'static str, fn(&SizeOutcome) -> Option<f64>);

fn by_size(runs: &[Run], varied: &[String]) -> Vec<Plot> {
    let figures: [SizeFigure; 3] = [
        ("fallback at swap-out, %", |size| size.fallback_percent),
        ("swapped out (swpout), MiB", |size| moved_mib(size, size.swpout)),
        ("swapped in (swpin), MiB", |size| moved_mib(size, size.swpin)),
    ];
    let size_of = |outcome: &'_ Outcome, order: Order| -> Option<SizeOutcome> {
        outcome.sizes.iter().find(|size| size.kib == order.kib()).cloned()
    };
    let orders: Vec<Order> =
        Order::all().filter(|&order| runs.iter().any(|run| size_of(&run.outcome, order).is_some())).collect();
    let plots = figures.iter().flat_map(|(title, of)| {
        let series = (1..).zip(runs).map(|(number, run)| Series {
            name: name(number, run, varied),
            values: orders.iter().map(|&order| size_of(&run.outcome, order).as_ref().and_then(of)).collect(),
        });
        split(series.collect(), |series| Plot {
            title: (*title).to_owned(),
            axis_name: "folio size".to_owned(),
            axis: Axis::Names(orders.iter().map(|order| format!("{}K", order.kib())).collect()),
            series,
        })
    });
    plots.collect()
}
