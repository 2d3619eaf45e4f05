//! Keeps the tables of `docs/benchmarks.md`: each follows from the measurements of its name in
//! `docs/benchmarks`, which `cargo xtask bench-docs` adds.

use super::table::{TableRow, markdown};
use foliomem_bench::{access, advise, compact, density, lab, languages, limit, programs, slots, start, swap};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A kept measurement: the rows that one command printed as JSON, and where and when.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Measurement {
    /// The kind of machine, as `docs/benchmarks.md` names it.
    machine: String,
    /// The machine's CPUs, memory and kernel, as it describes itself.
    system: String,
    date: String,
    /// The built commit, with `-dirty` if the sources differed from it.
    commit: String,
    /// Runnable tasks before the measurement, the average of a minute.
    load: f64,
    /// The arguments of `foliomem bench`.
    arguments: Vec<String>,
    rows: serde_json::Value,
}

impl Measurement {
    /// Returns the paragraph and the table of the measurement.
    fn markdown(&self) -> String {
        let Measurement { machine, system, date, commit, load, arguments, rows } = self;
        let (figures, table) = match arguments.first().map_or("", String::as_str) {
            "swap" => parse::<swap::Row>(rows),
            "slots" => parse::<slots::Row>(rows),
            "compact" => parse::<compact::Row>(rows),
            "programs" => parse::<programs::Row>(rows),
            "languages" => parse::<languages::Row>(rows),
            "access" => parse::<access::Row>(rows),
            "limit" => parse::<limit::Row>(rows),
            "advise" => parse::<advise::Row>(rows),
            "start" => parse::<start::Row>(rows),
            "density" => parse::<density::Row>(rows),
            "lab" => parse::<lab::Row>(rows),
            other => panic!("foliomem bench has no command {other:?}"),
        };
        let figures = if figures.is_empty() { figures } else { format!(" Cells are {figures}.") };
        let command = arguments.join(" ");
        format!(
            "\n`foliomem bench {command}` on {machine} ({system}), {date}, commit {commit}, load before {load}.{figures}\n\n{table}"
        )
    }
}

/// Returns what the cells of the table are, if it is folded, and the table.
fn parse<R: TableRow>(rows: &serde_json::Value) -> (String, String) {
    let rows: Vec<R> = serde_json::from_value(rows.clone()).unwrap();
    (markdown::figures::<R>(), markdown::table(&rows))
}

/// Returns the kept measurements by the name of their table, then by machine. A file is called
/// `NAME.MACHINE.json`.
fn kept(directory: &Path) -> BTreeMap<String, Vec<Measurement>> {
    let mut paths: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let mut kept = BTreeMap::<_, Vec<_>>::new();
    for path in paths {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        let measurement = serde_json::from_str(&std::fs::read_to_string(&path).unwrap());
        let measurement = measurement.unwrap_or_else(|error| panic!("{file}: {error}"));
        kept.entry(file.split('.').next().unwrap().to_owned()).or_default().push(measurement);
    }
    kept
}

#[test]
fn the_reference_has_the_measurements() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut kept = kept(&docs.join("benchmarks"));
    let page = std::fs::read_to_string(docs.join("benchmarks.md")).unwrap();
    for part in page.lines().filter_map(|line| line.strip_prefix("<!-- generated: ")?.strip_suffix(" -->")) {
        let text = kept.remove(part).map_or_else(
            || "\nNo measurement is kept yet.\n\n".to_owned(),
            |measurements| measurements.iter().map(Measurement::markdown).collect::<String>() + "\n",
        );
        foliomem_command::docs::keep_part("benchmarks.md", part, &text);
    }
    let left: Vec<&String> = kept.keys().collect();
    assert!(left.is_empty(), "docs/benchmarks.md has no place <!-- generated: NAME --> for {left:?}");
}

#[test]
fn a_measurement_says_where_it_comes_from() {
    let text = r#"{
        "machine": "EPYC", "system": "2 CPUs, Linux 6.18", "date": "2026-11-26", "commit": "abc", "load": 0.5,
        "arguments": ["start", "--runs", "5"],
        "rows": [{"setting": "plain", "runs": 5, "milliseconds": 0.84, "fastest_milliseconds": 0.7}]
    }"#;
    let expected = "
`foliomem bench start --runs 5` on EPYC (2 CPUs, Linux 6.18), 2026-11-26, commit abc, load before 0.5.

| setting | runs | ms | fastest ms |
|---|---|---|---|
| plain | 5 | 0.84 | 0.70 |
";
    assert_eq!(serde_json::from_str::<Measurement>(text).unwrap().markdown(), expected);
}
