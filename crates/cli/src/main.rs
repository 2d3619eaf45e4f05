//! The `foliomem` command.
//!
//! - `args` is the command line;
//! - `settings` resolves it together with the environment and the configuration file;
//! - `preflight` refuses programs that cannot be managed;
//! - `supervise` runs a program, `report` prints the result, `record` writes its memory use to a
//!   trace;
//! - `ctl` changes a run, `bench` measures, `lab` simulates, `doctor` checks the machine.
//!
//! Exit codes of `run`: the program's, 128 + n after signal n; 125 if foliomem itself fails, 126
//! for a program that cannot be executed, 127 for a program that does not exist, 2 for a wrong
//! command line, 137 if a hard limit stopped the program.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod ctl;
mod doctor;
mod error;
mod lab;
mod memory;
mod policy;
mod preflight;
mod record;
mod report;
mod settings;
mod size;
mod supervise;
mod unmanaged;
mod vary;

use args::{Args, Command, RunArgs};
use clap::Parser;
use error::CliError;
use record::Recorder;
use settings::Settings;
use std::path::Path;
use std::process::ExitCode;

/// The heap of this process. The threads of the runtime, which `bench swap` starts in this process,
/// must not use the C library's heap.
#[global_allocator]
static HEAP: foliomem_linux::heap::AgentHeap = foliomem_linux::heap::AgentHeap::new();

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
    foliomem_bench::enter_if_asked();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return complain(&error),
    };
    let done = match args.command {
        Command::Run(run) => self::run(&run, None),
        Command::Record(args) => self::run(&args.run, Some(&args.output)),
        Command::Ctl(args) => ctl::ctl(&args),
        Command::Doctor => Ok(doctor::doctor()),
        Command::Bench { what } => bench::bench(&what),
        Command::Lab { what } => lab::lab(&what),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("foliomem: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints help as it is, and an error of the command line in one line.
fn complain(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        print!("{error}");
        let is_version = error.kind() == clap::error::ErrorKind::DisplayVersion;
        if is_version && std::env::args_os().any(|argument| argument == "--verbose") {
            print!("{BUILD}");
        }
        return ExitCode::SUCCESS;
    }
    const WRONG_COMMAND_LINE: u8 = 2;
    let text = error.to_string();
    let what: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let what = what.join(" ");
    eprintln!("foliomem: {} (see foliomem --help)", what.strip_prefix("error: ").unwrap_or(&what));
    ExitCode::from(WRONG_COMMAND_LINE)
}

fn run(args: &RunArgs, trace: Option<&Path>) -> Result<u8, CliError> {
    let settings = Settings::resolve(args, &settings::environment(), memory::total_bytes())?;
    if args.print_config {
        print!("{}", settings.describe());
        return Ok(0);
    }
    let Some((name, arguments)) = args.program.split_first() else { return Err(CliError::NoProgram) };
    let limit = if trace.is_some() { settings.recorded_limit()? } else { settings.limit()? };
    let program = preflight::check(name)?;
    foliomem_linux::probe::check_userfaultfd()?;
    let recorder = trace.map(Recorder::create).transpose()?;
    supervise::run(&settings, limit, &program, name, arguments, recorder)
}
