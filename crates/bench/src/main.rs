//! The `foliomem-bench` command, which `foliomem bench` starts: measures foliomem and its peers.
//!
//! Exit codes: 125 if a measurement fails, 2 for a wrong command line.
#![forbid(unsafe_code)]

mod command;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    const EXIT_FAILED: u8 = 125;
    foliomem_bench::enter_if_asked();
    let args = match command::args::Args::try_parse() {
        Ok(args) => args,
        Err(error) => return foliomem_command::complain(&error, "foliomem bench --help"),
    };
    command::run_command(&args.command).map_or_else(
        |error| {
            eprintln!("foliomem: {error}");
            ExitCode::from(EXIT_FAILED)
        },
        ExitCode::from,
    )
}
