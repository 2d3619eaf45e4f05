//! Tests of the report.

use super::*;
use crate::costs::Costs;
use crate::shipped;
use crate::sweep;
use proptest::prelude::*;
use roxmltree::{Document, ParsingOptions};
use std::sync::LazyLock;

fn runs(varied: &[(&str, &[&str])]) -> Vec<Run> {
    let varied: Vec<_> = varied
        .iter()
        .map(|&(key, values)| (key.to_owned(), values.iter().map(|&value| value.to_owned()).collect()))
        .collect();
    sweep::sweep("swap-allocator", text(), &varied, Costs::reference(), 2, &|_, _| {}).unwrap()
}

fn text() -> &'static str {
    shipped::find("swap-allocator").unwrap().text
}

fn document(page: &str) -> Document<'_> {
    Document::parse_with_options(page, ParsingOptions { allow_dtd: true, ..ParsingOptions::default() }).unwrap()
}

/// Returns all texts of the elements with this tag.
fn texts(document: &Document, tag: &str) -> Vec<String> {
    let found = document.descendants().filter(|node| node.tag_name().name() == tag);
    found
        .map(|node| node.descendants().filter(roxmltree::Node::is_text).filter_map(|inner| inner.text()).collect())
        .collect()
}

#[test]
fn a_page_has_all_results_and_no_external_references() {
    let runs = runs(&[
        ("workload.swap-allocator.rounds", &["3", "5", "9"]),
        ("swap.strategy", &["cluster-lists", "nonfull-first"]),
        ("swap.size_mib", &["64"]),
    ]);
    let page = page("swap-allocator", text(), &runs).unwrap();
    let outside = page.replace("http://www.w3.org/1999/xhtml", "");
    for reference in ["http", "//", "src=", "href", "<script", "@import", "url("] {
        assert!(!outside.contains(reference), "{reference}");
    }
    let document = document(&page);
    let cells = texts(&document, "td");
    for run in &runs {
        let outcome = &run.outcome;
        let counts = outcome.sizes.iter().flat_map(|size| [size.swpin, size.swpout, size.swpout_fallback]);
        let counts = counts.chain(outcome.rounds.iter().flat_map(|round| [round.swpout, round.swpout_fallback]));
        let counts = counts.chain([outcome.faults, outcome.peak_pages, outcome.clusters_scanned, outcome.slots_stolen]);
        for wanted in counts.map(|count| count.to_string()).chain([outcome.digest.clone()]) {
            assert!(cells.contains(&wanted), "{wanted}");
        }
    }
    let headings = texts(&document, "h2");
    for wanted in ["Against swap.strategy", "Against workload.swap-allocator.rounds", "By round", "By folio size"] {
        assert!(headings.iter().any(|heading| heading == wanted), "{headings:?}");
    }
    assert!(!headings.iter().any(|heading| heading == "Against swap.size_mib"), "swap.size_mib does not vary");
    let points = texts(&document, "circle");
    let last = runs[5].outcome.rounds[8].percent().unwrap();
    let wanted = format!("swap.strategy=nonfull-first, 9: {last:.3}");
    assert!(
        points.iter().any(|point| point.starts_with("workload.") && point.trim_end().ends_with(&wanted)),
        "{wanted}"
    );
}

#[test]
fn more_runs_than_colours_need_several_plots() {
    let seeds: Vec<String> = (1..=30).map(|seed| seed.to_string()).collect();
    let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
    let runs = runs(&[("workload.swap-allocator.rounds", &["2"]), ("seed", &seeds)]);
    let page = page("swap-allocator", text(), &runs).unwrap();
    let document = document(&page);
    let by_round =
        document.descendants().filter(|node| node.attribute("aria-label") == Some("fallback at swap-out, %"));
    let lines = by_round.map(|svg| svg.children().filter(|node| node.has_tag_name("polyline")).count());
    let lines: Vec<usize> = lines.filter(|&lines| lines > 1).collect();
    assert_eq!(lines.iter().sum::<usize>(), 30);
    assert!(lines.iter().all(|&lines| lines <= plot::MAX_SERIES));
}

#[test]
fn a_page_without_runs_is_valid() {
    document(&page("swap-allocator", text(), &[]).unwrap());
}

static RUNS: LazyLock<Vec<Run>> = LazyLock::new(|| runs(&[("workload.swap-allocator.rounds", &["1"])]));

proptest! {
    #[test]
    fn any_name_or_setting_is_shown_as_text(name in any::<String>(), about in "[ -~]{0,30}[<>&\"']{0,9}") {
        let hostile = format!("{about}\"><script>alert(1)</script>");
        let mut table: toml::Table = toml::from_str(text()).unwrap();
        table["about"] = hostile.clone().into();
        let mut runs = RUNS.clone();
        runs[0].outcome.digest = hostile.clone();
        let page = page(&format!("{name}</title>"), &table.to_string(), &runs).unwrap();
        let document = document(&page);
        prop_assert!(texts(&document, "script").is_empty());
        prop_assert!(texts(&document, "p").contains(&hostile));
        prop_assert!(texts(&document, "td").contains(&hostile));
    }
}
