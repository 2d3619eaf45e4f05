//! A client of redis-server over its Unix socket. It fills the server with real data and reads
//! every value back.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::Error;

/// Commands sent before their answers are read, in one round trip.
const PIPELINE: usize = 64;
/// Maximum bytes of a line of an answer; useful lines are shorter.
const MAX_LINE_BYTES: u64 = 4096;
/// Maximum bytes of a value; values here have a few KiB.
const MAX_VALUE_BYTES: usize = 1 << 20;
/// Time after which a server without an answer counts as hanging.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to a server.
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to a server that answers.
    pub(crate) fn connect(socket: &Path) -> Result<Self, Error> {
        let stream = UnixStream::connect(socket).map_err(Error::at(socket))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(Error::at(socket))?;
        let mut client = Self { stream: BufReader::new(stream) };
        client.send(&[[b"PING".as_slice()]])?;
        client.answer()?;
        Ok(client)
    }

    /// Sets `keys` keys, named as redis-benchmark names them, to the values of `value`.
    pub(crate) fn fill<'a>(&mut self, keys: usize, value: impl Fn(usize) -> &'a [u8]) -> Result<(), Error> {
        for first in (0..keys).step_by(PIPELINE) {
            let batch = first..keys.min(first + PIPELINE);
            let names: Vec<String> = batch.clone().map(key).collect();
            let sets: Vec<[&[u8]; 3]> =
                batch.clone().zip(&names).map(|(i, name)| [b"SET".as_slice(), name.as_bytes(), value(i)]).collect();
            self.send(&sets)?;
            for _ in batch {
                self.answer()?;
            }
        }
        Ok(())
    }

    /// Reads all keys back and counts the values that `right` accepts.
    pub(crate) fn count_right(&mut self, keys: usize, right: impl Fn(usize, &[u8]) -> bool) -> Result<usize, Error> {
        let mut count = 0;
        for first in (0..keys).step_by(PIPELINE) {
            let batch = first..keys.min(first + PIPELINE);
            let names: Vec<String> = batch.clone().map(key).collect();
            self.send(&names.iter().map(|name| [b"GET".as_slice(), name.as_bytes()]).collect::<Vec<_>>())?;
            for i in batch {
                count += usize::from(self.answer()?.is_some_and(|value| right(i, &value)));
            }
        }
        Ok(count)
    }

    /// Stops the server without saving.
    pub(crate) fn shut_down(mut self) -> Result<(), Error> {
        self.send(&[[b"SHUTDOWN".as_slice(), b"NOSAVE"]])
    }

    fn send<'a, C: AsRef<[&'a [u8]]>>(&mut self, commands: &[C]) -> Result<(), Error> {
        let mut bytes = Vec::new();
        for command in commands {
            let words = command.as_ref();
            bytes.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
            for word in words {
                bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        self.stream.get_mut().write_all(&bytes).map_err(Error::doing("redis-server"))
    }

    /// Returns the next answer: a value, or `None` for a plain "OK" or a missing key.
    fn answer(&mut self) -> Result<Option<Vec<u8>>, Error> {
        answer(&mut self.stream)
    }
}

/// Reads one answer: a line, and the value that it announces.
fn answer(stream: &mut impl BufRead) -> Result<Option<Vec<u8>>, Error> {
    let mut line = String::new();
    stream.take(MAX_LINE_BYTES).read_line(&mut line).map_err(Error::doing("redis-server"))?;
    let text = line.trim_end();
    let bad = || Error::parse("redis-server", text);
    match text.split_at_checked(1) {
        Some(("$", "-1")) | Some(("+", _)) => Ok(None),
        Some(("$", length)) => {
            let length = length.parse().ok().filter(|&length| length <= MAX_VALUE_BYTES).ok_or_else(bad)?;
            let mut value = vec![0; length + 2];
            stream.read_exact(&mut value).map_err(Error::doing("redis-server"))?;
            if !value.ends_with(b"\r\n") {
                return Err(bad());
            }
            value.truncate(length);
            Ok(Some(value))
        }
        _ => Err(bad()),
    }
}

/// Returns the name that redis-benchmark gives its `i`-th random key.
fn key(i: usize) -> String {
    format!("key:{i:012}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn answers_parse_one_after_another(values in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..300)), 0..8)) {
            let mut sent = Vec::new();
            for value in &values {
                match value {
                    Some(value) => {
                        sent.extend_from_slice(format!("${}\r\n", value.len()).as_bytes());
                        sent.extend_from_slice(value);
                        sent.extend_from_slice(b"\r\n");
                    }
                    None => sent.extend_from_slice(b"+OK\r\n"),
                }
            }
            let mut rest = &sent[..];
            for value in values {
                prop_assert_eq!(answer(&mut rest).unwrap(), value);
            }
            prop_assert!(answer(&mut rest).is_err(), "the end is no answer");
        }

        #[test]
        fn strange_answers_are_errors_that_name_the_server(noise in prop::collection::vec(any::<u8>(), 0..100), length in "[-+0-9]{0,22}", tail in ".{0,20}") {
            for text in [&noise[..], format!("${length}\r\n{tail}").as_bytes(), &[b'x'; 10_000]] {
                if let Err(error) = answer(&mut &text[..]) {
                    prop_assert!(error.to_string().starts_with("redis-server: "), "{error}");
                }
            }
        }
    }
}
