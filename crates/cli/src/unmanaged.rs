//! Finds memory of a run outside the limit, and warns about it: all figures would silently omit it.
//!
//! - A child can escape the agent: it is static, its parent cleared its environment, or its root
//!   directory or process namespace has neither agent nor control segment.
//! - Shared memory is not managed: PostgreSQL's buffers, the heap of Java's ZGC.

use foliomem_types::size::format_mib;
use rustix::process::Pid;
use std::fs;
use std::time::{Duration, Instant};

/// Shortest time between two scans.
const INTERVAL: Duration = Duration::from_millis(200);
/// Divisor of the time that scans may take: a scan of thousands of threads is slow.
const SHARE: u32 = 50;
/// Divisor of the limit: memory below this share of the limit, or below [`LEAST_BYTES`], causes no
/// warning.
const LIMIT_SHARE: u64 = 4;
/// Memory in bytes below which no warning appears.
const LEAST_BYTES: u64 = 16 << 20;

/// Scans a run for unmanaged and shared memory, and warns about each at most once.
pub struct Lookout {
    due: Instant,
    least_bytes: u64,
    said_unmanaged: bool,
    said_shared: bool,
}

impl Lookout {
    /// Creates a lookout whose first scan is due after [`INTERVAL`].
    pub fn new(limit_bytes: u64) -> Lookout {
        let least_bytes = LEAST_BYTES.max(limit_bytes / LIMIT_SHARE);
        Lookout { due: Instant::now() + INTERVAL, least_bytes, said_unmanaged: false, said_shared: false }
    }

    /// Scans `program` and its descendants, if a scan is due.
    pub fn look(&mut self, program: Pid) {
        let started = Instant::now();
        if self.said_unmanaged && self.said_shared || started < self.due {
            return;
        }
        let mut rest = vec![program.as_raw_nonzero().get() as u32];
        while let Some(pid) = rest.pop() {
            self.look_at(pid);
            for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                rest.extend(children.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok()));
            }
        }
        self.due = Instant::now() + INTERVAL.max(started.elapsed() * SHARE);
    }

    fn look_at(&mut self, pid: u32) {
        let status = status(pid);
        let name = field(&status, "Name:").unwrap_or_default();
        let [anon, shared] = ["RssAnon:", "RssShmem:"].map(|kind| bytes(&status, kind));
        if !self.said_unmanaged && anon >= self.least_bytes && self.is_unmanaged(pid) {
            self.said_unmanaged = true;
            eprintln!(
                "foliomem: {name} (process {pid}) runs without the agent and takes {}, for which the limit does not hold: it \
                 is static, or started with another environment, root directory or process namespace",
                format_mib(anon)
            );
        }
        if !self.said_shared && shared >= self.least_bytes {
            self.said_shared = true;
            eprintln!(
                "foliomem: {name} (process {pid}) takes {} of shared memory, for which the limit does not hold",
                format_mib(shared)
            );
        }
    }

    /// Returns whether a process with much memory runs without the agent. It reads the memory again
    /// after the maps: a process that shared its parent's memory (`vfork`) may have executed a
    /// small program in between.
    fn is_unmanaged(&self, pid: u32) -> bool {
        !has_segment(pid) && bytes(&status(pid), "RssAnon:") >= self.least_bytes
    }
}

fn status(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default()
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Returns the value of a line of `/proc/PID/status` in bytes.
fn bytes(status: &str, name: &str) -> u64 {
    let kib = field(status, name).and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Returns whether the process maps a control segment. So do a process that was just forked and is
/// about to register itself there, a process that shares its parent's memory (`vfork`), and a
/// process of a nested run, which has a limit of its own. Nothing is known of a process that this
/// user may not look at, and nothing is said of it.
fn has_segment(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).map_or(true, |maps| maps.contains("/memfd:foliomem-control"))
}
