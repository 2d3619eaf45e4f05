//! The rule about the crates of the workspace that a crate may use.

use super::Finding;
use super::source::Source;
use proc_macro2::{TokenStream, TokenTree};

/// The crates of the workspace by directory, with their name in code and the crates that each may
/// use beside itself. The library of `core-one-thread` is named as that of `core`, which has its
/// source: traces and the lab use it instead.
const CRATES: [(&str, &str, &[&str]); 14] = [
    ("types", "foliomem_types", &[]),
    ("sync", "foliomem_sync", &[]),
    ("core", "foliomem_core", &["foliomem_types", "foliomem_sync"]),
    ("core-one-thread", "foliomem_core", &["foliomem_types", "foliomem_sync"]),
    ("sys", "foliomem_sys", &["foliomem_types", "foliomem_sync"]),
    ("session", "foliomem_session", &["foliomem_sys", "foliomem_types", "foliomem_sync"]),
    (
        "runtime",
        "foliomem_runtime",
        &["foliomem_core", "foliomem_session", "foliomem_sys", "foliomem_types", "foliomem_sync"],
    ),
    (
        "agent",
        "foliomem_agent",
        &["foliomem_runtime", "foliomem_session", "foliomem_sys", "foliomem_types", "foliomem_sync"],
    ),
    ("trace", "foliomem_trace", &["foliomem_types"]),
    ("command", "foliomem_command", &[]),
    ("lab", "foliomem_lab", &["foliomem_core", "foliomem_types", "foliomem_trace", "foliomem_command"]),
    (
        "bench",
        "foliomem_bench",
        &[
            "foliomem_core",
            "foliomem_runtime",
            "foliomem_session",
            "foliomem_sys",
            "foliomem_lab",
            "foliomem_types",
            "foliomem_trace",
            "foliomem_command",
        ],
    ),
    (
        "cli",
        "foliomem_cli",
        &["foliomem_session", "foliomem_sys", "foliomem_types", "foliomem_trace", "foliomem_command"],
    ),
    ("xtask", "xtask", &[]),
];

/// Refuses uses of crates of the workspace that the table does not allow.
pub fn check(source: &Source, findings: &mut Vec<Finding>) {
    let directory = source.path.split('/').nth(1).unwrap_or_default();
    let Some((_, own, allowed)) = CRATES.iter().find(|(name, ..)| *name == directory) else {
        let reason = format!("`{directory}` is missing in the table of crates");
        findings.push(Finding { rule: "import", path: source.path.clone(), line: 1, reason });
        return;
    };
    let mut used = Vec::new();
    add_crates(source.tokens.clone(), &mut used);
    for (name, line) in used {
        if name != *own && !allowed.contains(&name) {
            let reason = format!("`{directory}` must not use `{name}`");
            findings.push(Finding { rule: "import", path: source.path.clone(), line, reason });
        }
    }
}

/// Adds the crates of the workspace that the tokens name, with their lines.
fn add_crates(tokens: TokenStream, used: &mut Vec<(&'static str, usize)>) {
    for token in tokens {
        match token {
            TokenTree::Ident(name) => {
                let known = CRATES.iter().find(|(_, known, _)| name == known);
                used.extend(known.map(|(_, known, _)| (*known, name.span().start().line)));
            }
            TokenTree::Group(group) => add_crates(group.stream(), used),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_bad, assert_good};
    use super::*;

    #[test]
    fn crates_outside_the_table_are_refused() {
        assert_bad(check, "use foliomem_runtime::heap;\nfn f() {\n    foliomem_lab::run()\n}\n", &[1, 3]);
        assert_good(check, "use std::fmt;\nuse foliomem_core::units;\n// foliomem_runtime calls this.\n");
    }

    #[test]
    fn a_crate_may_use_the_crates_of_its_row() {
        let findings = |path: &str| {
            let text = "use foliomem_core::units;\nuse foliomem_runtime::heap;\n".to_owned();
            let mut findings = Vec::new();
            check(&Source::parse(path.to_owned(), text).unwrap(), &mut findings);
            findings.len()
        };
        assert_eq!(findings("crates/bench/src/lib.rs"), 0);
        assert_eq!(findings("crates/runtime/src/lib.rs"), 0);
        assert_eq!(findings("crates/lab/src/lib.rs"), 1);
        assert_eq!(findings("crates/new/src/lib.rs"), 1);
    }
}
