//! The commands of the benchmarks: they measure, and print rows as a table or as JSON.

pub mod args;
mod error;

use args::{
    BenchAccessArgs, BenchAdviseArgs, BenchCommand, BenchCompactArgs, BenchDensityArgs, BenchLabArgs, BenchLimitArgs,
    BenchProgramsArgs, BenchSlotsArgs, BenchStartArgs, BenchSwapArgs, CalibrateArgs,
};
use error::{BadValue, CommandError};
use foliomem_bench::{access, advise, calibrate, compact, density, lab, limit, programs, slots, start, swap};
use foliomem_command::beside;
use foliomem_core::cluster::Strategy;
use foliomem_core::compaction::Variant;
use foliomem_types::codec::UnknownCodec;
use foliomem_types::size::{parse_order, parse_orders};
use foliomem_types::units::Order;
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Runs the requested benchmark; returns the exit code.
pub fn run_command(what: &BenchCommand) -> Result<u8, CommandError> {
    match what {
        BenchCommand::Swap(args) => bench_swap(args),
        BenchCommand::Slots(args) => bench_slots(args),
        BenchCommand::Compact(args) => bench_compact(args),
        BenchCommand::Programs(args) => bench_programs(args),
        BenchCommand::Access(args) => bench_access(args),
        BenchCommand::Advise(args) => bench_advise(args),
        BenchCommand::Limit(args) => bench_limit(args),
        BenchCommand::Start(args) => bench_start(args),
        BenchCommand::Density(args) => bench_density(args),
        BenchCommand::Lab(args) => bench_lab(args),
        BenchCommand::Calibrate(args) => measure_costs(args),
    }
}

fn setting<T>(name: &'static str, value: Result<T, impl Into<BadValue>>) -> Result<T, CommandError> {
    value.map_err(|source| CommandError::Setting(name, source.into()))
}

fn bench_swap(args: &BenchSwapArgs) -> Result<u8, CommandError> {
    let sizes = match &args.sizes {
        // 4K is part of every set of folio sizes, but is measured only if it is named.
        Some(list) => {
            let set = setting("sizes", parse_orders(list))?;
            let has_single_pages = list.split(',').any(|size| parse_order(size) == Ok(Order::ZERO));
            Order::all()
                .filter(|&order| if order == Order::ZERO { has_single_pages } else { set.contains(order) })
                .collect()
        }
        None => swap::SIZES_KIB.iter().filter_map(|&kib| Order::from_bytes(u64::from(kib) << 10)).collect(),
    };
    let options = swap::Options {
        child: beside("foliomem-bench-swap")?,
        sizes,
        codecs: setting("codec", args.codec.iter().map(|codec| codec.parse()).collect::<Result<_, UnknownCodec>>())?,
        granules: setting("granule", args.granule.iter().map(|size| parse_order(size)).collect::<Result<_, _>>())?,
        threads: args.threads.clone(),
        kernel: !args.no_kernel,
    };
    if !args.json {
        println!(
            "{:>6} {:>11} {:>8} {:>7} {:>7} {:>7} {:>6} {:>7} {:>6} {:>8} {:>7} {:>11} {:>10} {:>13}",
            "size",
            "codec",
            "granule",
            "threads",
            "out",
            "in",
            "ratio",
            "memory",
            "waste",
            "raw out",
            "raw in",
            "kernel out",
            "kernel in",
            "kernel memory"
        );
    }
    let (rows, skipped) = swap::run(&options, &mut |row| {
        if !args.json {
            println!("{}", swap_line(row));
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(rows));
    }
    skipped.iter().for_each(|why| eprintln!("foliomem: {why}"));
    Ok(0)
}

fn swap_line(row: &swap::Row) -> String {
    let known = |figure: Option<f64>, digits: usize| figure.map_or_else(|| "-".to_owned(), |f| format!("{f:.digits$}"));
    format!(
        "{:>5}K {:>11} {:>7}K {:>7} {:>7.0} {:>7.0} {:>6.2} {:>7.2} {:>6.2} {:>8.0} {:>7.0} {:>11} {:>10} {:>13}",
        row.size_kib,
        row.codec,
        row.granule_kib,
        row.threads,
        row.out_mb_s,
        row.in_mb_s,
        row.ratio,
        row.memory_ratio,
        row.waste,
        row.raw_out_mb_s,
        row.raw_in_mb_s,
        known(row.kernel_out_mb_s, 0),
        known(row.kernel_in_mb_s, 0),
        known(row.kernel_memory_ratio, 2),
    )
}

fn to_orders(orders: &[u8]) -> Vec<Order> {
    orders.iter().filter_map(|&order| Order::new(order)).collect()
}

fn bench_slots(args: &BenchSlotsArgs) -> Result<u8, CommandError> {
    let strategies: Result<Vec<Strategy>, _> = args.strategies.iter().map(|name| name.parse()).collect();
    let strategies = setting("strategies", strategies)?;
    let options = slots::Options {
        strategies: if strategies.is_empty() { Strategy::ALL.to_vec() } else { strategies },
        orders: if args.orders.is_empty() { to_orders(&slots::ORDERS) } else { to_orders(&args.orders) },
        threads: if args.threads.is_empty() { slots::THREADS.to_vec() } else { args.threads.clone() },
    };
    if !args.json {
        println!(
            "{:>10} {:>5} {:>7} {:<14} {:>11} {:>13} {:>8}",
            "fill", "order", "threads", "strategy", "ns per pair", "scanned/alloc", "fallback"
        );
    }
    let rows = slots::run(&options, &mut |row| {
        if !args.json {
            println!("{}", slots_line(row));
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(rows));
    }
    Ok(0)
}

fn slots_line(row: &slots::Row) -> String {
    format!(
        "{:>10} {:>5} {:>7} {:<14} {:>11.0} {:>13.2} {:>7.2}%",
        row.fill,
        row.order,
        row.threads,
        row.strategy,
        row.ns_per_pair,
        row.clusters_scanned_per_alloc,
        row.fallback_rate * 100.0,
    )
}

fn bench_compact(args: &BenchCompactArgs) -> Result<u8, CommandError> {
    let variants: Result<Vec<Variant>, _> = args.variants.iter().map(|name| name.parse()).collect();
    let variants = setting("variants", variants)?;
    let options = compact::Options {
        variants: if variants.is_empty() { Variant::ALL.to_vec() } else { variants },
        orders: to_orders(if args.orders.is_empty() { &compact::ORDERS } else { &args.orders }),
    };
    if !args.json {
        println!(
            "{:<13} {:>5} {:>8} {:>13} {:>13} {:>10}",
            "variant", "order", "success", "moved/success", "split/success", "us/success"
        );
    }
    let rows = compact::run(&options, &mut |row| {
        if !args.json {
            let known = |figure: Option<f64>| figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.1}"));
            println!(
                "{:<13} {:>5} {:>7.1}% {:>13} {:>13} {:>10}",
                row.variant,
                row.order,
                row.success_rate * 100.0,
                known(row.moved_pages_per_success),
                known(row.split_pages_per_success),
                known(row.us_per_success)
            );
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(rows));
    }
    Ok(0)
}

fn bench_programs(args: &BenchProgramsArgs) -> Result<u8, CommandError> {
    let mut options = programs::Options::new(Some(beside("foliomem")?));
    options.kernel = !args.no_kernel;
    options.runs = args.runs.max(1);
    if !args.only.is_empty() {
        let find = |name: &String| {
            programs::Program::ALL
                .into_iter()
                .find(|program| serde_json::json!(program) == serde_json::json!(name))
                .ok_or_else(|| CommandError::NoSuchBenchmark(name.clone(), "numpy, redis, compile"))
        };
        options.programs = args.only.iter().map(find).collect::<Result<_, _>>()?;
    }
    if !args.json {
        println!("{:<9} {:<18} {:>10} {:>11} {:>9} result", "program", "setting", "limit MiB", "total MiB", "seconds");
    }
    let report = programs::run(&options, &mut |row| {
        if !args.json {
            println!("{}", programs_line(row));
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(report.rows));
    }
    report.skipped.iter().for_each(|why| eprintln!("foliomem: {why}"));
    Ok(0)
}

fn programs_line(row: &programs::Row) -> String {
    let name = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let result = match row.right_runs {
        0 => "WRONG".to_owned(),
        _ if row.result_ok => "right".to_owned(),
        right => format!("{right} of {} right", row.runs),
    };
    format!(
        "{:<9} {:<18} {:>10} {:>11.0} {:>9.2} {}",
        name(serde_json::json!(row.program)),
        name(serde_json::json!(row.setting)),
        row.limit_mib.map_or_else(|| "-".to_owned(), |mib| format!("{mib:.0}")),
        row.total_peak_mib,
        row.seconds,
        result,
    )
}

fn bench_access(args: &BenchAccessArgs) -> Result<u8, CommandError> {
    let find = |name: &String| {
        name.parse().map_err(|_| CommandError::NoSuchBenchmark(name.clone(), "sequential, strided, zipf, random"))
    };
    let named = args.only.iter().map(find).collect::<Result<Vec<access::Pattern>, _>>()?;
    let options = access::Options {
        foliomem: beside("foliomem")?,
        child: beside("foliomem-bench-access")?,
        patterns: if named.is_empty() { access::Pattern::ALL.to_vec() } else { named },
        limits: args.limits.clone(),
        kernel: !args.no_kernel,
        runs: args.runs.max(1),
    };
    if !args.json {
        println!(
            "{:<11} {:>7} {:>10} {:<8} {:>8} {:>8}",
            "pattern", "limit %", "total MiB", "setting", "seconds", "kernel"
        );
    }
    let rows = access::run(&options, &mut |row| {
        if !args.json {
            let kernel = row.kernel_seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.2}"));
            let (pattern, setting) = (row.pattern.to_string(), row.setting);
            println!(
                "{pattern:<11} {:>7} {:>10} {setting:<8} {:>8.2} {kernel:>8}",
                row.limit_percent, row.total_mib, row.seconds
            );
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(rows));
    }
    Ok(0)
}

/// Returns the programs of `all` with these names, or all of them without names. Fails if there is
/// no such program, with `known` as what there is.
fn programs_named<P: Copy + Serialize>(
    names: &[String],
    all: &[P],
    known: &'static str,
) -> Result<Vec<P>, CommandError> {
    let find = |name: &String| {
        let is_named = |program: &&P| serde_json::json!(program) == serde_json::json!(name);
        all.iter().find(is_named).copied().ok_or_else(|| CommandError::NoSuchBenchmark(name.clone(), known))
    };
    if names.is_empty() { Ok(all.to_vec()) } else { names.iter().map(find).collect() }
}

fn bench_limit(args: &BenchLimitArgs) -> Result<u8, CommandError> {
    let options = limit::Options {
        foliomem: beside("foliomem")?,
        programs: programs_named(&args.only, &limit::Program::ALL, "see foliomem bench limit --help")?,
        runs: args.runs,
        margin_percent: args.margin,
        groups_mib: args.groups.clone(),
    };
    if !args.json {
        println!(
            "{:<12} {:>8} {:>5} {:>6} {:>12} {:>8}",
            "program", "margin %", "runs", "killed", "over limit %", "seconds"
        );
    }
    let report = limit::run(&options, &mut |row| {
        if !args.json {
            println!("{}", limit_line(row));
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(report.rows));
    }
    report.skipped.iter().for_each(|why| eprintln!("foliomem: {why}"));
    Ok(0)
}

fn limit_line(row: &limit::Row) -> String {
    let limit::Row { program, margin_percent, runs, killed, peak_over_limit_percent_max, seconds } = row;
    let program = serde_json::json!(program);
    let program = program.as_str().unwrap_or_default();
    format!(
        "{program:<12} {margin_percent:>8} {runs:>5} {killed:>6} {peak_over_limit_percent_max:>12.1} {seconds:>8.1}"
    )
}

fn bench_advise(args: &BenchAdviseArgs) -> Result<u8, CommandError> {
    let options = advise::Options {
        foliomem: beside("foliomem")?,
        programs: programs_named(&args.only, &advise::Program::ALL, "numpy, compile, sqlite, redis, java")?,
        runs: args.runs,
    };
    if !args.json {
        println!(
            "{:<8} {:>9} {:>7} {:>9} {:>8} {:>6} {:>18} {:>8} {:>8}",
            "program",
            "limit MiB",
            "of need",
            "predicted",
            "measured",
            "off",
            "faults from swap",
            "measured",
            "seconds"
        );
    }
    let report = advise::run(&options, &mut |row| {
        if !args.json {
            println!("{}", advise_line(row));
        }
    })?;
    report.skipped.iter().for_each(|why| eprintln!("foliomem: {why}"));
    if args.json {
        println!("{}", serde_json::json!(report.rows));
    }
    Ok(0)
}

fn advise_line(row: &advise::Row) -> String {
    let program = serde_json::json!(row.program);
    format!(
        "{:<8} {:>9} {:>6}% {:>9} {:>7.2}x {:>6} {:>18} {:>8.0} {:>8.2}",
        program.as_str().unwrap_or_default(),
        row.limit_mib,
        row.limit_percent,
        row.predicted.map_or_else(|| "not known".to_owned(), |predicted| format!("{predicted:.2}x")),
        row.measured,
        row.error_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:+.0}%")),
        row.predicted_swap_ins.map_or_else(|| "-".to_owned(), |faults| faults.to_string()),
        row.measured_swap_ins,
        row.seconds
    )
}

fn bench_start(args: &BenchStartArgs) -> Result<u8, CommandError> {
    let rows = start::run(&beside("foliomem")?, args.runs as usize)?;
    if args.json {
        println!("{}", serde_json::json!(rows));
        return Ok(0);
    }
    println!("{:<9} {:>6} {:>8} {:>11} {:>6}", "setting", "runs", "ms", "fastest ms", "ratio");
    let plain = rows.first().map_or(0.0, |row| row.milliseconds);
    for row in &rows {
        let start::Row { setting, runs, milliseconds, fastest_milliseconds } = row;
        let setting = serde_json::json!(setting);
        let setting = setting.as_str().unwrap_or_default();
        let ratio = milliseconds / plain;
        println!("{setting:<9} {runs:>6} {milliseconds:>8.2} {fastest_milliseconds:>11.2} {ratio:>6.2}");
    }
    Ok(0)
}

fn bench_density(args: &BenchDensityArgs) -> Result<u8, CommandError> {
    let options = density::Options { foliomem: beside("foliomem")?, total_mib: args.total, ratings: args.ratings };
    if !args.json {
        println!(
            "{:<9} {:>9} {:>9} {:>13} {:>14}",
            "setting", "sandboxes", "total MiB", "ready s (p99)", "resume s (p99)"
        );
    }
    let rows = density::run(&options, &mut |row| {
        if !args.json {
            let density::Row { setting, sandboxes, total_mib, seconds_to_ready_p99, resume_seconds_p99 } = row;
            let setting = serde_json::json!(setting);
            let setting = setting.as_str().unwrap_or_default();
            println!(
                "{setting:<9} {sandboxes:>9} {total_mib:>9.0} {seconds_to_ready_p99:>13.2} {resume_seconds_p99:>14.2}"
            );
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(rows));
    }
    Ok(0)
}

fn bench_lab(args: &BenchLabArgs) -> Result<u8, CommandError> {
    if !args.json {
        println!(
            "{:<18} {:>12} {:>8} {:>16} {:>14}",
            "scenario", "page events", "seconds", "million a second", "bytes per page"
        );
    }
    let rows = lab::run(args.runs, &mut |row| {
        if !args.json {
            println!(
                "{:<18} {:>12} {:>8.2} {:>16.2} {:>14.0}",
                row.scenario,
                row.page_events,
                row.seconds,
                row.events_per_s / 1e6,
                row.bytes_per_page
            );
        }
    })?;
    if args.json {
        println!("{}", serde_json::json!(rows));
    }
    Ok(0)
}

fn measure_costs(args: &CalibrateArgs) -> Result<u8, CommandError> {
    let unwritable = |path: &Path, error| CommandError::Costs(path.to_owned(), error);
    // Creates the file first, so that an unwritable path fails before the measurement.
    let file = match &args.output {
        Some(path) => Some((path, File::create(path).map_err(|error| unwritable(path, error))?)),
        None => None,
    };
    let table = calibrate::run(&mut |done, of| eprintln!("foliomem: {done} of {of} rounds done"))?;
    match file {
        Some((path, mut file)) => {
            file.write_all(table.to_toml().as_bytes()).map_err(|error| unwritable(path, error))?
        }
        None => print!("{}", table.to_toml()),
    }
    Ok(0)
}
