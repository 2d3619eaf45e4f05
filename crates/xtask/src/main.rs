//! Tasks of the workspace that cargo does not have: `cargo xtask tidy` checks the house rules,
//! `cargo xtask deny` the licences and sources of dependencies. `cargo xtask dist-docs` writes the
//! generated part of the reference.

#![forbid(unsafe_code)]

mod dependencies;
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
        _ => {
            eprintln!("usage: cargo xtask tidy|deny|dist-docs");
            return ExitCode::from(2);
        }
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
