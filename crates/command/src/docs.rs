//! Keeps the generated docs: `cargo xtask dist-docs` runs the tests that call these functions with
//! [`WRITE`] set, which writes the docs. Without it, they fail if the docs are not up to date.

use clap::Command;
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// The variable of the environment that asks for the docs to be written.
pub const WRITE: &str = "FOLIOMEM_WRITE_DOCS";

/// Keeps the man pages of `command` and of its commands, and its completions. `name` is the
/// program. Commands that other programs have are left out.
///
/// # Panics
/// Panics if a file is not up to date.
pub fn keep_command(name: &'static str, command: Command, others: &[&str]) {
    let mut command = command.name(name).bin_name(name).disable_help_subcommand(true);
    for (shell, file) in
        [(Shell::Bash, format!("{name}.bash")), (Shell::Zsh, format!("_{name}")), (Shell::Fish, format!("{name}.fish"))]
    {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command, name, &mut text);
        keep(&format!("reference/completions/{file}"), &as_text(text));
    }
    command.build();
    keep_page(&command, name, others);
}

/// Keeps the man pages of `command`, the page of which is called `name`.
fn keep_page(command: &Command, name: &str, others: &[&str]) {
    let mut text = Vec::new();
    let rendered = clap_mangen::Man::new(command.clone()).title(name).date("").render(&mut text);
    assert!(rendered.is_ok(), "writing to memory does not fail");
    keep(&format!("reference/man/{name}.1"), &as_text(text));
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set() && !others.contains(&inner.get_name())) {
        keep_page(inner, &format!("{name}-{}", inner.get_name()), others);
    }
}

/// Keeps the part of a page of the docs between the comments `<!-- generated: part -->` and
/// `<!-- end of part -->`.
///
/// # Panics
/// Panics if the part is missing or not up to date.
pub fn keep_part(page: &str, part: &str, text: &str) {
    let whole = read(&path(page));
    let (begin, end) = (format!("<!-- generated: {part} -->\n"), format!("<!-- end of {part} -->\n"));
    let found = whole.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
    let Some((before, after)) = found else { panic!("{page} has no part {part}") };
    keep(page, &format!("{before}{begin}{text}{end}{after}"));
}

fn as_text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Returns the path of a file of the docs.
fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn keep(file: &str, text: &str) {
    let path = path(file);
    if std::env::var_os(WRITE).is_some() {
        let written = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| std::fs::write(&path, text));
        assert!(written.is_ok(), "{}: {written:?}", path.display());
    }
    assert!(read(&path) == text, "docs/{file} is not up to date: run `cargo xtask dist-docs`");
}
