//! The plan of the comparison: the runs for each published row.

use super::compare::Figure;
use super::{Published, vm_scalability};
use crate::error::LabError;
use crate::scenario::Scenario;
use crate::shipped;

/// A shipped scenario with settings.
pub type RunSpec = (&'static str, Vec<(&'static str, String)>);

/// The plan for a row.
pub enum Plan {
    /// Runs, as the figure needs them.
    Covered { runs: Vec<RunSpec>, figure: Figure },
    /// Runs of a kernel without a series, and with one more of its patches each time.
    Variants(Vec<RunSpec>),
    /// No runs, with the reason.
    NotCovered(&'static str),
}

impl Plan {
    /// Returns the runs of the plan.
    pub fn runs(&self) -> &[RunSpec] {
        match self {
            Plan::Covered { runs, .. } | Plan::Variants(runs) => runs,
            Plan::NotCovered(_) => &[],
        }
    }
}

/// Parses the scenario of a run.
pub fn parse(spec: &RunSpec) -> Result<Scenario, LabError> {
    let (name, settings) = spec;
    let Some(shipped) = shipped::find(name) else { unreachable!("{name} is shipped") };
    let settings: Vec<_> = settings.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    Scenario::parse_with(name, shipped.text, &settings)
}

/// Makes a run of a scenario with settings.
pub fn run(scenario: &'static str, settings: &[(&'static str, &str)]) -> RunSpec {
    (scenario, settings.iter().map(|&(key, value)| (key, value.to_owned())).collect())
}

/// Returns the plan for a row.
pub fn plan(row: &Published) -> Plan {
    match row.series.as_str() {
        "mthp-swap-out-2024-04" => usemem(row),
        "mthp-swap-in-2024-09" => swap_in(row),
        "anon-folios-2023-09" => anon_folios(row),
        "swap-cluster-scan-2025-08" => cluster_scan(row),
        "compaction-2023-11" => vm_scalability::plan(row),
        _ => Plan::NotCovered("the lab has no scenario for it"),
    }
}

/// Scales everything down to an eighth, which gives equal results. Before mTHP was swapped out
/// whole, 2 MiB folios already were.
fn usemem(row: &Published) -> Plan {
    let eighth = [("machine.limit_mib", "5120"), ("swap.size_mib", "4480"), ("workload.usemem.task_mib", "128")];
    let usemem = |sizes, split| {
        run("usemem", &[eighth[0], eighth[1], eighth[2], ("machine.sizes_kib", sizes), ("swap.split_kib", split)])
    };
    let (before, after) = match row.config.as_str() {
        "4K" => (usemem("", ""), usemem("", "")),
        "64K" => (usemem("64", "64"), usemem("64", "")),
        _ => (usemem("2048", ""), usemem("2048", "")),
    };
    let runs = vec![usemem("", ""), before, after];
    Plan::Covered { runs, figure: Figure::Throughput }
}

fn swap_in(row: &Published) -> Plan {
    let swap_in = |scenario, more: &[(&'static str, &str)]| {
        let by = |how| [&[("swap.swap_in", how)], more].concat();
        vec![run(scenario, &by("page")), run(scenario, &by("whole"))]
    };
    let granules = |store| {
        let by = |kib, sizes| {
            let granule = [("swap.store", store), ("swap.granule_kib", kib), ("machine.sizes_kib", sizes)];
            run("swap-bandwidth", &granule)
        };
        vec![by("4", ""), by("64", "64")]
    };
    let store = if row.config.starts_with("zstd") { "zstd" } else { "lz4" };
    let (runs, figure) = match (row.table.as_str(), row.metric.as_str()) {
        ("swap allocator test", metric) => {
            let Some(round) = row.config.strip_prefix("round ").and_then(|number| number.parse().ok()) else {
                return Plan::NotCovered("no such round");
            };
            let figure = if metric == "swpout" { Figure::RoundSwpout(round) } else { Figure::RoundPercent(round) };
            (swap_in("swap-allocator", &[]), figure)
        }
        ("granule", "compressed size") => {
            return Plan::NotCovered(
                "a ratio is what the table of costs says: foliomem bench swap --codec zstd measures it",
            );
        }
        ("granule", "swap-in time") => (granules(store), Figure::PageInTime),
        ("granule", _) => (granules(store), Figure::PageOutTime),
        ("same-filled", _) => {
            let filled = [("workload.swap-bandwidth.filled", "true"), ("workload.swap-bandwidth.rounds", "5")];
            (swap_in("swap-bandwidth", &filled), Figure::Bandwidth)
        }
        _ => return Plan::NotCovered("it is about a device that decompresses"),
    };
    Plan::Covered { runs, figure }
}

fn anon_folios(row: &Published) -> Plan {
    if row.table != "kernel build" {
        return Plan::NotCovered("not modelled: there is no trace of a browser");
    }
    let jobs = if row.workload.contains("-j80 ") { "80" } else { "8" };
    let units = if jobs == "80" { "400" } else { "100" };
    let build = |sizes: &str| {
        let common = [("machine.cpus", jobs), ("workload.kernel-build.jobs", jobs)];
        run(
            "kernel-build-roomy",
            &[common[0], common[1], ("workload.kernel-build.units", units), ("machine.sizes_kib", sizes)],
        )
    };
    let sizes = row.config.trim_end_matches(" folio").split('/').map(|size| size.trim_end_matches('k'));
    let runs = std::iter::once("").chain(sizes).map(build).collect();
    Plan::Covered { runs, figure: if row.metric == "peak memory change" { Figure::Memory } else { Figure::Times } }
}

fn cluster_scan(row: &Published) -> Plan {
    const LISTS: &str = "cluster-lists";
    const ONE: &str = "one-fragment";
    const NONFULL: &str = "nonfull-first";
    let strategies = match row.table.as_str() {
        "patch 1" | "kernel build 4K" => [LISTS, ONE],
        "patch 2" => [ONE, NONFULL],
        _ => [LISTS, NONFULL],
    };
    // On such a device a swapped-in folio keeps its slots, and is swapped in by pages.
    let not_synchronous = [("swap.store", "ram-disk"), ("swap.swap_in", "page"), ("swap.keep_copies", "true")];
    let only_pages = [("machine.sizes_kib", ""), ("machine.limit_mib", "768"), ("workload.kernel-build.jobs", "48")];
    let described = format!("{} {}", row.workload, row.config);
    let scenario = if row.table == "all sizes" { "kernel-build-all-sizes" } else { "kernel-build-64k" };
    let build = |strategy: &'static str| {
        let mut settings = vec![("swap.strategy", strategy)];
        settings.extend(described.contains("8G").then_some(("swap.size_mib", "8192")));
        settings.extend(described.contains("not synchronous").then_some(not_synchronous).into_iter().flatten());
        settings.extend((row.table == "kernel build 4K").then_some(only_pages).into_iter().flatten());
        run(scenario, &settings)
    };
    let size = row.config.split("kB").next().and_then(|kib| kib.parse().ok());
    let figure = match row.metric.as_str() {
        "sys time" => Figure::SysTime,
        "swpout" => Figure::Swpout(64),
        "swpout_fallback" => Figure::Fallback(64),
        _ => Figure::Both(size.unwrap_or(if row.config.starts_with("2M") { 2048 } else { 64 })),
    };
    Plan::Covered { runs: strategies.map(build).into(), figure }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::published;
    use foliomem_types::units::Order;

    #[test]
    fn every_row_has_valid_runs_or_a_reason() {
        let rows = published().unwrap();
        assert_eq!(rows.len(), 75);
        let mut not_covered = 0;
        for row in &rows {
            match plan(row) {
                Plan::Covered { runs, figure } => {
                    let sizes: Vec<_> = runs.iter().map(|spec| parse(spec).unwrap().machine.sizes_kib).collect();
                    assert!(sizes.len() > 1 && (runs[0] != runs[1] || row.config == "4K"), "{row:?}");
                    if let Figure::Swpout(kib) | Figure::Fallback(kib) | Figure::Both(kib) = figure {
                        let order = Order::from_bytes(u64::from(kib) << 10).unwrap();
                        assert!(sizes.iter().all(|sizes| sizes.contains(order)), "{row:?}");
                    }
                }
                Plan::Variants(runs) => {
                    runs.iter().for_each(|spec| drop(parse(spec).unwrap()));
                    assert!(runs.iter().enumerate().all(|(at, spec)| !runs[..at].contains(spec)), "{row:?}");
                }
                Plan::NotCovered(why) => {
                    assert!(!why.is_empty());
                    not_covered += 1;
                }
            }
        }
        assert_eq!(not_covered, 4, "2 of Speedometer, one of a size, one of a device");
    }
}
