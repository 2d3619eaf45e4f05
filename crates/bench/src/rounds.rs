//! Starts processes that each measure one round on request, so that the compared measurements take
//! turns. The speed of a shared machine changes within seconds.
//!
//! The parent writes a line to the child's stdin for each round and reads a line of JSON from its
//! stdout.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::kernel::said;

/// A measuring child. Dropping it kills the child.
#[derive(Debug)]
pub struct Rounds {
    shown: String,
    child: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Rounds {
    /// Starts the child, which runs [`serve`].
    ///
    /// # Errors
    /// Fails if the child cannot be started.
    pub fn start(command: &mut Command) -> Result<Self, Error> {
        let shown = format!("{command:?}");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(Error::doing(&shown))?;
        let (Some(ask), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both are piped")
        };
        Ok(Self { shown, child, ask, answers: BufReader::new(answers) })
    }

    /// Requests and returns the next round's figures.
    ///
    /// # Errors
    /// Fails if the child has ended, or if its answer has another form.
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        let mut line = String::new();
        let asked = self.ask.write_all(b"\n").and_then(|()| self.answers.read_line(&mut line));
        match asked {
            Ok(1..) => serde_json::from_str(&line).map_err(|_| Error::parse(&self.shown, &line)),
            Ok(0) | Err(_) => Err(self.why_it_ended()),
        }
    }

    fn why_it_ended(&mut self) -> Error {
        let mut stderr = Vec::new();
        let read = self.child.stderr.as_mut().map_or(Ok(0), |pipe| pipe.read_to_end(&mut stderr));
        match read.and_then(|_| self.child.wait()) {
            Ok(status) => Error::Command { command: self.shown.clone(), said: said(&status, &stderr) },
            Err(error) => Error::doing(&self.shown)(error),
        }
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        // The child has ended, or ends now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves a round for each line on stdin, until stdin ends. This is the child's side.
///
/// # Errors
/// Fails if a round fails or if the parent's pipes fail.
pub fn serve<T: Serialize>(mut round: impl FnMut() -> Result<T, Error>) -> Result<(), Error> {
    for line in std::io::stdin().lines() {
        line.map_err(Error::doing("the parent's pipe"))?;
        let answer = serde_json::to_string(&round()?).map_err(|e| Error::parse("a round", &e.to_string()))?;
        let mut stdout = std::io::stdout();
        writeln!(stdout, "{answer}").and_then(|()| stdout.flush()).map_err(Error::doing("the parent's pipe"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Rounds {
        Rounds::start(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn each_round_has_its_answer_and_the_error_quotes_stderr() {
        let mut rounds = shell("read a; echo 1; read a; echo 2; read a; echo ouch >&2; exit 3");
        assert_eq!([rounds.next::<u32>().unwrap(), rounds.next().unwrap()], [1, 2]);
        let ended = rounds.next::<u32>().unwrap_err().to_string();
        assert!(ended.contains("ouch") && ended.contains('3'), "{ended}");
    }

    #[test]
    fn a_malformed_answer_is_an_error() {
        assert!(matches!(shell("read a; echo one").next::<u32>(), Err(Error::Parse { .. })));
    }
}
