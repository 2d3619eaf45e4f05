//! Tasks of the workspace that cargo does not have: `cargo xtask tidy` checks the house rules,
//! `cargo xtask deny` the licences and sources of dependencies.

#![forbid(unsafe_code)]

mod dependencies;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // This crate is crates/xtask of the workspace.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let names: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (name, checked) = match names[..] {
        ["tidy"] => ("tidy", tidy::run(&root)),
        ["deny"] => ("deny", dependencies::run(&root)),
        _ => {
            eprintln!("usage: cargo xtask tidy|deny");
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
