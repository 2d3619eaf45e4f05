//! The columns of each benchmark's table.

use super::table::{Column, TableRow, known, name};
use foliomem_bench::{access, advise, compact, density, equal_total, lab, limit, slots, start, swap};
use serde::Serialize;
use serde::de::DeserializeOwned;

impl TableRow for swap::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::figure("size", |row| format!("{}K", row.size_kib)),
        Column::figure("codec", |row| row.codec.clone()),
        Column::figure("granule", |row| format!("{}K", row.granule_kib)),
        Column::figure("threads", |row| row.threads.to_string()),
        Column::figure("out MB/s", |row| format!("{:.0}", row.out_mb_s)),
        Column::figure("in MB/s", |row| format!("{:.0}", row.in_mb_s)),
        Column::figure("ratio", |row| format!("{:.2}", row.ratio)),
        Column::figure("memory", |row| format!("{:.2}", row.memory_ratio)),
        Column::figure("waste", |row| format!("{:.2}", row.waste)),
        Column::figure("raw out", |row| format!("{:.0}", row.raw_out_mb_s)),
        Column::figure("raw in", |row| format!("{:.0}", row.raw_in_mb_s)),
        Column::figure("kernel out", |row| known(row.kernel_out_mb_s, 0)),
        Column::figure("kernel in", |row| known(row.kernel_in_mb_s, 0)),
        Column::figure("kernel memory", |row| known(row.kernel_memory_ratio, 2)),
    ];
}

impl TableRow for slots::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("fill", 10, |row| name(&row.fill)),
        Column::figure("order", |row| row.order.to_string()),
        Column::figure("threads", |row| row.threads.to_string()),
        Column::key("strategy", 14, |row| row.strategy.clone()),
        Column::keyed_figure("ns per pair", |row| format!("{:.0}", row.ns_per_pair)),
        Column::keyed_figure("scanned/alloc", |row| format!("{:.2}", row.clusters_scanned_per_alloc)),
        Column::keyed_figure("fallback", |row| format!("{:.2}%", row.fallback_rate * 100.0)),
    ];
}

impl TableRow for compact::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("variant", 13, |row| row.variant.clone()),
        Column::figure("order", |row| row.order.to_string()),
        Column::figure("success", |row| format!("{:.1}%", row.success_rate * 100.0)),
        Column::figure("moved/success", |row| known(row.moved_pages_per_success, 1)),
        Column::figure("split/success", |row| known(row.split_pages_per_success, 1)),
        Column::figure("us/success", |row| known(row.us_per_success, 1)),
    ];
}

impl<P: Serialize + DeserializeOwned + 'static> TableRow for equal_total::Row<P> {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("program", 9, |row| name(&row.program)),
        Column::name("setting", 18, |row| name(&row.setting)),
        Column::figure("limit MiB", |row| known(row.limit_mib, 0)),
        Column::figure("total MiB", |row| format!("{:.0}", row.total_peak_mib)),
        Column::figure("seconds", |row| format!("{:.2}", row.seconds)),
        Column::name("result", 6, |row| match row.right_runs {
            0 => "WRONG".to_owned(),
            _ if row.result_ok => "right".to_owned(),
            right => format!("{right} of {} right", row.runs),
        }),
    ];
}

impl TableRow for access::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("pattern", 11, |row| name(&row.pattern)),
        Column::figure("need MiB", |row| row.need_mib.to_string()),
        Column::figure("threads", |row| row.threads.to_string()),
        Column::figure("limit %", |row| row.limit_percent.to_string()),
        Column::figure("total MiB", |row| row.total_mib.to_string()),
        Column::key("setting", 8, |row| row.setting.clone()),
        Column::keyed_figure("seconds", |row| format!("{:.2}", row.seconds)),
        Column::keyed_figure("p99 us", |row| format!("{:.0}", row.touch_p99_us)),
        Column::keyed_figure("p99.9 us", |row| format!("{:.0}", row.touch_p999_us)),
        Column::figure("kernel", |row| known(row.kernel_seconds, 2)),
        Column::figure("kernel p99 us", |row| known(row.kernel_touch_p99_us, 0)),
        Column::figure("kernel p99.9 us", |row| known(row.kernel_touch_p999_us, 0)),
    ];
}

impl TableRow for limit::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("program", 12, |row| name(&row.program)),
        Column::figure("margin %", |row| {
            row.margin_percent.map_or_else(|| "container".to_owned(), |percent| percent.to_string())
        }),
        Column::figure("runs", |row| row.runs.to_string()),
        Column::figure("killed", |row| row.killed.to_string()),
        Column::figure("over limit %", |row| format!("{:.1}", row.peak_over_limit_percent_max)),
        Column::figure("seconds", |row| format!("{:.1}", row.seconds)),
    ];
}

impl TableRow for advise::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("program", 8, |row| name(&row.program)),
        Column::figure("limit MiB", |row| row.limit_mib.to_string()),
        Column::figure("of need", |row| format!("{}%", row.limit_percent)),
        Column::figure("predicted", |row| {
            row.predicted.map_or_else(|| "not known".to_owned(), |predicted| format!("{predicted:.2}x"))
        }),
        Column::figure("measured", |row| format!("{:.2}x", row.measured)),
        Column::figure("off", |row| {
            row.error_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:+.0}%"))
        }),
        Column::figure("faults from swap", |row| {
            row.predicted_swap_ins.map_or_else(|| "-".to_owned(), |faults| faults.to_string())
        }),
        Column::figure("measured", |row| format!("{:.0}", row.measured_swap_ins)),
        Column::figure("seconds", |row| format!("{:.2}", row.seconds)),
    ];
}

impl TableRow for start::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("setting", 9, |row| name(&row.setting)),
        Column::figure("runs", |row| row.runs.to_string()),
        Column::figure("ms", |row| format!("{:.2}", row.milliseconds)),
        Column::figure("fastest ms", |row| format!("{:.2}", row.fastest_milliseconds)),
    ];
}

impl TableRow for density::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("setting", 9, |row| name(&row.setting)),
        Column::figure("sandboxes", |row| row.sandboxes.to_string()),
        Column::figure("total MiB", |row| format!("{:.0}", row.total_mib)),
        Column::figure("ready s (p99)", |row| format!("{:.2}", row.seconds_to_ready_p99)),
        Column::figure("resume s (p99)", |row| format!("{:.2}", row.resume_seconds_p99)),
    ];
}

impl TableRow for lab::Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::name("scenario", 18, |row| row.scenario.clone()),
        Column::figure("page events", |row| row.page_events.to_string()),
        Column::figure("seconds", |row| format!("{:.2}", row.seconds)),
        Column::figure("million a second", |row| format!("{:.2}", row.events_per_s / 1e6)),
        Column::figure("bytes per page", |row| format!("{:.0}", row.bytes_per_page)),
    ];
}
