//! The `foliomem-bench` command, which `foliomem bench` starts: measures foliomem and its peers.
//!
//! Exit codes: 125 if a measurement fails, 2 for a wrong command line.
#![forbid(unsafe_code)]

mod command;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    foliomem_bench::enter_if_asked();
    let args = match command::args::Args::try_parse() {
        Ok(args) => args,
        Err(error) => return foliomem_command::complain(&error, "foliomem bench --help"),
    };
    foliomem_command::finish(command::run_command(&args.command))
}
