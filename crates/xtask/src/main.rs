//! Tasks of the workspace that cargo does not have: `cargo xtask tidy` checks the house rules,
//! `cargo xtask deny` the licences and sources of dependencies. `cargo xtask dist-docs` writes the
//! generated parts of the docs, `cargo xtask bench-docs` also adds a measurement to them.

#![forbid(unsafe_code)]

mod dependencies;
mod measurement;
mod tidy;

use std::path::Path;
use std::process::{Command, ExitCode};

/// The tests that write the generated docs, and check them, by package.
const DOCS: [&str; 3] = ["foliomem-cli", "foliomem-lab", "foliomem-bench"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // This crate is crates/xtask of the workspace.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let names: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (name, checked) = match names[..] {
        ["tidy"] => ("tidy", tidy::run(&root)),
        ["deny"] => ("deny", dependencies::run(&root)),
        ["dist-docs"] => return dist_docs(),
        ["bench-docs", ref words @ ..] => match measurement::Request::parse(words) {
            Some(request) => return bench_docs(&root, &request),
            None => return usage(),
        },
        _ => return usage(),
    };
    match checked {
        Ok(complaints) if complaints.is_empty() => ExitCode::SUCCESS,
        Ok(complaints) => {
            for complaint in &complaints {
                eprintln!("{complaint}");
            }
            eprintln!("{name}: {} complaints", complaints.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::from(2)
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: cargo xtask tidy|deny|dist-docs\n       {}", measurement::USAGE);
    ExitCode::from(2)
}

/// Measures, keeps the result and writes its table.
fn bench_docs(root: &Path, request: &measurement::Request) -> ExitCode {
    match measurement::run(root, request) {
        Ok(()) => dist_docs(),
        Err(error) => {
            eprintln!("bench-docs: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the man pages, the completions, the table of settings and those of the benchmarks.
fn dist_docs() -> ExitCode {
    let packages = DOCS.iter().flat_map(|package| ["--package", package]);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.arg("test").args(packages).args(["--bins", "the_reference_has"]).env("FOLIOMEM_WRITE_DOCS", "1");
    match cargo.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
