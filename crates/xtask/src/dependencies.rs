//! Checks licences and sources of all dependencies against `deny.toml`, without a network.
//!
//! `cargo deny` checks more (advisories); it is not on every machine that runs the tests.

use serde_json::Value;
use spdx::{Expression, ParseMode};
use std::path::Path;
use std::process::Command;

/// The only registry that dependencies come from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Returns the complaints about the dependencies of the workspace at `root`, one line each.
///
/// # Errors
/// Fails if cargo cannot list the dependencies, or if `deny.toml` lists no licences.
pub fn run(root: &Path) -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(root.join("deny.toml")).map_err(|error| format!("deny.toml: {error}"))?;
    let allowed = allowed_licences(&text)?;
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version=1", "--locked", "--filter-platform", &host])
        .current_dir(root)
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    Ok(packages.iter().flat_map(|package| complaints(package, &allowed)).collect())
}

fn complaints(package: &Value, allowed: &[String]) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or("?");
    let mut found = Vec::new();
    match package["license"].as_str() {
        None => found.push(format!("{name}: has no licence")),
        Some(licence) if !is_allowed(licence, allowed) => {
            found.push(format!("{name}: {licence} is not allowed by deny.toml"));
        }
        Some(_) => {}
    }
    if let Some(source) = package["source"].as_str().filter(|&source| source != REGISTRY) {
        found.push(format!("{name}: comes from {source}"));
    }
    found
}

fn allowed_licences(text: &str) -> Result<Vec<String>, String> {
    let table: toml::Table = text.parse().map_err(|error| format!("deny.toml: {error}"))?;
    let allow = table.get("licenses").and_then(|licences| licences.get("allow")).and_then(toml::Value::as_array);
    let allow = allow.ok_or("deny.toml: licenses.allow is missing")?;
    Ok(allow.iter().filter_map(|licence| licence.as_str().map(str::to_owned)).collect())
}

/// Returns whether allowed licences alone satisfy an SPDX expression. `/` is the old `OR`.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    Expression::parse_mode(expression, ParseMode::LAX)
        .is_ok_and(|expression| expression.evaluate(|licence| allowed.contains(&licence.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_needs_allowed_licences_alone() {
        let allowed = ["MIT", "ISC"].map(str::to_owned);
        for good in
            ["MIT", "MIT OR GPL-3.0", "GPL-3.0/MIT", "(GPL-3.0 OR ISC) AND MIT", "Zlib WITH LLVM-exception OR MIT"]
        {
            assert!(is_allowed(good, &allowed), "{good}");
        }
        for bad in [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "MIT OR",
            "(MIT",
            "MIT MIT",
            "MIT WITH LLVM-exception",
            "Zlib OR (MIT AND 0BSD)",
        ] {
            assert!(!is_allowed(bad, &allowed), "{bad}");
        }
    }

    #[test]
    fn another_source_or_no_licence_is_a_complaint() {
        let allowed = ["MIT".to_owned()];
        let package =
            |licence: Value, source: &str| serde_json::json!({"name": "p", "license": licence, "source": source});
        assert!(complaints(&package("MIT".into(), REGISTRY), &allowed).is_empty());
        assert_eq!(complaints(&package(Value::Null, REGISTRY), &allowed), ["p: has no licence"]);
        assert_eq!(complaints(&package("MIT".into(), "git+elsewhere"), &allowed), ["p: comes from git+elsewhere"]);
    }
}
