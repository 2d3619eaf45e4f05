//! Checks every Rust file of the workspace against the house rules.
//!
//! Each rule is a function in a module of its own that adds [`Finding`]s. The allow-list
//! (`crates/xtask/tidy.allow`) accepts findings of files that are not converted yet.

mod allow;
mod comments;
mod identifiers;
mod imports;
mod shape;
mod source;

use allow::AllowList;
use source::Source;
use std::fmt;
use std::path::{Path, PathBuf};

/// A place that breaks a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Name of the rule, as in the allow-list.
    pub rule: &'static str,
    /// Path of the file, relative to the root of the workspace.
    pub path: String,
    /// Line number, from 1.
    pub line: usize,
    /// The reason, and the remedy if there is one.
    pub reason: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { rule, path, line, reason } = self;
        write!(f, "{path}:{line}: {rule}: {reason}")
    }
}

/// The rules, in the order of their findings.
const RULES: [fn(&Source, &mut Vec<Finding>); 7] = [
    comments::check_text,
    comments::check_width,
    identifiers::check_bounds,
    identifiers::check_glossary,
    shape::check_length,
    shape::check_bool_parameters,
    imports::check,
];

/// Checks the workspace at `root` and returns the complaints, one line each.
///
/// # Errors
/// Fails if a file cannot be read or parsed, or if the allow-list is malformed.
pub fn run(root: &Path) -> Result<Vec<String>, String> {
    let allow_path = root.join("crates/xtask/tidy.allow");
    let allow = AllowList::parse(&read(&allow_path)?)?;
    let mut findings = Vec::new();
    for file in rust_files(&root.join("crates"))? {
        let path = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
        let source = Source::parse(path, read(&file)?)?;
        for rule in RULES {
            rule(&source, &mut findings);
        }
    }
    Ok(allow.apply(&findings))
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Returns all Rust files below `directory`, sorted by path.
fn rust_files(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let failed = |error| format!("{}: {error}", directory.display());
        for entry in std::fs::read_dir(&directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines and reasons of the findings of `rule` in a file of `crates/core`.
    pub(super) fn findings_of(rule: fn(&Source, &mut Vec<Finding>), text: &str) -> Vec<(usize, String)> {
        let source = Source::parse("crates/core/src/example.rs".to_owned(), text.to_owned()).unwrap();
        let mut findings = Vec::new();
        rule(&source, &mut findings);
        findings.into_iter().map(|finding| (finding.line, finding.reason)).collect()
    }

    /// Asserts that `rule` finds nothing in `text`.
    pub(super) fn assert_good(rule: fn(&Source, &mut Vec<Finding>), text: &str) {
        assert_eq!(findings_of(rule, text), [], "{text}");
    }

    /// Asserts that `rule` finds exactly the lines `lines` in `text`.
    pub(super) fn assert_bad(rule: fn(&Source, &mut Vec<Finding>), text: &str, lines: &[usize]) {
        let found: Vec<usize> = findings_of(rule, text).into_iter().map(|(line, _)| line).collect();
        assert_eq!(found, lines, "{text}");
    }

    #[test]
    fn the_workspace_is_tidy() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let complaints = run(&root).unwrap();
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    }
}
