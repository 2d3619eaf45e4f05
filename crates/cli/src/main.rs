//! The `foliomem` command.
//!
//! - `args` is the command line;
//! - `settings` declares all settings with `knob`, and resolves them from the command line, the
//!   environment and the configuration file;
//! - `checks` finds out what this machine allows, `remedy` says how to mend what it does not;
//! - `cgroups` finds the cgroups around this process, `container_limit` what they leave
//!   for a run;
//! - `preflight` refuses programs that cannot be managed;
//! - `supervise` runs a program, `idle` has its idle processes compressed and `cold` what others do
//!   not use, `report` prints the result, `exit_cause` why it was killed, `stall` samples how much
//!   it waits for memory,
//!   `thrashing` decides what is too much, `run_report` gathers what happens in it with `timeline`,
//!   for the page that `run_page` makes, `record` writes its memory use to a trace, `advise`
//!   predicts other limits from one, for which `run_delay` measures how long threads waited for a
//!   CPU; `metrics` publishes the run's figures for a scraper by way of `metrics_target`;
//! - `threads` lists the threads of a process;
//! - `sampler` looks at runs and their `figures`, `ps` lists them in `columns`, `top` shows them
//!   live; `ctl` changes a run, `doctor` prints all checks, `setup`
//!   gives others the permission to run.
//!
//! `bench` and `lab` are programs of their own, which lie beside this one. `jupyter` is part of the
//! Python module.
//!
//! Exit codes of `run`: the program's, 128 + n after signal n; 125 if foliomem itself fails, 126
//! for a program that cannot be executed, 127 for a program that does not exist, 2 for a wrong
//! command line, 137 if a hard limit stopped the program.

#![forbid(unsafe_code)]

mod advise;
mod args;
mod balance;
mod cgroups;
mod checks;
mod cold;
mod columns;
mod config_file;
mod container_limit;
mod ctl;
mod doctor;
mod error;
mod exit_cause;
mod figures;
mod idle;
mod knob;
mod limit_updater;
mod live_limit;
mod machine_load;
mod metrics;
mod metrics_target;
mod policy;
mod preflight;
mod proc_file;
mod proc_stat;
mod process_name;
mod ps;
mod record;
mod relatives;
mod remedy;
mod report;
mod run_delay;
mod run_page;
mod run_report;
mod sampler;
mod settings;
mod setup;
mod stall;
mod stillness;
mod supervise;
mod swap_ins;
mod thrashing;
mod threads;
mod timeline;
mod top;
mod turns;
mod unmanaged;

use args::{Args, Command, OtherArgs, RunArgs};
use cgroups::Cgroups;
use clap::Parser;
use clap::error::ErrorKind;
use error::CliError;
use foliomem_command::WRONG_COMMAND_LINE;
use knob::Machine;
use record::{Recorder, Target};
use settings::{Recording, Settings};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode, Stdio};
use supervise::Program;

/// What this command was built from (`build.rs`).
const BUILD: &str = concat!(
    "commit: ",
    env!("FOLIOMEM_COMMIT"),
    "\ntarget: ",
    env!("FOLIOMEM_TARGET"),
    "\nprofile: ",
    env!("FOLIOMEM_PROFILE"),
    "\nfeatures: ",
    env!("FOLIOMEM_FEATURES"),
    "\n",
);

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return refuse(&error),
    };
    let done = match args.command {
        Command::Run(run) => self::run(&run, None),
        Command::Record(args) => self::run(&args.run, Some(Target::Path(&args.output))),
        Command::Advise(args) => advise::advise(args),
        Command::Ps(args) => Ok(ps::ps(&args)),
        Command::Top(args) => top::top(&args),
        Command::Ctl(args) => ctl::ctl(&args),
        Command::Doctor(args) => Ok(doctor::doctor(&args)),
        Command::Setup(args) => setup::setup(&args),
        Command::Bench(args) => start("foliomem-bench", &args),
        Command::Lab(args) => start("foliomem-lab", &args),
        Command::Jupyter(args) => start_jupyter(&args),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("foliomem: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints the error of the command line. Options without a command are probably meant for `run`.
fn refuse(error: &clap::Error) -> ExitCode {
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    let run = ["foliomem", "run"].map(OsString::from).into_iter().chain(given.iter().cloned());
    let is_option = given.first().is_some_and(|word| word.as_encoded_bytes().starts_with(b"-"));
    if is_option && error.kind() == ErrorKind::UnknownArgument && Args::try_parse_from(run).is_ok() {
        let words: Vec<_> = given.iter().map(|word| word.to_string_lossy()).collect();
        eprintln!(
            "foliomem: the command is missing: did you mean foliomem run {}? (see foliomem --help)",
            words.join(" ")
        );
        return ExitCode::from(WRONG_COMMAND_LINE);
    }
    let is_version = error.kind() == ErrorKind::DisplayVersion;
    let code = foliomem_command::complain(error, "foliomem --help");
    if is_version && given.iter().any(|argument| argument == "--verbose") {
        print!("{BUILD}");
    }
    code
}

/// Replaces this process by a program that lies beside this one.
fn start(program: &'static str, args: &OtherArgs) -> Result<u8, CliError> {
    match foliomem_command::become_beside(program, &args.arguments)? {}
}

/// Replaces this process by the Python module, in the Python that lies beside this command, as in a
/// virtual environment, or else in that of PATH.
fn start_jupyter(args: &OtherArgs) -> Result<u8, CliError> {
    let beside = supervise::own_executable()?.with_file_name("python3");
    let python = if beside.is_file() { beside } else { PathBuf::from("python3") };
    let found = process::Command::new(&python).args(["-c", "import foliomem"]).stderr(Stdio::null()).status();
    if found.is_ok_and(|status| !status.success()) {
        return Err(CliError::NoModule(python));
    }
    let error = process::Command::new(&python).args(["-m", "foliomem", "jupyter"]).args(&args.arguments).exec();
    Err(CliError::NoPython(python, error))
}

fn run(args: &RunArgs, trace: Option<Target<'_>>) -> Result<u8, CliError> {
    let groups = Cgroups::find(Path::new("/"));
    let machine = Machine::around(&groups);
    let settings = Settings::resolve(args, &settings::environment(), machine)?;
    if args.print_config {
        print!("{}", settings.describe());
        return Ok(0);
    }
    let Some((name, arguments)) = args.program.split_first() else { return Err(CliError::NoProgram) };
    let recording = if trace.is_some() { Recording::On } else { Recording::Off };
    let configuration = settings.configuration(recording, machine)?;
    container_limit::warn_if_above(configuration.limit, machine, &groups);
    let program = preflight::check(name)?;
    checks::require()?;
    let recorder = trace.map(Recorder::create).transpose()?;
    supervise::run(&settings, &configuration, groups, &Program { path: &program, name, arguments }, recorder)
}
