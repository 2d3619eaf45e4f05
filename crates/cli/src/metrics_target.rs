//! Where the metrics of a run go: a file that is rewritten, a Unix socket, or a port of this
//! machine.
//!
//! A socket answers each HTTP GET with the text of that moment, one client at a time.

use crate::error::{BadValue, CliError};
use crate::metrics::{MEDIA_TYPE, Metrics};
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A path with this extension names a socket.
const SOCKET_EXTENSION: &str = "sock";
/// Time between two writes of the file.
const INTERVAL: Duration = Duration::from_secs(5);
/// Maximum time that one client may take for its request, and for reading the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);
/// The text before the run has begun: no samples.
const NOTHING: &str = "# EOF\n";
/// Maximum length of a request, in bytes.
const MAX_REQUEST_BYTES: usize = 8 << 10;

/// The setting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetricsSetting {
    /// A file.
    File(PathBuf),
    /// A Unix socket.
    Socket(PathBuf),
    /// A port of this machine.
    Port(SocketAddr),
}

impl MetricsSetting {
    /// Parses a path, or the address of a port that only this machine can reach.
    pub fn parse(text: &str) -> Result<MetricsSetting, BadValue> {
        let numeric = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
        if let Ok(address) = numeric.as_deref().unwrap_or(text).parse::<SocketAddr>() {
            let is_own = address.ip().is_loopback();
            return if is_own { Ok(MetricsSetting::Port(address)) } else { Err(BadValue::Metrics(text.to_owned())) };
        }
        let path = PathBuf::from(text);
        match path.extension() {
            _ if path.file_name().is_none() => Err(BadValue::Metrics(text.to_owned())),
            Some(extension) if extension == SOCKET_EXTENSION => Ok(MetricsSetting::Socket(path)),
            _ => Ok(MetricsSetting::File(path)),
        }
    }
}

impl fmt::Display for MetricsSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsSetting::File(path) | MetricsSetting::Socket(path) => write!(f, "{}", path.display()),
            MetricsSetting::Port(address) => write!(f, "{address}"),
        }
    }
}

/// The file of a socket. Dropping it removes the file.
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The file may be gone already.
        let _ = fs::remove_file(&self.0);
    }
}

/// An open target. It is opened before the program starts.
pub enum MetricsTarget {
    /// A file that can be written.
    File(PathBuf),
    /// A socket.
    Socket(UnixListener, SocketFile),
    /// A port.
    Port(TcpListener),
}

impl MetricsTarget {
    /// Opens the target, or finds out that it cannot be written.
    pub fn open(setting: &MetricsSetting) -> Result<MetricsTarget, CliError> {
        let opened = match setting {
            MetricsSetting::File(path) => replace(path, NOTHING).map(|()| MetricsTarget::File(path.clone())),
            MetricsSetting::Socket(path) => {
                listen(path).map(|socket| MetricsTarget::Socket(socket, SocketFile(path.clone())))
            }
            MetricsSetting::Port(address) => TcpListener::bind(address).map(MetricsTarget::Port),
        };
        opened.map_err(|error| CliError::Metrics(setting.to_string(), error))
    }
}

/// Binds a socket. One that a killed run has left behind is removed.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let is_left = || {
        let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
        is_socket && UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    };
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_left() => {
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

/// Replaces the content of a file at once: nobody reads a part of it.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{}.tmp", std::process::id()));
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        // It may not exist.
        let _ = fs::remove_file(&new);
    }
    written
}

/// Publishes the metrics of a run to its end.
pub struct Publisher {
    metrics: &'static Metrics,
    file: Option<PathBuf>,
    /// The socket's file, which is removed with the target.
    _socket: Option<SocketFile>,
    written: Option<Instant>,
    said_failed: bool,
}

impl Publisher {
    /// Starts to publish. A socket gets a thread.
    pub fn start(target: MetricsTarget, metrics: Metrics) -> Result<Publisher, CliError> {
        let metrics: &'static Metrics = Box::leak(Box::new(metrics));
        let (mut file, mut socket) = (None, None);
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        let started = match target {
            MetricsTarget::File(path) => {
                file = Some(path);
                Ok(None)
            }
            MetricsTarget::Socket(listener, file) => {
                socket = Some(file);
                thread.spawn(move || serve(listener.incoming(), metrics)).map(Some)
            }
            MetricsTarget::Port(listener) => {
                if let Ok(address) = listener.local_addr() {
                    eprintln!("foliomem: metrics are at http://{address}/metrics");
                }
                thread.spawn(move || serve(listener.incoming(), metrics)).map(Some)
            }
        };
        started.map_err(|error| CliError::System("start a thread", error))?;
        Ok(Publisher { metrics, file, _socket: socket, written: None, said_failed: false })
    }

    /// Writes the file if that is due.
    pub fn publish_if_due(&mut self) {
        if self.written.is_none_or(|written| written.elapsed() >= INTERVAL) {
            self.publish();
        }
    }

    /// Writes the file.
    fn publish(&mut self) {
        let Some(path) = &self.file else { return };
        self.written = Some(Instant::now());
        if let Err(error) = replace(path, &self.metrics.text())
            && !std::mem::replace(&mut self.said_failed, true)
        {
            eprintln!("foliomem: cannot write the metrics to {}: {error}", path.display());
        }
    }

    /// Writes the figures of the end.
    pub fn finish(mut self) {
        self.publish();
    }
}

/// A connection that can time out.
trait Connection: Read + Write {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()>;
}

impl Connection for UnixStream {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout)).and_then(|()| self.set_write_timeout(Some(timeout)))
    }
}

impl Connection for TcpStream {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout)).and_then(|()| self.set_write_timeout(Some(timeout)))
    }
}

fn serve<C: Connection>(clients: impl Iterator<Item = io::Result<C>>, metrics: &Metrics) {
    for client in clients {
        let answered = client.and_then(|client| answer(client, metrics));
        if answered.is_err() {
            // Ignores a client that has gone. The pause keeps this loop from spinning when no
            // descriptor is free.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn answer(mut client: impl Connection, metrics: &Metrics) -> io::Result<()> {
    let until = Instant::now() + CLIENT_TIMEOUT;
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > MAX_REQUEST_BYTES {
            return Err(ErrorKind::TimedOut.into());
        }
        client.set_timeout(left)?;
        let mut part = [0; 1024];
        let read = client.read(&mut part)?;
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        request.extend_from_slice(&part[..read]);
    }
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let (status, kind, body) = match words[..] {
        [b"GET", b"/" | b"/metrics", _] => ("200 OK", MEDIA_TYPE, metrics.text()),
        [b"GET", _, _] => ("404 Not Found", "text/plain", "The metrics are at /metrics.\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "Only GET is answered.\n".to_owned()),
    };
    client.set_timeout(CLIENT_TIMEOUT)?;
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    client.write_all((head + &body).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_file_a_socket_or_a_port_of_this_machine() {
        let parsed = |text| MetricsSetting::parse(text).map_err(|error| error.to_string());
        assert_eq!(parsed("/x/run.prom"), Ok(MetricsSetting::File("/x/run.prom".into())));
        assert_eq!(parsed("run.sock"), Ok(MetricsSetting::Socket("run.sock".into())));
        for (text, port) in [("127.0.0.1:9400", 9400), ("localhost:0", 0), ("[::1]:80", 80)] {
            assert!(matches!(parsed(text), Ok(MetricsSetting::Port(address)) if address.port() == port), "{text}");
        }
        for text in ["0.0.0.0:9400", "10.0.0.1:80", "/", ""] {
            assert!(parsed(text).unwrap_err().contains("127.0.0.1:9400"), "{text}");
        }
    }
}
