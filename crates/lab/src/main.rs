//! The `foliomem-lab` command, which `foliomem lab` starts: foliomem's engine on a simulated
//! machine.
//!
//! Exit codes: 125 if a run fails, 2 for a wrong command line.
#![forbid(unsafe_code)]

mod command;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = match command::args::Args::try_parse() {
        Ok(args) => args,
        Err(error) => return foliomem_command::complain(&error, "foliomem lab --help"),
    };
    foliomem_command::finish(command::run_command(&args.command))
}
