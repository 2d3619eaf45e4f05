//! Restores the machine's settings, also after Ctrl-C, `kill -9` or a panic that aborts.
//!
//! Representation: a list of shell lines, each of which undoes one change. A line is added *before*
//! its change is made, so every line must be harmless if its change did not happen. A *guardian*
//! keeps the lines: a `sh` in a process group of its own reads them from a pipe and runs them, last
//! one first, when the pipe closes. The pipe closes when [`Undo`] is dropped, and when this process
//! dies in any way.
//!
//! `Drop` alone does not suffice: the release profile aborts on panic, and no signal runs
//! destructors.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::Error;

/// Shell script that reads lines until the pipe closes, then runs them last one first. It exits
/// with 1 if one failed.
const GUARDIAN: &str = r#"trap '' INT TERM HUP QUIT TSTP
undo=
while IFS= read -r line; do undo="{ $line; } || rc=1
$undo"; done
rc=0
eval "$undo"
exit $rc"#;

/// A list of changes to undo on [`Undo::restore`], on drop, and when the process dies.
#[derive(Debug)]
pub struct Undo {
    guardian: Option<Child>,
    /// The guardian's lines, in order: if the guardian fails, a user must run them by hand.
    lines: Vec<String>,
}

impl Undo {
    /// Starts the guardian without any line.
    ///
    /// # Errors
    /// Fails if no shell can be started.
    pub fn new() -> Result<Self, Error> {
        let guardian = Command::new("sh")
            .args(["-c", GUARDIAN])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .process_group(0)
            .spawn()
            .map_err(Error::doing("sh (which restores the machine's settings)"))?;
        Ok(Self { guardian: Some(guardian), lines: Vec::new() })
    }

    /// Adds a line of shell that undoes a change about to be made. The line must not contain a
    /// newline.
    ///
    /// # Errors
    /// Fails if the guardian is gone: then the change must not be made.
    pub fn push(&mut self, line: &str) -> Result<(), Error> {
        assert!(!line.contains('\n'), "one undo, one line: {line:?}");
        let stdin = self.guardian.as_mut().and_then(|g| g.stdin.as_mut());
        let mut stdin = stdin.ok_or_else(|| Error::NotRestored(line.to_owned()))?;
        writeln!(&mut stdin, "{line}").map_err(Error::doing("the process which restores settings"))?;
        self.lines.push(line.to_owned());
        Ok(())
    }

    /// Writes `value` to the file `path`. The undo writes `before`.
    ///
    /// # Errors
    /// Fails if the file refuses the value. The undo is recorded even then.
    pub fn write(&mut self, path: &Path, value: &str, before: &str) -> Result<(), Error> {
        self.push(&format!("printf %s {} > {}", quote(before), quote(&path.to_string_lossy())))?;
        std::fs::write(path, value).map_err(Error::at(path))
    }

    /// Undoes everything now and returns whether that worked.
    ///
    /// # Errors
    /// Fails with [`Error::NotRestored`] and the lines, last first, if one of them failed.
    pub fn restore(mut self) -> Result<(), Error> {
        self.run()
    }

    fn run(&mut self) -> Result<(), Error> {
        let Some(mut guardian) = self.guardian.take() else { return Ok(()) };
        drop(guardian.stdin.take());
        match guardian.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => {
                let lines: Vec<&str> = self.lines.iter().rev().map(String::as_str).collect();
                Err(Error::NotRestored(lines.join("\n")))
            }
        }
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Err(error) = self.run() {
            eprintln!("foliomem bench: {error}");
        }
    }
}

/// Quotes `text` as one word of shell.
#[must_use]
pub fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("foliomem-undo-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn a_drop_undoes_changes_last_one_first() {
        let dir = scratch("reverse");
        let file = dir.join("it's a file");
        std::fs::write(&file, "first").unwrap();
        {
            let mut undo = Undo::new().unwrap();
            undo.write(&file, "second", "first").unwrap();
            undo.write(&file, "third", "second").unwrap();
            assert_eq!(std::fs::read_to_string(&file).unwrap(), "third");
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "first");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_failed_undo_does_not_stop_the_others_and_is_reported() {
        let dir = scratch("failure");
        let file = dir.join("a");
        std::fs::write(&file, "before").unwrap();
        let mut undo = Undo::new().unwrap();
        undo.write(&file, "after", "before").unwrap();
        undo.push("false").unwrap();
        assert!(matches!(undo.restore(), Err(Error::NotRestored(lines)) if lines.starts_with("false\n")));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "before");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_early_error_restores_everything() {
        let dir = scratch("error");
        let file = dir.join("a");
        std::fs::write(&file, "before").unwrap();
        let attempt = || -> Result<(), Error> {
            let mut undo = Undo::new()?;
            undo.write(&file, "after", "before")?;
            undo.write(&dir.join("no/such"), "x", "y")
        };
        assert!(attempt().is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "before");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
