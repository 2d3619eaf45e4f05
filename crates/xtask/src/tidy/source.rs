//! A Rust file with its syntax tree and its comments.

/// A parsed Rust file.
pub struct Source {
    /// Path relative to the root of the workspace, with slashes.
    pub path: String,
    /// Content of the file.
    pub text: String,
    /// Syntax tree of the file.
    pub file: syn::File,
    /// Tokens of the file.
    pub tokens: proc_macro2::TokenStream,
    /// Comments, in the order of the file.
    pub comments: Vec<Comment>,
}

/// A comment: adjacent lines of one kind, or one block.
#[derive(PartialEq, Eq, Debug)]
pub struct Comment {
    /// Line number of the first line, from 1.
    pub line: usize,
    /// The text without comment marks, its lines joined by newlines.
    pub text: String,
}

impl Source {
    /// Parses a file.
    ///
    /// # Errors
    /// Fails if the text is not Rust.
    pub fn parse(path: String, text: String) -> Result<Source, String> {
        let failed = |error: syn::Error| format!("{path}:{}: {error}", error.span().start().line);
        let file = syn::parse_file(&text).map_err(failed)?;
        let tokens = text.parse().map_err(|error| format!("{path}: {error}"))?;
        let comments = comments(&text);
        Ok(Source { path, text, file, tokens, comments })
    }
}

/// Marks of line comments, the longest first.
const MARKS: [&str; 3] = ["//!", "///", "//"];

/// Returns the comments of a file.
fn comments(text: &str) -> Vec<Comment> {
    let mut comments: Vec<Comment> = Vec::new();
    // The mark and the last line of the line comment that the next line may continue.
    let mut open: Option<(&str, usize)> = None;
    for (start, raw) in raw_comments(text) {
        let line = 1 + text[..start].matches('\n').count();
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let Some(mark) = MARKS.into_iter().find(|mark| raw.starts_with(mark)) else {
            let inner = raw.trim_start_matches("/*").trim_end_matches("*/");
            comments.push(Comment { line, text: inner.trim().to_owned() });
            open = None;
            continue;
        };
        let is_alone = text[line_start..start].trim().is_empty();
        let content = raw[mark.len()..].trim();
        match comments.last_mut() {
            Some(last) if is_alone && open == Some((mark, line - 1)) => {
                last.text.push('\n');
                last.text.push_str(content);
            }
            _ => comments.push(Comment { line, text: content.to_owned() }),
        }
        open = is_alone.then_some((mark, line));
    }
    comments
}

/// Returns offset and text of each comment. A line comment ends before its newline.
fn raw_comments(text: &str) -> Vec<(usize, &str)> {
    let mut comments = Vec::new();
    let mut at = 0;
    while let Some(next) = text[at..].chars().next() {
        let rest = &text[at..];
        let len = if rest.starts_with("//") {
            let len = rest.find('\n').unwrap_or(rest.len());
            comments.push((at, &rest[..len]));
            len
        } else if rest.starts_with("/*") {
            let len = block_comment_len(rest);
            comments.push((at, &rest[..len]));
            len
        } else if let Some(len) = raw_string_len(rest) {
            len
        } else if next == '"' {
            quoted_len(rest, '"')
        } else if next == '\'' {
            quote_len(rest)
        } else if next.is_alphanumeric() || next == '_' {
            // A whole word, so that the `r` of a word does not begin a raw string.
            rest.find(|char: char| !char.is_alphanumeric() && char != '_').unwrap_or(rest.len())
        } else {
            next.len_utf8()
        };
        at += len;
    }
    comments
}

/// Returns the length of a block comment, which may contain others.
fn block_comment_len(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                break;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    at
}

/// Returns the length of the raw string that `text` begins with, if it does.
fn raw_string_len(text: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"]
        .into_iter()
        .find(|prefix| text.strip_prefix(prefix).is_some_and(|rest| rest.trim_start_matches('#').starts_with('"')))?;
    let rest = &text[prefix.len()..];
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let end = format!("\"{}", &rest[..hashes]);
    let content = prefix.len() + hashes + 1;
    Some(text[content..].find(&end).map_or(text.len(), |at| content + at + end.len()))
}

/// Returns the length of a literal in `quote`s, which may be escaped inside.
fn quoted_len(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, char) in text.char_indices().skip(1) {
        if char == quote && !is_escaped {
            return at + char.len_utf8();
        }
        is_escaped = char == '\\' && !is_escaped;
    }
    text.len()
}

/// Returns the length of a character literal, or of the quote of a lifetime.
fn quote_len(text: &str) -> usize {
    let mut chars = text.chars().skip(1);
    let is_literal = match chars.next() {
        Some('\\') => true,
        Some(_) => chars.next() == Some('\''),
        None => false,
    };
    if is_literal { quoted_len(text, '\'') } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<(usize, String)> {
        comments(text).into_iter().map(|comment| (comment.line, comment.text)).collect()
    }

    #[test]
    fn adjacent_lines_of_one_kind_are_one_comment() {
        let found = texts("//! One\n//! two.\n\n/// Three.\n// Four.\nfn f() {} // Five.\n// Six.\n");
        let expected = [(1, "One\ntwo."), (4, "Three."), (5, "Four."), (6, "Five."), (7, "Six.")];
        assert_eq!(found, expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn literals_contain_no_comments() {
        for literal in [r#""// \" //""#, "r#\"// \" //\"#", "'\\''", "'/'", "b\"//\"", "bar\"//\""] {
            assert_eq!(texts(&format!("let x = {literal}; // Yes.")), [(1, "Yes.".to_owned())], "{literal}");
        }
        assert_eq!(texts("fn f<'a>(x: &'a u8) {} // 'Yes'."), [(1, "'Yes'.".to_owned())]);
    }

    #[test]
    fn block_comments_nest() {
        assert_eq!(texts("/* a /* b */ c */ // d"), [(1, "a /* b */ c".to_owned()), (1, "d".to_owned())]);
    }
}
