//! The program that `foliomem bench access` runs under foliomem: it touches its memory in one
//! pattern. It has no system call of its own, as few programs have, so that it is measured without
//! precautions against such calls.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    foliomem_bench::access_child::measure(&arguments)
}
