//! Runs as a table: one row for each run, one column for each setting and for each value of an
//! outcome.
//!
//! The columns are those of the scenario and of [`Outcome`](crate::outcome::Outcome): settings by
//! their `--vary` keys, counters of a folio size with the size appended (`swpout_64k`), parts of a
//! workload as lists.

use crate::error::LabError;
use crate::scenario::Scenario;
use crate::sweep::Run;
use foliomem_types::units::Order;
use serde_json::Value;

/// The cells of a column, one for each row.
#[derive(Clone, PartialEq, Debug)]
pub enum Cells {
    /// Counts, sizes and page numbers.
    Integers(Vec<Option<i64>>),
    /// Seconds and ratios.
    Floats(Vec<Option<f64>>),
    /// Yes or no.
    Flags(Vec<Option<bool>>),
    /// Names.
    Texts(Vec<Option<String>>),
    /// Lists of counts.
    Lists(Vec<Vec<i64>>),
}

/// A column of the table.
#[derive(Clone, PartialEq, Debug)]
pub struct Column {
    /// The column's name.
    pub name: String,
    /// The column's cells.
    pub cells: Cells,
}

/// Converts `number`; values above `i64::MAX`, which no counter reaches, become `i64::MAX`.
pub fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Makes the table of some runs of the scenario `text` from the file `name`.
pub fn of_runs(name: &str, text: &str, runs: &[Run]) -> Result<Vec<Column>, LabError> {
    let named = runs.iter().map(|_| Value::from(name)).collect();
    let settings = runs.iter().map(|run| settings(name, text, run)).collect::<Result<Vec<_>, _>>()?;
    let outcomes: Vec<_> = runs.iter().map(results).collect();
    let mut columns = vec![column("scenario".to_owned(), named)];
    columns.extend(transposed(settings));
    columns.extend(transposed(outcomes));
    Ok(columns)
}

type Row = Vec<(String, Value)>;

/// Turns rows into columns. All rows have the same names in the same order.
fn transposed(rows: Vec<Row>) -> Vec<Column> {
    let names: Vec<String> = rows.first().into_iter().flatten().map(|(name, _)| name.clone()).collect();
    let mut rows: Vec<_> = rows.into_iter().map(|row| row.into_iter().map(|(_, value)| value)).collect();
    let next = |name| column(name, rows.iter_mut().map(|row| row.next().unwrap_or_default()).collect());
    names.into_iter().map(next).collect()
}

fn settings(name: &str, text: &str, run: &Run) -> Result<Row, LabError> {
    let value = |value: toml::Value| match value {
        toml::Value::Integer(number) => number.into(),
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::String(text) => text.into(),
        // The format that --vary takes.
        toml::Value::Array(items) => items.iter().map(ToString::to_string).collect::<Vec<_>>().join("+").into(),
        other => other.to_string().into(),
    };
    let settings = Scenario::settings(name, text, &run.set)?;
    Ok(settings.into_iter().map(|(key, setting)| (key, value(setting))).collect())
}

fn results(run: &Run) -> Row {
    let mut row = Vec::new();
    let Value::Object(outcome) = serde_json::json!(run.outcome) else { unreachable!("an outcome is an object") };
    for (name, value) in outcome {
        match value {
            Value::Array(sizes) if name == "sizes" => push_sizes(&sizes, &mut row),
            Value::Array(parts) => push_parts(&name, &parts, &mut row),
            Value::Object(cache) => push_page_cache(cache, &mut row),
            value => row.push((name, value)),
        }
    }
    row
}

/// Pushes the counters of a page cache: folio counts with the size appended, everything else by its
/// name.
fn push_page_cache(cache: serde_json::Map<String, Value>, row: &mut Row) {
    for (name, value) in cache {
        match value {
            Value::Array(counts) => {
                row.extend(Order::all().zip(counts).map(|(order, count)| (format!("{name}_{}k", order.kib()), count)));
            }
            value => row.push((name, value)),
        }
    }
}

/// Pushes the counters of all folio sizes. A size without events has zero counts.
fn push_sizes(sizes: &[Value], row: &mut Row) {
    let fields = sizes.first().and_then(Value::as_object).into_iter().flatten().filter(|(field, _)| *field != "kib");
    for order in Order::all() {
        let size = sizes.iter().find(|size| size["kib"] == order.kib());
        for (field, value) in fields.clone() {
            let nothing = if value.is_u64() { Value::from(0) } else { Value::Null };
            let found = size.map_or(nothing, |size| size[field].clone());
            row.push((format!("{field}_{}k", order.kib()), found));
        }
    }
}

fn push_parts(name: &str, parts: &[Value], row: &mut Row) {
    for field in ["swpout", "swpout_fallback"] {
        row.push((format!("{name}_{field}"), parts.iter().map(|part| part[field].clone()).collect()));
    }
}

fn column(name: String, values: Vec<Value>) -> Column {
    let is = |kind: fn(&Value) -> bool| values.iter().any(kind);
    let cells = if is(Value::is_array) {
        let list = |value: &Value| value.as_array().into_iter().flatten().filter_map(Value::as_i64).collect();
        Cells::Lists(values.iter().map(list).collect())
    } else if is(Value::is_string) {
        Cells::Texts(values.iter().map(|value| value.as_str().map(str::to_owned)).collect())
    } else if is(Value::is_boolean) {
        Cells::Flags(values.iter().map(Value::as_bool).collect())
    } else if is(Value::is_i64) || is(Value::is_u64) {
        Cells::Integers(values.iter().map(|value| value.as_i64().or(value.as_u64().map(signed))).collect())
    } else {
        Cells::Floats(values.iter().map(Value::as_f64).collect())
    };
    Column { name, cells }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::shipped;
    use crate::sweep::sweep;

    fn cells<'a>(columns: &'a [Column], name: &str) -> &'a Cells {
        let found: Vec<&Column> = columns.iter().filter(|column| column.name == name).collect();
        let [column] = found[..] else { panic!("{} columns {name}", found.len()) };
        &column.cells
    }

    #[test]
    fn each_run_is_a_row_with_all_settings_and_results() {
        let text = shipped::find("swap-allocator").unwrap().text;
        let varied = [
            ("machine.sizes_kib".to_owned(), vec!["16+64".to_owned(), String::new()]),
            ("workload.swap-allocator.rounds".to_owned(), vec!["2".to_owned()]),
        ];
        let runs = sweep("x.toml", text, &varied, Costs::reference(), 1, &|_, _| {}).unwrap();
        let columns = of_runs("x.toml", text, &runs).unwrap();
        let is = |name: &str, wanted: Cells| assert_eq!(*cells(&columns, name), wanted, "{name}");
        let texts = |texts: [&str; 2]| Cells::Texts(texts.map(|text| Some(text.to_owned())).to_vec());
        let counts = |of: fn(&Run) -> u64| Cells::Integers(runs.iter().map(|run| Some(signed(of(run)))).collect());
        is("scenario", texts(["x.toml", "x.toml"]));
        is("machine.sizes_kib", texts(["16+64", ""]));
        is("swap.size_mib", Cells::Integers(vec![Some(64); 2]));
        is("swap.keep_copies", Cells::Flags(vec![Some(false); 2]));
        is("workload.swap-allocator.rounds", Cells::Integers(vec![Some(2); 2]));
        is("digest", texts([&runs[0].outcome.digest, &runs[1].outcome.digest]));
        is("pswpout", counts(|run| run.outcome.pswpout));
        is("swpout_4k", counts(|run| run.outcome.sizes[0].swpout));
        let large = runs[0].outcome.sizes.last().unwrap();
        assert!(large.kib == 64 && large.swpout > 0, "{large:?}");
        is("swpout_64k", Cells::Integers(vec![Some(signed(large.swpout)), Some(0)]));
        is("fallback_percent_64k", Cells::Floats(vec![large.fallback_percent, None]));
        is("fallback_percent_2048k", Cells::Floats(vec![None; 2]));
        let rounds = |run: &Run| run.outcome.rounds.iter().map(|round| signed(round.swpout)).collect();
        is("rounds_swpout", Cells::Lists(runs.iter().map(rounds).collect()));
    }

    #[test]
    fn page_cache_counters_have_their_own_columns() {
        let text = shipped::find("vm-scalability").unwrap().text;
        let varied = [
            ("machine.limit_mib".to_owned(), vec!["64".to_owned()]),
            ("workload.vm-scalability.case".to_owned(), vec!["lru-file-readtwice".to_owned()]),
        ];
        let runs = sweep("v", text, &varied, Costs::reference(), 1, &|_, _| {}).unwrap();
        let columns = of_runs("v", text, &runs).unwrap();
        let cache = runs[0].outcome.page_cache.as_ref().unwrap();
        let count = |count: u64| Cells::Integers(vec![Some(signed(count))]);
        assert!(cache.counters.allocated[4] > 0);
        assert_eq!(*cells(&columns, "allocated_64k"), count(cache.counters.allocated[4]));
        assert_eq!(*cells(&columns, "reclaimed_pages"), count(cache.counters.reclaimed_pages));
        assert_eq!(*cells(&columns, "modelled_throughput"), Cells::Floats(vec![Some(cache.modelled_throughput)]));
    }
}
