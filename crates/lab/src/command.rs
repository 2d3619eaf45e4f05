//! The commands of the lab: runs scenarios and prints their results.

pub mod args;
mod error;
mod files;
mod ray;
mod vary;

use args::{
    LabAdviseArgs, LabCalibrateArgs, LabCommand, LabExportArgs, LabReplayArgs, LabRunsArgs, LabSeedsArgs, LabSweepArgs,
};
use error::CommandError;
use files::Files;
use foliomem_command::become_beside;
use foliomem_lab::advice;
use foliomem_lab::costs::CostTable;
use foliomem_lab::outcome::Outcome;
use foliomem_lab::scenario::Scenario;
use foliomem_lab::seeds::{self, SeedRow};
use foliomem_lab::shipped::SHIPPED;
use foliomem_lab::sweep::{self, Run};
use foliomem_lab::trace_table;
use foliomem_lab::workload::{CacheOutcome, Summary};
use foliomem_types::size::{SizeError, format_mib, parse_bytes, parse_order};
use foliomem_types::units::{Order, PAGE_BYTES};
use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Runs the requested command; returns the exit code.
pub fn run_command(what: &LabCommand) -> Result<u8, CommandError> {
    match what {
        LabCommand::List => list(),
        LabCommand::Run(args) => {
            let (name, text) = sweep::read(&args.scenario.scenario)?;
            let varied = &args.scenario.varied;
            run(&name, &text, &varied.settings(), varied.costs.as_deref(), &args.runs)
        }
        LabCommand::Replay(args) => replay(args),
        LabCommand::Sweep(args) => sweep_by_ray(args),
        LabCommand::Advise(args) => advise(args),
        LabCommand::Export(args) => export(args),
        LabCommand::Seeds(args) => seeds(args),
        LabCommand::Calibrate(args) => calibrate(args),
    }
}

/// Has `foliomem-bench` measure the costs: the lab itself makes no system calls.
fn calibrate(args: &LabCalibrateArgs) -> Result<u8, CommandError> {
    let output = args.output.iter().flat_map(|path| [OsStr::new("--output"), path.as_os_str()]);
    match become_beside("foliomem-bench", [OsStr::new("calibrate")].into_iter().chain(output))? {}
}

fn threads(wanted: Option<u16>) -> usize {
    wanted.map_or_else(|| std::thread::available_parallelism().map_or(1, Into::into), usize::from)
}

fn say_progress(done: usize, of: usize) {
    if of > 1 {
        eprintln!("foliomem: {done} of {of} runs done");
    }
}

fn list() -> Result<u8, CommandError> {
    for shipped in SHIPPED {
        println!("{:<24} {}", shipped.name, Scenario::parse(shipped.name, shipped.text)?.about);
    }
    Ok(0)
}

fn run(
    name: &str,
    text: &str,
    vary: &[(String, Vec<String>)],
    costs: Option<&Path>,
    args: &LabRunsArgs,
) -> Result<u8, CommandError> {
    let files = Files::create(&args.files)?;
    let costs = cost_table(costs)?;
    let started = Instant::now();
    let runs = sweep::sweep(name, text, vary, costs.costs, threads(args.threads), &say_progress)?;
    show(name, text, &costs, &runs, started, files)
}

fn cost_table(file: Option<&Path>) -> Result<Cow<'static, CostTable>, CommandError> {
    Ok(match file {
        Some(file) => Cow::Owned(CostTable::read(file)?),
        None => Cow::Borrowed(CostTable::reference()),
    })
}

fn sweep_by_ray(args: &LabSweepArgs) -> Result<u8, CommandError> {
    let (name, text) = sweep::read(&args.scenario.scenario)?;
    let files = Files::create(&args.files)?;
    let started = Instant::now();
    let costs = cost_table(args.scenario.varied.costs.as_deref())?;
    let runs = ray::sweep(&args.ray, &name, &text, &args.scenario.varied.settings(), &costs)?;
    show(&name, &text, &costs, &runs, started, files)
}

/// Writes and prints the runs of a scenario.
fn show(
    name: &str,
    text: &str,
    costs: &CostTable,
    runs: &[Run],
    started: Instant,
    files: Files,
) -> Result<u8, CommandError> {
    let seconds = started.elapsed().as_secs_f64();
    if files.write(name, text, runs)? {
        return Ok(0);
    }
    for run in runs {
        println!("{name} {}", sweep::named(&run.set));
        print_outcome(&run.outcome);
    }
    eprintln!("foliomem: times are those of {}", costs.measured_on);
    let events: u64 = runs.iter().map(|run| run.outcome.page_events).sum();
    eprintln!(
        "foliomem: {events} page events in {seconds:.1} s, {:.1} million a second",
        events as f64 / seconds / 1e6
    );
    Ok(0)
}

fn export(args: &LabExportArgs) -> Result<u8, CommandError> {
    let events = trace_table::export(&args.trace, &args.output)?;
    eprintln!("foliomem: {}: {events} events", args.output.display());
    Ok(0)
}

/// Returns the limits of a list in MiB; shares are of `need_bytes`.
fn limits_mib(list: &[String], option: &'static str, need_bytes: u64) -> Result<Vec<u64>, CommandError> {
    let limit_mib = |text: &String| Ok(parse_bytes(text, Some(need_bytes))? >> 20);
    list.iter().map(limit_mib).collect::<Result<_, _>>().map_err(|error| CommandError::Setting(option, error))
}

fn advise(args: &LabAdviseArgs) -> Result<u8, CommandError> {
    let unwritable = |path: &Path| {
        let path = path.to_owned();
        move |error| CommandError::Advice(path, error)
    };
    let json = args.json.as_deref().filter(|path| *path != Path::new("-"));
    // Creates the file before the replays, so that an unwritable path fails at once.
    let json = json.map(|path| File::create(path).map_err(unwritable(path)).map(|file| (path, file))).transpose()?;
    let summary = Summary::of(&args.trace)?;
    let limits_mib = limits_mib(&args.at, "at", summary.peak_pages * PAGE_BYTES as u64)?;
    let advice = advice::advise(&args.trace, &summary, &limits_mib, threads(args.threads))?;
    match json {
        Some((path, mut file)) => {
            writeln!(file, "{}", serde_json::json!(advice)).map_err(unwritable(path))?;
            print!("{advice}");
        }
        None if args.json.is_some() => println!("{}", serde_json::json!(advice)),
        None => print!("{advice}"),
    }
    Ok(0)
}

/// Shift of the tolerance: a limit within 1/2^4 of the recorded one counts as equal.
const NEARLY_SHIFT: u32 = 4;

fn replay(args: &LabReplayArgs) -> Result<u8, CommandError> {
    let summary = Summary::of(&args.trace)?;
    let peak_bytes = summary.peak_pages * PAGE_BYTES as u64;
    let bad = |name| move |error: SizeError| CommandError::Setting(name, error);
    let limits = limits_mib(&args.limit, "limit", peak_bytes)?;
    let sizes = args.sizes.iter().filter(|size| *size != "none").map(|size| Ok(parse_order(size)?.kib().to_string()));
    let sizes = sizes.collect::<Result<Vec<_>, _>>().map_err(bad("sizes"))?;
    eprintln!(
        "foliomem: {}: {} at most, {} of {} processes looked at, {} touches seen, {} events lost",
        args.trace.display(),
        format_mib(peak_bytes),
        summary.managed_processes,
        summary.processes,
        summary.touches,
        summary.lost
    );
    if let Some(limit_bytes) = summary.limit_pages.map(|pages| pages * PAGE_BYTES as u64)
        && limits.iter().any(|limit_mib| limit_mib << 20 < limit_bytes - (limit_bytes >> NEARLY_SHIFT))
    {
        let limit = format_mib(limit_bytes);
        eprintln!("foliomem: recorded within {limit}: what the program would touch again in less is not known");
    }
    let mut set = vec![("machine.limit_mib".to_owned(), limits.iter().map(u64::to_string).collect())];
    if !sizes.is_empty() {
        set.push(("machine.sizes_kib".to_owned(), vec![sizes.join("+")]));
    }
    set.extend(args.varied.settings());
    let scenario = summary.scenario(&args.trace);
    run(&args.trace.display().to_string(), &scenario, &set, args.varied.costs.as_deref(), &args.runs)
}

fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.2}%"))
}

fn print_outcome(outcome: &Outcome) {
    if outcome.rounds.len() > 1 {
        println!("  {:>6} {:>9} {:>9} {:>9}", "round", "swpout", "fallback", "");
        for (number, round) in (1..).zip(&outcome.rounds) {
            println!("  {number:>6} {:>9} {:>9} {:>9}", round.swpout, round.swpout_fallback, percent(round.percent()));
        }
    }
    if let Some(cache) = &outcome.page_cache {
        return print_page_cache(cache, outcome);
    }
    println!(
        "  {:>6} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9}",
        "size", "allocated", "not had", "swpin", "swpout", "fallback", ""
    );
    for size in &outcome.sizes {
        println!(
            "  {:>5}K {:>10} {:>10} {:>9} {:>9} {:>9} {:>9}",
            size.kib,
            size.anon_fault_alloc,
            size.anon_fault_fallback,
            size.swpin,
            size.swpout,
            size.swpout_fallback,
            percent(size.fallback_percent)
        );
    }
    println!(
        "  clusters scanned per allocation {:.2}; slots taken from larger folios' clusters {}; at most {} MiB in, {} out",
        outcome.clusters_scanned_per_alloc,
        outcome.slots_stolen,
        outcome.peak_pages >> 8,
        outcome.peak_swapped_pages >> 8,
    );
    println!("  faults from swap {}; pages in {}, out {}", outcome.pgmajfault, outcome.pswpin, outcome.pswpout);
    println!(
        "  modelled: {:.1} s of CPU in {:.1} s, {:.1} s of it not the program's own; digest {}",
        outcome.modelled_cpu_seconds, outcome.modelled_elapsed_seconds, outcome.modelled_sys_seconds, outcome.digest
    );
}

fn print_page_cache(cache: &CacheOutcome, outcome: &Outcome) {
    let counters = &cache.counters;
    println!("  {:>6} {:>10} {:>10}", "size", "allocated", "not had");
    for ((order, allocated), not_had) in Order::all().zip(counters.allocated).zip(counters.fallbacks) {
        if allocated + not_had > 0 {
            println!("  {:>5}K {allocated:>10} {not_had:>10}", order.kib());
        }
    }
    println!(
        "  compactions {}, of which {} made a run; pages looked at {}, moved {}; pages dropped {}, page tables {}",
        cache.compact_stall,
        cache.compact_success,
        cache.compact_migrate_scanned,
        cache.pgmigrate_success,
        counters.reclaimed_pages,
        counters.most_table_pages
    );
    println!(
        "  modelled: {:.0} KiB/s in {:.1} s; digest {}",
        cache.modelled_throughput, outcome.modelled_elapsed_seconds, outcome.digest
    );
}

fn seeds(args: &LabSeedsArgs) -> Result<u8, CommandError> {
    let rows = seeds::run(&args.only, threads(args.threads), &say_progress)?;
    if args.json {
        println!("{}", serde_json::json!(rows));
        return Ok(0);
    }
    for row in &rows {
        println!("{}", seed_line(row));
    }
    let covered = rows.iter().filter(|row| row.agrees.is_some()).count();
    let agreeing = rows.iter().filter(|row| row.agrees == Some(true)).count();
    println!("{} rows, {covered} covered, {agreeing} agree", rows.len());
    Ok(0)
}

fn seed_line(row: &SeedRow) -> String {
    let agrees = match row.agrees {
        Some(true) => "agrees",
        Some(false) => "DIFFERS",
        None => "-",
    };
    let ours = |figure: &Option<String>| figure.clone().unwrap_or_else(|| "-".to_owned());
    let published = &row.published;
    format!(
        "{:<7} {}, {}, {}, {}: published {} -> {} {}, ours {} -> {}: {}",
        agrees,
        published.series,
        published.workload,
        published.config,
        published.metric,
        published.before,
        published.after,
        published.unit,
        ours(&row.ours_before),
        ours(&row.ours_after),
        row.why
    )
}
