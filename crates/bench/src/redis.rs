//! A client of redis-server over its Unix socket: enough to fill it with real data and to read every value back.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::Error;

/// Commands sent before their answers are read: one round trip for that many.
const PIPELINE: usize = 64;
/// An answer later than this is none: the server hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection.
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

    /// Sets `keys` keys, named as redis-benchmark names them, to the values `value` gives.
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

    /// Reads all keys back; how many values `right` accepts.
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

    /// Ends the server without saving.
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

    /// The next answer: a value, or none for a plain "OK" or a missing key.
    fn answer(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let mut line = String::new();
        self.stream.read_line(&mut line).map_err(Error::doing("redis-server"))?;
        let text = line.trim_end();
        match text.split_at_checked(1) {
            Some(("$", "-1")) | Some(("+", _)) => Ok(None),
            Some(("$", length)) => {
                let length: usize = length.parse().map_err(|_| Error::parse("redis-server", text))?;
                let mut value = vec![0; length + 2];
                self.stream.read_exact(&mut value).map_err(Error::doing("redis-server"))?;
                value.truncate(length);
                Ok(Some(value))
            }
            _ => Err(Error::parse("redis-server", text)),
        }
    }
}

/// The name redis-benchmark gives its `i`-th random key.
fn key(i: usize) -> String {
    format!("key:{i:012}")
}
