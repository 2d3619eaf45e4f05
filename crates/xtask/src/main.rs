//! Tasks of the workspace that cargo does not have: `cargo xtask tidy` checks the house rules,
//! `cargo xtask dist-docs` writes the generated part of the reference.

#![forbid(unsafe_code)]

mod tidy;

use std::path::Path;
use std::process::{Command, ExitCode};

/// The tests that write the generated docs, and check them, by package.
const DOCS: [&str; 3] = ["foliomem-cli", "foliomem-lab", "foliomem-bench"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => tidy(),
        ["dist-docs"] => dist_docs(),
        _ => {
            eprintln!("usage: cargo xtask tidy|dist-docs");
            ExitCode::from(2)
        }
    }
}

/// Writes the man pages, the completions and the table of settings.
fn dist_docs() -> ExitCode {
    let packages = DOCS.iter().flat_map(|package| ["--package", package]);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.arg("test").args(packages).args(["--bins", "the_reference_has"]).env("FOLIOMEM_WRITE_DOCS", "1");
    match cargo.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn tidy() -> ExitCode {
    // This crate is crates/xtask of the workspace.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match tidy::run(&root) {
        Ok(complaints) if complaints.is_empty() => ExitCode::SUCCESS,
        Ok(complaints) => {
            for complaint in &complaints {
                eprintln!("{complaint}");
            }
            eprintln!("tidy: {} complaints", complaints.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("tidy: {error}");
            ExitCode::from(2)
        }
    }
}
