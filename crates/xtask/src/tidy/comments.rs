//! The rules about the text and the width of comments.

use super::Finding;
use super::source::Source;

/// Beginnings of comments that document nothing.
const PLACEHOLDERS: [&str; 7] =
    ["see the module", "likewise", "the same", "the reverse.", "the reverse of", "as above", "ditto"];

/// Beginnings of comments whose subject is a relative clause.
const HEADLESS: [&str; 3] = ["what is", "who", "whoever"];

/// Maximum width of a line with nothing but a comment, in characters. rustfmt wraps only code.
const MAX_COLUMNS: usize = 100;

/// Refuses placeholder comments, and comments that begin with a headless relative clause.
pub fn check_text(source: &Source, findings: &mut Vec<Finding>) {
    for comment in &source.comments {
        let text = comment.text.trim_start_matches(['-', '*', ' ']).to_lowercase();
        let begins = |phrase: &&str| {
            let rest = text.strip_prefix(phrase);
            rest.is_some_and(|rest| !rest.starts_with(|char: char| char.is_alphanumeric() || char == '_'))
        };
        let (rule, phrase, remedy) = if let Some(phrase) = PLACEHOLDERS.iter().find(|phrase| begins(phrase)) {
            ("placeholder", phrase, "say what the item is or does")
        } else if let Some(phrase) = HEADLESS.iter().find(|phrase| begins(phrase)) {
            ("headless", phrase, "name the thing that the clause means")
        } else {
            continue;
        };
        let reason = format!("the comment begins with \"{phrase}\": {remedy}");
        findings.push(Finding { rule, path: source.path.clone(), line: comment.line, reason });
    }
}

/// Refuses comment lines over [`MAX_COLUMNS`]. A single long word, such as an address, may be
/// wider.
pub fn check_width(source: &Source, findings: &mut Vec<Finding>) {
    let lines: Vec<&str> = source.text.lines().collect();
    for comment in &source.comments {
        for (index, text) in comment.text.split('\n').enumerate() {
            let line = lines.get(comment.line - 1 + index).copied().unwrap_or_default();
            let is_alone = line.trim_start().starts_with("//") || index > 0;
            let columns = line.chars().count();
            if is_alone && columns > MAX_COLUMNS && text.trim().contains(' ') {
                let reason = format!("the comment line has {columns} columns, more than {MAX_COLUMNS}");
                let line = comment.line + index;
                findings.push(Finding { rule: "width", path: source.path.clone(), line, reason });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_bad, assert_good};
    use super::*;

    #[test]
    fn placeholders_are_refused() {
        assert_bad(check_text, "/// See the module.\nstruct A;\n/// Likewise.\nstruct B;\n", &[1, 3]);
        assert_bad(check_text, "fn f() {\n    g(); // The same.\n}\n", &[2]);
        assert_good(check_text, "/// Opens the file; see the module for its format.\nstruct A;\n");
        assert_good(check_text, "const A: &str = \"// Likewise.\";\n");
        assert_good(check_text, "/// The reverse mapping of pages.\nstruct A;\n");
    }

    #[test]
    fn headless_clauses_are_refused() {
        assert_bad(check_text, "/// What is out.\nstruct A;\n// Who waits, waits.\nstruct B;\n", &[1, 3]);
        assert_good(check_text, "/// Whole folios only.\nstruct A;\n/// Says what is out.\nstruct B;\n");
    }

    #[test]
    fn wide_comment_lines_are_refused() {
        let wide = "word ".repeat(20);
        assert_bad(check_width, &format!("/// Short.\n/// {wide}end\nstruct A;\n"), &[2]);
        assert_good(check_width, &format!("/// {}\nstruct A;\n", &wide[..96]));
        assert_good(check_width, &format!("// https://example.org/{}\n", "x".repeat(100)));
    }
}
