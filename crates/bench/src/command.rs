//! The commands of the benchmarks: they measure, and print rows as a table or as JSON.

pub mod args;
mod columns;
mod error;
#[cfg(test)]
mod measurements;
mod table;

use args::{
    BenchAccessArgs, BenchAdviseArgs, BenchCommand, BenchCompactArgs, BenchDensityArgs, BenchLabArgs,
    BenchLanguagesArgs, BenchLimitArgs, BenchProgramsArgs, BenchSlotsArgs, BenchStartArgs, BenchSwapArgs,
    CalibrateArgs, Turns,
};
use error::{BadValue, CommandError};
use foliomem_bench::{
    access, advise, calibrate, compact, density, equal_total, lab, languages, limit, programs, slots, start, swap,
};
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
        BenchCommand::Languages(args) => bench_languages(args),
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

/// Returns the items of `all` with these names, or all items if there are no names. Fails for an
/// unknown name; the error lists `known`.
fn named<P: Copy + Serialize>(names: &[String], all: &[P], known: &'static str) -> Result<Vec<P>, CommandError> {
    let find = |name: &String| {
        let is_named = |known: &&P| table::name(*known) == *name;
        all.iter().find(is_named).copied().ok_or_else(|| CommandError::NoSuchBenchmark(name.clone(), known))
    };
    if names.is_empty() { Ok(all.to_vec()) } else { names.iter().map(find).collect() }
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
    table::print(args.printing.form(), |progress| {
        let (rows, skipped) = swap::run(&options, progress)?;
        report_skipped(&skipped);
        Ok(rows)
    })
}

/// Prints why something was not measured.
fn report_skipped(reasons: &[String]) {
    reasons.iter().for_each(|reason| eprintln!("foliomem: {reason}"));
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
    table::print(args.printing.form(), |progress| slots::run(&options, progress))
}

fn bench_compact(args: &BenchCompactArgs) -> Result<u8, CommandError> {
    let variants: Result<Vec<Variant>, _> = args.variants.iter().map(|name| name.parse()).collect();
    let variants = setting("variants", variants)?;
    let options = compact::Options {
        variants: if variants.is_empty() { Variant::ALL.to_vec() } else { variants },
        orders: to_orders(if args.orders.is_empty() { &compact::ORDERS } else { &args.orders }),
    };
    table::print(args.printing.form(), |progress| compact::run(&options, progress))
}

fn bench_programs(args: &BenchProgramsArgs) -> Result<u8, CommandError> {
    let options = programs::Options {
        programs: named(&args.only, &programs::Program::ALL, "numpy, redis, compile, make")?,
        settings: args.turns.settings()?,
    };
    table::print(args.printing.form(), |progress| {
        let report = programs::run(&options, progress)?;
        report_skipped(&report.skipped);
        Ok(report.rows)
    })
}

fn bench_languages(args: &BenchLanguagesArgs) -> Result<u8, CommandError> {
    let options = languages::Options {
        languages: named(&args.only, &languages::Language::ALL, languages::NAMES)?,
        settings: args.turns.settings()?,
        percent: args.percent,
        scale: args.scale,
    };
    table::print(args.printing.form(), |progress| {
        let report = languages::run(&options, progress)?;
        report_skipped(&report.skipped);
        Ok(report.rows)
    })
}

impl Turns {
    /// Returns the settings to run.
    fn settings(&self) -> Result<equal_total::Options, CommandError> {
        let foliomem = Some(beside("foliomem")?);
        Ok(equal_total::Options { foliomem, kernel: !self.no_kernel, runs: self.runs.max(1) })
    }
}

/// Returns the settings with these names, or all without names, as indices.
fn access_settings(names: &[String]) -> Result<Vec<usize>, CommandError> {
    let find = |name: &String| {
        let index = access::SETTINGS.iter().position(|(known, _)| known == name);
        index.ok_or_else(|| CommandError::NoSuchBenchmark(name.clone(), "default, 4K, 16K, 64K, 256K, 2M"))
    };
    if names.is_empty() { Ok((0..access::SETTINGS.len()).collect()) } else { names.iter().map(find).collect() }
}

fn bench_access(args: &BenchAccessArgs) -> Result<u8, CommandError> {
    let options = access::Options {
        foliomem: beside("foliomem")?,
        child: beside("foliomem-bench-access")?,
        patterns: named(&args.only, &access::Pattern::ALL, "sequential, strided, zipf, random")?,
        settings: access_settings(&args.settings)?,
        limits: args.limits.clone(),
        need_mib: args.need,
        touches_per_page: args.touches,
        threads: args.threads.clone(),
        kernel: !args.no_kernel,
        runs: args.runs.max(1),
    };
    table::print(args.printing.form(), |progress| access::run(&options, progress))
}

fn bench_limit(args: &BenchLimitArgs) -> Result<u8, CommandError> {
    let options = limit::Options {
        foliomem: beside("foliomem")?,
        programs: named(&args.only, &limit::Program::ALL, "see foliomem bench limit --help")?,
        runs: args.runs,
        margin: args.margin,
        groups_mib: args.groups.clone(),
    };
    table::print(args.printing.form(), |progress| {
        let report = limit::run(&options, progress)?;
        report_skipped(&report.skipped);
        Ok(report.rows)
    })
}

fn bench_advise(args: &BenchAdviseArgs) -> Result<u8, CommandError> {
    let options = advise::Options {
        foliomem: beside("foliomem")?,
        programs: named(&args.only, &advise::Program::ALL, "numpy, compile, sqlite, redis, java")?,
        runs: args.runs,
    };
    table::print(args.printing.form(), |progress| {
        let report = advise::run(&options, progress)?;
        report_skipped(&report.skipped);
        Ok(report.rows)
    })
}

fn bench_start(args: &BenchStartArgs) -> Result<u8, CommandError> {
    let foliomem = beside("foliomem")?;
    table::print(args.printing.form(), |progress| {
        let rows = start::run(&foliomem, args.runs as usize)?;
        rows.iter().for_each(progress);
        Ok(rows)
    })
}

fn bench_density(args: &BenchDensityArgs) -> Result<u8, CommandError> {
    let options = density::Options { foliomem: beside("foliomem")?, total_mib: args.total, ratings: args.ratings };
    table::print(args.printing.form(), |progress| {
        let (rows, skipped) = density::run(&options, progress)?;
        report_skipped(&skipped);
        Ok(rows)
    })
}

fn bench_lab(args: &BenchLabArgs) -> Result<u8, CommandError> {
    table::print(args.printing.form(), |progress| lab::run(args.runs, progress))
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
