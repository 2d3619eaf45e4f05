//! Tells the command what it was built from, for `foliomem --version --verbose`.

use std::path::Path;
use std::process::Command;

/// Runs git, and returns its output in one line; `None` without git or outside of a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// The commit of this source; `None` for a tarball, even one unpacked inside another repository.
fn commit() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().ok()?;
    let top = Path::new(&git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?;
    if top != root {
        return None;
    }
    // Each commit and each checkout adds a line there.
    let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=FOLIOMEM_COMMIT");
    let given = std::env::var("FOLIOMEM_COMMIT").ok();
    println!("cargo::rustc-env=FOLIOMEM_COMMIT={}", given.or_else(commit).as_deref().unwrap_or("unknown"));
    for variable in ["TARGET", "PROFILE"] {
        println!("cargo::rustc-env=FOLIOMEM_{variable}={}", std::env::var(variable).unwrap_or_default());
    }
    let features = std::env::vars().filter_map(|(name, _)| name.strip_prefix("CARGO_FEATURE_").map(str::to_lowercase));
    let features: Vec<String> = features.map(|name| name.replace('_', "-")).collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(" ") };
    println!("cargo::rustc-env=FOLIOMEM_FEATURES={features}");
}
