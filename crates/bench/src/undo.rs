//! Putting the machine back as it was found, also after Ctrl-C, `kill -9` or a panic that aborts.
//!
//! Representation: a list of shell lines, each of which undoes one change. A line is handed over *before* its change is
//! made, so every line must be harmless when its change did not happen. The lines are kept by a *guardian*: a `sh` in a
//! process group of its own that reads them from a pipe and runs them, last one first, when the pipe closes. It closes
//! when [`Undo`] is dropped, and equally when this process dies in any way.
//!
//! `Drop` alone would not do: the release profile aborts on panic and no signal runs destructors.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::Error;

/// Reads lines until the pipe closes, then runs them in reverse; exit 1 if one failed.
const GUARDIAN: &str = r#"trap '' INT TERM HUP QUIT TSTP
undo=
while IFS= read -r line; do undo="{ $line; } || rc=1
$undo"; done
rc=0
eval "$undo"
exit $rc"#;

/// A list of changes to take back. Taken back on [`Undo::restore`], on drop, and when the process dies.
#[derive(Debug)]
pub struct Undo {
    guardian: Option<Child>,
    /// The same lines, in the order given: what is left to do by hand if the guardian fails.
    lines: Vec<String>,
}

impl Undo {
    /// Starts the guardian, with nothing to undo yet.
    ///
    /// # Errors
    /// No shell could be started.
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

    /// Adds a line of shell that undoes a change about to be made. It must not hold a newline.
    ///
    /// # Errors
    /// The guardian is gone: then the change must not be made.
    pub fn push(&mut self, line: &str) -> Result<(), Error> {
        assert!(!line.contains('\n'), "one undo, one line: {line:?}");
        let stdin = self.guardian.as_mut().and_then(|g| g.stdin.as_mut());
        let mut stdin = stdin.ok_or_else(|| Error::NotRestored(line.to_owned()))?;
        writeln!(&mut stdin, "{line}").map_err(Error::doing("the process which restores settings"))?;
        self.lines.push(line.to_owned());
        Ok(())
    }

    /// Writes `value` to the file `path`, to be undone by writing `before`.
    ///
    /// # Errors
    /// The file does not take the value. The undo is recorded all the same.
    pub fn write(&mut self, path: &Path, value: &str, before: &str) -> Result<(), Error> {
        self.push(&format!("printf %s {} > {}", quote(before), quote(&path.to_string_lossy())))?;
        std::fs::write(path, value).map_err(Error::at(path))
    }

    /// Takes everything back now and says whether that worked.
    ///
    /// # Errors
    /// [`Error::NotRestored`] with the lines, last first, if one of them failed.
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

/// `text` as one word of shell.
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
    fn undoes_in_reverse_on_drop() {
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
    fn one_failure_does_not_stop_the_others_and_is_reported() {
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
    fn an_early_error_restores_too() {
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
