//! The program that `foliomem bench access` runs under foliomem: it touches its memory in one
//! pattern. Like most programs, it makes no inline system calls, so it is measured without
//! the precautions against them.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    foliomem_bench::access_child::measure(&arguments)
}
