//! The allow-list: findings that are accepted until their file is converted.
//!
//! A line is `RULE PATH COUNT`, or `RULE PATH *` for a directory that is not converted yet. An
//! entry with a count accepts exactly that many findings; an entry with `*` accepts at least one.
//! So the list can only shrink: a file that improves must lower its count or lose its entry.

use super::Finding;

/// The entries of the allow-list.
pub struct AllowList {
    entries: Vec<Entry>,
}

struct Entry {
    line: usize,
    rule: String,
    path: String,
    /// The number of accepted findings; `None` for any number.
    count: Option<usize>,
}

impl Entry {
    fn accepts(&self, finding: &Finding) -> bool {
        let is_below = || finding.path.strip_prefix(&self.path).is_some_and(|rest| rest.starts_with('/'));
        finding.rule == self.rule && (finding.path == self.path || is_below())
    }

    /// Returns the reason why the entry does not fit `found` findings, if it does not.
    fn complaint(&self, found: usize) -> Option<String> {
        let Entry { line, rule, path, count } = self;
        let remedy = match (found, count) {
            (0, _) => "remove the entry".to_owned(),
            (_, Some(count)) if found < *count => format!("lower the count to {found}"),
            (_, Some(count)) if found > *count => format!("{} are new", found - count),
            _ => return None,
        };
        Some(format!("crates/xtask/tidy.allow:{line}: {rule} {path}: {found} findings: {remedy}"))
    }
}

impl AllowList {
    /// Parses a list. Empty lines and lines that begin with `#` have no meaning.
    ///
    /// # Errors
    /// Fails if a line is not an entry.
    pub fn parse(text: &str) -> Result<AllowList, String> {
        let mut entries = Vec::new();
        for (line, text) in (1..).zip(text.lines()) {
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let words: Vec<&str> = text.split_whitespace().collect();
            let entry = match words[..] {
                [rule, path, "*"] => Some((rule, path, None)),
                [rule, path, count] => count.parse().ok().map(|count| (rule, path, Some(count))),
                _ => None,
            };
            let (rule, path, count) = entry.ok_or_else(|| format!("line {line} of the allow-list: {text:?}"))?;
            entries.push(Entry { line, rule: rule.to_owned(), path: path.to_owned(), count });
        }
        Ok(AllowList { entries })
    }

    /// Returns the findings that no entry accepts, and the entries that do not fit, as lines. The
    /// findings of an entry with too small a count are all returned, since none is known to be old.
    pub fn apply(&self, findings: &[Finding]) -> Vec<String> {
        let mut found = vec![0; self.entries.len()];
        let mut accepted_by = Vec::new();
        for finding in findings {
            let index = self.entries.iter().position(|entry| entry.accepts(finding));
            if let Some(index) = index {
                found[index] += 1;
            }
            accepted_by.push(index);
        }
        let is_exceeded = |index: usize| self.entries[index].count.is_some_and(|count| found[index] > count);
        let refused = findings.iter().zip(accepted_by).filter(|(_, by)| by.is_none_or(is_exceeded));
        let mut lines: Vec<String> = refused.map(|(finding, _)| finding.to_string()).collect();
        lines.extend(self.entries.iter().zip(&found).filter_map(|(entry, &found)| entry.complaint(found)));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(list: &str, paths: &[&str]) -> Vec<String> {
        let finding =
            |path: &&str| Finding { rule: "width", path: (*path).to_owned(), line: 1, reason: "wide".to_owned() };
        AllowList::parse(list).unwrap().apply(&paths.iter().map(finding).collect::<Vec<_>>())
    }

    #[test]
    fn an_entry_accepts_its_findings_alone() {
        assert_eq!(lines("# Old.\n\nwidth a/b.rs 2\n", &["a/b.rs", "a/b.rs"]), [""; 0]);
        assert_eq!(lines("width a *\n", &["a/b.rs", "a/c/d.rs"]), [""; 0]);
        assert_eq!(lines("", &["a/b.rs"]), ["a/b.rs:1: width: wide"]);
        assert_eq!(lines("width a *\nlong a *\n", &["a/b.rs", "ab.rs"]).len(), 2);
    }

    #[test]
    fn the_list_only_shrinks() {
        assert!(lines("width a.rs 2\n", &["a.rs"])[0].ends_with("lower the count to 1"));
        assert!(lines("width a.rs *\n", &[])[0].ends_with("remove the entry"));
        assert_eq!(lines("width a.rs 1\n", &["a.rs", "a.rs"]).len(), 3);
    }

    #[test]
    fn malformed_lines_are_errors() {
        for bad in ["width", "width a.rs", "width a.rs x", "width a.rs 1 2"] {
            assert!(AllowList::parse(bad).is_err(), "{bad}");
        }
    }
}
